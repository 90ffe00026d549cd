"""Where a shared object is hosted, and how a call on it runs.

`host_of(store)` selects the host. Our server hosts the object itself: one request, answered when its outcome is known.
On any other store the members host it by compare-and-set (`recipes/hosting/store_host.py`) and detect dead members by
heartbeats. All blocking calls go through `SharedObject.perform`: send the command; while it waits, report the reason
every few seconds; at the deadline, or when interrupted, undo it, unless it completed at that moment. `Recipe` is the
base class of the public classes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from rallypoint import errors
from rallypoint.client.outage import WithoutQuorum
from rallypoint.core import ops
from rallypoint.core.machines.machine import Command, Disconnected, Done, Machine, Refused, Undo, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import MeetingError, MembersMissing, NoQuorum, RallypointError
from rallypoint.store.base import Store
from rallypoint.store.batch import Answer, Batch
from rallypoint.store.internal import backend_of, encoded_key
from rallypoint.text import printable

__all__ = ["ObjectHost", "SharedObject", "ObjectStatistics", "Progress", "Recipe", "host_of"]

log = logging.getLogger("rallypoint")

PROGRESS_S = 10.0
"""How often a waiting call reports why it waits."""

ADVICE = {"lock": "Look at its holder: is it running, and will it release the lock?"}
"""Advice for a timeout without missing members, by kind of object."""

DOWN = "This call is undone when the server is back; whether it completed is unknown. Is the server being restarted?"
"""Advice for a timeout while the server is down."""

T = TypeVar("T")

Progress = Callable[[Waiting], object]
"""A callback that is called every few seconds while a call waits."""


def _as_it_is(answer: Any) -> Any:
    return answer


class ObjectHost(Protocol):
    """Hosts the state machines of shared objects."""

    label: str
    hosted_by: str

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Apply a command, or check a pending one; return why it still waits after `wait_s`."""

    def evict_dead(self, name: str, kind: type[Machine]) -> None:
        """Evict dead sessions, so that a query is accurate."""


class ServerHost:
    """Hosts the state machines on our server."""

    hosted_by = "server"

    def __init__(self, store: Store) -> None:
        self.label = repr(store)
        self._store = store

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Send the command to the server."""
        outcome: Done | Refused | Waiting = backend_of(self._store).execute(
            self.op(name, member, call, command, wait_s)
        )
        return outcome

    def op(self, name: str, member: str, call: int, command: Command, wait_s: float) -> ops.Act:
        """Return the operation that sends a command."""
        return ops.Act(0, encoded_key(self._store, name), member, call, command, wait_s)  # type: ignore[arg-type]

    def evict_dead(self, name: str, kind: type[Machine]) -> None:
        """Do nothing: the server evicts a session when it ends."""


def host_of(store: Any) -> ObjectHost:
    """Return the host of the objects of a store."""
    if isinstance(store, Store) and backend_of(store).hosts_objects:
        return ServerHost(store)
    from rallypoint.recipes.hosting.store_host import StoreHost

    return StoreHost(store)


class ObjectStatistics(NamedTuple):
    """A shared object's kind, name and host, and how many calls this process made on it."""

    kind: str
    name: str
    hosted_by: str
    """`server`, or `members` (by compare-and-set)."""

    store: str
    calls: int


class SharedObject:
    """One process's handle on a shared object."""

    _calls = itertools.count(1)

    def __init__(self, kind: str, store: Any, name: str, host: ObjectHost | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a {kind} must be a non-empty string, not {name!r}")
        self.kind = kind
        self.name = name
        self.title = f"{kind} {name!r}"
        self._host = host_of(store) if host is None else host
        self.label = self._host.label
        self._made = 0
        self._default_s = store.timeout.total_seconds() if hasattr(store, "timeout") else 300.0

    def __repr__(self) -> str:
        return f"<{self.title} in {self._host.label}>"

    def perform(
        self,
        member: str,
        command: Command,
        undo: type[Undo],
        deadline: Deadline,
        progress: Progress | None = None,
        call: int = 0,
        abandon: type[Undo] | None = None,
    ) -> tuple[int, Any]:
        """Make a call and wait for its result; return its number and the result.

        At the deadline, undo it and raise MembersMissing or NoQuorum, unless it completed at that moment. A spare waits
        without a deadline. An interrupted call is undone by `abandon`, if given, because the caller is gone and cannot
        use a result.
        """
        call = call or self.next_call()
        try:
            outcome, deadline = self._wait_for_outcome(member, call, command, deadline, progress)
        except BaseException:
            with contextlib.suppress(RallypointError):
                self.act(member, self.next_call(), (abandon or undo)(call), 0.0)
            raise
        if isinstance(outcome, Refused):
            self._refused(outcome)
        if isinstance(outcome, Done):
            return call, outcome.answer
        late = self.act(member, self.next_call(), undo(call), 0.0)
        if isinstance(late, Done) and isinstance(late.answer, list):
            return call, late.answer[0]
        if isinstance(outcome, WithoutQuorum):
            raise NoQuorum(store=self._host.label, timeout_s=deadline.timeout_s, tried=outcome.no_quorum)
        raise MembersMissing(
            thing=f"{self.title} in {self._host.label}",
            member=member,
            missing=outcome.missing,
            withdrawn=outcome.withdrawn,
            timeout_s=deadline.timeout_s,
            reason=outcome.reason,
            advice=DOWN if isinstance(outcome, Disconnected) else ADVICE.get(self.kind, ""),
        )

    def _wait_for_outcome(
        self, member: str, call: int, command: Command, deadline: Deadline, progress: Progress | None
    ) -> tuple[Done | Refused | Waiting, Deadline]:
        """Return the outcome of a call, or why it waits at the deadline; and the deadline (infinite for a spare)."""
        began_at = time.monotonic()
        while True:
            outcome = self._host.act(self.name, member, call, command, min(deadline.remaining(), PROGRESS_S))
            if isinstance(outcome, (Done, Refused)):
                return outcome, deadline
            if outcome.is_spare:
                deadline = Deadline(float("inf"))
            if deadline.expired():
                return outcome, deadline
            self._report_progress(member, outcome._replace(waited_s=time.monotonic() - began_at), progress)

    def act(self, member: str, call: int, command: Command, wait_s: float) -> Done | Waiting:
        """Apply one command; raise the error if it is refused."""
        outcome = self._host.act(self.name, member, call, command, wait_s)
        if isinstance(outcome, Refused):
            self._refused(outcome)
        return outcome

    def ask(
        self, batch: Batch | None, member: str, command: Command, read: Callable[[Any], T] = _as_it_is
    ) -> Answer[T]:
        """Apply a command that does not wait: with the other requests of a batch, or at once if there is none.

        The value is what `read` makes of the machine's answer. Only our server has batches.
        """

        def answer_of(outcome: Done | Refused | Waiting) -> T:
            if isinstance(outcome, Refused):
                self._refused(outcome)
            return read(outcome.answer if isinstance(outcome, Done) else None)

        call = self.next_call()
        if batch is not None and isinstance(self._host, ServerHost):
            return batch.request(self._host.op(self.name, member, call, command, 0.0), answer_of)
        answer = Answer(answer_of)
        error = answer.settle(self._host.act(self.name, member, call, command, 0.0))
        if error is not None:
            raise error
        return answer

    def evict_dead(self, kind: type[Machine]) -> None:
        """Evict dead sessions from this object, so that a query of its members is accurate."""
        self._host.evict_dead(self.name, kind)

    def next_call(self) -> int:
        """Return a unique number for a call made with `act`."""
        self._made += 1
        return next(SharedObject._calls)

    def deadline(self, timeout: Any) -> Deadline:
        """Return the deadline for a timeout; None means the store's timeout."""
        return Deadline(self._default_s if timeout is None else timeout)

    def statistics(self) -> ObjectStatistics:
        """Return this object's kind, name and host, and the calls made on it here."""
        return ObjectStatistics(self.kind, self.name, self._host.hosted_by, self._host.label, self._made)

    def _report_progress(self, member: str, waiting: Waiting, progress: Progress | None) -> None:
        if progress is not None:
            progress(waiting)
        else:
            words = printable(f"member {member} has waited {waiting.waited_s:.0f} s: {waiting.reason}")
            log.info("%s, %s", self.title, words)

    def _refused(self, outcome: Refused) -> NoReturn:
        if outcome.error == "Undone":
            raise MeetingError(f"{self.title} in {self._host.label}: another thread undid the call")
        kind = getattr(errors, outcome.error, None)
        if not isinstance(kind, type) or not issubclass(kind, MeetingError):
            raise MeetingError(f"{self.title} in {self._host.label} refused: {outcome.error} {outcome.fields}")
        raise kind(thing=f"{self.title} in {self._host.label}", **outcome.fields)


class Recipe:
    """Base class of the public shared objects."""

    _object: SharedObject

    def __repr__(self) -> str:
        return repr(self._object)

    def statistics(self) -> ObjectStatistics:
        """Return the object's kind, name, host and store, and the calls made on it here."""
        return self._object.statistics()
