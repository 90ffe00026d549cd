"""Client: ours on our server, in our protocol, beside torch's on torch's, each in a process of its own.

`set` of torch's client returns before the server has it, so both sides read back what they set. A wake-up is timed
over two processes on the machine's monotonic clock: one waits for a fresh key, the other sets it some milliseconds
later; a key that was set before its waiter had called is left out. The rest of the subject, many threads on one
client, many connections, and a killed client, is in sharing.py and killed.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import rallypoint
from benchmarks import crowd, killed, sharing
from benchmarks.rig import PLACEMENTS, Placement, Team, in_turn, need, say, team
from benchmarks.servers import Running, serving
from benchmarks.table import Line, Target

TITLE = "Client: ours on our server, torch's on torch's"
NOTES = (
    "One client, 32-byte values, time per call: less is better. *set and get* sets a key and reads it back, since "
    "torch's `set` alone is not acknowledged. *wait wakes* runs from before the `set` in one process to the return of "
    "`wait` in another. *50 threads* share one client of ours: the peer is the same client with nobody blocked, and a "
    "ratio of 1 says that blocked threads cost the others nothing (torch's client has one lock, and would stand still)."
    " *64 connections*: 8 processes of 8 threads, and the processor time of the server alone. *Killed client*: from "
    "SIGKILL to the deletion of its lease, as a watch in another process sees it; the grace of 2 s is in it. *Killed "
    "lock holder*: from SIGKILL until the next one holds the lock. *Killed barrier member*: eight processes have come, "
    "one is killed; from SIGKILL until the last of the other seven has raised MembersLost with its name. *before* is "
    "our client on our server, both as they were in the checkout that RALLYPOINT_BEFORE names, if it names one."
)
KEY, COUNTER, VALUE = "bench/value", "bench/count", b"v" * 32
KEYS = [f"bench/many/{number}" for number in range(1000)]
TARGETS = {
    "get": {"one core": 0.75, "two cores": 0.65},
    "add": {"one core": 1.4, "two cores": 1.15},
    "check": {"one core": 1.4, "two cores": 1.15},
    "set and get": {"one core": 1.4, "two cores": 1.15},
    "multi_get of 1,000": {"one core": 0.8, "two cores": 0.8},
    "wait wakes": {"one core": 1.2, "two cores": 1.2},
}
"""At most so much of torch's time, by operation and placement."""

OF_BEFORE = {operation: {placement.name: 1.05 for placement in PLACEMENTS} for operation in list(TARGETS)[:-1]}
"""The same of an older checkout's time, but for wake-ups, which vary by more than that."""

WARM_S, SLICE_S = 0.02, 0.1
WAKES, LEAD_S, GAP_S = 40, 0.05, 0.004
BLOCKED_S = 0.0005
"""How long before the `set` a waiter must have called, to count as waiting: a call takes a tenth of that."""


def run(quick: bool) -> list[Line]:
    """Measure one client, then shared ones, then faults."""
    need("torch")
    rounds, slice_s = (2, 0.03) if quick else (15, SLICE_S)
    lines = []
    if "RALLYPOINT_BEFORE" in os.environ:
        with serving(("rallypoint", "before")) as servers:
            lines = _one_client(servers, OF_BEFORE, rounds, slice_s)
    with serving(("rallypoint", "torch")) as servers:
        lines += _one_client(servers, TARGETS, rounds, slice_s)
        lines += sharing.threads(servers["rallypoint"], *((2, 0.1) if quick else (8, 0.4)))
        lines += sharing.connections(servers, *((2, 0.1) if quick else (6, 0.25)))
        return lines + killed.run(servers["rallypoint"], 1 if quick else 5)


def connect(name: str, port: int) -> Any:
    """Return a client of the kind that belongs to a server."""
    if name == "torch":
        return crowd.connect(port)
    package = import_before() if name == "before" else rallypoint
    return package.TCPStore("127.0.0.1", port, timeout=crowd.PATIENCE)


def import_before() -> Any:
    """Import our package, in this process from now on, as it was in the checkout that RALLYPOINT_BEFORE names."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "rallypoint"]:
        del sys.modules[module]
    sys.path.insert(0, os.environ["RALLYPOINT_BEFORE"] + "/src")
    return importlib.import_module("rallypoint")


def calls(store: Any) -> dict[str, Callable[[], object]]:
    """Return the calls under test on a store, which has the keys for them afterwards."""

    def set_and_get() -> None:
        store.set(KEY, VALUE)
        store.get(KEY)

    store.set(KEY, VALUE)
    return {
        "get": functools.partial(store.get, KEY),
        "add": functools.partial(store.add, COUNTER, 1),
        "check": functools.partial(store.check, [KEY]),
        "set and get": set_and_get,
    }


class Client:
    """One client in one process."""

    def __init__(self, name: str, port: int) -> None:
        self._store = connect(name, port)
        self._store.multi_set(KEYS, [VALUE.decode()] * len(KEYS))
        self._calls = calls(self._store)
        self._calls["multi_get of 1,000"] = functools.partial(self._store.multi_get, KEYS)

    def call_us(self, operation: str, slice_s: float) -> float:
        """Call and call; return the time of one."""
        call, now = self._calls[operation], time.monotonic
        batch = 1 if "1,000" in operation else 8
        warm_until = now() + WARM_S
        while now() < warm_until:
            call()
        count, began_at, instant = 0, now(), now()
        while instant < began_at + slice_s:
            for _ in range(batch):
                call()
            count += batch
            instant = now()
        return (instant - began_at) * 1e6 / count

    def await_keys(self, keys: list[str]) -> list[tuple[float, float]]:
        """Wait for one key after the other; return when each call was made and when it returned."""
        store, now, times = self._store, time.monotonic, []
        for key in keys:
            called_at = now()
            store.wait([key])
            times.append((called_at, now()))
        return times

    def set_keys(self, keys: list[str], start_at: float) -> list[float]:
        """Set one key after the other, with a gap between; return when each call was made."""
        store, now, times = self._store, time.monotonic, []
        for number, key in enumerate(keys):
            time.sleep(max(0.0, start_at + number * GAP_S - now()))
            times.append(now())
            store.set(key, b"awake")
        return times


@contextlib.contextmanager
def _teams(servers: dict[str, Running]) -> Iterator[dict[str, Team]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(team(1, Client, name, server.port)) for name, server in servers.items()}


def _one_client(
    servers: dict[str, Running], targets: dict[str, dict[str, float]], rounds: int, slice_s: float
) -> list[Line]:
    """Measure our client and a peer's, each on its own server."""
    lines = []
    _, peer = servers
    with _teams(servers) as clients, _teams(servers) as others:
        server_pids = [server.pid for server in servers.values()]
        client_pids = [pid for held in (*clients.values(), *others.values()) for pid in held.pids]
        for placement in PLACEMENTS:
            placement.put(server_pids, client_pids)
            for operation, at_most in targets.items():
                if operation == "wait wakes":
                    measure = _wake_meter(clients, others, placement)
                else:
                    measure = functools.partial(_call_us, clients, operation, slice_s)
                say(f"  {operation}, {placement.name}")
                ours, theirs = in_turn(tuple(servers), rounds, measure).values()
                target = Target(at_most=at_most[placement.name])
                lines.append(Line(operation, placement.name, "µs", ours, peer, theirs, target))
    return lines


def _call_us(clients: dict[str, Team], operation: str, slice_s: float, name: str) -> float:
    (figure,) = clients[name].ask("call_us", operation, slice_s)
    return float(figure)


def _wake_meter(waiters: dict[str, Team], setters: dict[str, Team], placement: Placement) -> Callable[[str], float]:
    """Return what measures the median time of a wake-up, each time with fresh keys."""
    slices = iter(range(10**6))

    def wake_us(name: str) -> float:
        fresh = f"bench/wake/{placement.name}/{next(slices)}"
        keys = [f"{fresh}/{number}" for number in range(WAKES)]
        waiters[name].tell("await_keys", keys)
        (set_at,) = setters[name].ask("set_keys", keys, time.monotonic() + LEAD_S)
        (waited,) = waiters[name].hear()
        return _median_wake_us(set_at, waited)

    return wake_us


def _median_wake_us(set_at: list[float], waited: list[tuple[float, float]]) -> float:
    taken = [
        (woken_at - at) * 1e6
        for at, (called_at, woken_at) in zip(set_at, waited, strict=True)
        if called_at < at - BLOCKED_S
    ]
    if not taken:
        raise RuntimeError(f"none of {len(set_at)} waiters had called {BLOCKED_S * 1000:g} ms before its key was set")
    return statistics.median(taken)
