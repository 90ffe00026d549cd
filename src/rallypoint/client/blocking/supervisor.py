"""The supervision of a blocking session's connection: its reconnects, its heartbeats, and the detection of a hang.

Two threads call it, and neither is a caller's. The connection monitor (`monitor.py`) looks at all sessions of the
process: it notices a cut while no call reads, sends heartbeats and pings, and starts probes. The reconnect thread
(`reconnect.py`) of a cut becomes the reader, connects to the same or another address, resumes the session and repeats
unanswered requests. Calls, also new ones, wait meanwhile, within the limits of `outage.py`. If the session no longer
exists, or its grace period is over, it ends for good: `SessionLost`, or `ServerRestarted` if another server replies.

With several addresses, or a relay, a hung peer counts as lost. The monitor detects it, by the rules of `hang_check.py`,
and cuts the connection, so that the session continues elsewhere.

- The locks are those of `shared_connection.py`. The monitor waits for none of them during I/O: it takes `send_lock`
  only if it is free, and sends what the socket accepts at once. Else one hung server would stop it for all sessions.
- The reconnect thread is the reader from `take_over` to `resume` or `give_up`. It holds no lock while it connects, and
  `send_lock` while it replaces the socket and repeats requests.
- The state of the hang check (`_ping`, `_checked_at`, `_seen`) is the monitor's alone.

Monitor and reconnect thread hold the supervisor weakly, and it knows nothing of the `ClientSession`, so that an owner
can drop a session at any time.
"""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import time
import weakref
from collections.abc import Mapping

from rallypoint.client import hang_check
from rallypoint.client.blocking import reconnect
from rallypoint.client.blocking.reader_election import ReaderElection
from rallypoint.client.blocking.shared_connection import SharedConnection
from rallypoint.client.blocking.socket_reader import SocketReader, poll
from rallypoint.client.outage import Outage, session_error
from rallypoint.client.routing.dial import Dialer, DialResult, ForeignServer
from rallypoint.core import ops
from rallypoint.errors import ConnectionLost, RallypointError
from rallypoint.protocol import native

__all__ = ["ConnectionSupervisor"]

_BEAT = native.frame(ops.SessionHeartbeat(0))


class ConnectionSupervisor:
    """Supervises the connection of one session, for the connection monitor and the reconnect thread."""

    def __init__(self, connection: SharedConnection) -> None:
        self._connection = connection
        self.election = ReaderElection(connection, functools.partial(reconnect.start, weakref.ref(self)))
        self.heartbeat_s = float("inf")
        """The interval of heartbeats that the leases of this session need."""

        self.closed = connection.closed
        """Set when the session is over."""

        self._ping = 0
        """The number of the last ping."""

        self._checked_at = time.monotonic()
        self._seen = 0
        """The number of the next request at the last check of a relay."""

    # Called by the monitor

    def monitor_state(self) -> tuple[socket.socket | None, bool] | None:
        """Return the socket (None while reconnecting) and whether data is expected that no call reads.

        Returns None if the session is over. Wakes the waiting calls when the server counts as down.
        """
        connection, election = self._connection, self.election
        if connection.over is not None:
            return None
        outage = connection.outage
        if outage is not None:
            if outage.check_down():
                with connection.lock:
                    election.wake_all()
            return None, False
        expected = bool(connection.pending) or not connection.core.answered(self._ping)
        return connection.socket_reader.socket, expected and election.reader is None

    def read_idle(self) -> None:
        """Receive pushed events, if no other thread reads."""
        self.election.read_idle()

    def reconnect(self, sock: socket.socket) -> None:
        """Reconnect after a cut of this socket, unless a call reads it and will notice."""
        socket_reader = self._connection.socket_reader
        if socket_reader.socket is sock and self.election.reader is None:
            reconnect.start(weakref.ref(self), socket_reader, None)

    def send_heartbeat(self) -> bool:
        """Tell the server that this process is running, unless reconnecting; return whether it was sent."""
        sent: list[bool] = []
        self._connection.in_turn(lambda: sent.append(self._connection.try_send(_BEAT)), 0.0)
        return True in sent

    def unresponsive_socket(self) -> socket.socket | None:
        """Ping, or at a relay check for a reply to a recent request; return the socket if there was none."""
        connection, now, last_at = self._connection, time.monotonic(), self._checked_at
        core, sock, route = connection.core, connection.socket_reader.socket, connection.route
        pause_s = hang_check.silence_s(route)
        if not route.has_alternative or now < last_at + pause_s or connection.outage is not None:
            return None
        if route.relayed:
            self._checked_at = now
            asked, self._seen = self._seen, core.number  # first request since the last check, and the next
            return None if asked < self._seen and core.answered(asked) else sock
        sent: list[bool] = []
        if core.answered(self._ping):
            free = connection.in_turn(lambda: sent.append(self._send_ping()), 0.0)
            if not free and now < last_at + 2 * pause_s:  # a thread is sending; if for longer, the server hangs
                return None
        self._checked_at = now
        return None if True in sent else sock

    def _send_ping(self) -> bool:
        """Ping, with `send_lock` held; return whether the socket accepted it at once."""
        connection = self._connection
        self._ping = connection.core.number
        with contextlib.suppress(RallypointError):  # the session is over
            if not connection.try_send(connection.number(ops.Ping(0))):
                with connection.lock:
                    connection.core.forget(self._ping)
                return False
        return True

    def check_hang(self, sock: socket.socket) -> None:
        """Probe the peer of this socket, and cut it if the peer hangs: the session then continues elsewhere."""
        connection = self._connection
        hangs = hang_check.is_hung(connection.route)
        same = connection.socket_reader.socket is sock and sock.fileno() >= 0
        if hangs and same and not poll(sock, select.POLLIN, 0.0):
            connection.route.leave(hangs=True)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # Called by the reconnect thread

    def take_over(self, socket_reader: object, reader: object) -> bool:
        """Make the calling thread the reader instead of `reader`, if this is still the current connection."""
        return self.election.take_over(socket_reader, reader)

    def drop_connection(self) -> tuple[Dialer, float] | None:
        """Close the connection; return a dialer and the pause before its first attempt; None if the session ends."""
        connection, core = self._connection, self._connection.core
        connection.shut_down()  # wakes a thread that is sending
        with connection.send_lock:
            connection.socket_reader.socket.close()
            outage = Outage(connection.peer, connection.grace_s, core.number, core.trouble)
            connection.outage = outage
        try:
            pause_s = connection.cut_counter.count(core.recovers)
        except ConnectionLost as error:
            self.give_up(error)
            return None
        return Dialer(connection.route, core, connection.lock, outage.deadline), pause_s

    def note_attempt(self, why: str, no_quorum: Mapping[str, str]) -> None:
        """Note why an attempt failed; `no_quorum` has the reason at each address, if one reported no quorum."""
        if self._connection.outage is not None:
            self._connection.outage.note_attempt(why, no_quorum)

    def resume(self, contact: DialResult) -> None:
        """Let the callers go on with a new connection, and repeat their unanswered requests on it.

        They read meanwhile: a server that has large replies to write may read on only when these are read.
        """
        connection = self._connection
        with connection.send_lock:
            with connection.lock:
                again = connection.core.repeat(time.monotonic())
            if self.heartbeat_s < float("inf"):  # first: leases may be about to expire
                again = _BEAT + again
            outage = connection.outage
            assert outage is not None
            self.election.deliver_early(contact.replies)
            connection.grace_s = contact.grace_s
            connection.socket_reader = SocketReader(contact.socket)
            connection.outage = None
            if connection.over is not None:
                contact.socket.close()  # the session was closed meanwhile
            self.election.step_back()
            connection.send(again)
        if connection.over is None:
            outage.end()

    def give_up(self, error: Exception) -> None:
        """End the session, which cannot be resumed."""
        connection = self._connection
        if isinstance(error, ForeignServer):
            error.socket.close()
        self.election.end(session_error(error, connection.peer, connection.grace_s))
        connection.outage = None
        self.election.step_back()
