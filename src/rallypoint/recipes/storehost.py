"""Shared objects on a store that only has bytes: the members host the machine themselves, by compare-and-set.

Keys, for an object of some KIND and NAME:

    KIND:NAME            the state, as JSON (`recipes/blob.py`), with the number of the bell, and who is under suspicion
    KIND:NAME:bell:N     set when the bell rings the Nth time; a waiting member waits for the next. Only a few are kept
    pulse:SESSION        the sign of life of a session (`recipes/pulse.py`)

A change that others wait for rings the bell. Who waits also feels the pulse of the next few sessions in a ring of all
that the machine has to hear of, and takes the dead out of it. Who gives up before it can be sure writes down for how
long it has watched a pulse stand still, and the next one goes on from there: no two clocks are compared, and as a
counter never comes to the same count again, what was watched in turn adds up. So a dead holder does not survive by
others' being impatient.

Rejected: to feel everybody's pulse. A thousand members would read a million counters a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import msgspec

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machine import Command, Done, Machine, Refused, Step, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import LimitExceeded, StoreTimeout
from rallypoint.recipes import pulse
from rallypoint.recipes.blob import BlobHost, Found, State
from rallypoint.store.base import Store

__all__ = ["StoreHost"]

LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.032
"""How long it pauses between two looks for the bell, on a store where it cannot wait for it."""

BELLS = 16
"""How many rings back a bell is kept, for members that have not yet begun to wait for it."""


class _State(State):
    """What is written under an object's key."""

    bell: int
    suspects: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class StoreHost(BlobHost[_State]):
    """The objects of one store, hosted by their members."""

    def __init__(self, store: Any) -> None:
        super().__init__(repr(store) if isinstance(store, Store) else _label(store), _State, 0)
        self._store = store
        self._pulse = pulse.pulse_of(store)

    @property
    def session(self) -> str:
        """That of this process on this store; it beats from now on."""
        return self._pulse.start()

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""
        outcome = super().act(name, member, call, command, wait_s)
        if isinstance(outcome, Refused) and outcome.error == "NameTaken":  # by one who may be dead
            self.make_sure(name, command.machine)
            outcome = super().act(name, member, call, command, wait_s)
        return outcome

    def make_sure(self, name: str, kind: type[Machine]) -> None:
        """Find out whether all who are in live, for nobody else may be here to notice; take out the dead.

        That takes no time where all were felt lately, as a rule one beat, and the grace where one is dead.
        """
        place, deadline = f"{kind.kind}:{name}", Deadline(pulse.GRACE_S + 2 * pulse.SLICE_S)
        unsure: set[str] | None = None
        while True:
            state, machine = self._open(self._fetch(place)[0], kind)
            sessions = machine.sessions() if unsure is None else machine.sessions() & unsure
            dead = self._pulse.still(sessions, state.suspects)
            self._bury(place, kind, dead)
            unsure = self._pulse.unsure_of(sessions.difference(dead))
            if not unsure or deadline.expired():
                return
            time.sleep(self._pulse.rest_s(unsure))

    def _fetch(self, place: str) -> Found:
        blob = bytes(self._store.compare_set(place, "", self._empty.decode()))
        return blob, blob

    def _swap(self, place: str, token: Any, blob: bytes) -> Found | None:
        if len(blob) > MAX_VALUE_BYTES:
            raise LimitExceeded(what="the state of", key=place, size=len(blob), limit=MAX_VALUE_BYTES)
        present = bytes(self._store.compare_set(place, token.decode(), blob.decode()))
        if present == blob:
            return None
        return (present, present) if present != token else self._fetch(place)  # stores answer so where the key is gone

    def _finish(self, state: _State, machine: Machine, step: Step) -> None:
        state.bell += bool(list(step.woken))
        sessions = machine.sessions()
        told = {session: suspicion for session, suspicion in state.suspects.items() if session in sessions}
        ours = self._pulse.suspects(sessions)
        state.suspects = told | {session: max(ours[session], told.get(session, (0, 0))) for session in ours}

    def _won(self, place: str, state: _State, step: Step) -> None:
        """Ring the bell if somebody waits for it."""
        if list(step.woken):
            self._store.set(f"{place}:bell:{state.bell}", "")
            self._store.delete_key(f"{place}:bell:{state.bell - BELLS}")

    def _disown(self, session: str) -> str:
        self._pulse.stop(session)
        return f"its pulse stood still for {pulse.GRACE_S:g} s, and others went on"

    def _dead(self, place: str, state: _State, machine: Machine) -> Iterable[str]:
        return self._pulse.still(self._pulse.neighbours(machine.sessions()), state.suspects)

    def _buried(self, session: str) -> None:
        self._store.delete_key(pulse.key_of(session))

    def _hear(self, place: str, state: _State, machine: Machine, within_s: float) -> bool:
        """Wait for the bell, and feel pulses meanwhile, unless it rings very soon."""
        bell, deadline = f"{place}:bell:{state.bell + 1}", Deadline(min(within_s, pulse.SLICE_S))
        neighbours, pause_s = self._pulse.neighbours(machine.sessions()), pulse.SLICE_S / 10
        while not self._rings(bell, min(pause_s, deadline.remaining())):
            if self._pulse.still(neighbours, state.suspects) or deadline.expired():
                return False
            pause_s = self._pulse.rest_s(neighbours) if neighbours else pulse.SLICE_S
        return True

    def _rings(self, bell: str, within_s: float) -> bool:
        """Wait for one ring."""
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
