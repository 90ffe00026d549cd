"""Requests of a blocking session that were sent together: the caller goes on, and collects the replies later.

The server executes the requests of a session in order, also those that are repeated after a cut. So a batch takes
effect before any later request of the session, and a caller that is far from its server can send several requests, with
others after them, and wait for a single round trip.

Until `results` is called nobody waits: another call, or the connection monitor, receives the replies meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.client.blocking.pending_call import PendingCall
from rallypoint.client.blocking.reader_election import ReaderElection
from rallypoint.client.blocking.session_watch import SessionWatch
from rallypoint.client.blocking.shared_connection import SharedConnection
from rallypoint.client.outage import CallDeadline, operation_name
from rallypoint.core import ops
from rallypoint.core.records import Event, ReplyStatus, TimedOut
from rallypoint.errors import RallypointError, SessionLost
from rallypoint.protocol.native_client import Reply
from rallypoint.protocol.reported_errors import error_of

if TYPE_CHECKING:
    from rallypoint.client.blocking.session import ClientSession

__all__ = ["SentBatch"]


class SentBatch:
    """Requests that do not wait, sent together; call `results` once."""

    def __init__(
        self,
        session: ClientSession,
        connection: SharedConnection,
        election: ReaderElection,
        batch: Sequence[ops.Op],
    ) -> None:
        self._session, self._connection, self._election = session, connection, election
        self._requests = [(op, PendingCall()) for op in batch]
        self._operation = operation_name(batch[0]) if len(batch) == 1 else "pipeline"
        try:
            connection.submit(self._requests, self._operation, CallDeadline(session.patience_s, None))
        except BaseException:
            self._abandon()
            raise

    def results(self) -> list[Any]:
        """Wait for all replies. The result of a request that failed is its error, and that of a watch its events."""
        session, connection, patience = self._session, self._connection, CallDeadline(self._session.patience_s, None)
        if not session.uses(connection):
            raise SessionLost(peer=connection.peer, why="this process is a fork, and the requests are its parent's")
        try:
            replies = [self._reply(pending, patience) for _, pending in self._requests]
        except BaseException:
            self._abandon()
            raise
        finally:
            self._election.wake_another()
        return [self._result(op, pending, reply) for (op, pending), reply in zip(self._requests, replies, strict=True)]

    def _reply(self, pending: PendingCall, patience: CallDeadline) -> Reply:
        """Return the reply to a request; the events of a watch may precede it after a reconnect, and are kept."""
        early = list[Event]()
        while isinstance(answer := self._election.next(pending, self._operation, patience), Event):
            early.append(answer)
        pending.answers.extendleft(reversed(early))
        return answer

    def _result(self, op: ops.Op, pending: PendingCall, reply: Reply) -> Any | RallypointError:
        connection = self._connection
        if isinstance(op, ops.WatchPrefix) and reply.status == ReplyStatus.OK:
            return SessionWatch(self._session, connection, self._election, pending)
        connection.pending.pop(pending.number, None)
        if reply.status == ReplyStatus.TIMED_OUT:
            return TimedOut(tuple(reply.result))
        return reply.result if reply.status == ReplyStatus.OK else error_of(reply, self._session.label)

    def _abandon(self) -> None:
        """Forget the requests, whose caller is gone: they are not repeated. Withdraw the watches."""
        connection = self._connection
        for op, pending in self._requests:
            if isinstance(op, ops.WatchPrefix):
                connection.withdraw(pending.number)
                continue
            connection.pending.pop(pending.number, None)
            with connection.lock:
                connection.core.forget(pending.number)
