"""The connection that all threads of a blocking session share: its protocol core, its socket, and how to send on it.

`reader_election.py` decides which thread reads from it, `supervisor.py` replaces the socket after a cut, and
`session.py` makes the calls. This module has the locks of all of them:

- `send_lock` protects the order of requests on the wire, and the socket that they go to: a request is numbered and sent
  in one turn. It is held during I/O.
- `lock` protects the protocol core, the pending calls and the token of the reader. It is never held during I/O. A
  reader that holds `send_lock` needs no `lock` to number a request: no other thread uses the core then.
- Order: the reader may take `send_lock`, the holder of either may take `lock`, and never the other way round.

A pending call is registered when its request is numbered; replies are delivered to it with `lock` held, and its own
thread removes it.

`socket_reader` and `grace_s` change, and an outage starts and ends, only in the reconnect thread, which is the reader
then. `over` is set once, with `lock` held (`ReaderElection.end`).

Ctrl-C may interrupt the main thread between any two lines. A turn to send is therefore taken and noted in one step
(`in_turn`); `with` a lock is safe, too. An interrupted send may have left a part of a request on the wire, and anything
after it would be malformed: the connection is cut, and unanswered requests are repeated on the next one.
"""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
import time
from collections.abc import Callable, Sequence

from rallypoint.client.blocking.one_shot_event import OneShotEvent
from rallypoint.client.blocking.pending_call import PendingCall
from rallypoint.client.blocking.socket_reader import SocketReader
from rallypoint.client.outage import CallDeadline, Outage
from rallypoint.client.routing.dial import DialResult
from rallypoint.client.routing.route import CutCounter, Route
from rallypoint.core import ops
from rallypoint.errors import RallypointError
from rallypoint.protocol.native_client import ClientProtocol

__all__ = ["SharedConnection"]


class SharedConnection:
    """The state of a session that its threads share, and the sending half of its current connection."""

    def __init__(self, route: Route, core: ClientProtocol, lock: threading.Lock, contact: DialResult) -> None:
        self.route, self.peer = route, route.name
        self.core, self.lock = core, lock
        self.send_lock = threading.Lock()
        self.socket_reader = SocketReader(contact.socket)
        self.grace_s = contact.grace_s
        """How long the session may be without a connection."""

        self.pending: dict[int, PendingCall] = {}
        """The calls that wait for a reply, and the watches, by the number of the request."""

        self.cut_counter = CutCounter(route)
        self.outage: Outage | None = None
        """The current outage; None while connected."""

        self.over: RallypointError | None = None
        """Why the session has ended; None before that."""

        self.closed = OneShotEvent()
        """Set when the session is over."""

    def check_open(self) -> None:
        """Raise an error if the session is over."""
        if self.over is not None:
            raise copy.copy(self.over)  # an exception that several threads raise would collect all their tracebacks

    # Requests

    def submit(
        self,
        requests: Sequence[tuple[ops.Op, PendingCall]],
        operation: str,
        patience: CallDeadline,
        until: float | None = None,
    ) -> None:
        """Number requests and send them together, in turn; those that wait expire at `until`."""

        def send() -> None:
            self.send(b"".join([self.number(op, pending, until) for op, pending in requests]))

        if not self.in_turn(send, until or patience.at):
            raise patience.unsent(self.peer, operation, until is not None)

    def number(self, op: ops.Op, pending: PendingCall | None = None, until: float | None = None) -> bytes:
        """Number a request and return its bytes, with `send_lock` held; `pending` will receive the reply."""
        with self.lock:
            self.check_open()
            if pending is None:
                return self.core.ask(op, until)
            pending.number = number = self.core.number
            self.pending[number] = pending
            try:
                return self.core.ask(op, until)
            except BaseException:  # Ctrl-C before the number was taken: another request gets it
                if self.core.number == number:
                    del self.pending[number]
                    pending.number = 0
                raise

    def withdraw(self, number: int) -> None:
        """Drop a request whose caller is gone, as after Ctrl-C: the server cancels it, and revokes what it granted.

        The server never received a request made in an outage: polling calls must not queue a Drop each.
        """
        if not number:
            return
        self.pending.pop(number, None)
        with contextlib.suppress(OSError, RallypointError), self.send_lock:
            with self.lock:
                self.core.forget(number)
            if self.outage is None or self.outage.was_sent(number):
                self.send(self.number(ops.Drop(0, number)))

    def confirm(self, send: Callable[[bytes], object], until: float) -> None:
        """Confirm delivered replies to the server if they are many, unless other threads send until `until`."""

        def send_confirmation() -> None:
            with self.lock:
                confirmation = self.core.confirm()
            if confirmation:
                send(confirmation)

        self.in_turn(send_confirmation, until)

    def send_goodbye(self, goodbye: PendingCall, patience: CallDeadline) -> bool:
        """Withdraw all requests and send Bye; return False if that is not possible in time."""

        def send() -> None:
            sock = self.socket_reader.socket
            sock.settimeout(patience.remaining())
            with self.lock:
                unanswered = self.core.unanswered()
            requests = [self.number(ops.Drop(0, number)) for number in unanswered]
            sock.sendall(b"".join([*requests, self.number(ops.Bye(0), goodbye)]))

        with contextlib.suppress(OSError, RallypointError):
            return self.in_turn(send, patience.at)
        return False

    # Sending

    def in_turn(self, send: Callable[[], object], until: float) -> bool:
        """Send with `send_lock` held; return False, and send nothing, if other threads hold it until `until`."""
        taken: list[bool] = []
        left_s = min(max(until - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        try:
            taken.extend(map(self.send_lock.acquire, [True], [left_s]))  # in C: no signal between taking and noting it
            if taken[0]:
                send()
            return taken[0]
        finally:
            if True in taken:
                self.send_lock.release()

    def send(self, request: bytes) -> None:
        """Send, with `send_lock` held; a request lost in a cut is repeated after the reconnect."""
        sock = self.socket_reader.socket
        try:
            sent = sock.send(request)
            if sent < len(request):
                sock.sendall(request[sent:])
        except OSError:
            sock.close()
        except BaseException:  # Ctrl-C within a request: bytes after it would be malformed
            self.cut()
            raise

    def try_send(self, request: bytes) -> bool:
        """Send at once, with `send_lock` held; return False if the socket accepts nothing now."""
        sock = self.socket_reader.socket
        try:
            if sock.send(request, socket.MSG_DONTWAIT) < len(request):
                sock.close()  # a part of a frame: bytes after it would be malformed
        except OSError:
            return False
        return True

    def cut(self) -> None:
        """Cut the connection after an interruption; it is not the server's fault and does not count as a cut."""
        self.cut_counter.uncount()
        self.shut_down()  # a thread that is sending would block on, and hold `send_lock`
        self.socket_reader.socket.close()

    def shut_down(self) -> None:
        """End all sending and receiving: a thread that is blocked in either finds the connection lost."""
        with contextlib.suppress(OSError):
            self.socket_reader.socket.shutdown(socket.SHUT_RDWR)
