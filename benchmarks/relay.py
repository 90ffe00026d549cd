"""Relay: what a thousand ranks cost the server behind relays and without; and what a relay costs one client.

The server has a core to itself; ranks and relays, many of them in one process each, share the other. What they take is
not looked at: on a cluster every relay works on a node of its own. So the figures are the server's processor time and
the frames between relays and server, each divided by the number of ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import rallypoint
from benchmarks.crowd import connect
from benchmarks.ranks import Ranks, Relays
from benchmarks.rig import CORES, PLACEMENTS, Team, cpu_s, in_turn, need, pin, resident_kb, say, team
from benchmarks.servers import Running, serving
from benchmarks.table import Line, Target

TITLE = "Relay: ranks behind relays, and a client of one"
NOTES = (
    "`us` of a rank: the server's processor time for one barrier or exchange, divided by the number of ranks; less is "
    "better. The server is alone on its core. `elastic barrier` and `synchronize` are PyTorch's, with its protocol; "
    "Barrier and Exchange are ours; `torch` is PyTorch's own server. *Frames*: between relays and server, both ways, a "
    "rank. A client of a relay: server, relay and client on one core, or the server on one and the others on the other."
)
_WHERE = "server alone on a core"
_OURS = ("Barrier", "Exchange")
_ELASTIC = {"elastic barrier": "barrier", "synchronize": "synchronize"}
_TARGETS = {("add", "one core"): 3.0, ("get", "one core"): 2.0, ("get", "two cores"): 1.1}
_keys = itertools.count()


class _Job(NamedTuple):
    """Connected ranks, the server that they cost, and how many there are."""

    name: str
    server: Running
    world: int


def run(quick: bool) -> list[Line]:
    """Measure the cost at the server at 1,000 and 10,000 ranks, then one client."""
    need("torch")
    world, rounds = (64, 2) if quick else (1000, 9)
    with _crowd(("rallypoint", "torch")) as (servers, ranks, relays):
        lines = _at_scale(servers, ranks, relays, world, rounds)
    with _crowd(("rallypoint",)) as (servers, ranks, relays):
        lines += _growth(servers["rallypoint"], ranks, relays, (64, 128) if quick else (1000, 10_000), rounds)
    return lines + _one_client(2 if quick else 12, 50 if quick else 500) + _memory()


@contextmanager
def _crowd(names: tuple[str, ...]) -> Iterator[tuple[dict[str, Running], Team, Team]]:
    with ExitStack() as stack:
        servers = stack.enter_context(serving(names))
        ranks = stack.enter_context(team(1, Ranks))
        relays = stack.enter_context(team(1, Relays, servers["rallypoint"].port))
        for server in servers.values():
            pin(server.pid, CORES[0])
        for pid in (*ranks.pids, *relays.pids):
            pin(pid, CORES[-1])
        yield servers, ranks, relays


def _at_scale(servers: dict[str, Running], ranks: Team, relays: Team, world: int, rounds: int) -> list[Line]:
    """Compare direct ranks with those behind relays of 8 and of 62, and with PyTorch's server."""
    ours = servers["rallypoint"]
    jobs = {"direct": _Job("direct", ours, world), "torch": _Job("torch", servers["torch"], world)}
    ranks.ask("connect", "direct", False, [ours.port], world)
    ranks.ask("connect", "torch", False, [servers["torch"].port], world)
    ranks.ask("connect", "direct, ours", True, [ours.port], world)
    counts = (world // 8, 16)
    for name in ("direct", *map(str, counts)):
        jobs[f"{name}, ours"] = _Job(f"{name}, ours", ours, world)
    for count in counts:
        (ports,) = relays.ask("start", count)
        for native in (False, True):
            ranks.ask("connect", f"{count}{', ours' * native}", native, ports, world)
        jobs[str(count)] = _Job(str(count), ours, world)
    lines = []
    for what, said in _ELASTIC.items():
        say(f"  {what} of {world:,}")
        names = ("direct", "torch", *map(str, counts))
        figures = in_turn(names, rounds, lambda name, said=said: _cost(jobs[name], ranks, said))
        target = Target(at_most=10.0, unit="us") if what == "elastic barrier" else None
        for peer in ("direct", "torch"):
            for count in counts:
                best = target if count == counts[0] and peer == "direct" else None
                label = f"{what}, {world:,} ranks, {count} relays"
                lines.append(Line(label, _WHERE, "us", figures[str(count)], peer, figures[peer], best))
    for what in _OURS:
        say(f"  {what} of {world:,}")
        names = ("direct, ours", *(f"{count}, ours" for count in counts))
        figures = in_turn(names, rounds, lambda name, what=what: _cost(jobs[name], ranks, what))
        for count in counts:
            target = Target(at_most=0.3) if count == counts[0] else None
            mine, theirs = figures[f"{count}, ours"], figures["direct, ours"]
            lines.append(Line(f"{what}, {world:,} ranks, {count} relays", _WHERE, "us", mine, "direct", theirs, target))
    return lines + _frames(ranks, relays, jobs, counts)


def _frames(ranks: Team, relays: Team, jobs: dict[str, _Job], counts: tuple[int, ...]) -> list[Line]:
    lines = []
    whats = {**{what: ("", said) for what, said in _ELASTIC.items()}, **{what: (", ours", what) for what in _OURS}}
    for count in counts:
        for what, (suffix, said) in whats.items():
            job = jobs[f"{count}{suffix}"]
            (before,) = relays.ask("frames")
            ranks.ask("do", job.name, said, f"bench/{next(_keys)}")
            (after,) = relays.ask("frames")
            label = f"{what}, {job.world:,} ranks, {count} relays: frames"
            lines.append(Line(label, "", "a rank", [(after - before) / job.world]))
    return lines


def _cost(job: _Job, ranks: Team, what: str) -> float:
    """Return the microseconds of server a rank for one barrier or exchange."""
    before_s = cpu_s(job.server.pid)
    ranks.ask("do", job.name, what, f"bench/{next(_keys)}")
    return (cpu_s(job.server.pid) - before_s) / job.world * 1e6


def _growth(server: Running, ranks: Team, relays: Team, sizes: tuple[int, int], rounds: int) -> list[Line]:
    """Compare the cost of an elastic barrier a rank of many ranks with that of few, 8 a relay."""
    jobs = {}
    for size in sizes:
        (ports,) = relays.ask("start", size // 8)
        ranks.ask("connect", str(size), False, ports, size)
        jobs[str(size)] = _Job(str(size), server, size)
    few, many = map(str, sizes)
    say(f"  elastic barrier of {few} and of {many}")
    figures = in_turn((few, many), rounds, lambda name: _cost(jobs[name], ranks, "barrier"))
    label = f"elastic barrier, {sizes[1]:,} ranks, {sizes[1] // 8:,} relays"
    peer = f"{sizes[0]:,} ranks"
    return [Line(label, _WHERE, "us", figures[many], peer, figures[few], Target(at_most=1.3))]


class _Client:
    """A PyTorch client of each server."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._stores = {name: connect(port) for name, port in ports.items()}
        for store in self._stores.values():
            store.set("bench/value", b"x" * 32)

    def median_us(self, name: str, what: str, calls: int) -> float:
        """Return the median of some calls."""
        store: Any = self._stores[name]
        act = {"add": lambda: store.add("bench/count", 1), "get": lambda: store.get("bench/value")}[what]
        times = []
        for _ in range(calls):
            start_at = time.perf_counter()
            act()
            times.append(time.perf_counter() - start_at)
        return statistics.median(times) * 1e6


def _one_client(rounds: int, calls: int) -> list[Line]:
    with (
        serving(("rallypoint",)) as servers,
        rallypoint.Relay(f"tcp://127.0.0.1:{servers['rallypoint'].port}") as relay,
        team(1, _Client, {"relay": relay.port, "direct": servers["rallypoint"].port}) as client,
    ):
        lines = []
        for placement in PLACEMENTS:
            placement.put([servers["rallypoint"].pid], [relay.pid, *client.pids])
            for what in ("add", "get"):
                say(f"  {what} by a relay, {placement.name}")

                def measure(name: str, what: str = what) -> float:
                    return float(client.ask("median_us", name, what, calls)[0])

                ours, direct = in_turn(("relay", "direct"), rounds, measure).values()
                at_most = _TARGETS.get((what, placement.name))
                target = None if at_most is None else Target(at_most=at_most)
                lines.append(Line(f"{what} of a client", placement.name, "us", ours, "direct", direct, target))
    return lines


def _memory() -> list[Line]:
    with rallypoint.Server() as server, rallypoint.Relay(server.url) as relay:
        stores = [connect(relay.port) for _ in range(8)]
        for number, store in enumerate(stores):
            store.add("bench/count", number)
        resident_mb = resident_kb(relay.pid) / 1024
    return [Line("memory of a relay with 8 clients", "", "MB", [resident_mb], target=Target(at_most=32.0, unit="MB"))]
