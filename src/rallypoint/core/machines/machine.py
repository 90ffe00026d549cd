"""A shared object: a state that members change by commands, some of which wait until the state lets them proceed.

Barrier, exchange, lock, membership, rendezvous and work queue are machines. A machine is a msgspec struct, so its state
can be serialized; its methods do no I/O and read no clock. It has one of two hosts, and cannot tell which. Our server
keeps it in memory (`core/objects.py`). On a store of plain bytes, each client reads the state, applies its command, and
writes the new state by compare-and-set (`recipes/hosting/shared_object.py`).

Rules
- A `Call` is one call of one member: its name, its session, with whose end it ends, a number that the session uses
  once, and the member's location, for diagnostics. `apply` may see the same call again: after a lost race, after a lost
  connection, or when its caller checks whether the wait is over. It then changes nothing and returns the current
  outcome.
- `apply` returns a `Step`: the outcome (an answer, a refusal, or `WAIT`), whether the state changed, and the waiting
  calls to recheck, or the outcome that they share. Only those are rechecked, so a round of n members costs n steps.
- `session_ended(session)` removes everything that belongs to a session.
- `stamp` is a number that the host increases with every change of the state, for ever, even past the end of a machine:
  numbers that must never repeat are taken from it.
- `explain(call)` returns what a waiting call waits for; it may cost more than a step, because it runs rarely.
- An `idle` machine has no members and may be dropped. One that `persists_idle` is remembered for a while: the host
  calls `trim`, and the machine discards what later members do not need.
- A delayed action is a `timer`: a number and a duration. The host calls `on_timer` when that much time has passed, by
  its own clock, since it first saw the number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from msgspec import Meta, Struct, msgpack, structs

__all__ = [
    "MAX_MEMBERS",
    "MAX_NAME",
    "SHOWN",
    "WAIT",
    "WAITS_STEP",
    "Call",
    "Command",
    "Disconnected",
    "Done",
    "Machine",
    "Name",
    "Outcome",
    "Refused",
    "Step",
    "Undo",
    "Waiting",
    "disagreement",
    "list_names",
    "explain_missing",
]

MAX_NAME = 256
"""The longest name, in characters."""

MAX_MEMBERS = 65_536
"""The most members of one object."""

SHOWN = 100
"""How many names a reason lists."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
"""The name of a member."""


class Call(Struct, frozen=True, array_like=True, gc=False):
    """One call of one member."""

    member: Name
    session: Annotated[str, Meta(max_length=64)]
    number: int
    where: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    former: tuple[str, ...] = ()
    """The sessions that the same process had before and lost: what they hold belongs to it."""

    @property
    def id(self) -> str:
        """Unique id of this call."""
        return f"{self.session}/{self.number}"

    def owns(self, other: Call) -> bool:
        """Return whether another call was made by the same process, in this session or in one it has lost."""
        return other.session == self.session or other.session in self.former

    def __str__(self) -> str:
        return f"{self.member} ({self.where})" if self.where else self.member


class Command(Struct, array_like=True):
    """A member's command to a machine; each command class belongs to one kind of machine."""

    machine: ClassVar[type[Machine]]
    suspended_by: ClassVar[type[Undo] | None] = None
    """If set, takes the waiting call back while its client is away; it is made again when the client returns."""

    @property
    def weight(self) -> int:
        """The bytes that the state keeps because of it, besides names."""
        return 0


class Undo(Command):
    """Take back an earlier call of the same session: a wait, or what it obtained.

    If the call has completed and that stands, the answer is a list of the call's own answer, or its refusal. Any other
    answer says that the call was taken back.
    """

    call: int


class Done(NamedTuple):
    """A call is over; `answer` is plain data."""

    answer: Any = None


class Refused(NamedTuple):
    """A call is over and was refused: the name of an error, and its fields."""

    error: str
    fields: dict[str, Any]


class _Wait:
    """A call waits."""

    def __repr__(self) -> str:
        return "WAIT"


WAIT = _Wait()
"""The outcome of a call that is not over."""

Outcome = Done | Refused | _Wait
"""The outcome of `apply`."""


class Waiting(NamedTuple):
    """Why a call waits: a sentence, the names of missing members, and those of them that arrived and withdrew."""

    reason: str
    missing: Sequence[str] = ()
    withdrawn: Sequence[str] = ()
    waited_s: float = 0.0
    """How long it has waited, measured by the caller: a machine reads no clock."""

    is_spare: bool = False
    """Whether it waits in reserve, so that no timeout should end it."""


class Disconnected(Waiting):
    """Why a call waits, as far as its client knows: the server is down. Never sent over the wire."""

    __slots__ = ()


class Step(NamedTuple):
    """The result of a command."""

    outcome: Outcome
    changed: bool = False
    woken: Iterable[Call] = ()
    shared_outcome: Done | Refused | None = None
    """The outcome of all woken calls if they share one: they need no recheck."""

    dropped: Iterable[Call] = ()
    """Other calls that the state no longer holds."""

    grown: int = 0
    """By how many bytes the part of the state grew that belongs to no call."""


WAITS_STEP = Step(WAIT, True)
"""A call was admitted and waits; no other call is affected."""


class Machine(Struct):
    """The state of one shared object."""

    kind: ClassVar[str]
    rejoins: ClassVar[bool] = False
    """Whether a call that lost its place between two checks of its wait takes another."""

    sections: ClassVar[tuple[str, ...]] = ()
    """The fields that may be large: dicts, which a snapshot writes in chunks."""

    def apply(self, call: Call, command: Any, stamp: int) -> Step:
        """Apply a command, or recheck one that waits."""
        raise NotImplementedError

    def admit_all(self, calls: Mapping[str, Call], commands: Sequence[Any]) -> bool:
        """Admit calls, by id, if `apply` would return `WAITS_STEP` for each of them; else change nothing.

        Returns whether they were admitted. A machine may always decline.
        """
        return False

    def session_ended(self, session: str, stamp: int) -> Step:
        """Remove everything that belongs to a session that has ended."""
        raise NotImplementedError

    def holds(self, call_id: str) -> bool:
        """Return whether the state holds something of an unfinished call: its wait, or what it obtained."""
        raise NotImplementedError

    def sessions(self) -> set[str]:
        """Return the sessions whose end this machine must learn of."""
        raise NotImplementedError

    def explain(self, call: Call) -> Waiting:
        """Return what a waiting call waits for."""
        raise NotImplementedError

    def on_timer(self, timer: int, stamp: int) -> Step:
        """Perform the action of the timer with that number; do nothing if another timer is set."""
        raise NotImplementedError

    def restore(self, section: str, row: bytes) -> None:
        """Add an entry of one of the `sections`, as a snapshot has it."""
        getattr(self, section).update(_row_decoder(type(self), section)(row))

    @property
    def timer(self) -> tuple[int, float] | None:
        """The number of the timer that is set, and its duration in seconds."""
        return None

    @property
    def idle(self) -> bool:
        """Whether it has no members."""
        raise NotImplementedError

    @property
    def persists_idle(self) -> bool:
        """Whether it is to be remembered for a while, although idle."""
        return False

    def trim(self, most: int) -> int:
        """Discard what need not be remembered, then the oldest facts above `most` bytes; return the size that is left.

        Called only if the machine is idle and `persists_idle`.
        """
        raise NotImplementedError


@functools.cache
def _row_decoder(machine: type[Machine], section: str) -> Callable[[bytes], dict[Any, Any]]:
    kind = next(field.type for field in structs.fields(machine) if field.name == section)
    return msgpack.Decoder(kind).decode


def list_names(names: Sequence[str]) -> str:
    """Return names as text, at most `SHOWN` of them, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def explain_missing(so_far: str, missing: Sequence[str], withdrawn: Mapping[str, None]) -> Waiting:
    """Return the progress, the missing members, and those of them that arrived and gave up."""
    gone = [name for name in missing if name in withdrawn] if withdrawn else []
    gave_up = f" (gave up: {list_names(gone)})" if gone else ""
    return Waiting(f"{so_far}; missing: {list_names(missing)}{gave_up}", missing, gone)


def disagreement(what: str, mine: str, theirs: str, other: Call) -> Refused:
    """Refuse a call whose arguments contradict those of another member."""
    return Refused("Disagreement", {"what": what, "mine": mine, "theirs": theirs, "other": str(other)})
