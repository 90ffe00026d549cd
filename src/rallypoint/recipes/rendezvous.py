"""Rendezvous: the nodes of a run form a round, keep their ranks, and are notified when they must form another.

On our server a round of n nodes takes n requests, and a dead node is detected when its session ends. On any other store
the nodes host the rendezvous themselves, by compare-and-set on the key `rendezvous:RUN`. The shared keys of a round
have the prefix `round:RUN:SCOPE/`, and are deleted when the next round forms or the last node leaves.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from rallypoint.core.machines import rendezvous
from rallypoint.core.machines.machine import Done, Waiting
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import NameTaken, RallypointError, RunFull, Unsupported
from rallypoint.net import is_loopback
from rallypoint.recipes import join_args
from rallypoint.recipes.hosting.shared_object import Progress, Recipe, SharedObject
from rallypoint.recipes.round_watch import RoundChange, RoundWatch
from rallypoint.store.batch import Answer, Batch
from rallypoint.store.prefix import with_prefix
from rallypoint.text import printable

__all__ = ["Node", "Rendezvous", "Round", "Status"]

log = logging.getLogger("rallypoint")

JOIN_S = 600.0
LAST_CALL_S = 5.0
TAKEN_S, FULL_S, AGAIN_S = 3.0, 10.0, 0.1
"""How long a node retries when its name is taken, or when the run is full and it may not be a spare; and the pause
between retries. The holder of the name or place may be dead, and the server may not have noticed yet."""

DUPLICATES = 1000
"""How many nodes of one machine get a unique default name."""


class Node(NamedTuple):
    """A node of a round: its name, its host, and its process (`where`; empty if the node is gone)."""

    name: str
    host: str
    where: str


class Status(NamedTuple):
    """The state of a run: `phase` is gathering, formed or closed, `reason` explains it, `nodes` maps names to ranks."""

    phase: str
    reason: str
    round: int
    nodes: Mapping[str, int]
    waiting: tuple[str, ...]
    spares: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    over: str
    """Why the last round is over; empty while it is valid."""

    result: str | None

    @classmethod
    def decode(cls, told: dict[str, Any]) -> Status:
        """Return the status in the answer to a query."""
        told["waiting"], told["spares"] = tuple(told["waiting"]), tuple(told["spares"])
        return cls(**{name: told[name] for name in cls._fields})


class Round:
    """One round, as seen by one of its nodes; `store` holds the keys of this round only."""

    def __init__(self, shared: SharedObject, told: list[Any], store: Any) -> None:
        self.told = told
        _, number, scope, rank, size, first, before, reason = told
        self.number: int = number
        self.rank: int = rank
        self.world_size: int = size
        self.reason: str = reason
        self.scope: int = scope
        self._before: int = before  # the scope of the round before; 0 if there was none
        self.first = Node(first[0], first[1], "")
        """The node of rank 0; its `host` is the address at which other nodes reach it."""

        self.store: Any = store
        self._object = shared

    def __repr__(self) -> str:
        return f"<round {self.number} of {self._object!r}: rank {self.rank} of {self.world_size}>"

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of this round, by rank; asks the store once. Empty if a later round has formed."""
        outcome = self._object.act("", self._object.next_call(), rendezvous.RendezvousQuery(self.scope), 0.0)
        assert isinstance(outcome, Done)
        return tuple(Node(*row) for row in outcome.answer)


class Rendezvous(Recipe):
    """The rendezvous of the nodes of one run, round after round.

    A round has `min_nodes` to `max_nodes` nodes. With enough nodes it waits `last_call` for more, but not if all nodes
    of the last round are back. A node that returns under the same name `node` (default: its host name) gets its rank
    back; it may also request a `rank`. All nodes must give the same `settings`. With `spare=False` a node for which the
    round has no place is refused (RunFull) instead of waiting. `on_change` is called with the reason, in a separate
    thread, when a round is over.
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
        self._object = SharedObject("rendezvous", store, run_id)
        self.node = join_args.node_name(node) if node is not None else _own_name(self._object)
        self._store = store
        self._named = node is not None
        self._on_change = on_change
        self._progress = progress
        self._join = rendezvous.RendezvousJoin(
            join_args.limits(min_nodes, max_nodes, last_call),
            join_args.settings(settings or {}),
            -1 if rank is None else join_args.rank(rank),
            socket.gethostname(),
            join_args.node_name(address, "address") if address else join_args.address_of(store),
            is_loopback(join_args.host_of(store)),
            spare=spare,
        )
        self.address = self._join.address
        """The address at which other nodes reach this one."""

        _here.add(self)
        self._round: Round | None = None
        self._call = 0
        self._watch: RoundWatch | None = None
        self._lock = threading.Lock()

    def join(self, timeout: Timeout | None = None) -> Round:
        """Join or rejoin, and return the next round once this node is in it.

        Raises MembersMissing at the timeout (default 600 s; a spare waits without limit), RunClosed if the run is
        closed, Disagreement, RankTaken and NotAMember at once, NameTaken after 3 s of retries, RunFull after 10 s, and
        SessionLost if this process stalled and the others continued without it: then call `join` again.
        """
        joined = self._join_round(timeout)
        if joined.rank == 0 and joined._before:
            self._drop(joined._before)
        return joined

    def _join_round(self, timeout: Timeout | None) -> Round:
        """Join, and keep the keys of the round before."""
        self._stop_watching()
        self._round = None
        deadline = self._object.deadline(JOIN_S if timeout is None else timeout)
        told = self._join_as(deadline)
        self._named = True
        self._join.run = told[0]
        return self._enter(told)

    def _enter(self, told: list[Any]) -> Round:
        """Make a round this node's current one, and watch it if there is a callback."""
        self._round = Round(self._object, told, with_prefix(self._prefix(told[2]), self._store))
        if self._on_change is not None:
            self.changed  # noqa: B018 - starts the watch
        return self._round

    def succeed(self, earlier: Rendezvous, same_server: bool) -> None:
        """Continue as the same node after a session was lost; on another server the run is a new one."""
        self.node, self._named = earlier.node, earlier._named
        if same_server:
            self._join.run = earlier._join.run

    def follow(self, last: Round) -> Round:
        """Watch a round without joining it: this node is done, and lost its place there when its session ended."""
        self._stop_watching()
        return self._enter(last.told)

    def _join_as(self, deadline: Deadline) -> list[Any]:
        """Join; if the default name is taken, try other names."""
        patience, duplicate, waited = Deadline(min(TAKEN_S, deadline.remaining())), 1, False
        place = Deadline(min(FULL_S, deadline.remaining()))
        while True:
            self._call = self._object.next_call()
            try:
                _, told = self._object.perform(
                    self.node,
                    self._join,
                    rendezvous.RendezvousWithdraw,
                    deadline,
                    self._progress,
                    self._call,
                    rendezvous.RendezvousLeave,
                )
                return list(told)
            except RunFull as full:
                self._call = 0
                if place.expired():
                    raise
                if not waited:
                    self._log_refusal(f"waiting up to {place.timeout_s:g} s for a place: {full}")
                waited = True
                time.sleep(AGAIN_S)
            except NameTaken as taken:
                self._call = 0
                if not patience.expired() and (self._named or join_args.other_is_dead(taken.other)):
                    if not waited:
                        self._log_refusal(f"waiting up to {patience.timeout_s:g} s for its name: {taken}")
                    waited = True
                    time.sleep(AGAIN_S)
                    continue
                duplicate += 1
                if self._named or duplicate > DUPLICATES:
                    raise
                self.node = f"{socket.gethostname()}#{duplicate}"
            except BaseException:
                self._call = 0
                raise

    def _log_refusal(self, why: str) -> None:
        if self._progress is None:
            log.warning("this node cannot join yet: %s", printable(why))
        else:
            self._progress(Waiting(why))

    @property
    def changed(self) -> RoundChange:
        """An event that is set, with the reason, when this node's round is over: then call `join` again.

        Without a round it is not set.
        """
        with self._lock:
            if self._round is None:
                return RoundChange()
            if self._watch is None:
                self._watch = RoundWatch(self._object, self.node, self._round.scope, RoundChange(self._on_change))
            return self._watch.change

    def leave(self, *, failed: str = "", done: bool = False) -> bool:
        """Leave the round, or stop waiting for one; the run continues. Return whether this was the last node.

        A node that is `done` does not end the round for the others. If it `failed` (the reason), and fewer nodes than
        the minimum are left, the run is closed as failed.
        """
        scope = None if self._round is None else self._round.scope
        left = self._leave(None, failed, done)
        self._forget_round()
        last = left is not None and left.value == 0
        if last and scope is not None:
            self._drop(scope)
        return last

    def _leave(self, batch: Batch | None, failed: str, done: bool) -> Answer[int] | None:
        """Ask to leave, with a batch; the answer is how many nodes are left, or None if this one had not joined."""
        self._stop_watching(batch)
        command = rendezvous.RendezvousLeave(self._call, join_args.shortened(failed, "failed"), done)
        return self._object.ask(batch, self.node, command) if self._call else None

    def _forget_round(self) -> None:
        self._call, self._round = 0, None

    def evict(self, node: str, scope: int, reason: str) -> None:
        """Remove another node, which does not respond, from the round of that scope, if it is still in it."""
        self._done(rendezvous.RendezvousEvict(scope, node, join_args.shortened(reason, "reason")))

    def close(self, result: str, reason: str = "") -> bool:
        """Close the run with a result, for all nodes; return whether it was still open."""
        command = rendezvous.RendezvousClose(
            join_args.shortened(result, "result"), join_args.shortened(reason or f"closed by {self.node}", "reason")
        )
        return bool(self._done(command))

    def open(self) -> bool:
        """Start a new run under this id if the last one was closed; return whether it was."""
        self._join.run = -1
        return bool(self._done(rendezvous.RendezvousReopen()))

    def begin_anew(self) -> None:
        """Start a new run if the last one is closed and all nodes have left it.

        Call this before the first join, not when a join finds the run closed: a spare that waited for the result must
        see it, and may be the last node by then.
        """
        if self._done(rendezvous.RendezvousReopen(if_left=True)):
            self._join.run = -1

    def status(self) -> Status:
        """Return the current state of the run; the caller need not be a node of it."""
        return Status.decode(self._done(rendezvous.RendezvousQuery()))

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*([] if kind is None else [RallypointError])):  # the block's own error matters more
            self.leave()

    def _done(self, command: Any) -> Any:
        outcome = self._object.act(self.node, self._object.next_call(), command, 0.0)
        assert isinstance(outcome, Done)
        return outcome.answer

    def _stop_watching(self, batch: Batch | None = None) -> None:
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop(batch)

    def _prefix(self, scope: int) -> str:
        return join_args.round_prefix(self._object.name, scope)

    def _drop(self, scope: int) -> None:
        """Delete the keys of a round; a store that cannot list its keys keeps them."""
        prefix = f"{self._prefix(scope)}/"
        with contextlib.suppress(RuntimeError, AttributeError):
            try:
                self._store.delete_prefix(prefix)
            except (Unsupported, AttributeError):  # PyTorch's server, and its stores
                for key in self._store.list_keys():
                    if key.startswith(prefix):
                        self._store.delete_key(key)


_here: weakref.WeakSet[Rendezvous] = weakref.WeakSet()


def _own_name(shared: SharedObject) -> str:
    """Return the host name, with a suffix if another node of this process has that name."""
    names = {other.node for other in _here if other.statistics()[:4] == shared.statistics()[:4]}
    host = socket.gethostname()
    return next(
        name for name in (host, *(f"{host}#{duplicate}" for duplicate in range(2, DUPLICATES + 1))) if name not in names
    )
