"""Where a shared object lives, and how a call on it is carried through.

`host_of(store)` chooses: our server hosts the object itself (one request, answered when it is time), on any other
store the members host it by compare-and-set (`recipes/storehost.py`), and show by counters that they live.
`Object.perform` is the one way a call is made: ask; while it waits, say why every few seconds; at the deadline,
or when interrupted, take it back, unless it came true at that very moment. `Recipe` is what the classes for users have
in common.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

from rallypoint import errors
from rallypoint.core import ops
from rallypoint.core.machine import Command, Disconnected, Done, Machine, Refused, Undo, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import MeetingError, MembersMissing, NoQuorum, RallypointError
from rallypoint.store.base import Store
from rallypoint.store.outage import WithoutQuorum
from rallypoint.text import printable

__all__ = ["Host", "Object", "ObjectStatistics", "Progress", "Recipe", "host_of"]

log = logging.getLogger("rallypoint")

PROGRESS_S = 10.0
"""How often a wait says why it waits."""

ADVICE = {"lock": "Look at its holder: does it run, and will it release the lock?"}
"""What to do about a time-out where nobody is missing, by kind of object."""

DOWN = "This call is taken back when the server is back; whether it came true is not known. Is it being restarted?"
"""What to say of a time-out while the server is down."""

Progress = Callable[[Waiting], object]
"""What is called now and then while a call waits."""


class Host(Protocol):
    """Where machines live."""

    label: str
    hosted_by: str

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""

    def make_sure(self, name: str, kind: type[Machine]) -> None:
        """Take out who is dead and still in, so that a look tells the truth."""


class ServerHost:
    """Our server hosts the machines."""

    hosted_by = "server"

    def __init__(self, store: Store) -> None:
        self.label = repr(store)
        self._store = store

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Ask the server."""
        op = ops.Act(0, self._store._name(name), member, call, command, wait_s)  # type: ignore[arg-type]
        outcome: Done | Refused | Waiting = self._store._backend.execute(op)
        return outcome

    def make_sure(self, name: str, kind: type[Machine]) -> None:
        """Do nothing: the server knows when a session ends."""


def host_of(store: Any) -> Host:
    """Return the host of the objects of a store."""
    if isinstance(store, Store) and store._backend.hosts_objects:
        return ServerHost(store)
    from rallypoint.recipes.pulsehost import PulseHost

    return PulseHost(store)


class ObjectStatistics(NamedTuple):
    """What a shared object is, where it lives, and how many calls on it were made here."""

    kind: str
    name: str
    hosted_by: str
    """`server`, or `members`, by compare-and-set."""

    store: str
    calls: int


class Object:
    """One shared object, as one process sees it."""

    _calls = itertools.count(1)

    def __init__(self, kind: str, store: Any, name: str, host: Host | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a {kind} must be a text, not {name!r}")
        self.kind = kind
        self.name = name
        self.thing = f"{kind} {name!r}"
        self._host = host_of(store) if host is None else host
        self.label = self._host.label
        self._made = 0
        self._default_s = store.timeout.total_seconds() if hasattr(store, "timeout") else 300.0

    def __repr__(self) -> str:
        return f"<{self.thing} in {self._host.label}>"

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
        """Make a call and wait for its answer; return its number and the answer.

        At the deadline it is taken back: raises MembersMissing or NoQuorum, unless it came true at that moment. Once it
        stands by in reserve, it has no deadline any more. One that is interrupted is taken back by `abandon`, if that
        is another way: nobody is there any more to whom it could have come true.
        """
        call = call or self.next_call()
        try:
            outcome, deadline = self._carry_through(member, call, command, deadline, progress)
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
            thing=f"{self.thing} in {self._host.label}",
            member=member,
            missing=outcome.missing,
            withdrawn=outcome.withdrawn,
            timeout_s=deadline.timeout_s,
            reason=outcome.reason,
            advice=DOWN if isinstance(outcome, Disconnected) else ADVICE.get(self.kind, ""),
        )

    def _carry_through(
        self, member: str, call: int, command: Command, deadline: Deadline, progress: Progress | None
    ) -> tuple[Done | Refused | Waiting, Deadline]:
        """Return what a call comes to, or why it still waits at the deadline; and that, which may have been put off."""
        began_at = time.monotonic()
        while True:
            outcome = self._host.act(self.name, member, call, command, min(deadline.remaining(), PROGRESS_S))
            if isinstance(outcome, (Done, Refused)):
                return outcome, deadline
            if outcome.stands_by:
                deadline = Deadline(float("inf"))
            if deadline.expired():
                return outcome, deadline
            self._say(member, outcome._replace(waited_s=time.monotonic() - began_at), progress)

    def act(self, member: str, call: int, command: Command, wait_s: float) -> Done | Waiting:
        """Carry out one command; raise what it is refused for."""
        outcome = self._host.act(self.name, member, call, command, wait_s)
        if isinstance(outcome, Refused):
            self._refused(outcome)
        return outcome

    def make_sure(self, kind: type[Machine]) -> None:
        """See to it that a look at this object, a machine of that kind, tells the truth about who lives."""
        self._host.make_sure(self.name, kind)

    def next_call(self) -> int:
        """Return a number for a call that is made with `act`."""
        self._made += 1
        return next(Object._calls)

    def deadline(self, timeout: Any) -> Deadline:
        """Return when a call ends that was given this timeout, or none."""
        return Deadline(self._default_s if timeout is None else timeout)

    def statistics(self) -> ObjectStatistics:
        """Return what it is, where it lives, and how many calls were made here."""
        return ObjectStatistics(self.kind, self.name, self._host.hosted_by, self._host.label, self._made)

    def _say(self, member: str, waiting: Waiting, progress: Progress | None) -> None:
        if progress is not None:
            progress(waiting)
        else:
            words = printable(f"member {member} has waited {waiting.waited_s:.0f} s: {waiting.reason}")
            log.info("%s, %s", self.thing, words)

    def _refused(self, outcome: Refused) -> NoReturn:
        if outcome.error == "Undone":
            raise MeetingError(f"{self.thing} in {self._host.label}: the call was taken back by another thread")
        kind = getattr(errors, outcome.error, None)
        if not isinstance(kind, type) or not issubclass(kind, MeetingError):
            raise MeetingError(f"{self.thing} in {self._host.label} refused: {outcome.error} {outcome.fields}")
        raise kind(thing=f"{self.thing} in {self._host.label}", **outcome.fields)


class Recipe:
    """A shared object as users have it."""

    _object: Object

    def __repr__(self) -> str:
        return repr(self._object)

    def statistics(self) -> ObjectStatistics:
        """Return what it is, whether our server or its members host it, in which store, and its calls made here."""
        return self._object.statistics()
