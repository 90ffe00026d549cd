"""A watch of a blocking session: the changes of keys under a prefix, in order, for any number of threads.

The watch is begun as a part of a batch (`sent_batch.py`). Its `PendingCall` stays registered while the watch is open,
so its events survive cuts as replies do. A thread that waits for an event takes part in the election of the reader,
like any call. In a forked child the watch remains its parent's: it raises `SessionLost` there, and closing it tells the
server nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rallypoint.client.blocking.pending_call import IGNORE_ANSWER, PendingCall
from rallypoint.client.blocking.reader_election import ReaderElection
from rallypoint.client.blocking.shared_connection import SharedConnection
from rallypoint.client.outage import CallDeadline
from rallypoint.core import ops
from rallypoint.core.records import Event, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost, RallypointError, SessionLost, StoreClosed

if TYPE_CHECKING:
    from rallypoint.client.blocking.session import ClientSession

__all__ = ["SessionWatch"]


class SessionWatch:
    """The events of one watch."""

    def __init__(
        self, session: ClientSession, connection: SharedConnection, election: ReaderElection, pending: PendingCall
    ) -> None:
        self._session, self._connection, self._election = session, connection, election
        self._pending = pending
        """The call that the server has accepted; it receives the events."""

    def next(self, deadline: Deadline) -> Event | TimedOut:
        """Return the next event, waiting for it until the deadline; raise StoreClosed once closed."""
        connection = self._connection
        if not self._session.uses(connection):
            raise SessionLost(peer=connection.peer, why="this process is a fork, and the watch is its parent's")
        try:
            answer = self._election.next(self._pending, "watch", CallDeadline(0.0, deadline.remaining()))
        except ConnectionLost:
            if connection.over is None and deadline.expired():
                outage = connection.outage
                return TimedOut((), outage.describe() if outage is not None and outage.down else "")
            raise
        finally:
            self._election.wake_another()
        assert isinstance(answer, Event)
        return answer

    def close(self) -> None:
        """Cancel the watch, and wake the threads that wait for its events."""
        if self._session.uses(self._connection):
            with contextlib.suppress(RallypointError):
                self._session.ask(ops.Drop(0, self._pending.number), 0.0, IGNORE_ANSWER)
            self._connection.pending.pop(self._pending.number, None)
        self._pending.deliver(StoreClosed(store=f"a watch of {self._session.label}"))
