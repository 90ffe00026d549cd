"""The server's clock: all deadlines in one heap, and the log entries submitted when they pass.

The state has no clock. This module holds the deadlines of waits, detached sessions, leases with heartbeats and timers
of shared objects. A passed deadline is submitted as an entry, so that it is in the log; only reads time out without
one. After a restart every deadline counts from the restart.

A server that was paused (SIGSTOP, a suspended machine, a stalled event loop) received nothing in that time and must not
blame its clients: when a deadline turns out to have passed long ago, all deadlines are postponed by the pause.

A heartbeat only records the time, however many leases depend on it. The deadline of a lease is moved when it passes.
Rejected: moving the deadline of every lease of the session with each heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.core import ops
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.entries import EndSession, ExpireLease, FireTimer, TimeOutRequest
from rallypoint.core.records import LATER
from rallypoint.core.session import Session
from rallypoint.core.state import Namespace
from rallypoint.server.status.wait_times import WaitTimes

if TYPE_CHECKING:
    from rallypoint.server.server import StoreServer

__all__ = ["FOLLOWED", "MOVE_S", "RETURN_S", "Clock"]

FOLLOWED = frozenset((ops.SetLease, ops.ReleaseLease, ops.Act, ops.DeletePrefix, ops.Drop))
"""Operations that need `Clock.follow` even when they were answered at once."""

RETURN_S = 6.0
"""Minimum time after a restart for clients to resume their sessions.

An attempt to resume takes up to 3 s (`client/routing/route.py`), so there is time for one that began before the restart
and for the next.
"""

MOVE_S = 12.0
"""The same after a failover from a leader that hangs, or whose machine is silent. Standbys notice within 2 s, but
clients and relays connected to the old leader only within 5 s (`relay/upstream/hang_detector.py`), and then search for
the new one."""

LATE_S = 0.5
"""How late a deadline may be handled; any later, the process was paused."""

DROPPED = 64
"""Deadlines of an ended session dropped in one step."""


class Clock:
    """Deadlines of one server."""

    def __init__(self, server: StoreServer, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.deadlines = Deadlines()
        self.times = WaitTimes(monotonic)
        self.monotonic = monotonic
        """The time, of which the event loop must have the same idea."""

        self._server = server
        self._timer: asyncio.TimerHandle | None = None
        self._ticks_at = NEVER
        self._seen_at = 0.0  # the last call of `now`, at least one a second
        self._heartbeat_at: dict[int, float] = {}  # the last heartbeat of each session
        self._leases: dict[int, dict[bytes, None]] = {}  # leases with deadlines, by session

    def now(self) -> float:
        """Return the time; if the process was paused, postpone all deadlines by the pause."""
        now = self.monotonic()
        if now - self._ticks_at > LATE_S:
            paused_s = now - self._seen_at
            self.deadlines.delay(paused_s)
            self._heartbeat_at = {serial: at + paused_s for serial, at in self._heartbeat_at.items()}
            self._arm(now)
        self._seen_at = now
        return now

    def start(self, back_s: float) -> None:
        """Set the deadlines of a restored state, all counted from now.

        Clients have `back_s` to resume their sessions, or the grace period if that is longer.
        """
        now, state = self.now(), self._server.state
        back_s = max(self._server.settings.grace_s, back_s)
        for session in state.sessions.values():
            self._set(("session", session.serial), now + back_s)
            for key, ttl_s in session.live_ttls().items():
                self._expect_heartbeats(session, key, now + max(ttl_s, back_s))
        for namespace in state.namespaces.values():
            namespace.objects.changed_timers = list(namespace.objects.timers)
            self.arm_timers(namespace)

    def stop(self) -> None:
        """Drop all deadlines."""
        self.deadlines = Deadlines()
        self._arm(0.0)

    # Set and drop deadlines

    def follow(self, session: Session, op: ops.Op) -> None:
        """Set the deadlines that a request started, and drop those that it ended."""
        key = (session.serial, op.number)
        timeout_s = getattr(op, "timeout_s", None)
        if timeout_s is not None and op.number in session.waiting and key not in self.deadlines:
            self._set(key, self.now() + timeout_s)  # a request repeated after a reconnect keeps its deadline
        if isinstance(op, ops.SetLease):
            if op.ttl_s and op.key in session.ttls:
                self._expect_heartbeats(session, op.key, self.now() + op.ttl_s)
        elif isinstance(op, ops.ReleaseLease):
            self.deadlines.drop(("lease", session.serial, op.key))
        elif isinstance(op, ops.Drop):
            self.deadlines.drop((session.serial, op.target))
        elif isinstance(op, (ops.Act, ops.DeletePrefix)):
            namespace = self._server.state.namespaces[session.namespace]
            if op.__class__ is ops.Act:
                self.times.acted(namespace, session, op)
            self.arm_timers(namespace)
            self._server.housekeeping.continue_change(namespace)

    def follow_arrivals(self, requests: Sequence[tuple[Session, ops.Act]]) -> None:
        """Set the deadlines of the arrivals at a shared object that must wait."""
        now, deadlines = self.now(), self.deadlines
        deadlines.set_all(
            [
                ((session.serial, op.number), now + op.timeout_s)
                for session, op in requests
                if op.number in session.waiting
            ]
        )
        if deadlines.earliest < self._ticks_at:
            self._arm(self._seen_at)
        self.times.arrived(self._server.state.namespaces[requests[0][0].namespace], requests)

    def heartbeat(self, session: Session) -> None:
        """Renew the leases of a session for another time to live."""
        self._heartbeat_at[session.serial] = self.now()

    def attached(self, session: Session) -> None:
        """Note that a session has a connection: its grace period ends."""
        self.deadlines.drop(("session", session.serial))

    def detached(self, session: Session) -> None:
        """Note that a session has lost its connection: its grace period begins."""
        self._set(("session", session.serial), self.now() + self._server.settings.grace_s)

    def forget(self, session: Session, waits: list[int]) -> None:
        """Drop the deadlines of a session that has ended."""
        self._heartbeat_at.pop(session.serial, None)
        self.deadlines.drop(("session", session.serial))
        leases = self._leases.pop(session.serial, {})
        self._server.turns.run(self._forget_all(session.serial, waits, leases))

    def _forget_all(self, serial: int, waits: list[int], leases: dict[bytes, None]) -> Iterator[None]:
        drop = self.deadlines.drop
        for count, number in enumerate(waits, 1):
            drop((serial, number))
            if not count % DROPPED:
                yield
        for count, key in enumerate(leases, 1):
            drop(("lease", serial, key))
            if not count % DROPPED:
                yield

    def arm_timers(self, namespace: Namespace) -> None:
        """Set or drop the changed timers of shared objects."""
        objects = namespace.objects
        if not objects.changed_timers:
            return
        changed, objects.changed_timers = objects.changed_timers, []
        now = self.now()
        for place in changed:
            key = ("timer", namespace.id, place)
            timer = objects.timers.get(place)
            if timer is None:
                self.deadlines.drop(key)
            else:
                self._set(key, now + timer[1])

    def _expect_heartbeats(self, session: Session, key: bytes, until: float) -> None:
        """Set the deadline of a lease; drop those of deleted leases once they outnumber the live ones."""
        leases = self._leases.setdefault(session.serial, {})
        leases[key] = None
        if len(leases) > 2 * len(session.ttls) + 64:
            for gone in [one for one in leases if one not in session.ttls]:
                del leases[gone]
                self.deadlines.drop(("lease", session.serial, gone))
        self._set(("lease", session.serial, key), until)

    # Expiry

    def _set(self, key: Any, at: float) -> None:
        self.deadlines.set(key, at)
        if self.deadlines.earliest < self._ticks_at:
            self._arm(self._seen_at)

    def _arm(self, now: float) -> None:
        """Have `_tick` called when the next deadline passes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ticks_at = max(self.deadlines.earliest, now)
        if self._ticks_at < NEVER:
            self._timer = asyncio.get_running_loop().call_later(self._ticks_at - now, self._tick)

    def _tick(self) -> None:
        """Handle passed deadlines, as many as this turn of the event loop has time for, and leave the rest to later."""
        self._timer = None
        now, deadlines, turns = self.now(), self.deadlines, self._server.turns
        while deadlines.earliest <= now:
            for key in deadlines.due(now, 1):
                self._expire(key, now)
            if turns.spent():
                break
        self._arm(now)

    def _expire(self, key: Any, now: float) -> None:
        state, submit = self._server.state, self._server.submit
        if key[0] == "session":
            submit(EndSession(key[1]))
        elif key[0] == "lease":
            self._stop_lease(key, now)
        elif key[0] == "timer":
            _, namespace, place = key
            found = state.namespaces.get(namespace)
            timer = found.objects.timers.get(place) if found is not None else None
            if timer is not None:
                submit(FireTimer(namespace, place[0].kind, place[1], timer[0]))
        else:
            serial, number = key
            session = state.sessions.get(serial)
            waiter = session.waiting.get(number) if session is not None else None
            if waiter is not None and waiter.reads:
                self._server.confirmed(lambda: self._time_out(serial, number))
            elif waiter is not None:
                submit(TimeOutRequest(serial, number))

    def _time_out(self, serial: int, number: int) -> None:
        """Time out a read, unless it was answered meanwhile."""
        state = self._server.state
        session = state.sessions.get(serial)
        if session is not None and number in session.waiting and session.waiting[number].reads:
            answer = session.time_out(number)
            if answer is not LATER:
                state.outputs.append((session, number, answer))
                self._server.deliver()

    def _stop_lease(self, key: tuple[str, int, bytes], now: float) -> None:
        """Expire a lease, unless there was a heartbeat since its deadline was set."""
        _, serial, name = key
        state = self._server.state
        session = state.sessions.get(serial)
        if session is None or name not in session.ttls:
            return
        ttl_s, number = session.ttls[name]
        until = self._heartbeat_at.get(serial, 0.0) + ttl_s
        if until > now and state.namespaces[session.namespace].engine.lease_owner(name) is session:
            self._set(key, until)
        else:
            self._server.submit(ExpireLease(serial, name, number))
