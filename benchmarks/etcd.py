"""A store with its log in etcd: beside a bare gRPC loop, and beside the former code, which had every operation there.

The cluster is three members on this machine, on one core with the store's server, with their data on its disk. The bare
loop is grpcio's own blocking client with requests built once: the least that a Python program can do. The former code
is that of the checkout that RALLYPOINT_BEFORE names, if it names one: a gateway for the many clients, which was its
best, and stores of their own for counting and meeting. PyTorch's clients reach the store by a relay, on their core.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rallypoint
from benchmarks.client import import_before
from benchmarks.crowd import PATIENCE, connect, release
from benchmarks.meeting import Members
from benchmarks.rendezvous import Nodes
from benchmarks.rig import PLACEMENTS, Placement, Team, in_turn, need, say, team
from benchmarks.servers import announced_port, child
from benchmarks.table import Line, Target
from rallypoint.etcd.local.cluster import LocalCluster

TITLE = "etcd: a store with its log in three members on this machine"
NOTES = (
    "*Two cores*: members and the store's server have one, clients and their relay the other. The bare loop is "
    "grpcio's blocking client with requests built once. *32 clients*: 4 processes with 8 clients each, every other "
    "call a set, the others gets. *add, 64 clients*: 4 processes with 16 clients each, one counter. *Barrier*, "
    "*round*: 64 members in 4 processes, 64 nodes in one. *torch* is PyTorch's client by a relay, whose `set` is not "
    "acknowledged; its peer is our own client. *before* is the code of the checkout that RALLYPOINT_BEFORE names, on "
    "the same cluster."
)
VALUE = b"x" * 32
SLICE_S = 1.0
PROCESSES = 4
BEFORE = "before"
GATEWAY = """
import sys
sys.path.insert(0, sys.argv[1] + "/src")
from rallypoint.server.process import serve
from rallypoint.server.settings import Settings
serve(Settings(port=0, engine=sys.argv[2]), ready=lambda url: print(url.rpartition(":")[2], flush=True))
"""
_names = itertools.count()


def run(quick: bool) -> list[Line]:
    """Measure everything at every placement."""
    need("torch", "etcd", "hpack", "grpc")
    rounds = 2 if quick else 7
    lines: list[Line] = []
    with _cluster() as cluster:
        for placement in PLACEMENTS:
            with _places(cluster, placement) as places:
                lines += _alone(cluster, places, placement, rounds)
                lines += _together(places, placement, rounds)
                lines += _counting(places, placement, rounds)
                lines += _meeting(places, placement, 2 if quick else 5)
    return lines


class Places:
    """Where clients go: our server, a relay of it, and where there is former code, its gateway and its own store."""

    def __init__(self, server: str, relay: int, gateway: str, own: str) -> None:
        self.server, self.relay, self.gateway, self.own = server, relay, gateway, own

    @property
    def names(self) -> list[str]:
        """Who is measured."""
        return ["ours", "torch", *([BEFORE] if self.own else [])]

    def of(self, name: str, gateway: bool = False) -> Any:
        """Return where the clients of a name connect."""
        return {"ours": self.server, "torch": self.relay, BEFORE: self.gateway if gateway else self.own}[name]


@contextlib.contextmanager
def _cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="rally-bench-") as folder:
        cluster = LocalCluster(Path(folder))
        try:
            cluster.up(3)
            yield cluster
        finally:
            cluster.down(purge=True)


@contextlib.contextmanager
def _places(cluster: LocalCluster, placement: Placement) -> Iterator[Places]:
    """Run a server, a relay and, if there is former code, a gateway, each on its core."""
    members = [member.pid for member in cluster.members if member.pid]
    url, own = f"{cluster.url}/bench-{next(_names)}", f"{cluster.url}/before-{next(_names)}"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(rallypoint.Server(storage=url))
        relay = stack.enter_context(rallypoint.Relay(server.url))
        servers, gateway = [*members, server.pid], ""
        if "RALLYPOINT_BEFORE" in os.environ:
            command = [sys.executable, "-c", GATEWAY, os.environ["RALLYPOINT_BEFORE"], own]
            process = stack.enter_context(child(command))
            gateway = f"tcp://127.0.0.1:{announced_port(process)}"
            servers.append(process.pid)
        placement.put(servers, [relay.pid])
        yield Places(server.url, relay.port, gateway, own if gateway else "")


# One client


def _alone(cluster: LocalCluster, places: Places, placement: Placement, rounds: int) -> list[Line]:
    lines = []
    with team(1, Lone, cluster.url, places.server) as clients:
        placement.put([], clients.pids)
        for operation, (peer, target) in {"set": ("Put", Target(at_most=1.15)), "get": ("Range", None)}.items():
            say(f"  {operation}, {placement.name}")
            figures = in_turn([operation, peer], rounds, lambda name: float(clients.ask("slice", name)[0]))
            lines.append(Line(operation, placement.name, "µs", figures[operation], peer, figures[peer], target))
    return lines


class Lone:
    """One client of our store, and the bare loop at the member of etcd that leads."""

    def __init__(self, cluster: str, url: str) -> None:
        import grpc

        from rallypoint.etcd import requests
        from rallypoint.etcd.local.member import ask
        from rallypoint.etcd.requests import Method

        store = rallypoint.connect(url)
        store.set("k", VALUE)
        ports = [int(place.rpartition(":")[2]) for place in cluster.removeprefix("etcd://").split(",")]
        told = {port: ask(port, "/v3/maintenance/status", {}) for port in ports}
        leader = next(port for port, status in told.items() if status["leader"] == status["header"]["member_id"])
        channel = grpc.insecure_channel(f"127.0.0.1:{leader}")
        put, get = (channel.unary_unary(name) for name in ("/etcdserverpb.KV/Put", Method.RANGE))
        write, read = requests.put(b"bare", VALUE).body, requests.get(b"bare").body
        self._calls: dict[str, Callable[[], object]] = {
            "set": lambda: store.set("k", VALUE),
            "get": lambda: store.get("k"),
            "Put": lambda: put(write),
            "Range": lambda: get(read),
        }

    def slice(self, name: str) -> float:
        """Return how many microseconds one call takes."""
        call, done, start_at = self._calls[name], 0, time.perf_counter()
        while time.perf_counter() - start_at < SLICE_S:
            call()
            done += 1
        return (time.perf_counter() - start_at) / done * 1e6


# Many clients


def _together(places: Places, placement: Placement, rounds: int) -> list[Line]:
    say(f"  32 clients, {placement.name}")
    with _teams(places, placement, 8) as teams:

        def measure(name: str) -> float:
            return sum(teams[name].ask("set_and_get", places.of(name, gateway=True)))

        figures = in_turn(places.names, rounds, measure)
    return _lines("32 clients", placement, "op/s", figures, Target(at_least=10_000, unit="op/s"), Target(at_least=5.0))


def _counting(places: Places, placement: Placement, rounds: int) -> list[Line]:
    say(f"  add, 64 clients, {placement.name}")
    with _teams(places, placement, 16) as teams:

        def measure(name: str) -> float:
            return sum(teams[name].ask("count", places.of(name), f"n{next(_names)}"))

        figures = in_turn(places.names, rounds, measure)
    return _lines("add, 64 clients", placement, "op/s", figures, None, Target(at_least=20.0))


def _lines(
    what: str, placement: Placement, unit: str, figures: dict[str, list[float]], own: Target | None, beside: Target
) -> list[Line]:
    ours, where = figures["ours"], placement.name
    lines = [
        Line(what, where, unit, ours, target=own),
        Line(f"{what}, torch", where, unit, figures["torch"], "ours", ours),
    ]
    if BEFORE in figures:
        lines.insert(1, Line(what, where, unit, ours, BEFORE, figures[BEFORE], beside))
    return lines


@contextlib.contextmanager
def _teams(places: Places, placement: Placement, size: int) -> Iterator[dict[str, Team]]:
    """Hold the clients of every name, on their core."""
    with contextlib.ExitStack() as stack:
        teams = {name: stack.enter_context(team(PROCESSES, Many, size, name)) for name in places.names}
        for one in teams.values():
            placement.put([], one.pids)
        yield teams


class Many:
    """Clients that are threads of one process, each with a store of its own."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        package = import_before() if name == BEFORE else rallypoint
        self._connect: Callable[[Any], Any] = connect if name == "torch" else package.connect
        self._stores: dict[Any, list[Any]] = {}

    def set_and_get(self, place: Any) -> float:
        """Return how many calls a second all make together."""

        def calls(store: Any, number: int) -> Iterator[object]:
            while True:
                yield store.set(f"k{number}", VALUE)
                yield store.get(f"k{number}")

        return self._rate(place, calls)

    def count(self, place: Any, key: str) -> float:
        """Return how many times a second all together add to one counter."""

        def calls(store: Any, _: int) -> Iterator[object]:
            while True:
                yield store.add(key, 1)

        return self._rate(place, calls)

    def _rate(self, place: Any, calls: Callable[[Any, int], Iterator[object]]) -> float:
        if place not in self._stores:
            self._stores[place] = [self._connect(place) for _ in range(self._size)]
        done = [0] * self._size
        end_at = time.monotonic() + SLICE_S

        def work(number: int) -> None:
            for _ in calls(self._stores[place][number], number):
                if time.monotonic() >= end_at:
                    return
                done[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / SLICE_S


# Meeting


def _meeting(places: Places, placement: Placement, rounds: int) -> list[Line]:
    lines = []
    say(f"  barrier of 64, {placement.name}")
    with contextlib.ExitStack() as stack:
        crowds = {name: stack.enter_context(team(PROCESSES, OnEtcd, 16, 64, name)) for name in places.names}
        for one in crowds.values():
            placement.put([], one.pids)
        lines += _met("barrier of 64", placement, rounds, 20, places, functools.partial(_pass, crowds, places))
    say(f"  round of 64, {placement.name}")
    with contextlib.ExitStack() as stack:
        names = [name for name in places.names if name != "torch"]
        nodes = {name: stack.enter_context(team(1, NodesOnEtcd, 64, name)) for name in names}
        for one in nodes.values():
            placement.put([], one.pids)
        lines += _met("round of 64", placement, rounds, 50, places, functools.partial(_form, nodes, places), names)
    return lines


def _met(
    what: str,
    placement: Placement,
    rounds: int,
    at_most: float,
    places: Places,
    measure: Callable[[str], float],
    names: list[str] | None = None,
) -> list[Line]:
    figures = in_turn(names or places.names, rounds, measure)
    ours, where = figures["ours"], placement.name
    lines = [Line(what, where, "ms", ours, target=Target(at_most=at_most, unit="ms"))]
    if BEFORE in figures:
        lines.append(Line(what, where, "ms", ours, BEFORE, figures[BEFORE]))
    if "torch" in figures:
        lines.append(Line(f"{what}, torch", where, "ms", figures["torch"], "ours", ours))
    return lines


def _pass(crowds: dict[str, Team], places: Places, name: str) -> float:
    crowds[name].ask("arm_meeting", name, places.of(name), "barrier", f"bench/{next(_names)}")
    return release(crowds[name]) / 10


def _form(nodes: dict[str, Team], places: Places, name: str) -> float:
    nodes[name].ask("arm_round", name, places.of(name), f"bench-{next(_names)}")
    took = release(nodes[name])
    nodes[name].ask("part")
    return took


class OnEtcd(Members):
    """Members of one name: their place is a URL, or of torch's a port."""

    def __init__(self, size: int, world: int, name: str) -> None:
        super().__init__(size, world)
        self._package = import_before() if name == BEFORE else rallypoint

    def _stores_at(self, name: str, place: Any) -> list[Any]:
        if name == "torch":
            return super()._stores_at(name, place)
        return [self._package.connect(place, timeout=PATIENCE) for _ in range(self._size)]


class NodesOnEtcd(Nodes):
    """Nodes of one name, whose place is a URL."""

    def __init__(self, size: int, name: str) -> None:
        super().__init__(size)
        self._package = import_before() if name == BEFORE else rallypoint

    def _stores_at(self, name: str, place: Any) -> list[Any]:
        return [self._package.connect(place, timeout=PATIENCE) for _ in range(self._size)]
