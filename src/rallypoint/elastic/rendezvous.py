"""Rendezvous: the nodes of a run form a round, keep their ranks, and are told when they have to form another.

On our server a round of n nodes takes n requests, and a node that dies is known when its session ends. On another
store the nodes host the rendezvous themselves, by compare-and-set on the key `rendezvous:RUN`. What they store together
in a round is under `round:RUN:SCOPE/`, and is deleted when the next round begins, or the last node leaves.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from rallypoint.core import rendezvous
from rallypoint.core.machine import Done, Waiting
from rallypoint.deadline import Deadline, Timeout
from rallypoint.elastic import card
from rallypoint.elastic.home import is_loopback
from rallypoint.elastic.watch import Change, Watch
from rallypoint.errors import NameTaken, RallypointError, RunFull, Unsupported
from rallypoint.recipes.hosting import Object, Progress, Recipe
from rallypoint.store.base import Store
from rallypoint.store.prefix import PrefixStore
from rallypoint.text import printable

__all__ = ["Node", "Rendezvous", "Round", "Status"]

log = logging.getLogger("rallypoint")

JOIN_S = 600.0
LAST_CALL_S = 5.0
TAKEN_S, FULL_S, AGAIN_S = 3.0, 10.0, 0.1
"""How long a node tries again whose name is taken, or that finds no place and is to be no spare, and how often: whoever
has the name or the place may have died, and the server may not know yet."""

TWINS = 1000
"""How many nodes of one machine get names of their own."""


class Node(NamedTuple):
    """A node of a round: what it goes by, on which host, and which process it is (empty if it is not here any more)."""

    name: str
    host: str
    where: str


class Status(NamedTuple):
    """What there is: `phase` is gathering, formed or closed, `nodes` has ranks by name, `reason` says why in words."""

    phase: str
    reason: str
    round: int
    nodes: Mapping[str, int]
    waiting: tuple[str, ...]
    spares: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    over: str
    """Why the last round does not stand."""

    result: str | None


class Round:
    """One round as one of its nodes sees it; `store` is for this round alone."""

    def __init__(self, shared: Object, told: list[Any], store: Any) -> None:
        self.told = told
        _, number, scope, rank, size, first, _, reason = told
        self.number: int = number
        self.rank: int = rank
        self.world_size: int = size
        self.reason: str = reason
        self.scope: int = scope
        self.first = Node(first[0], first[1], "")
        """The node of rank 0, with the address where others reach it as its host."""

        self.store: Any = store
        self._object = shared

    def __repr__(self) -> str:
        return f"<round {self.number} of {self._object!r}: rank {self.rank} of {self.world_size}>"

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of this round, by rank; asks the store once. Nobody is listed once another round was formed."""
        outcome = self._object.act("", self._object.next_call(), rendezvous.Look(self.scope), 0.0)
        assert isinstance(outcome, Done)
        return tuple(Node(*row) for row in outcome.answer)


class Rendezvous(Recipe):
    """Where the nodes of one run come together, again and again.

    A round has at least `min_nodes` and at most `max_nodes`; when enough are here, it waits `last_call` for more, but
    not when everybody of the last round is back. A node goes by `node` (its host name if none is given), under which it
    gets its rank back when it returns, or by a `rank` that it asks for. All nodes must bring the same `settings`. With
    `spare=False` a node that finds no place is refused (RunFull) instead of waiting for one. `on_change` is called,
    in a thread of its own, with the reason when a round is over.
    """

    def __init__(
        self,
        store: Any,
        run_id: str,
        min_nodes: int,
        max_nodes: int | None = None,
        *,
        node: str | None = None,
        rank: int | None = None,
        settings: Mapping[str, object] | None = None,
        last_call: Timeout = LAST_CALL_S,
        address: str | None = None,
        spare: bool = True,
        progress: Progress | None = None,
        on_change: Callable[[str], object] | None = None,
    ) -> None:
        self._object = Object("rendezvous", store, run_id)
        self.node = card.node_name(node) if node is not None else _own_name(self._object)
        self._store = store
        self._named = node is not None
        self._on_change = on_change
        self._progress = progress
        self._join = rendezvous.Join(
            card.limits(min_nodes, max_nodes, last_call),
            card.settings(settings or {}),
            -1 if rank is None else card.rank(rank),
            socket.gethostname(),
            card.node_name(address, "address") if address else card.address_of(store),
            is_loopback(card.host_of(store)),
            spare=spare,
        )
        _here.add(self)
        self._round: Round | None = None
        self._call = 0
        self._watch: Watch | None = None
        self._lock = threading.Lock()

    def join(self, timeout: Timeout | None = None) -> Round:
        """Come, or come again, and return the next round once this node is in it.

        Raises MembersMissing when none was formed in time (600 s if not told; a spare waits as long as it takes),
        RunClosed when the run has its result, Disagreement, RankTaken and NotAMember at once, NameTaken when that is
        still so after 3 s, RunFull after 10 s, and SessionLost when this process stood still and the others went on:
        then come again.
        """
        self._stop_watching()
        self._round = None
        deadline = self._object.deadline(JOIN_S if timeout is None else timeout)
        told = self._come(deadline)
        self._named = True
        self._join.run = told[0]
        entered = self._enter(told)
        if entered.rank == 0:
            self._drop(told[6])
        return entered

    def _enter(self, told: list[Any]) -> Round:
        """Take a round for this node's, and watch it if somebody is to be called."""
        self._round = Round(self._object, told, self._scoped(told[2]))
        if self._on_change is not None:
            self.changed  # noqa: B018 - starts the watch
        return self._round

    def succeed(self, earlier: Rendezvous, same_server: bool) -> None:
        """Go on as the node that this process was in an earlier session; at another server the run is another, too."""
        self.node, self._named = earlier.node, earlier._named
        if same_server:
            self._join.run = earlier._join.run

    def follow(self, last: Round) -> Round:
        """Watch a round that this node was in and has lost its place in, because the others need it no more."""
        self._stop_watching()
        return self._enter(last.told)

    def _come(self, deadline: Deadline) -> list[Any]:
        """Make the call, under another name if this one is taken and nobody has given it to us."""
        patience, base, twin, waited = Deadline(min(TAKEN_S, deadline.remaining())), self.node, 1, False
        place = Deadline(min(FULL_S, deadline.remaining()))
        while True:
            self._call = self._object.next_call()
            try:
                _, told = self._object.perform(
                    self.node,
                    self._join,
                    rendezvous.Withdraw,
                    deadline,
                    self._progress,
                    self._call,
                    rendezvous.Leave,
                )
                return list(told)
            except RunFull as full:
                self._call = 0
                if place.expired():
                    raise
                if not waited:
                    self._say_why(f"it waits up to {place.timeout_s:g} s for a place: {full}")
                waited = True
                time.sleep(AGAIN_S)
            except NameTaken as taken:
                self._call = 0
                if not patience.expired() and (self._named or card.has_died(taken.other)):
                    if not waited:
                        self._say_why(f"it waits up to {patience.timeout_s:g} s for its name: {taken}")
                    waited = True
                    time.sleep(AGAIN_S)
                    continue
                twin += 1
                if self._named or twin > TWINS:
                    raise
                self.node = f"{base}#{twin}"
            except BaseException:
                self._call = 0
                raise

    def _say_why(self, why: str) -> None:
        if self._progress is None:
            log.warning("a node has to wait: %s", printable(why))
        else:
            self._progress(Waiting(why))

    @property
    def changed(self) -> Change:
        """Whether this node's round is over, and why: then come again. It is not set before there is a round."""
        with self._lock:
            if self._round is None:
                return Change()
            if self._watch is None:
                self._watch = Watch(self._object, self.node, self._round.scope, Change(self._on_change))
            return self._watch.change

    def leave(self, *, failed: str = "", done: bool = False) -> bool:
        """Leave the round, or the wait for one; the run goes on without this node. Say whether it was the last.

        A node whose work is `done` does not end the round for the others. One that has `failed`, which says of what,
        closes the run as failed where fewer than the minimum are left.
        """
        self._stop_watching()
        last = False
        if self._call:
            command = rendezvous.Leave(self._call, card.cut(failed, "failed"), done)
            outcome = self._object.act(self.node, self._object.next_call(), command, 0.0)
            last = isinstance(outcome, Done) and outcome.answer == 0
            if last and self._round is not None:
                self._drop(self._round.scope)
        self._call, self._round = 0, None
        return last

    def close(self, result: str, reason: str = "") -> bool:
        """End the run with its result, for everybody; say whether it was still open."""
        command = rendezvous.Close(card.cut(result, "result"), card.cut(reason or f"closed by {self.node}", "reason"))
        return bool(self._done(command))

    def open(self) -> bool:
        """Begin a new run under this id where the last one was closed; say whether it was."""
        self._join.run = -1
        return bool(self._done(rendezvous.Open()))

    def begin_anew(self) -> None:
        """Begin a new run where the last one is over and everybody has left it.

        This is for coming, not for finding a run closed: a spare that has waited for the end is told of it, and may be
        the last one here by then.
        """
        status = self.status()
        if status.phase == "closed" and not status.nodes:
            self.open()  # or somebody else has by now

    def status(self) -> Status:
        """Return what there is now; one need not be a node to ask."""
        told = self._done(rendezvous.Look())
        told["waiting"], told["spares"] = tuple(told["waiting"]), tuple(told["spares"])
        return Status(**{name: told[name] for name in Status._fields})

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*([] if kind is None else [RallypointError])):  # what is on its way matters more
            self.leave()

    def _done(self, command: Any) -> Any:
        outcome = self._object.act(self.node, self._object.next_call(), command, 0.0)
        assert isinstance(outcome, Done)
        return outcome.answer

    def _stop_watching(self) -> None:
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def _prefix(self, scope: int) -> str:
        return card.round_prefix(self._object.name, scope)

    def _scoped(self, scope: int) -> Any:
        if isinstance(self._store, Store):
            return PrefixStore(self._prefix(scope), self._store)
        return sys.modules["torch"].distributed.PrefixStore(self._prefix(scope), self._store)

    def _drop(self, scope: int) -> None:
        """Delete what a round has stored; a store that cannot even list its keys keeps it."""
        prefix = f"{self._prefix(scope)}/"
        with contextlib.suppress(RuntimeError, AttributeError):
            try:
                self._store.delete_prefix(prefix)
            except (Unsupported, AttributeError):  # PyTorch's server, and its stores
                for key in self._store.list_keys():
                    if key.startswith(prefix):
                        self._store.delete_key(key)


_here: weakref.WeakSet[Rendezvous] = weakref.WeakSet()


def _own_name(shared: Object) -> str:
    """Return the host's name, or one beside it where another node of this process has that."""
    names = {other.node for other in _here if other.statistics()[:4] == shared.statistics()[:4]}
    host = socket.gethostname()
    return next(name for name in (host, *(f"{host}#{twin}" for twin in range(2, TWINS + 1))) if name not in names)
