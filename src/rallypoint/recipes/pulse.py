"""Shared objects on a store that only has bytes: the members host the machine themselves, by compare-and-set.

Keys, for an object of some KIND and NAME:

    KIND:NAME            the state, as JSON: a version, who wrote it, the bell's number, the ended sessions, the machine
    KIND:NAME:bell:N     set when the bell rings the Nth time; a waiting member waits for the next. Only a few are kept
    pulse:SESSION        a counter that moves while a session lives and takes part in something

Every member reads the state, applies its command, and writes the result if nobody else was faster. A change that others
wait for rings the bell. Who waits also feels the pulse of the next few sessions in a ring of all that the machine has
to hear of: a counter that has not moved for `GRACE_S`, by the watcher's own clock, belongs to a dead session, which is
then taken out of the machine. One that was only asleep finds itself among the ended when it wakes, and raises.

Rejected: to feel everybody's pulse. A thousand members would read a million counters a second.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import msgspec

from rallypoint import net
from rallypoint.core.machine import Call, Command, Done, Machine, Refused, Step, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import SessionLost, StoreTimeout
from rallypoint.store.base import Store

__all__ = ["StoreHost"]

BEAT_S = 0.5
GRACE_S = 4.0
"""How long a pulse may stand still."""

SLICE_S = 1.0
"""How long a member waits for the bell before it feels pulses."""

LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.032
"""How long it pauses between two looks for the bell, on a store where it cannot wait for it."""

NEIGHBOURS = 8
"""How many pulses one member feels."""

BELLS = 16
"""How many rings back a bell is kept, for members that have not yet begun to wait for it."""

ENDED = 256
"""How many ended sessions a state remembers."""


class _State(msgspec.Struct, array_like=True):
    """What is written under an object's key."""

    version: int
    writer: str
    bell: int
    ended: list[str]
    machine: msgspec.Raw


_EMPTY = msgspec.json.encode(_State(0, "", 0, [], msgspec.Raw(b"{}"))).decode()


class StoreHost:
    """The objects of one store, hosted by their members."""

    hosted_by = "members"

    def __init__(self, store: Any) -> None:
        self.label = repr(store) if isinstance(store, Store) else _label(store)
        self._store = store
        self._pulse = _pulse_of(store)
        self._alarms: dict[str, tuple[int, float]] = {}
        self._felt_at: dict[str, float] = {}

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""
        deadline = Deadline(wait_s)
        place = f"{type(command).machine.kind}:{name}"
        caller = Call(member, self._pulse.session, call, net.caller_name())
        self._pulse.start()
        looks = False
        while True:
            state, machine, step = self._apply(place, type(command).machine, caller, command, looks)
            looks = True
            if isinstance(step.outcome, (Done, Refused)):
                return step.outcome
            due_s = self._until_alarm(place, machine)
            if due_s <= 0:
                self._ring(place, machine)
            elif deadline.expired():
                self._bury_the_dead(place, machine)
                return machine.why(caller)
            elif not self._hear(f"{place}:bell:{state.bell + 1}", min(deadline.remaining(), SLICE_S, due_s)):
                self._bury_the_dead(place, machine)

    def _apply(
        self, place: str, kind: type[Machine], call: Call, command: Command, looks: bool
    ) -> tuple[_State, Machine, Step]:
        while True:
            blob, state, machine = self._read(place, kind)
            if call.session in state.ended:
                self._pulse.stop()
                raise SessionLost(peer=self.label, why=f"its pulse stood still for {GRACE_S:g} s, and others went on")
            step = machine.apply(call, command, state.version + 1)
            if looks and step.changed and not isinstance(step.outcome, (Done, Refused)):  # its place is another's now
                other = "another process that came under the same name"
                return state, machine, Step(Refused("NameTaken", {"member": call.member, "other": other}))
            if not step.changed or self._write(place, blob, state, machine, step):
                return state, machine, step

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
        blob, state, now = self._read(place, type(machine))
        step = now.ring(machine.alarm[0], state.version + 1)
        if step.changed:
            self._write(place, blob, state, now, step)

    def _bury_the_dead(self, place: str, machine: Machine) -> None:
        """Take sessions out whose pulse stands still; it is felt once in a while, however often this is called."""
        felt_at, now_at = self._felt_at.get(place, float("-inf")), time.monotonic()
        if now_at < felt_at + SLICE_S / 2:
            return
        self._felt_at[place] = now_at
        for session in self._pulse.still(self._store, machine.sessions()):
            while True:
                blob, state, now = self._read(place, type(machine))
                if session in state.ended:
                    break
                step = now.lost(session, state.version + 1)
                state.ended = [*state.ended[1 - ENDED :], session]
                if self._write(place, blob, state, now, step):
                    break

    def _read(self, place: str, kind: type[Machine]) -> tuple[str, _State, Any]:
        """Return the state as it was found, or as it is where there is none."""
        blob = bytes(self._store.compare_set(place, "", _EMPTY)).decode()
        state = msgspec.json.decode(blob, type=_State)
        return blob, state, msgspec.json.decode(state.machine, type=kind)

    def _write(self, place: str, blob: str, state: _State, machine: Machine, step: Step) -> bool:
        """Write a new state unless another was faster, and ring the bell if somebody waits for it."""
        state.version += 1
        state.writer = self._pulse.session
        state.machine = msgspec.Raw(msgspec.json.encode(machine))
        rings = bool(list(step.woken))
        state.bell += rings
        desired = msgspec.json.encode(state).decode()
        if bytes(self._store.compare_set(place, blob, desired)).decode() != desired:
            return False
        if rings:
            self._store.set(f"{place}:bell:{state.bell}", "")
            self._store.delete_key(f"{place}:bell:{state.bell - BELLS}")
        return True

    def _hear(self, bell: str, within_s: float) -> bool:
        if not isinstance(self._store, Store):
            return self._listen(bell, within_s)
        try:
            self._store.wait([bell], timedelta(seconds=within_s))
            return True
        except StoreTimeout:
            return False

    def _listen(self, bell: str, within_s: float) -> bool:
        """Look for the bell again and again. A client of torch's has one lock, so nobody else of this process could
        use it during a wait, the pulse included; and it prints a warning for every wait that ends by its time-out."""
        deadline, pause_s = Deadline(within_s), LEAST_PAUSE_S
        while not self._store.check([bell]):
            if deadline.expired():
                return False
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
        return True


def _label(store: Any) -> str:
    """Name a store of another kind; torch's own repr asks the resolver for its peer's name, which may take seconds."""
    host, port = (getattr(store, name, None) for name in ("host", "port"))
    return f"<{type(store).__name__} of {type(store).__module__}{'' if host is None else f' at {host}:{port}'}>"


class Pulse:
    """The sign of life of one process on one store, and the feeling of others'."""

    def __init__(self, store: Any) -> None:
        self.session = secrets.token_hex(8)
        self._store = weakref.ref(store)
        self._felt: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Beat, in a daemon thread, until stopped or the store is gone."""
        with self._lock:
            if self._thread is None:
                self.beat()
                name, stopped = f"pulse of {self.session}", self._stopped
                self._thread = threading.Thread(target=_beat, args=[weakref.ref(self), stopped], name=name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop beating; what comes after is another session."""
        with self._lock:
            self._stopped.set()
            self._stopped, self._thread = threading.Event(), None
            self.session = secrets.token_hex(8)

    def beat(self) -> None:
        """Move the counter."""
        store = self._store()
        if store is None:
            raise RuntimeError("the store is gone")
        store.add(f"pulse:{self.session}", 1)

    def still(self, store: Any, sessions: set[str]) -> list[str]:
        """Return those of our neighbours, among these sessions, whose pulse has stood still for the grace."""
        ring = sorted(sessions - {self.session})
        after = [session for session in ring if session > self.session]
        neighbours = (after + ring)[:NEIGHBOURS]
        now = time.monotonic()
        dead = []
        for session in dict.fromkeys(neighbours):
            key = f"pulse:{session}"
            count = int(store.get(key)) if store.check([key]) else -1
            seen, since = self._felt.get(session, (None, now))
            if count != seen:
                self._felt[session] = (count, now)
            elif now - since >= GRACE_S:
                dead.append(session)
        self._felt = {session: felt for session, felt in self._felt.items() if session in neighbours}
        return dead


def _beat(reference: weakref.ref[Pulse], stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_S):
        pulse = reference()
        if pulse is None:
            return
        try:
            pulse.beat()
        except RuntimeError:  # the store is closed or lost: there is nobody to live for
            return
        del pulse


_pulses: weakref.WeakKeyDictionary[Any, Pulse] = weakref.WeakKeyDictionary()
_pulses_lock = threading.Lock()


def _pulse_of(store: Any) -> Pulse:
    """Return the pulse of this process on a store; there is one for all objects."""
    with _pulses_lock:
        if store not in _pulses:
            _pulses[store] = Pulse(store)
        return _pulses[store]
