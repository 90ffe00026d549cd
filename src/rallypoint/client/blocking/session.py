"""The session of the blocking client, as its callers see it: one socket, one session, any number of threads.

A call needs no thread switch. The calling thread numbers and sends its request, and one of the waiting threads reads
for all (`reader_election.py`). Most calls are alone: they become the reader before they send, and then the first reply
is theirs, which needs no PendingCall (`_ask_as_reader`). All others register one, send in turn, and wait until they
have the reply or become the reader (`_ask_as_follower`).

A call that ends without its reply (timeout, Ctrl-C) withdraws its request: the server stops waiting, and takes back
what it granted. The exceptions are in `_parked`: calls on shared objects that timed out in an outage. Their requests
stay, and the same call may go on waiting. Cuts and outages themselves are the business of `supervisor.py`.

- The locks, their order, and what each protects: `shared_connection.py`. A lone call takes `lock` to become the reader,
  `send_lock` to send, and `lock` to settle its reply, one at a time; it never waits for `send_lock`. Others hold `lock`
  within `send_lock`, to number their requests.
- `_connection`, `_election`, `_supervisor` and `_parked` belong to one process. A forked child leaves them, with any
  locks that its parent's threads held at that moment, and opens a session of its own with its first call. `_forks` says
  whose they are, and is written last; `_fork_lock` lets one thread of the child do it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint import net
from rallypoint.client import lost_sessions
from rallypoint.client.blocking import monitor
from rallypoint.client.blocking.pending_call import IGNORE_ANSWER, PendingCall
from rallypoint.client.blocking.sent_batch import SentBatch
from rallypoint.client.blocking.shared_connection import SharedConnection
from rallypoint.client.blocking.supervisor import ConnectionSupervisor
from rallypoint.client.outage import CallDeadline, ServerDown, operation_name, patience_s
from rallypoint.client.routing.dial import dial
from rallypoint.client.routing.route import Route
from rallypoint.core import ops
from rallypoint.core.records import ReplyStatus, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import NoQuorum, RallypointError, StoreClosed
from rallypoint.protocol.native_client import ClientProtocol, Reply
from rallypoint.protocol.reported_errors import error_of

__all__ = ["ClientSession"]

GOODBYE_S = 1.0
"""Timeout of `close`: when it returns, as a rule, the server grants nothing more to this session."""

CONFIRM_S = 0.1
"""How long to wait for a turn to confirm replies; the next request confirms them, too."""

_forks = 0
"""The number of forks between this process and the one that imported this module."""

_fork_lock = threading.Lock()


def _forked() -> None:
    global _forks, _fork_lock
    _forks += 1
    _fork_lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class ClientSession:
    """A session with a rallypoint server; thread-safe and fork-safe."""

    def __init__(self, route: Route, timeout_s: float) -> None:
        self.label = route.label
        self.patience_s = patience_s(timeout_s)
        """How long the server may take to reply, beyond the requested wait."""

        self._route = route
        self._timeout_s = timeout_s
        self._forks = _forks
        self._open()

    def _open(self) -> None:
        route, lock = self._route, threading.Lock()
        core = ClientProtocol(net.caller_name(), route.begin(), lost_sessions.of(route.name))
        contact = dial(route, core, lock, Deadline(self._timeout_s))
        connection = SharedConnection(route, core, lock, contact)  # a new session expects no replies beside the welcome
        supervisor = ConnectionSupervisor(connection)
        self._connection, self._election, self._supervisor = connection, supervisor.election, supervisor
        self._parked: dict[int, PendingCall] = {}
        """Requests whose callers timed out in an outage, by the call that may wait for the reply again."""

        monitor.start(supervisor)

    def _after_fork(self) -> None:
        """In a forked child: leave the session to the parent, and open a new one, unless the store is closed."""
        with _fork_lock:
            if isinstance(self._connection.over, StoreClosed):
                raise StoreClosed(store=self.label)
            if self._forks != _forks:
                self._connection.socket_reader.socket.close()
                self._open()
                self._forks = _forks

    @property
    def server(self) -> bytes:
        """The identity of the server."""
        return self._connection.core.server

    @property
    def recovers(self) -> bool:
        """Whether the server restores its sessions after a restart."""
        return self._connection.core.recovers

    @property
    def servers(self) -> Sequence[str]:
        """The URLs of all servers of the store, as last reported by one of them."""
        return self._connection.core.servers

    def need_heartbeat(self, interval_s: float) -> None:
        """Send heartbeats at least this often from now on: a lease of this session needs them."""
        self._supervisor.heartbeat_s = min(self._supervisor.heartbeat_s, interval_s)

    # Requests

    def ask(self, op: ops.Op, wait_s: float | None = None, left: int | None = None) -> Any:
        """Send a request and wait for its reply, due at once (`wait_s` None) or after at most `wait_s`.

        If the timeout expires while the server is down, `TimedOut` says so and the request is withdrawn. With `left`
        IGNORE_ANSWER it stays to be executed; with the number of a call, it stays for `act` to wait for again, and
        ServerDown is raised.
        """
        if _forks != self._forks:
            self._after_fork()
        connection, election, token = self._connection, self._election, object()
        try:
            with connection.lock:
                if election.reader is None and not connection.send_lock.locked():
                    election.reader = token
            reply = self._ask_as_reader(token, op, wait_s, left) if election.reader is token else None
            reply = reply or self._ask_as_follower(op, wait_s, left)
        except ServerDown as down:
            if left:
                raise
            if left is None and down.no_quorum:
                raise NoQuorum(store=self.label, timeout_s=wait_s or 0.0, tried=down.no_quorum) from None
            return TimedOut((), str(down))
        finally:
            if election.reader is token:
                election.reader = None
            if connection.pending:
                election.wake_another()
        return reply.result if reply.status == ReplyStatus.OK else self._failed(reply)

    def _ask_as_reader(self, me: object, op: ops.Op, wait_s: float | None, left: int | None) -> Reply | None:
        """Send a request and read its reply, as the reader; or step back, and return None, if another thread sends."""
        connection, election, number, turn = self._connection, self._election, 0, list[bool]()
        try:
            try:
                turn.extend(map(connection.send_lock.acquire, (False,)))  # as in `SharedConnection.in_turn`
                if not turn[0]:  # that thread may wait for the server, and the server for a reader
                    election.step_back()
                    return None
                if connection.over is not None:
                    connection.check_open()
                core = connection.core  # we send and read: no other thread uses it
                number = core.number
                until = time.monotonic() + wait_s if wait_s else None
                connection.send(core.ask(op, until))
                socket_reader = connection.socket_reader
            finally:
                if True in turn:
                    if number and core.number == number:  # Ctrl-C before it was taken: another request gets it
                        number = 0
                    connection.send_lock.release()
            data = socket_reader.read_soon()
            if data:
                with connection.lock:
                    reply = core.sole(data, number)
                if reply is not None:
                    connection.cut_counter.in_a_row = 0
                    return reply
            # More than our reply arrived, or nothing yet, or a cut: go on as a reader for all.
            pending = connection.pending[number] = PendingCall(number)
            patience = CallDeadline(self.patience_s, wait_s)
            election.read_on(socket_reader, data, pending, patience)
            return election.answer(pending, operation_name(op), patience)
        except BaseException as error:
            if election.reader is me and not isinstance(error, RallypointError):
                connection.cut()
            self._unanswered(error, number, left)
            raise

    def _ask_as_follower(self, op: ops.Op, wait_s: float | None, left: int | None) -> Reply:
        """Send a request, and wait for its reply while another thread reads, or until we become the reader."""
        pending, patience = PendingCall(), CallDeadline(self.patience_s, wait_s)
        try:
            self._connection.submit([(op, pending)], operation_name(op), patience, patience.own_at if wait_s else None)
            return self._election.answer(pending, operation_name(op), patience)
        except BaseException as error:
            self._unanswered(error, pending.number, left)
            raise

    def begin(self, batch: Sequence[ops.Op]) -> SentBatch:
        """Send requests together, and return at once; the batch collects the replies."""
        if _forks != self._forks:
            self._after_fork()
        return SentBatch(self, self._connection, self._election, batch)

    def act(self, op: ops.Act) -> Any:
        """Send a call on a shared object, or go on waiting for the reply to the request it sent before an outage.

        Raises ServerDown if its timeout expires while the server is down; then it may be repeated.
        """
        call, election = op.call, self._election
        pending = self._parked.pop(call, None) if self._parked and _forks == self._forks else None
        if pending is None:
            return self.ask(op, op.timeout_s, call)
        try:
            reply = election.answer(pending, operation_name(op), CallDeadline(self.patience_s, op.timeout_s))
        except BaseException as error:
            self._unanswered(error, pending.number, call)
            raise
        finally:
            election.wake_another()
        return reply.result if reply.status == ReplyStatus.OK else self._failed(reply)

    def discard_parked(self, call: int) -> None:
        """Drop the request that a call sent before an outage, and ignore its reply."""
        pending = self._parked.pop(call, None)
        if pending is not None:
            self._connection.pending.pop(pending.number, None)

    def confirm(self) -> None:
        """Confirm delivered replies to the server now if they are many; otherwise the next request does."""
        connection = self._connection
        if connection.core.has_unconfirmed:
            connection.confirm(connection.send, time.monotonic() + CONFIRM_S)

    def _failed(self, reply: Reply) -> TimedOut:
        """Return TimedOut for a timeout, or raise the error of the reply."""
        if reply.status == ReplyStatus.TIMED_OUT:
            return TimedOut(tuple(reply.result))
        raise error_of(reply, self.label)

    def _unanswered(self, error: BaseException, number: int, left: int | None) -> None:
        """Handle a request whose caller stops waiting: withdraw it, unless the server is down and `left` keeps it."""
        connection = self._connection
        if not isinstance(error, ServerDown) or left is None:
            connection.withdraw(number)
            return
        error.sent = number < error.unsent_from
        if left == IGNORE_ANSWER:
            connection.pending.pop(number, None)
        elif error.sent:
            self._parked[left] = connection.pending[number]
        else:
            connection.withdraw(number)

    def uses(self, connection: SharedConnection) -> bool:
        """Return whether a connection is this session's in this process."""
        return _forks == self._forks and connection is self._connection

    # The end

    def close(self) -> None:
        """End the session: withdraw all requests, send Bye, and wake the calls in progress."""
        connection, reason = self._connection, StoreClosed(store=self.label)
        if _forks != self._forks:  # a forked child: the connection, and perhaps a held lock, are its parent's
            connection.over = reason
            connection.socket_reader.socket.close()
            return
        if connection.over is None:
            goodbye, patience = PendingCall(), CallDeadline(GOODBYE_S, None)
            if connection.send_goodbye(goodbye, patience):
                self._election.await_goodbye(goodbye, patience)
        self._election.end(reason)

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_the_end() and "_supervisor" in self.__dict__ and self._connection.over is None:
            self.close()
