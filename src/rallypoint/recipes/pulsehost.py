"""Shared objects on a store that only has bytes, whose members show by counters that they live (`recipes/pulse.py`).

Who waits also feels the pulse of the next few sessions in a ring of all that the machine has to hear of, and takes the
dead out of it. Who gives up before it can be sure writes down for how long it has watched a pulse stand still, and the
next one goes on from there: no two clocks are compared, and as a counter never comes to the same count again, what was
watched in turn adds up. So a dead holder does not survive by others' being impatient.

Rejected: to feel everybody's pulse. A thousand members would read a million counters a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rallypoint.core.machine import Machine, Step
from rallypoint.deadline import Deadline
from rallypoint.recipes import pulse
from rallypoint.recipes.life import key_of
from rallypoint.recipes.storehost import ObjectState, StoreHost

__all__ = ["PulseHost"]


class PulseHost(StoreHost):
    """The objects of one store, hosted by their members, who feel each other's pulse."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self._pulse = pulse.pulse_of(store)

    @property
    def session(self) -> str:
        """That of this process on this store; it beats from now on."""
        return self._pulse.start()

    @property
    def former(self) -> tuple[str, ...]:
        """The sessions that this process had before, and has lost."""
        return self._pulse.former

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

    def _finish(self, state: ObjectState, machine: Machine, step: Step) -> None:
        super()._finish(state, machine, step)
        sessions = machine.sessions()
        told = {session: suspicion for session, suspicion in state.suspects.items() if session in sessions}
        ours = self._pulse.suspects(sessions)
        state.suspects = told | {session: max(ours[session], told.get(session, (0, 0))) for session in ours}

    def _disown(self, session: str) -> str:
        self._pulse.stop(session)
        return f"its pulse stood still for {pulse.GRACE_S:g} s, and others went on"

    def _dead(self, place: str, state: ObjectState, machine: Machine) -> Iterable[str]:
        return self._pulse.still(self._pulse.neighbours(machine.sessions()), state.suspects)

    def _buried(self, session: str) -> None:
        self._store.delete_key(key_of(session))

    def _hear(self, place: str, state: ObjectState, machine: Machine, within_s: float) -> bool:
        """Wait for the bell, and feel pulses meanwhile, unless it rings very soon."""
        bell, deadline = f"{place}:bell:{state.bell + 1}", Deadline(min(within_s, pulse.SLICE_S))
        neighbours, pause_s = self._pulse.neighbours(machine.sessions()), pulse.SLICE_S / 10
        while not self._rings(bell, min(pause_s, deadline.remaining())):
            if self._pulse.still(neighbours, state.suspects) or deadline.expired():
                return False
            pause_s = self._pulse.rest_s(neighbours) if neighbours else pulse.SLICE_S
        return True
