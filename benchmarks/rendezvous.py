"""Rendezvous: N nodes form a round, ours on our server, torch's c10d handler on torch's, and ours hosted on torch's.

All nodes are threads of one process, each with a connection of its own, and min = max = N, so nobody waits for last
call. A run is used once: what is measured is from the start signal until the last node has its round.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import rallypoint
from benchmarks import nodes as processes
from benchmarks.crowd import PATIENCE, Crowd, connect, release
from benchmarks.rig import PLACEMENTS, Team, in_turn, need, say, team
from benchmarks.servers import Running, serving
from benchmarks.table import Line, Target

TITLE = "Rendezvous: a round of N nodes"
NOTES = (
    "Time from the start signal until the last node is in the round; all are connected beforehand. Less is better. "
    "*ours on torch's server*: the nodes host the rendezvous by compare-and-set, as on any store that is not ours. "
    "Torch's handler delays its first attempt by up to 0.3 s, and polls every second; both are its own. *Per node* is "
    "the time at 1,000 nodes, divided by their number, beside the same at 64. The last two lines are of processes, on "
    "our server with its usual grace of 2 s: from the SIGKILL, or the start of the new ones, until all are in a round."
)
BESIDE_TORCH = {4: None, 16: 0.1, 64: 0.05}
ALONE = (256, 1000)
HOSTED = {16: 1.0, 64: 1.0}
_runs = itertools.count()


def run(quick: bool) -> list[Line]:
    """Measure every size at every placement."""
    need("torch")
    lines: list[Line] = []
    with serving(("rallypoint", "torch")) as servers:
        for placement in PLACEMENTS:
            per_node: dict[int, list[float]] = {}
            for size in [*BESIDE_TORCH, *ALONE][: 2 if quick else None]:
                with team(1, Nodes, size) as nodes:
                    placement.put([server.pid for server in servers.values()], nodes.pids)
                    say(f"  a round of {size}, {placement.name}")
                    lines += _beside(nodes, servers, size, placement.name, per_node, 2 if quick else 5)
            if 1000 in per_node:
                many, few = ([ms / size * 1000 for ms in per_node[size]] for size in (1000, 64))
                lines.append(Line("per node", placement.name, "us", many, "ours at 64", few, Target(at_most=2.0)))
        lines += processes.run(servers["rallypoint"], 1 if quick else 3)
    return lines


def _beside(
    nodes: Team, servers: dict[str, Running], size: int, where: str, per_node: dict[int, list[float]], rounds: int
) -> list[Line]:
    measure = functools.partial(_once, nodes, servers)
    names = ["ours", "torch", "hosted"] if size in BESIDE_TORCH else ["ours"]
    for name in names:
        measure(name)  # connects, and imports
    figures = in_turn(names, rounds, measure)
    per_node[size] = figures["ours"]
    what = f"round of {size:,}"
    if "torch" not in figures:
        return [Line(what, where, "ms", figures["ours"])]
    return [
        Line(what, where, "ms", figures["ours"], "torch", figures["torch"], _at_most(BESIDE_TORCH[size])),
        Line(f"{what}, ours on torch's server", where, "ms", figures["hosted"], "torch", figures["torch"],
             _at_most(HOSTED.get(size))),
    ]  # fmt: skip


def _at_most(ratio: float | None) -> Target | None:
    return None if ratio is None else Target(at_most=ratio)


def _once(nodes: Team, servers: dict[str, Running], name: str) -> float:
    port = servers["rallypoint" if name == "ours" else "torch"].port
    nodes.ask("arm_round", name, port, f"bench-{next(_runs)}")
    took = release(nodes)
    nodes.ask("part")
    return took


class Nodes(Crowd):
    """The nodes of a round: the threads of one process."""

    _package: Any = rallypoint

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._clients: dict[str, list[Any]] = {}
        self._leave: list[Callable[[], object]] = []

    def arm_round(self, name: str, port: int, run_id: str) -> None:
        """Bring the nodes before the gate; connect them first, if it is the first time."""
        if name not in self._clients:
            self._clients[name] = self._stores_at(name, port)
        make_node = _torchs if name == "torch" else functools.partial(_ours, self._package)
        pairs = [make_node(store, run_id, number, self._size) for number, store in enumerate(self._clients[name])]
        self._leave = [leave for _, leave in pairs]
        self._arm([join for join, _ in pairs])

    def _stores_at(self, name: str, port: int) -> list[Any]:
        make = functools.partial(rallypoint.TCPStore, "127.0.0.1", port, timeout=PATIENCE)
        return [make() if name == "ours" else connect(port) for _ in range(self._size)]

    def part(self) -> None:
        """Let all nodes leave."""
        for leave in self._leave:
            leave()


def _ours(
    package: Any, store: Any, run_id: str, number: int, size: int
) -> tuple[Callable[[], None], Callable[[], object]]:
    node = package.Rendezvous(store, run_id, size, node=f"node-{number}")
    return functools.partial(node.join, PATIENCE), node.leave  # type: ignore[return-value]


def _torchs(store: Any, run_id: str, number: int, size: int) -> tuple[Callable[[], None], Callable[[], object]]:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    params = RendezvousParameters("c10d", "127.0.0.1", run_id, size, size, "127.0.0.1")
    handler = create_handler(store, C10dRendezvousBackend(store, run_id), params)
    return handler.next_rendezvous, handler.shutdown  # type: ignore[return-value]
