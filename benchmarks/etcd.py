"""etcd: our store beside a bare gRPC loop, a gateway beside stores of one's own, counting, and meeting.

The cluster is three members on this machine, on one core, with their data on its disk. The bare loop is grpcio's own
blocking client with requests built once: the least that a Python program can do. It is measured twice: with the plain
`Put` and `Range` that one would write, and with the very transaction that our `set` sends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rallypoint
from benchmarks.crowd import PATIENCE, release
from benchmarks.meeting import Members
from benchmarks.rendezvous import Nodes
from benchmarks.rig import PLACEMENTS, Placement, Team, in_turn, need, say, team
from benchmarks.servers import serving
from benchmarks.table import Line, Target
from rallypoint.etcd.local import LocalCluster

TITLE = "etcd: three members on this machine"
NOTES = (
    "*Two cores*: members and gateway have one, clients the other. The bare loop is grpcio's blocking client with "
    "requests built once: *Put*, *Range*, and *same txn*, the transaction that `set` sends. Throughput is of 4 "
    "processes with 8 clients each, every other call a set, the others gets. *Counting*: 4 processes with 16 clients "
    "each add to one counter; *naive* reads it and swaps it, until it wins. *Meeting*: 64 members in 4 processes; "
    "torch's are on torch's own server, which keeps all in the memory of one process."
)
VALUE = b"x" * 32
SLICE_S = 1.0
PROCESSES = 4
_names = itertools.count()


def run(quick: bool) -> list[Line]:
    """Measure everything at every placement."""
    need("torch", "etcd", "grpc")
    rounds = 2 if quick else 7
    lines: list[Line] = []
    with _cluster() as cluster:
        members = [member.pid for member in cluster.members if member.pid]
        for placement in PLACEMENTS:
            lines += _alone(cluster, members, placement, rounds)
            lines += _together(cluster, members, placement, rounds)
            lines += _counting(cluster, members, placement, rounds)
            lines += _meeting(cluster, members, placement, 2 if quick else 5)
    return lines


@contextlib.contextmanager
def _cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="rally-bench-") as folder:
        cluster = LocalCluster(Path(folder))
        try:
            cluster.up(3)
            yield cluster
        finally:
            cluster.down(purge=True)


# One client


def _alone(cluster: LocalCluster, members: list[int], placement: Placement, rounds: int) -> list[Line]:
    lines = []
    with team(1, Lone, cluster.url) as clients:
        placement.put(members, clients.pids)
        for operation, peers in {"set": ("Put", "same txn"), "get": ("Range",)}.items():
            say(f"  {operation}, {placement.name}")
            names = ["ours", *peers]
            figures = in_turn(names, rounds, functools.partial(_microseconds, clients, operation))
            for peer in peers:
                target = Target(at_most=1.3)
                lines.append(Line(operation, placement.name, "µs", figures["ours"], peer, figures[peer], target))
    return lines


def _microseconds(clients: Team, operation: str, name: str) -> float:
    return float(clients.ask("slice", operation if name == "ours" else name)[0])


class Lone:
    """One client: our store, and the bare loop at the same endpoint."""

    def __init__(self, url: str) -> None:
        import grpc

        from rallypoint.etcd import messages
        from rallypoint.etcd.messages import Method, Txn

        self._store = store = rallypoint.connect(f"{url}/bench")
        store.set("k", VALUE)
        space = store._backend._space  # type: ignore[attr-defined]
        channel = grpc.insecure_channel(space.ties.client.some_endpoint().address)
        put, get, txn = (channel.unary_unary(name) for name in ("/etcdserverpb.KV/Put", Method.RANGE, Method.TXN))
        key = space.layout.value(b"/bare")
        write, read = messages.put(key, VALUE), messages.get(key)
        record = store._backend._session  # type: ignore[attr-defined]
        lane = b"bench-lane"
        put(messages.put(lane, b"%020d" % 0).body)
        guarded = Txn(
            [record.ours(), messages.value_below(lane, b"%020d" % 1)],
            [write, messages.delete(*space.layout.parts(False, b"/bare")), messages.put(lane, b"%020d" % 0)],
            [messages.get(record.place), messages.get(lane)],
        ).encode()
        self._calls: dict[str, Callable[[], object]] = {
            "set": lambda: store.set("k", VALUE),
            "get": lambda: store.get("k"),
            "Put": lambda: put(write.body),
            "Range": lambda: get(read.body),
            "same txn": lambda: txn(guarded),
        }

    def slice(self, name: str) -> float:
        """Return how many microseconds one call takes."""
        call, done, start_at = self._calls[name], 0, time.perf_counter()
        while time.perf_counter() - start_at < SLICE_S:
            call()
            done += 1
        return (time.perf_counter() - start_at) / done * 1e6


# Many clients


def _together(cluster: LocalCluster, members: list[int], placement: Placement, rounds: int) -> list[Line]:
    url = f"{cluster.url}/together-{next(_names)}"
    with rallypoint.Server(engine=url) as gateway, team(PROCESSES, Many, 8) as clients:
        placement.put([*members, gateway.pid], clients.pids)
        urls = {"through a gateway": gateway.url, "own stores": url}
        say(f"  32 clients, {placement.name}")
        figures = in_turn(list(urls), rounds, lambda name: sum(clients.ask("set_and_get", urls[name])))
    ours, theirs = figures.values()
    line = Line("32 clients", placement.name, "op/s", ours, "own stores", theirs, Target(at_least=1.0))
    return [line]


def _counting(cluster: LocalCluster, members: list[int], placement: Placement, rounds: int) -> list[Line]:
    with team(PROCESSES, Many, 16) as clients:
        placement.put(members, clients.pids)
        say(f"  add, 64 clients, {placement.name}")
        url = f"{cluster.url}/counting"
        figures = in_turn(
            ["add", "naive"], rounds, lambda name: sum(clients.ask("count", url, name, f"n{next(_names)}"))
        )
    line = Line(
        "add, 64 clients", placement.name, "op/s", figures["add"], "naive", figures["naive"], Target(at_least=10.0)
    )
    return [line]


class Many:
    """Clients that are threads of one process, each with a store of its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._stores: dict[str, list[rallypoint.Store]] = {}

    def set_and_get(self, url: str) -> float:
        """Return how many calls a second all make together."""

        def calls(store: rallypoint.Store, number: int) -> Iterator[object]:
            while True:
                yield store.set(f"k{number}", VALUE)
                yield store.get(f"k{number}")

        return self._rate(url, calls)

    def count(self, url: str, how: str, key: str) -> float:
        """Return how many times a second all together add to one counter."""

        def calls(store: rallypoint.Store, _: int) -> Iterator[object]:
            while True:
                yield store.add(key, 1) if how == "add" else _naive(store, key)

        return self._rate(url, calls)

    def _rate(self, url: str, calls: Callable[[rallypoint.Store, int], Iterator[object]]) -> float:
        if url not in self._stores:
            self._stores[url] = [rallypoint.connect(url, timeout=PATIENCE) for _ in range(self._size)]
            for store in self._stores[url]:
                store.set("warm", "")
        done = [0] * self._size
        end_at = time.monotonic() + SLICE_S

        def work(number: int) -> None:
            for _ in calls(self._stores[url][number], number):
                if time.monotonic() >= end_at:
                    return
                done[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / SLICE_S


def _naive(store: rallypoint.Store, key: str) -> None:
    """Add one by reading and swapping."""
    value = store.get(key) if store.check([key]) else None
    while True:
        won, value = store.swap(key, value, b"%d" % (int(value or 0) + 1))
        if won:
            return


# Meeting


def _meeting(cluster: LocalCluster, members: list[int], placement: Placement, rounds: int) -> list[Line]:
    lines = []
    with serving(("torch",)) as servers:
        torch = servers["torch"]
        with team(PROCESSES, OnEtcd, 16, 64) as crowds:
            placement.put([*members, torch.pid], crowds.pids)
            say(f"  barrier of 64, {placement.name}")
            url = f"{cluster.url}/meeting-{next(_names)}"
            lines.append(_beside("barrier of 64", placement, rounds, functools.partial(_pass, crowds, url, torch.port)))
        with team(1, NodesOnEtcd, 64) as nodes:
            placement.put([*members, torch.pid], nodes.pids)
            say(f"  round of 64, {placement.name}")
            url = f"{cluster.url}/rounds-{next(_names)}"
            lines.append(_beside("round of 64", placement, rounds, functools.partial(_form, nodes, url, torch.port)))
    return lines


def _beside(what: str, placement: Placement, rounds: int, measure: Callable[[str], float]) -> Line:
    figures = in_turn(["etcd", "torch"], rounds, measure)
    return Line(what, placement.name, "ms", figures["etcd"], "torch", figures["torch"])


def _pass(crowds: Team, url: str, port: int, name: str) -> float:
    crowds.ask("arm_meeting", name, url if name == "etcd" else port, "barrier", f"bench/{next(_names)}")
    return release(crowds) / 10


def _form(nodes: Team, url: str, port: int, name: str) -> float:
    nodes.ask("arm_round", name, url if name == "etcd" else port, f"bench-{next(_names)}")
    took = release(nodes)
    nodes.ask("part")
    return took


class OnEtcd(Members):
    """Members whose place is a URL."""

    def _stores_at(self, name: str, place: Any) -> list[Any]:
        if name == "torch":
            return super()._stores_at(name, place)
        return [rallypoint.connect(place, timeout=PATIENCE) for _ in range(self._size)]


class NodesOnEtcd(Nodes):
    """Nodes whose place is a URL."""

    def _stores_at(self, name: str, place: Any) -> list[Any]:
        if name == "torch":
            return super()._stores_at(name, place)
        return [rallypoint.connect(place, timeout=PATIENCE) for _ in range(self._size)]
