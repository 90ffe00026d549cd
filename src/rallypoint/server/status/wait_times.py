"""When calls on shared objects began, by the server's clock; the state itself has no clock.

`Clock` calls `acted` after each call on a shared object, and `arrived` after several arrivals at one. They run for
every member of every barrier, so they do little: a member that waits costs one entry in a table.

A round of a barrier or an exchange keeps its calls in one dict, which the machine replaces when the round ends, however
it ends. So a round is over when `machine.calls` is another object than the one that was remembered.

Rejected: a timestamp in the machines. Instants of a server that restarted mean nothing, and core/ reads no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.core import ops
from rallypoint.core.arrivals import GATHERS
from rallypoint.core.machines.lock import LockAcquire, LockMachine
from rallypoint.core.machines.machine import Call, Done, Machine, Undo
from rallypoint.core.machines.membership import MembershipJoin
from rallypoint.core.machines.rendezvous import RendezvousJoin
from rallypoint.core.machines.work_queue import WorkQueueMachine, WorkTake
from rallypoint.core.session import Session
from rallypoint.server.status.stragglers import MeetingKey, StragglerTable

if TYPE_CHECKING:
    from rallypoint.core.state import Namespace

__all__ = ["MAX_OBJECTS", "WaitTimes"]

MAX_OBJECTS = 4096
"""Shared objects whose times are kept; of others, calls seem to have begun when the server did."""

SLACK = 64
"""Entries of calls that are over, besides as many as there are others, before they go."""

_TRACKED = frozenset((LockAcquire, MembershipJoin, RendezvousJoin, WorkTake))
"""Commands besides arrivals that begin something: a hold, a membership."""

_Key = tuple[int, type[Machine], bytes]


class ObjectTimes:
    """The times of one shared object."""

    __slots__ = ("calls", "fence", "fenced_at", "limit", "machine", "started")

    def __init__(self) -> None:
        self.machine: Any = None
        self.calls: Any = None  # those of the round, of a barrier or an exchange
        self.started: dict[tuple[str, int], float] = {}
        """When each call was first seen, by session and number, in that order."""

        self.limit = SLACK  # of entries, before those of calls that are over go
        self.fence = 0
        self.fenced_at = 0.0


class WaitTimes:
    """The times of the shared objects of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.began_at = clock()
        self.stragglers = StragglerTable()
        self._clock = clock
        self._objects: dict[_Key, ObjectTimes] = {}

    def acted(self, namespace: Namespace, session: Session, op: ops.Act) -> None:
        """Note a call that has run: it waits, has ended a round, has begun something, or took something back."""
        command = op.command
        kind = command.__class__
        key = (namespace.id, command.machine, op.name)
        if kind in GATHERS:
            times = self._objects.get(key)
            if op.number in session.waiting:
                if times is None or times.machine.calls is not times.calls:
                    times = self._begin_round(key, namespace)
                times.started.setdefault((session.tag, op.call), self._clock())
            elif times is not None:
                self._end_round(key, times, session, op)
        elif isinstance(command, Undo):
            times = self._objects.get(key)
            if times is not None:
                times.started.pop((session.tag, command.call), None)
                self._note_fence(times, namespace.objects.machines.get(key[1:]))
        elif kind in _TRACKED:
            self._begin(key, namespace, session, op)

    def arrived(self, namespace: Namespace, requests: Sequence[tuple[Session, ops.Act]]) -> None:
        """Note several arrivals at one object."""
        first = requests[0][1]
        key = (namespace.id, first.command.machine, first.name)
        now = self._clock()
        waiting = [(session.tag, op.call) for session, op in requests if op.number in session.waiting]
        times = self._objects.get(key)
        if waiting:
            if times is None or times.machine.calls is not times.calls:
                times = self._begin_round(key, namespace)
            for call in waiting:
                times.started.setdefault(call, now)
        session, op = requests[-1]
        if op.number not in session.waiting and times is not None:
            self._end_round(key, times, session, op)

    def since(self, namespace: int, kind: type[Machine], name: bytes, call: Call) -> float:
        """Return for how long a call of an object waits or holds, in seconds; at most as long as the server runs."""
        times = self._objects.get((namespace, kind, name))
        at = self.began_at if times is None else times.started.get((call.session, call.number), self.began_at)
        return max(0.0, self._clock() - at)

    def held_s(self, namespace: int, name: bytes, machine: LockMachine) -> float:
        """Return for how long the holder of a lock has it, as far as is known."""
        times = self._objects.get((namespace, LockMachine, name))
        if times is None:
            return max(0.0, self._clock() - self.began_at)
        self._note_fence(times, machine)
        return max(0.0, self._clock() - times.fenced_at)

    def forget(self, namespace: int) -> None:
        """Drop what belongs to a namespace that is gone."""
        self.stragglers.forget(namespace)
        for key in [key for key in self._objects if key[0] == namespace]:
            del self._objects[key]

    @property
    def namespaces(self) -> set[int]:
        """The namespaces of which something is kept."""
        return {key[0] for key in self._objects} | {key.namespace for key, *_ in self.stragglers}

    # Inside

    def _begin_round(self, key: _Key, namespace: Namespace) -> ObjectTimes:
        """Return new times for an object in whose new round a call waits."""
        machine: Any = namespace.objects.machines.get(key[1:])
        if machine is None:  # a refused call waits while its refusal is contested, and its machine may be idle
            return ObjectTimes()
        times = self._add(key)
        times.machine, times.calls = machine, machine.calls
        return times

    def _add(self, key: _Key) -> ObjectTimes:
        if key not in self._objects and len(self._objects) >= MAX_OBJECTS:
            del self._objects[next(iter(self._objects))]
        times = self._objects[key] = ObjectTimes()
        return times

    def _end_round(self, key: _Key, times: ObjectTimes, session: Session, op: ops.Act) -> None:
        """Record who came last, if this call has completed the round; a later look at an earlier round does not."""
        if times.machine.calls is times.calls:
            return
        kept = session.kept.get(op.number)
        if kept is not None and kept[0].__class__ is Done and times.started:
            del self._objects[key]
            others = list(times.started.values())
            late_s = self._clock() - others[len(others) // 2]
            self.stragglers.add(MeetingKey(key[0], key[1].kind, key[2]), op.member, late_s)

    def _begin(self, key: _Key, namespace: Namespace, session: Session, op: ops.Act) -> None:
        """Note the beginning of a call that stays: a lock's, a member's, a node's."""
        machine = namespace.objects.machines.get(key[1:])
        if machine is None or not machine.holds(f"{session.tag}/{op.call}"):
            return
        times = self._objects.get(key) or self._add(key)
        started = times.started
        if isinstance(machine, WorkQueueMachine):  # a taker that waits asks again and again: its item is newer
            started.pop((session.tag, op.call), None)
        started.setdefault((session.tag, op.call), self._clock())
        if len(started) > times.limit:
            times.started = {call: at for call, at in started.items() if machine.holds(f"{call[0]}/{call[1]}")}
            times.limit = 2 * len(times.started) + SLACK
        self._note_fence(times, machine)

    def _note_fence(self, times: ObjectTimes, machine: Machine | None) -> None:
        """Note when the holder of a lock changed."""
        if isinstance(machine, LockMachine) and machine.fence != times.fence:
            times.fence, times.fenced_at = machine.fence, self._clock()
