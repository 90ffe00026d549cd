"""Which thread reads: one of the waiting threads, the reader, reads for all.

A thread that waits for a reply and finds no reader becomes the reader. It reads until its own reply arrives, delivers
the others' on the way, and then wakes another waiting thread to go on. All others sleep in their `PendingCall`. While
no call waits, the connection monitor reads pushed events (`read_idle`). After a cut the reconnect thread is the reader,
until the session is resumed.

- `reader` is a unique token of the reader. Only a thread that finds None under `lock` may set its token, and only the
  holder of the token clears it, or the reconnect thread that takes it over. A token tells an interrupted call whether
  it was the reader; a lock could stay held after a signal right after its acquisition. No call, where a signal could
  interrupt, comes between the end of reading and the clearing of the token.
- The locks are those of `shared_connection.py`. `lock` is held to become the reader, to deliver and to wake. While it
  reads, the reader takes `send_lock` only if it is free: a sender may have to wait until the server, which waits for
  the reader, reads on.

A reader that is interrupted (Ctrl-C) may have read data that it can no longer deliver. It cuts the connection, and the
server sends the lost data again when the session is resumed.

Rejected: a dedicated reader thread. It costs two thread switches per reply, and Ctrl-C cannot reach it.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence

from rallypoint.client import lost_sessions
from rallypoint.client.blocking.pending_call import PendingCall
from rallypoint.client.blocking.shared_connection import SharedConnection
from rallypoint.client.blocking.socket_reader import SocketReader
from rallypoint.client.outage import CallDeadline, report_denied
from rallypoint.core.records import Event
from rallypoint.errors import ConnectionLost, RallypointError, StoreClosed
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native_client import Reply

__all__ = ["ReaderElection"]

_RECONNECTING = object()
"""The reader during a reconnect."""


class ReaderElection:
    """Elects the thread that reads for all pending calls of a session.

    `on_cut` is called by a reader that finds the connection lost, with that connection and its token; when it returns,
    another thread is the reader, unless the session is over.
    """

    def __init__(self, connection: SharedConnection, on_cut: Callable[[SocketReader, object], object]) -> None:
        self._connection = connection
        self._on_cut = on_cut
        self.reader: object = None
        """Token of the call or thread that reads; None if none does."""

    # Waiting

    def answer(self, pending: PendingCall, operation: str, patience: CallDeadline) -> Reply:
        """Wait for the reply to a request, and remove its pending call."""
        reply = self.next(pending, operation, patience)
        assert isinstance(reply, Reply)
        self._connection.pending.pop(pending.number, None)
        return reply

    def next(self, pending: PendingCall, operation: str, patience: CallDeadline) -> Reply | Event:
        """Return the next reply or event of a pending call, reading for all if no other thread does.

        Raises ConnectionLost if no reply came in time, ServerDown if the caller's timeout expires in an outage.
        """
        connection = self._connection
        while not pending.answers:
            connection.check_open()
            outage, trouble = connection.outage, connection.core.trouble
            if time.monotonic() >= patience.until(outage, trouble):
                raise patience.ended(connection.peer, operation, outage, trouble)
            if not self._as_reader(lambda: self._read(pending, patience)):
                self._wait_for_reader(pending, patience)
        answer = pending.answers.popleft()
        if isinstance(answer, RallypointError):
            pending.answers.append(answer)
            raise copy.copy(answer)
        return answer

    def await_goodbye(self, pending: PendingCall, patience: CallDeadline) -> None:
        """Wait for the reply to Bye, without reconnecting for it."""
        connection, hung_up = self._connection, False

        def read() -> None:
            nonlocal hung_up
            hung_up = self._read_some(connection.socket_reader, patience.remaining()) == b""

        while not (pending.answers or hung_up or patience.expired()):
            if connection.over is not None or connection.outage is not None:
                return
            if not self._as_reader(read):
                self._wait_for_reader(pending, patience)

    def _wait_for_reader(self, pending: PendingCall, patience: CallDeadline) -> None:
        """Sleep while another thread reads; it wakes us with our reply, to read on, or because of an outage."""
        connection = self._connection
        with connection.lock:
            pending.waiting = True
            if pending.wakeup is None:
                pending.wakeup = threading.Lock()
                pending.wakeup.acquire()
        try:
            if not pending.answers and self.reader is not None:
                until = patience.until(connection.outage, connection.core.trouble)
                pending.wait(max(0.0, until - time.monotonic()))
        finally:
            pending.waiting = False

    def wake_another(self) -> None:
        """Wake a waiting thread to read on, if there is no reader."""
        if not self._connection.pending or self.reader is not None:
            return
        with self._connection.lock:
            for pending in list(self._connection.pending.values()):
                if pending.waiting and not pending.answers:
                    pending.wake()
                    return

    def wake_all(self) -> None:
        """Wake all waiting threads, with `lock` held: their calls may have to end sooner."""
        for pending in list(self._connection.pending.values()):
            pending.wake()

    # Reading

    def _as_reader(self, read: Callable[[], object]) -> bool:
        """Call `read` as the reader, then wake another to read on; return False, without a call, if another reads."""
        token = object()
        try:
            with self._connection.lock:
                if self.reader is None:
                    self.reader = token
            if self.reader is not token:
                return False
            read()
            return True
        finally:
            if self.reader is token:
                self.reader = None
                self.wake_another()

    def _read(self, pending: PendingCall, patience: CallDeadline) -> None:
        """Read and deliver until our reply arrives, our deadline passes, or a cut makes another thread the reader."""
        connection = self._connection
        socket_reader = connection.socket_reader
        while not pending.answers and connection.over is None:
            left_s = patience.until(None, connection.core.trouble) - time.monotonic()
            data = self._read_some(socket_reader, max(left_s, 0.0))
            if data == b"":
                self._hand_over(socket_reader)
                return
            if data is None and left_s <= 0.0:
                return

    def read_on(
        self, socket_reader: SocketReader, data: bytes | None, pending: PendingCall, patience: CallDeadline
    ) -> None:
        """As the reader, handle what was read before, and go on as `_read` does."""
        if data == b"":
            self._hand_over(socket_reader)
            return
        if data:
            self._deliver_all(data)
        self._read(pending, patience)

    def read_idle(self) -> None:
        """Receive pushed events, if no other thread reads."""
        self._as_reader(lambda: self._read_some(self._connection.socket_reader, 0.0))

    def _read_some(self, socket_reader: SocketReader, within_s: float) -> bytes | None:
        """Read once and deliver; return the data, b"" after a cut, None if none arrived. Cut if interrupted."""
        try:
            data = socket_reader.read(within_s)
            if data:
                self._deliver_all(data)
            return data
        except BaseException:
            if socket_reader is self._connection.socket_reader:
                self._connection.cut()
            raise

    # Delivering

    def _deliver_all(self, data: bytes) -> None:
        """Deliver received data. Confirm pushed events, as no request may follow them."""
        connection, core = self._connection, self._connection.core
        servers, trouble = core.servers, core.trouble
        try:
            with connection.lock:
                replies = core.receive(data)
                self._deliver(replies)
                if core.servers is not servers or core.trouble != trouble:
                    connection.route.learn_servers(core)
                    self.wake_all()
            report_denied(connection.peer, core)
            if replies and not replies[-1].number:
                connection.confirm(connection.try_send, 0.0)
        except BadMessage as error:
            self.end(ConnectionLost(peer=connection.peer, operation="reading", why=str(error)))

    def _deliver(self, replies: Sequence[Reply]) -> None:
        """Deliver replies and events, with `lock` held; after a reconnect, some may come twice."""
        core = self._connection.core
        for reply in replies:
            if not core.expects(reply):
                continue
            self._connection.cut_counter.in_a_row = 0
            number, answer = (reply.number, reply) if reply.number else reply.event()
            pending = self._connection.pending.get(number)
            if pending is not None:
                pending.deliver(answer)
            core.settle(reply)

    # A cut, and the end

    def _hand_over(self, socket_reader: SocketReader) -> None:
        """Let another thread be the reader, and reconnect; the calling thread, until now the reader, found a cut."""
        reader = self.reader
        self._on_cut(socket_reader, reader)
        if self.reader is reader:
            self.reader = None  # the session is over, so no thread took over from us

    def take_over(self, socket_reader: object, reader: object) -> bool:
        """Make the reconnect thread the reader instead of `reader`, if this is still the current connection."""
        connection = self._connection
        with connection.lock:
            if connection.over is not None or connection.socket_reader is not socket_reader:
                return False
            if self.reader not in (None, reader):
                return False
            self.reader = _RECONNECTING
            return True

    def deliver_early(self, replies: Sequence[Reply]) -> None:
        """Deliver the replies that came with a welcome."""
        with self._connection.lock:
            self._deliver(replies)

    def step_back(self) -> None:
        """As the reader, let other threads read instead."""
        self.reader = None
        self.wake_another()

    def end(self, reason: RallypointError) -> None:
        """Refuse further calls, and wake those in progress."""
        connection = self._connection
        with connection.lock:
            if connection.over is None:
                connection.over = reason
                if not isinstance(reason, StoreClosed):
                    lost_sessions.note(connection.peer, connection.core.session)
            for pending in list(connection.pending.values()):
                pending.deliver(connection.over)
        connection.closed.set()
        connection.shut_down()
        connection.socket_reader.socket.close()
