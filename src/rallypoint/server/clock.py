"""The server's clock: deadlines in one heap, and the entries that are submitted when they pass.

The state has no clock. Waits, sessions in their grace, leases that need heartbeats and timers of shared objects have
their deadlines here. What is due is submitted as an entry, so that the log has it; only reads end without one. After a
restart every deadline counts from the moment of the restart.

A server that was stopped for a while (SIGSTOP, a suspended machine, a stalled loop) has heard nobody in that time, and
must not blame its clients: when a deadline is found to have passed long ago, all of them are put off by the pause.

A heartbeat is a note of the time, however many leases depend on it: the deadline of a lease moves when it has passed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.core import ops
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.entries import End, Fire, Lapse, TimeOut
from rallypoint.core.session import Session
from rallypoint.core.state import Namespace

if TYPE_CHECKING:
    from rallypoint.server.server import StoreServer

__all__ = ["FOLLOWED", "MOVE_S", "RETURN_S", "Clock"]

FOLLOWED = frozenset((ops.Lease, ops.Unlease, ops.Act, ops.DeletePrefix, ops.Drop))
"""Operations after which `Clock.follow` has something to do, though they were answered."""

RETURN_S = 6.0
"""How long clients have at least, after a restart, to come back to their sessions.

One attempt to resume lasts up to 3 s (`store/route.py`): one that began before the server was back, and the next, fit.
"""

MOVE_S = 12.0
"""The same where another server led that hangs now, or whose machine is silent. Standbys know that after 2 s, but the
clients and relays that are connected to it after 5 to 8 s (`relay/hang_watch.py`), and only then look for this one."""

LATE_S = 0.5
"""How long after its time a deadline may be seen to; later than that, the process was not running."""

MAX_DUE = 128
"""How many deadlines are seen to in one turn of the event loop."""


class Clock:
    """Deadlines of one server."""

    def __init__(self, server: StoreServer) -> None:
        self.deadlines = Deadlines()
        self._server = server
        self._timer: asyncio.TimerHandle | None = None
        self._ticks_at = NEVER
        self._seen_at = 0.0  # when the time was last looked at, at least once a second
        self._beaten_at: dict[int, float] = {}  # the last heartbeats of sessions
        self._leases: dict[int, dict[bytes, None]] = {}  # those that have deadlines, by session

    def now(self) -> float:
        """Return the time; where the process was stopped for a while, put all deadlines off by as much."""
        now = time.monotonic()
        if now - self._ticks_at > LATE_S:
            paused_s = now - self._seen_at
            self.deadlines.delay(paused_s)
            self._beaten_at = {serial: at + paused_s for serial, at in self._beaten_at.items()}
            self._arm(now)
        self._seen_at = now
        return now

    def start(self, back_s: float) -> None:
        """Begin with what a restored state has: all that waits for a client, or for a time, does so from now on.

        Clients have so long to come back to their sessions, or their grace, if that is longer.
        """
        now, state = self.now(), self._server.state
        back_s = max(self._server.settings.grace_s, back_s)
        for session in state.sessions.values():
            self._set(("session", session.serial), now + back_s)
            for key, ttl_s in session.live_ttls().items():
                self._expect_beats(session, key, now + max(ttl_s, back_s))
        for namespace in state.namespaces.values():
            namespace.objects.changed_timers = list(namespace.objects.timers)
            self.arm_timers(namespace)

    def stop(self) -> None:
        """See to nothing any more."""
        self.deadlines = Deadlines()
        self._arm(0.0)

    # What there is to wait for

    def follow(self, session: Session, op: ops.Op) -> None:
        """Set the deadlines that a request has brought, and drop those that it has ended."""
        key = (session.serial, op.number)
        timeout_s = getattr(op, "timeout_s", None)
        if timeout_s is not None and op.number in session.waiting and key not in self.deadlines:
            self._set(key, self.now() + timeout_s)  # one that came again after a cut keeps its deadline
        if isinstance(op, ops.Lease):
            if op.ttl_s and op.key in session.ttls:
                self._expect_beats(session, op.key, self.now() + op.ttl_s)
        elif isinstance(op, ops.Unlease):
            self.deadlines.drop(("lease", session.serial, op.key))
        elif isinstance(op, ops.Drop):
            self.deadlines.drop((session.serial, op.target))
        elif isinstance(op, (ops.Act, ops.DeletePrefix)):
            namespace = self._server.state.namespaces[session.namespace]
            self.arm_timers(namespace)
            self._server.go_on_clearing(namespace)

    def follow_arrivals(self, requests: Sequence[tuple[Session, ops.Act]]) -> None:
        """Set the deadlines of those arrivals at a shared object that wait."""
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

    def beat(self, session: Session) -> None:
        """Keep the leases of a session for another time to live."""
        self._beaten_at[session.serial] = self.now()

    def attached(self, session: Session) -> None:
        """Note that a session has a connection."""
        self.deadlines.drop(("session", session.serial))

    def detached(self, session: Session) -> None:
        """Note that a session has lost its connection: its grace begins."""
        self._set(("session", session.serial), self.now() + self._server.settings.grace_s)

    def forget(self, session: Session, waits: list[int]) -> None:
        """Drop the deadlines of a session that has ended."""
        self._beaten_at.pop(session.serial, None)
        self.deadlines.drop(("session", session.serial))
        for number in waits:
            self.deadlines.drop((session.serial, number))
        for key in self._leases.pop(session.serial, ()):
            self.deadlines.drop(("lease", session.serial, key))

    def arm_timers(self, namespace: Namespace) -> None:
        """Set and drop the timers of shared objects that have changed."""
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

    def _expect_beats(self, session: Session, key: bytes, until: float) -> None:
        """Set the deadline of a lease; those of leases that were deleted go when they are as many as the others."""
        leases = self._leases.setdefault(session.serial, {})
        leases[key] = None
        if len(leases) > 2 * len(session.ttls) + 64:
            for gone in [one for one in leases if one not in session.ttls]:
                del leases[gone]
                self.deadlines.drop(("lease", session.serial, gone))
        self._set(("lease", session.serial, key), until)

    # When it is over

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
        """See to what is due, some of it; others get their turn before the rest."""
        self._timer = None
        now = self.now()
        for key in self.deadlines.due(now, MAX_DUE):
            self._expire(key, now)
        self._arm(now)

    def _expire(self, key: Any, now: float) -> None:
        state, submit = self._server.state, self._server.submit
        if key[0] == "session":
            submit(End(key[1]))
        elif key[0] == "lease":
            self._stop_lease(key, now)
        elif key[0] == "timer":
            _, namespace, place = key
            found = state.namespaces.get(namespace)
            timer = found.objects.timers.get(place) if found is not None else None
            if timer is not None:
                submit(Fire(namespace, place[0].kind, place[1], timer[0]))
        else:
            serial, number = key
            session = state.sessions.get(serial)
            waiter = session.waiting.get(number) if session is not None else None
            if waiter is not None and waiter.reads:
                self._server.confirmed(lambda: self._time_out(serial, number))
            elif waiter is not None:
                submit(TimeOut(serial, number))

    def _time_out(self, serial: int, number: int) -> None:
        """End a read whose time is over, unless it was answered meanwhile."""
        state = self._server.state
        session = state.sessions.get(serial)
        if session is not None and number in session.waiting and session.waiting[number].reads:
            state.outputs.append((session, number, session.time_out(number)))
            self._server.deliver()

    def _stop_lease(self, key: tuple[str, int, bytes], now: float) -> None:
        """Give up a lease, unless there was a heartbeat since its deadline was set."""
        _, serial, name = key
        state = self._server.state
        session = state.sessions.get(serial)
        if session is None or name not in session.ttls:
            return
        ttl_s, number = session.ttls[name]
        until = self._beaten_at.get(serial, 0.0) + ttl_s
        if until > now and state.namespaces[session.namespace].engine.lessee(name) is session:
            self._set(key, until)
        else:
            self._server.submit(Lapse(serial, name, number))
