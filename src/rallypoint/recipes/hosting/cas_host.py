"""Shared objects whose state is one value that the members change by compare-and-set: read, apply, write, retry.

`CasHost` has that loop, and is given two parts:

    StateCell    where the value is: read it, replace it, back off after a lost race, wait for a change
    Liveness     this process's session, and which of the other sessions are dead

    on a store                 StoreCell      HeartbeatLiveness    recipes/hosting/store_cell.py, store_host.py
    in a rendezvous backend    BackendCell    KeepAliveLiveness    compat/rendezvous/backend_host.py

A member that loses the race retries with the new state. A waiting member checks again when the state may have changed,
fires timers that are due by its own clock, and evicts sessions without a heartbeat. A session that only stalled finds
itself in the list of ended sessions when it resumes, and raises SessionLost.

Rejected: a lock around read and write. Its holder may die, so dead sessions would have to be detected anyway.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rallypoint import net
from rallypoint.core.machines.machine import Call, Command, Done, Machine, Refused, Step, Undo, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import SessionLost

__all__ = ["CasHost", "HostedState", "Liveness", "StateCell", "StoredState", "decode_state", "place_of"]

UNDONE = 64
ENDED = 256
"""How many ended sessions a state lists."""

StoredState = tuple[bytes, Any]
"""An encoded state, and the token with which to replace it."""


class HostedState(msgspec.Struct, array_like=True):
    """The stored state: its version, its last writer, the ended sessions, and the machine."""

    version: int
    writer: str
    ended: list[str]
    machine: msgspec.Raw


S = TypeVar("S", bound=HostedState)
S_contra = TypeVar("S_contra", bound=HostedState, contravariant=True)


def decode_state(data: bytes, state_type: type[S], kind: type[Machine]) -> tuple[S, Any]:
    """Return a decoded state and its machine; raise msgspec.DecodeError or UnicodeDecodeError."""
    state = msgspec.json.decode(data, type=state_type)
    return state, msgspec.json.decode(state.machine, type=kind)


def place_of(kind: type[Machine], name: str) -> str:
    """Return the place of an object in a cell."""
    return f"{kind.kind}:{name}"


class StateCell(Protocol[S]):
    """Keeps the states of objects, each at its place."""

    label: str
    """The name of the cell in errors."""

    def fetch(self, place: str) -> StoredState:
        """Return the stored state; if there is none, an empty one."""

    def decode(self, data: bytes, kind: type[Machine]) -> tuple[S, Any]:
        """Return a state that was fetched, decoded, and its machine."""

    def swap(self, place: str, token: Any, state: S, wakes: bool) -> StoredState | None:
        """Replace the state of that token; if it `wakes`, wake the waiting members.

        Return None, or the present state if another member was faster.
        """

    def patience(self, command: Command | None) -> Deadline:
        """Return the deadline for the retries of a command; None means a timer or an eviction."""

    def back_off(self, place: str, present: StoredState, machine: Any, lost: int, patience: Deadline) -> StoredState:
        """Pause after a lost compare-and-set, which found `present`; return the state to retry with.

        `machine` has the change that was not written; `lost` counts the losses. May raise once `patience` is expired.
        """

    def await_change(self, place: str, state: S, machine: Any, within_s: float) -> bool:
        """Wait at most `within_s` until the state may have changed; return whether a wakeup arrived."""


class Liveness(Protocol[S_contra]):
    """The session of this process, and the heartbeats of the others."""

    @property
    def session(self) -> str:
        """The id of this process's session; accessing it may start its heartbeat."""

    @property
    def former(self) -> tuple[str, ...]:
        """The earlier sessions of this process, which it has lost."""

    def replace_session(self, session: str) -> str:
        """Start a new session because the others have ended this one; return why they did."""

    def observe(self, state: S_contra) -> None:
        """Take the readings that a state has, which was just read."""

    def record(self, state: S_contra, machine: Machine) -> None:
        """Add to a state, which is about to be written, what other members need to detect dead sessions."""

    def pauses(self, state: S_contra, machine: Machine, within_s: float) -> Iterable[float]:
        """Iterate over the waits between two readings while a member waits; end when the state is to be read again."""

    def dead_in(self, state: S_contra, machine: Machine) -> Iterable[str]:
        """Return the machine's sessions whose heartbeat has stalled."""

    def is_alive_in(self, state: S_contra, session: str) -> bool:
        """Return whether a session that seemed dead has a heartbeat in a state that was read since."""

    def forget(self, session: str) -> None:
        """Remove what is left of a session that was evicted."""


class CasHost(Generic[S]):
    """Hosts objects on the members themselves."""

    def __init__(self, cell: StateCell[S], liveness: Liveness[S]) -> None:
        self._cell = cell
        self._liveness = liveness
        self._timers: dict[str, tuple[int, float]] = {}
        self._undone: deque[int] = deque(maxlen=UNDONE)
        """The calls that were undone last: another thread may be waiting for one of them."""

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Apply a command, or check a pending one; return why it still waits after `wait_s`."""
        deadline = Deadline(wait_s)
        place = place_of(command.machine, name)
        caller = Call(member, self._liveness.session, call, net.caller_name(), self._liveness.former)
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
            due_s = self._until_timer(place, machine)
            if due_s <= 0:
                self._fire_timer(place, machine)
            elif deadline.expired():
                self.evict_stalled(place, state, machine)
                return machine.explain(caller)
            elif not self._await_change(place, state, machine, min(deadline.remaining(), due_s)):
                self.evict_stalled(place, state, machine)

    def read(self, place: str, kind: type[Machine]) -> tuple[S, Any]:
        """Return the present state and its machine."""
        return self._decode(self._cell.fetch(place)[0], kind)

    def change(
        self, place: str, kind: type[Machine], change: Callable[[S, Any], Step], patience: Deadline
    ) -> tuple[S, Any, Step]:
        """Apply a change by compare-and-set, with retries; return the new state, its machine, and the last step."""
        found, lost = self._cell.fetch(place), 0
        while True:
            data, token = found
            state, machine = self._decode(data, kind)
            step = change(state, machine)
            if not step.changed:
                return state, machine, step
            state.version += 1
            state.writer = self._liveness.session
            state.machine = msgspec.Raw(msgspec.json.encode(machine))
            self._liveness.record(state, machine)
            present = self._cell.swap(place, token, state, bool(list(step.woken)))
            if present is None:
                return state, machine, step
            lost += 1
            found = self._cell.back_off(place, present, machine, lost, patience)

    def require_session(self, state: S, session: str) -> None:
        """Raise SessionLost if other members have ended a session of this process."""
        if session in state.ended:
            advice = "the store is available: call again to continue with a new session"
            raise SessionLost(peer=self._cell.label, why=self._liveness.replace_session(session), advice=advice)

    def evict_stalled(self, place: str, state: S, machine: Machine) -> None:
        """Evict the sessions whose heartbeat has stalled."""
        self.evict(place, type(machine), self._liveness.dead_in(state, machine))

    def evict(self, place: str, kind: type[Machine], dead: Iterable[str]) -> None:
        """Evict these sessions in one change."""
        sessions = list(dead)

        def evict(state: S, now: Any) -> Step:
            evicted, woken = [], list[Call]()
            for session in sessions:
                if session not in state.ended and not self._liveness.is_alive_in(state, session):
                    woken += now.session_ended(session, state.version + 1).woken
                    state.version += 1  # each eviction gets its own version
                    evicted.append(session)
            state.ended = [*state.ended, *evicted][-ENDED:]
            return Step(Done(), bool(evicted), woken)

        if sessions:
            self.change(place, kind, evict, self._cell.patience(None))
        for session in sessions:
            self._liveness.forget(session)

    def _decode(self, data: bytes, kind: type[Machine]) -> tuple[S, Any]:
        state, machine = self._cell.decode(data, kind)
        self._liveness.observe(state)
        return state, machine

    def _apply(self, place: str, call: Call, command: Command, looks: bool) -> tuple[S, Machine, Step]:
        def apply(state: S, machine: Any) -> Step:
            self.require_session(state, call.session)
            step: Step = machine.apply(call, command, state.version + 1)
            waits = not isinstance(step.outcome, (Done, Refused))
            if looks and step.changed and waits and not machine.rejoins:  # another process has its place now
                other = "another process that joined under the same name"
                return Step(Refused("NameTaken", {"member": call.member, "other": other}))
            return step

        return self.change(place, command.machine, apply, self._cell.patience(command))

    def _await_change(self, place: str, state: S, machine: Machine, within_s: float) -> bool:
        """Wait for a change, with readings of heartbeats meanwhile; return whether a wakeup arrived."""
        pauses = self._liveness.pauses(state, machine, within_s)
        return any(self._cell.await_change(place, state, machine, pause_s) for pause_s in pauses)

    def _until_timer(self, place: str, machine: Machine) -> float:
        """Return in how many seconds the machine's timer is due, counted from when this process first saw it."""
        if machine.timer is None:
            self._timers.pop(place, None)
            return float("inf")
        number, after_s = machine.timer
        seen, since = self._timers.get(place, (0, 0.0))
        if seen != number:
            since = time.monotonic()
            self._timers[place] = (number, since)
        return since + after_s - time.monotonic()

    def _fire_timer(self, place: str, machine: Machine) -> None:
        """Fire a timer that is due, unless another member was faster."""
        assert machine.timer is not None
        number, patience = machine.timer[0], self._cell.patience(None)
        self.change(place, type(machine), lambda state, now: now.on_timer(number, state.version + 1), patience)
