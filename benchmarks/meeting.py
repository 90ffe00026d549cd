"""Meeting: N members pass a barrier, and exchange 100 bytes each, with ours on our server and torch's on torch's.

Every member has a connection of its own and is a thread of one of four processes. Torch's are
`torch.distributed.elastic.utils.store.barrier` and `synchronize`. To release the threads takes about 45 us a member, on
both sides; so that this does not drown what is compared, a thread that is released passes ten barriers in a row. Ours
are one `Barrier`, used again and again; torch's have a fresh key each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import rallypoint
from benchmarks.crowd import NAMES, PATIENCE, Crowd, connect, release
from benchmarks.rig import PLACEMENTS, Team, in_turn, need, say, team
from benchmarks.servers import Running, serving
from benchmarks.table import Line, Target

TITLE = "Meeting: barriers and exchanges of N members"
NOTES = (
    "Time from the start signal until the last member is through; all are connected beforehand. Less is better. A "
    "barrier's figure is a tenth of the time of ten in a row, an exchange's is that of one. The members' own work, N "
    "Python threads in 4 processes, is in both figures.\n\n"
    "![How barriers and exchanges grow with N](../docs/images/meeting.svg)"
)
PROCESSES = 4
IN_A_ROW = {"barrier": 10, "exchange": 1}
SIZES = (16, 64, 256, 1000)
DATA = b"x" * 100
TARGETS = {("barrier", 256): 0.7, ("barrier", 1000): 0.7, ("exchange", 1000): 0.3}


def run(quick: bool) -> list[Line]:
    """Measure every size at every placement."""
    need("torch")
    lines: list[Line] = []
    for size in SIZES[:2] if quick else SIZES:
        rounds = 2 if quick else 9
        with serving(NAMES) as servers, team(PROCESSES, Members, size // PROCESSES, size) as crowds:
            for placement in PLACEMENTS:
                placement.put([server.pid for server in servers.values()], crowds.pids)
                for what in IN_A_ROW:
                    say(f"  {what} of {size}, {placement.name}")
                    measure = functools.partial(pass_once, crowds, servers, what)
                    figures = in_turn(NAMES, rounds, measure)
                    ours, theirs = figures.values()
                    at_most = TARGETS.get((what, size))
                    target = None if at_most is None else Target(at_most=at_most)
                    lines.append(Line(f"{what} of {size:,}", placement.name, "ms", ours, "torch", theirs, target))
    return lines


_keys = itertools.count()


def pass_once(crowds: Team, servers: dict[str, Running], what: str, name: str) -> float:
    """Return how long all members took to pass one meeting."""
    crowds.ask("arm_meeting", name, servers[name].port, what, f"bench/{next(_keys)}")
    return release(crowds) / IN_A_ROW[what]


class Members(Crowd):
    """Some of the members of a meeting: the threads of one process."""

    _package: Any = rallypoint

    def __init__(self, size: int, world: int) -> None:
        super().__init__(size)
        self._world = world
        self._members: dict[str, list[tuple[int, Any, Any, Any]]] = {}

    def arm_meeting(self, name: str, port: int, what: str, key: str) -> None:
        """Bring the threads before the gate, to meet behind it; connect them first, if it is the first time."""
        if name not in self._members:
            self._members[name] = self._come(name, port)
        keys = [f"{key}/{number}" for number in range(IN_A_ROW[what])]
        acts = [self._acts(name, what, keys, *member) for member in self._members[name]]
        self._arm([functools.partial(_in_a_row, row) for row in acts])

    def _stores_at(self, name: str, port: int) -> list[Any]:
        make: Callable[[], Any] = functools.partial(connect, port)
        if name != "torch":
            make = functools.partial(rallypoint.TCPStore, "127.0.0.1", port, timeout=PATIENCE)
        return [make() for _ in range(self._size)]

    def _come(self, name: str, port: int) -> list[tuple[int, Any, Any, Any]]:
        """Connect all members of this process, which take the next free ranks."""
        stores = self._stores_at(name, port)
        first = stores[0].add(f"bench/ranks/{name}", self._size) - self._size
        if name == "torch":
            return [(first + number, store, None, None) for number, store in enumerate(stores)]
        return [
            (
                first + number,
                store,
                self._package.Barrier(store, "bench", self._world),
                self._package.Exchange(store, "bench", self._world),
            )
            for number, store in enumerate(stores)
        ]

    def _acts(
        self, name: str, what: str, keys: list[str], rank: int, store: Any, barrier: Any, exchange: Any
    ) -> list[Callable[[], object]]:
        """Return what one member does, with a key each."""
        if name != "torch":
            if what == "barrier":
                return [functools.partial(barrier.wait, rank) for _ in keys]
            return [functools.partial(exchange.all_gather, rank, DATA) for _ in keys]
        from torch.distributed.elastic.utils import store as torchs

        seconds = int(PATIENCE / timedelta(seconds=1))
        if what == "barrier":
            return [functools.partial(torchs.barrier, store, self._world, key, seconds) for key in keys]
        return [functools.partial(torchs.synchronize, store, DATA, rank, self._world, key, seconds) for key in keys]


def _in_a_row(acts: list[Callable[[], object]]) -> None:
    for act in acts:
        act()
