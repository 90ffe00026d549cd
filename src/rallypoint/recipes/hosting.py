"""Where a shared object lives, and how a call on it is carried through.

`host_of(store)` chooses: our server hosts the object itself (one request, answered when it is time), on any other
store the members host it by compare-and-set (`recipes/pulse.py`, `StoreHost` there). `Object.perform` is the one way in
which a call is made: ask; while it waits, say why every few seconds; at the deadline, or when interrupted, take it
back, unless it came true at that very moment. `Recipe` is what the classes for users have in common.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

from rallypoint import errors
from rallypoint.core.machine import Command, Done, Refused, Undo, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import MeetingError, MembersMissing, RallypointError
from rallypoint.store.base import Store

__all__ = ["Host", "Object", "ObjectStatistics", "Progress", "Recipe", "host_of"]

log = logging.getLogger("rallypoint")

PROGRESS_S = 10.0
"""How often a wait says why it waits."""

Progress = Callable[[Waiting], object]
"""What is called now and then while a call waits."""


class Host(Protocol):
    """Where machines live."""

    label: str
    hosted_by: str

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""


class ServerHost:
    """Our server hosts the machines."""

    hosted_by = "server"

    def __init__(self, store: Store) -> None:
        self.label = repr(store)
        self._store = store

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Ask the server."""
        return self._store._backend.act(self._store._name(name), member, call, command, wait_s)


def host_of(store: Any) -> Host:
    """Return the host of the objects of a store."""
    if isinstance(store, Store) and store._backend.hosts_objects:
        return ServerHost(store)
    from rallypoint.recipes.pulse import StoreHost  # most programs have a server

    return StoreHost(store)


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
    ) -> tuple[int, Any]:
        """Make a call and wait for its answer; return its number and the answer.

        At the deadline it is taken back: raises MembersMissing, unless it came true at that moment. Once it stands by
        in reserve, it has no deadline any more.
        """
        call, began_at = self.next_call(), time.monotonic()
        try:
            while True:
                waiting = self.act(member, call, command, min(deadline.remaining(), PROGRESS_S))
                if isinstance(waiting, Done):
                    return call, waiting.answer
                if waiting.stands_by:
                    deadline = Deadline(float("inf"))
                if deadline.expired():
                    break
                self._say(member, waiting._replace(waited_s=time.monotonic() - began_at), progress)
        except MeetingError:
            raise
        except BaseException:
            with contextlib.suppress(RallypointError):
                self.act(member, self.next_call(), undo(call), 0.0)
            raise
        late = self.act(member, self.next_call(), undo(call), 0.0)
        if isinstance(late, Done) and isinstance(late.answer, list):
            return call, late.answer[0]
        raise MembersMissing(
            thing=f"{self.thing} in {self._host.label}",
            member=member,
            missing=waiting.missing,
            withdrawn=waiting.withdrawn,
            timeout_s=deadline.timeout_s,
            reason=waiting.reason,
        )

    def act(self, member: str, call: int, command: Command, wait_s: float) -> Done | Waiting:
        """Carry out one command; raise what it is refused for."""
        outcome = self._host.act(self.name, member, call, command, wait_s)
        if isinstance(outcome, Refused):
            self._refused(outcome)
        return outcome

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
            log.info("%s, member %s has waited %.0f s: %s", self.thing, member, waiting.waited_s, waiting.reason)

    def _refused(self, outcome: Refused) -> NoReturn:
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
