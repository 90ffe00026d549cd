"""Shared objects whose state is one blob, which members change themselves: read, apply, write if nobody was faster.

    StoreHost      recipes/storehost.py          a key of a store; others tell of a change, and show that they live
    BackendHost    compat/rendezvous/host.py     what a rendezvous backend keeps; there is nothing but the blob

Whoever loses a race goes on with what is there now. Whoever waits looks again when there may be something new, lets
an alarm ring that is due by its own clock, and takes sessions out that show no sign of life. One that was only asleep
finds itself among the ended when it wakes, and raises.

Rejected: a lock around read and write. Its holder may die, and then somebody has to know that anyway.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from rallypoint import net
from rallypoint.core.machine import Call, Command, Done, Machine, Refused, Step, Undo, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import SessionLost

__all__ = ["BlobHost", "Felt", "Found", "Reading", "State"]

UNDONE = 64
ENDED = 256
"""How many ended sessions a state remembers."""

Found = tuple[bytes, Any]
"""A blob, and the token by which it is replaced."""


class State(msgspec.Struct, array_like=True):
    """What is in every blob: how often it was written and by whom, the ended sessions, and the machine."""

    version: int
    writer: str
    ended: list[str]
    machine: msgspec.Raw


S = TypeVar("S", bound=State)


class BlobHost(Generic[S]):
    """Objects that are hosted by their members."""

    hosted_by = "members"

    def __init__(self, label: str, state_type: type[S], *more: Any) -> None:
        self.label = label
        self._state_type = state_type
        self._empty = msgspec.json.encode(state_type(0, "", [], msgspec.Raw(b"{}"), *more))
        self._alarms: dict[str, tuple[int, float]] = {}
        self._undone: deque[int] = deque(maxlen=UNDONE)
        """Calls that were taken back last: another thread may wait for one of them."""

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""
        deadline = Deadline(wait_s)
        place = f"{type(command).machine.kind}:{name}"
        caller = Call(member, self.session, call, net.caller_name(), self.former)
        looks = False
        if isinstance(command, Undo):
            self._undone.append(command.call)
        while True:
            if call in self._undone:
                return Refused("Undone", {})
            state, machine, step = self._apply(place, caller, command, looks)
            looks = True
            if isinstance(step.outcome, (Done, Refused)):
                return step.outcome
            due_s = self._until_alarm(place, machine)
            if due_s <= 0:
                self._ring(place, machine)
            elif deadline.expired():
                self._bury_the_dead(place, state, machine)
                return machine.why(caller)
            elif not self._hear(place, state, machine, min(deadline.remaining(), due_s)):
                self._bury_the_dead(place, state, machine)

    def make_sure(self, name: str, kind: type[Machine]) -> None:
        """Take out who is dead and still in, so that a look tells the truth; here those who wait see to that."""

    # What hosts differ in

    @property
    def session(self) -> str:
        """What this process goes by, as one that lives or not."""
        raise NotImplementedError

    @property
    def former(self) -> tuple[str, ...]:
        """The sessions that this process had before, and has lost."""
        return ()

    def _fetch(self, place: str) -> Found:
        """Return what is there; where there is nothing, `self._empty`."""
        raise NotImplementedError

    def _swap(self, place: str, token: Any, blob: bytes) -> Found | None:
        """Replace what was read; return what is there where another was faster."""
        raise NotImplementedError

    def _hear(self, place: str, state: S, machine: Any, within_s: float) -> bool:
        """Wait until there may be something new, or for so long at most; say whether somebody told so."""
        raise NotImplementedError

    def _dead(self, place: str, state: S, machine: Machine) -> Iterable[str]:
        """Return sessions of the machine that show no sign of life."""
        raise NotImplementedError

    def _disown(self, session: str) -> str:
        """Begin another session, for the others have ended this one; say why they did."""
        raise NotImplementedError

    def _patience(self, command: Command) -> Deadline:
        """Return how long a command may go on losing races."""
        return Deadline(float("inf"))

    def _upkeep_patience(self) -> Deadline:
        """Return how long ringing an alarm, or taking out the dead, may go on losing races."""
        return Deadline(float("inf"))

    def _beaten(self, times: int, machine: Any, patience: Deadline) -> None:
        """Do what is to be done when another was faster, for the so many-th time."""

    def _again(self, place: str, present: Found, times: int) -> Found:
        """Return what to go on with when another was faster and left this, for the so many-th time."""
        return present

    def _finish(self, state: S, machine: Machine, step: Step) -> None:
        """Change the state further before it is written."""

    def _won(self, place: str, state: S, step: Step) -> None:
        """Do what is to be done after a change was written."""

    # What they have in common

    def _open(self, blob: bytes, kind: type[Machine]) -> tuple[S, Any]:
        """Return the state and the machine in a blob."""
        state = msgspec.json.decode(blob, type=self._state_type)
        return state, msgspec.json.decode(state.machine, type=kind)

    def _change(
        self, place: str, kind: type[Machine], change: Callable[[S, Any], Step], patience: Deadline
    ) -> tuple[S, Any, Step]:
        """Change what is there, again until nobody else was faster; return what it has become, and the last step."""
        found, lost = self._fetch(place), 0
        while True:
            blob, token = found
            state, machine = self._open(blob, kind)
            step = change(state, machine)
            if not step.changed:
                return state, machine, step
            state.version += 1
            state.writer = self.session
            state.machine = msgspec.Raw(msgspec.json.encode(machine))
            self._finish(state, machine, step)
            present = self._swap(place, token, msgspec.json.encode(state))
            if present is None:
                self._won(place, state, step)
                return state, machine, step
            lost += 1
            self._beaten(lost, machine, patience)
            found = self._again(place, present, lost)

    def _apply(self, place: str, call: Call, command: Command, looks: bool) -> tuple[S, Machine, Step]:
        def apply(state: S, machine: Any) -> Step:
            self._must_live(state, call.session)
            step: Step = machine.apply(call, command, state.version + 1)
            waits = not isinstance(step.outcome, (Done, Refused))
            if looks and step.changed and waits and not machine.comes_again:  # its place is another's now
                other = "another process that came under the same name"
                return Step(Refused("NameTaken", {"member": call.member, "other": other}))
            return step

        return self._change(place, type(command).machine, apply, self._patience(command))

    def _must_live(self, state: S, session: str) -> None:
        if session in state.ended:
            advice = "the store is well: make the call again to go on as a new session"
            raise SessionLost(peer=self.label, why=self._disown(session), advice=advice)

    def _until_alarm(self, place: str, machine: Machine) -> float:
        """Say in how many seconds a machine's alarm is due, counted from when we first saw it."""
        if machine.alarm is None:
            self._alarms.pop(place, None)
            return float("inf")
        number, after_s = machine.alarm
        seen, since = self._alarms.get(place, (0, 0.0))
        if seen != number:
            since = time.monotonic()
            self._alarms[place] = (number, since)
        return since + after_s - time.monotonic()

    def _ring(self, place: str, machine: Machine) -> None:
        """Let an alarm ring that is due, unless another member was faster."""
        assert machine.alarm is not None
        number, patience = machine.alarm[0], self._upkeep_patience()
        self._change(place, type(machine), lambda state, now: now.ring(number, state.version + 1), patience)

    def _bury_the_dead(self, place: str, state: S, machine: Machine) -> None:
        """Take sessions out that show no sign of life."""
        self._bury(place, type(machine), self._dead(place, state, machine))

    def _bury(self, place: str, kind: type[Machine], dead: Iterable[str]) -> None:
        """Take these sessions out, all by one change."""
        sessions = list(dead)

        def bury(state: S, now: Any) -> Step:
            buried, woken = [], list[Call]()
            for session in sessions:
                if session not in state.ended and not self._stirs(state, session):
                    woken += now.lost(session, state.version + 1).woken
                    state.version += 1  # each has a stamp of its own
                    buried.append(session)
            state.ended = [*state.ended, *buried][-ENDED:]
            return Step(Done(), bool(buried), woken)

        if sessions:
            self._change(place, kind, bury, self._upkeep_patience())
        for session in sessions:
            self._buried(session)

    def _buried(self, session: str) -> None:
        """Do what is to be done after a session was taken out."""

    def _stirs(self, state: S, session: str) -> bool:
        """Say whether a session that seemed dead has shown a sign of life in a state that was read since."""
        return False


class Reading(NamedTuple):
    """A counter as it was felt last: where it stood, since when, and an instant after which it was seen to move."""

    stands: int
    since: float
    felt_at: float
    moved_at: float


class Felt:
    """How long counters have stood still, by the clock of whoever feels them; for one thread at a time.

    Who has not felt a counter for longer than the gap was away itself, or nobody could move: it has its time again.
    """

    def __init__(self, gap_s: float = float("inf")) -> None:
        self._gap_s = gap_s
        self._felt: dict[str, Reading] = {}

    def still(self, counts: Mapping[str, int], now: float, grace_s: float) -> list[str]:
        """Feel all counters there are, and return those that have not moved for the grace; others are forgotten."""
        self._felt = {name: reading for name, reading in self._felt.items() if name in counts}
        return [name for name, count in counts.items() if self.feel(name, count, now, grace_s)]

    def feel(self, name: str, count: int, now: float, grace_s: float, still_s: float = 0.0) -> bool:
        """Feel one counter, and say whether it has not moved for the grace.

        `still_s` is for how long it stood where it is before it came to be felt here, as others tell.
        """
        last = self.last(name, now)
        if last is None:
            last = Reading(count, now, now, float("-inf"))
        elif last.stands != count:
            last = Reading(count, now, now, last.felt_at)
        self._felt[name] = reading = last._replace(since=min(last.since, now - still_s), felt_at=now)
        return now - reading.since >= grace_s

    def last(self, name: str, now: float) -> Reading | None:
        """Return a counter's last reading, unless that was too long ago."""
        reading = self._felt.get(name)
        return reading if reading is not None and now - reading.felt_at <= self._gap_s else None

    def moved(self, name: str, now: float, within_s: float) -> bool:
        """Say whether a counter was seen to move in the last so many seconds."""
        reading = self.last(name, now)
        return reading is not None and now - reading.moved_at <= within_s

    def forget(self, now: float) -> None:
        """Forget what was felt too long ago."""
        self._felt = {name: reading for name, reading in self._felt.items() if now - reading.felt_at <= self._gap_s}
