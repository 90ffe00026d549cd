"""Sharing: many threads on one client of ours, and many connections to one server.

Threads: two processes with one client each, and 50 threads that call and call; in one of them 50 more are blocked, as
the server confirms before anything is measured. Connections: 64 of them, all busy, and only the server's own processor
time counts, so that what the clients cost does not matter.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import threading
import time
import urllib.request
from typing import Any

from benchmarks import client
from benchmarks.rig import PLACEMENTS, Team, cpu_s, in_turn, say, team
from benchmarks.servers import Running
from benchmarks.table import Line

ACTIVE = BLOCKED = 50
PROCESSES, THREADS = 8, 8
OPERATIONS = ("get", "add", "check", "set and get")
LEAD_S, PATIENCE_S, FOREVER_S = 0.05, 30.0, 3600.0


class Sharers:
    """One client in one process, with threads that are blocked on it for good and threads that are not."""

    def __init__(self, port: int, blocked: int) -> None:
        self._store = client.connect("rallypoint", port)
        self._call = client.calls(self._store)["add"]
        for number in range(blocked):
            wait = functools.partial(self._store.get, f"bench/never/{number}", timeout=FOREVER_S)
            threading.Thread(target=wait, daemon=True).start()
        _await_waiting(port, blocked)

    def latencies_us(self, slice_s: float) -> tuple[float, float]:
        """Have the active threads call and call; return the median time of a call, and the 99th percentile."""
        gate = threading.Barrier(ACTIVE)
        taken: list[list[float]] = [[] for _ in range(ACTIVE)]
        threads = [threading.Thread(target=self._act, args=(gate, slice_s, own)) for own in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        every = [figure for own in taken for figure in own]
        return statistics.median(every), statistics.quantiles(every, n=100)[98]

    def _act(self, gate: threading.Barrier, slice_s: float, taken: list[float]) -> None:
        call, now = self._call, time.monotonic
        gate.wait()
        began_at = now()
        end_at = began_at + slice_s
        while not taken or began_at < end_at:
            call()
            instant = now()
            taken.append((instant - began_at) * 1e6)
            began_at = instant


def threads(server: Running, rounds: int, slice_s: float) -> list[Line]:
    """Measure what blocked threads cost the others on the same client."""
    lines = []
    with contextlib.ExitStack() as stack:
        sharers = {
            "blocked": stack.enter_context(team(1, Sharers, server.port, BLOCKED)),
            "free": stack.enter_context(team(1, Sharers, server.port, 0)),
        }
        for placement in PLACEMENTS:
            say(f"  threads, {placement.name}")
            placement.put([server.pid], [pid for held in sharers.values() for pid in held.pids])
            lines += _threads_lines(sharers, placement.name, rounds, slice_s)
    return lines


def _threads_lines(sharers: dict[str, Team], where: str, rounds: int, slice_s: float) -> list[Line]:
    tails: dict[str, list[float]] = {name: [] for name in sharers}

    def measure(name: str) -> float:
        ((middle, tail),) = sharers[name].ask("latencies_us", slice_s)
        tails[name].append(tail)
        return float(middle)

    blocked, free = in_turn(tuple(sharers), rounds, measure).values()
    what, peer = f"add, {ACTIVE} threads, {BLOCKED} more blocked", "nobody blocked"
    slow, slow_free = tails["blocked"][1:], tails["free"][1:]  # the first was for warming up
    return [
        Line(what, where, "µs", blocked, peer, free),
        Line(f"{what}: 99th percentile", where, "µs", slow, peer, slow_free),
    ]


class Bunch:
    """The connections of one process, each with a thread of its own."""

    def __init__(self, name: str, port: int) -> None:
        self._calls = [client.calls(client.connect(name, port)) for _ in range(THREADS)]

    def count(self, operation: str, start_at: float, slice_s: float) -> int:
        """From a moment that all processes share, call and call on every connection; return how many calls it were."""
        counts: list[int] = []
        threads = [
            threading.Thread(target=self._act, args=(calls[operation], start_at, slice_s, counts))
            for calls in self._calls
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    def _act(self, call: Any, start_at: float, slice_s: float, counts: list[int]) -> None:
        now, count = time.monotonic, 0
        time.sleep(max(0.0, start_at - now()))
        while not count or now() < start_at + slice_s:  # once at least, however late the thread comes
            call()
            count += 1
        counts.append(count)


def connections(servers: dict[str, Running], rounds: int, slice_s: float) -> list[Line]:
    """Measure what a call costs the server when 64 connections are busy."""
    lines = []
    with contextlib.ExitStack() as stack:
        bunches = {
            name: stack.enter_context(team(PROCESSES, Bunch, name, server.port)) for name, server in servers.items()
        }
        for placement in PLACEMENTS:
            pids = [pid for bunch in bunches.values() for pid in bunch.pids]
            placement.put([server.pid for server in servers.values()], pids)
            for operation in OPERATIONS:
                what = f"{operation}, {PROCESSES * THREADS} connections, server's CPU"
                say(f"  {what}, {placement.name}")
                measure = functools.partial(_spent_us, servers, bunches, operation, slice_s)
                ours, theirs = in_turn(tuple(servers), rounds, measure).values()
                lines.append(Line(what, placement.name, "µs/op", ours, "torch", theirs))
    return lines


def _spent_us(
    servers: dict[str, Running], bunches: dict[str, Team], operation: str, slice_s: float, name: str
) -> float:
    before_s = cpu_s(servers[name].pid)
    counts = bunches[name].ask("count", operation, time.monotonic() + LEAD_S, slice_s)
    return (cpu_s(servers[name].pid) - before_s) * 1e6 / float(sum(counts))


def _await_waiting(port: int, number: int) -> None:
    """Return when our server has so many calls waiting."""
    give_up_at, waiting = time.monotonic() + PATIENCE_S, -1
    while waiting < number:
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{waiting} of {number} threads are blocked after {PATIENCE_S:g} s")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/statistics") as answer:
            waiting = json.load(answer)["waiting"]
