"""Shared objects on a plain key-value store: the members host them by compare-and-set, and observe each other.

The states are in a `StoreCell`. Dead members are detected by heartbeats (`recipes/hosting/heartbeat.py`): a waiting
member observes the heartbeats of the next few sessions in a ring of all sessions of the machine, and evicts the dead
ones. A member that gives up before the grace period is over records how long it has seen a counter stall, and the next
observer continues from there. No two clocks are compared; a counter never returns to an earlier count, so the times
that several observers saw add up. A dead lock holder is thus evicted even if every waiter has a short timeout.

Rejected: observe all heartbeats. A thousand members would read a million counters a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from rallypoint.core.calls.contested_refusals import CONTESTABLE
from rallypoint.core.machines.machine import Command, Done, Machine, Refused, Undo, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import LimitExceeded
from rallypoint.recipes.hosting import heartbeat
from rallypoint.recipes.hosting.cas_host import CasHost, place_of
from rallypoint.recipes.hosting.heartbeat import HeartbeatReader, heartbeat_reader_of
from rallypoint.recipes.hosting.local_session import heartbeat_key
from rallypoint.recipes.hosting.store_cell import ObjectState, StoreCell

__all__ = ["HeartbeatLiveness", "StoreHost"]


class HeartbeatLiveness:
    """The session of this process on a store, and the heartbeats of its neighbours."""

    def __init__(self, store: Any, reader: HeartbeatReader) -> None:
        self._store = store
        self._reader = reader

    @property
    def session(self) -> str:
        """The id of this process's session on this store; accessing it starts its heartbeat."""
        return self._reader.local.start()

    @property
    def former(self) -> tuple[str, ...]:
        """The earlier sessions of this process, which it has lost."""
        return self._reader.local.former

    def replace_session(self, session: str) -> str:
        """Start a new session because the others have ended this one; return why they did."""
        self._reader.local.stop(session)
        return f"its heartbeat stalled for {heartbeat.GRACE_S:g} s, and the other members evicted it"

    def observe(self, state: ObjectState) -> None:
        """Do nothing: a state has no heartbeats, only suspicions, which count when they are compared with a reading."""

    def record(self, state: ObjectState, machine: Machine) -> None:
        """Record which counters stall, and for how long, for observers that continue from there."""
        sessions = machine.sessions()
        told = {session: suspicion for session, suspicion in state.suspects.items() if session in sessions}
        ours = self._reader.suspicions(sessions)
        state.suspects = told | {session: max(ours[session], told.get(session, (0, 0))) for session in ours}

    def pauses(self, state: ObjectState, machine: Machine, within_s: float) -> Iterator[float]:
        """Read the neighbours' heartbeats during a wait; not in its first moments, in which most wakeups arrive."""
        deadline = Deadline(min(within_s, heartbeat.SLICE_S))
        neighbours, pause_s = self._reader.neighbours(machine.sessions()), heartbeat.SLICE_S / 10
        while True:
            yield min(pause_s, deadline.remaining())
            if self._reader.dead_among(neighbours, state.suspects) or deadline.expired():
                return
            pause_s = self._reader.next_read_s(neighbours) if neighbours else heartbeat.SLICE_S

    def dead_in(self, state: ObjectState, machine: Machine) -> Iterable[str]:
        """Return the neighbours that ended or are dead."""
        return self._reader.dead_among(self._reader.neighbours(machine.sessions()), state.suspects)

    def is_alive_in(self, state: ObjectState, session: str) -> bool:
        """Return False: a state has no heartbeats."""
        return False

    def forget(self, session: str) -> None:
        """Delete the heartbeat of a session that was evicted."""
        self._store.delete_key(heartbeat_key(session))


class StoreHost:
    """Hosts the objects of one store on their members."""

    hosted_by = "members"

    def __init__(self, store: Any) -> None:
        self._reader = heartbeat_reader_of(store)
        cell = StoreCell(store)
        self.label = cell.label
        self._objects = CasHost(cell, HeartbeatLiveness(store, self._reader))

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Apply a command, or check a pending one; return why it still waits after `wait_s`."""
        try:
            outcome = self._objects.act(name, member, call, command, wait_s)
            if not isinstance(outcome, Refused) or outcome.error not in CONTESTABLE:
                return outcome
        except LimitExceeded:  # restarted members need room beside the data of their dead processes
            if isinstance(command, Undo):
                raise
        self.evict_dead(name, command.machine)  # the sessions in the way may be dead
        return self._objects.act(name, member, call, command, wait_s)

    def evict_dead(self, name: str, kind: type[Machine]) -> None:
        """Check that all sessions are alive, since no other member may be observing them; evict the dead ones.

        This returns at once if all were seen alive lately. Else it usually takes one heartbeat, or the grace period if
        a session is dead.
        """
        place, deadline = place_of(kind, name), Deadline(heartbeat.GRACE_S + 2 * heartbeat.SLICE_S)
        unsure: set[str] | None = None
        while True:
            state, machine = self._objects.read(place, kind)
            sessions = machine.sessions() if unsure is None else machine.sessions() & unsure
            dead = self._reader.dead_among(sessions, state.suspects)
            self._objects.evict(place, kind, dead)
            unsure = self._reader.unconfirmed(sessions.difference(dead))
            if not unsure or deadline.expired():
                return
            time.sleep(self._reader.next_read_s(unsure))
