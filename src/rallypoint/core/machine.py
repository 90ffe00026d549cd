"""What a shared object is: a state that members change by commands, some of which wait until the state lets them go.

Barrier, exchange, lock and roster are machines. A machine is a msgspec struct, so its state can be written down; its
methods do no I/O and see no clock. It is hosted in one of two ways, and cannot tell which. Our server keeps it in
memory (`core/objects.py`). On a store that only has bytes, every client reads the state, applies its command, and
writes the new state by compare-and-set (`recipes/hosting.py`).

Rules
- A `Call` is one call of one member: its name, the session that it lives and dies with, a number that the session uses
  once, and where it runs, for people. `apply` may see the same call again, after a lost race, after a cut, or because
  its caller looks whether the wait is over: it then changes nothing and returns what is true now.
- `apply` returns a `Step`: the outcome (an answer, a refusal, or `WAIT`), whether the state changed, and the calls that
  were waiting and should look again, or what they all come to. Only those are looked at, so a round of n members costs
  n steps.
- `lost(session)` takes out everything that hangs on a session.
- `stamp` is a number that the host makes larger with every change of the state, for ever, also over the end of a
  machine: numbers that must never come twice are taken from it.
- `why(call)` says what a waiting call waits for; it may cost more than a step, for it is asked only now and then.
- A machine that is `idle` has nobody, and may be dropped. One that `lasts` is to be remembered for a while: it is
  `put_away`, and sheds what those who come next need not find.
- What has to happen after a while is an `alarm`: a number, and a duration. Whoever hosts the machine lets it `ring`
  when that much time has passed, by its own clock, since it first saw the number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from msgspec import Meta, Struct

__all__ = [
    "MAX_MEMBERS",
    "MAX_NAME",
    "WAIT",
    "WAITS",
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
    "listed",
    "waiting_for",
]

MAX_NAME = 256
"""How many characters a name may have."""

MAX_MEMBERS = 65_536
"""How many members an object may have."""

SHOWN = 100
"""How many names a reason lists."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
"""What a member goes by."""


class Call(Struct, frozen=True, array_like=True, gc=False):
    """One call of one member."""

    member: Name
    session: Annotated[str, Meta(max_length=64)]
    number: int
    where: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    former: tuple[str, ...] = ()
    """The sessions that the same process had before, and has lost: what they hold is its own."""

    @property
    def id(self) -> str:
        """What no other call has."""
        return f"{self.session}/{self.number}"

    def owns(self, other: Call) -> bool:
        """Say whether another call was made by the same process, in this session or one that it has lost."""
        return other.session == self.session or other.session in self.former

    def __str__(self) -> str:
        return f"{self.member} ({self.where})" if self.where else self.member


class Command(Struct, array_like=True):
    """What a member asks of a machine; each belongs to one kind of machine."""

    machine: ClassVar[type[Machine]]

    @property
    def weight(self) -> int:
        """How many bytes the state keeps because of it, beside names."""
        return 0


class Undo(Command):
    """Take back an earlier call of the same session: a wait, or what it has got.

    Where the call has come true and that stands, the answer is a list with the call's own answer in it, or what it was
    refused for. Any other answer says that it is taken back.
    """

    call: int


class Done(NamedTuple):
    """A call is over, and this is its answer: plain data."""

    answer: Any = None


class Refused(NamedTuple):
    """A call is over, and this is why it failed: an error's name, and its fields."""

    error: str
    fields: dict[str, Any]


class _Wait:
    """A call waits."""

    def __repr__(self) -> str:
        return "WAIT"


WAIT = _Wait()
"""The outcome of a call that is not over."""

Outcome = Done | Refused | _Wait
"""What `apply` comes to."""


class Waiting(NamedTuple):
    """Why a call waits: a sentence, and by name who is missing, and who of them came and went."""

    reason: str
    missing: Sequence[str] = ()
    withdrawn: Sequence[str] = ()
    waited_s: float = 0.0
    """For how long, as its caller measures it: a machine sees no clock."""

    stands_by: bool = False
    """Whether it waits in reserve, so that no time-out should end it."""


class Disconnected(Waiting):
    """Why a call waits as far as its client knows: the server is down, and says nothing. It never crosses the wire."""

    __slots__ = ()


class Step(NamedTuple):
    """What became of a command."""

    outcome: Outcome
    changed: bool = False
    woken: Iterable[Call] = ()
    told: Done | Refused | None = None
    """What all the woken come to, where that is one and the same: they need not look."""

    dropped: Iterable[Call] = ()
    """Other calls that were in the state, and are no more."""


WAITS = Step(WAIT, True)
"""A call was taken in, and waits; nobody else is concerned."""


class Machine(Struct):
    """The state of one shared object."""

    kind: ClassVar[str]
    comes_again: ClassVar[bool] = False
    """Whether a call that has lost its place while it did not look takes another."""

    def apply(self, call: Call, command: Any, stamp: int) -> Step:
        """Carry out a command, or look at one that waits."""
        raise NotImplementedError

    def take_in(self, calls: Mapping[str, Call], commands: Sequence[Any]) -> bool:
        """Take in calls, by their ids, if `apply` would return `WAITS` for each of them; else change nothing.

        Returns whether that was done. A machine may always refuse.
        """
        return False

    def lost(self, session: str, stamp: int) -> Step:
        """Take out everything that hangs on a session that has ended."""
        raise NotImplementedError

    def keeps(self, call_id: str) -> bool:
        """Say whether the state has something of a call that is not over: a wait, or what it has got."""
        raise NotImplementedError

    def sessions(self) -> set[str]:
        """Return the sessions whose end this machine has to hear of."""
        raise NotImplementedError

    def why(self, call: Call) -> Waiting:
        """Say what a waiting call waits for."""
        raise NotImplementedError

    def ring(self, alarm: int, stamp: int) -> Step:
        """Do what is due when the alarm of that number has been set for its time; nothing where it is another's."""
        raise NotImplementedError

    @property
    def alarm(self) -> tuple[int, float] | None:
        """The number of the alarm that is set, and for how many seconds from when it was."""
        return None

    @property
    def idle(self) -> bool:
        """Whether nobody is here."""
        raise NotImplementedError

    @property
    def lasts(self) -> bool:
        """Whether it should be remembered for a while, though idle."""
        return False

    def put_away(self, most: int) -> int:
        """Shed what need not be remembered, and the oldest if the rest is above so many bytes; return how many it is.

        Only of a machine that is idle and lasts.
        """
        raise NotImplementedError


def listed(names: Sequence[str]) -> str:
    """Return names in a row, and how many more there are where they are many."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def waiting_for(so_far: str, missing: Sequence[str], withdrawn: Mapping[str, None]) -> Waiting:
    """Say who has not come, after how far it is, and which of them came and gave up."""
    gone = [name for name in missing if name in withdrawn] if withdrawn else []
    gave_up = f" (came, and gave up: {listed(gone)})" if gone else ""
    return Waiting(f"{so_far}; missing: {listed(missing)}{gave_up}", missing, gone)


def disagreement(what: str, mine: str, theirs: str, other: Call) -> Refused:
    """Refuse a call that does not fit to that of another member."""
    return Refused("Disagreement", {"what": what, "mine": mine, "theirs": theirs, "other": str(other)})
