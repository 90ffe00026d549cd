"""The connection of the blocking client: one socket, one session, any number of threads.

A call takes no thread hop. The calling thread numbers and sends its request, and then one of the waiting threads
reads for all: whoever finds nobody reading reads until its own answer is there, hands out the others' on the way, and
wakes another waiting thread to read on.

A cut is mended by whoever notices it: a reading thread, or, when no call is under way, the keeper, a daemon thread. It
connects again, resumes the session and repeats what was not answered. When the server has no such session any more, or
the grace has passed, the wire is over for good: `SessionLost`, or `ServerRestarted` when another server answered.

Locks, always taken in this order: `_reader` (who reads, and mends), `_sender` (the order of requests on the wire),
`_lock` (the protocol core and the table of slots; held over no I/O).

Rejected: a thread that reads for all. It costs two switches of threads for every answer, and Ctrl-C cannot reach it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rallypoint import net
from rallypoint.core import native
from rallypoint.core.c10d import BadMessage
from rallypoint.core.native import ACCEPTED, PREFACE, Client, Reply, Request, Status, error_of
from rallypoint.core.records import Event, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import (
    ConnectFailed,
    ConnectionLost,
    RallypointError,
    ServerRestarted,
    SessionLost,
    StoreClosed,
)
from rallypoint.store import keeper
from rallypoint.store.keeper import poll

__all__ = ["NotOurs", "Slot", "Wire"]

SLICE_S = 1.0
"""How long one blocking read lasts at most; a longer wait is several."""

LEAST_PATIENCE_S = 10.0
"""How long a server may take to answer, however short the store's timeout is."""

FOREVER_S = 1e9
"""The longest wait that is asked of a server."""

MENDS = 5
"""How many cuts in a row, with no answer in between, are taken for bad luck."""

_SLICE = struct.pack("ll", int(SLICE_S), 0)


class NotOurs(Exception):
    """The server answered the greeting as PyTorch's does; the connection can be used for its protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.socket = sock


class Slot:
    """Where one call, or one watch, gets what came for it."""

    __slots__ = ("answers", "bell", "session", "waiting")

    def __init__(self) -> None:
        self.answers: deque[Reply | Event | RallypointError] = deque()
        self.bell: threading.Lock | None = None
        self.waiting = False
        self.session: Client | None = None
        """Of a watch: the session that it belongs to."""

    def give(self, answer: Reply | Event | RallypointError) -> None:
        self.answers.append(answer)
        self.ring()

    def ring(self) -> None:
        if self.bell is not None and self.bell.locked():
            with contextlib.suppress(RuntimeError):  # two may ring at once
                self.bell.release()

    def wait(self, timeout_s: float) -> None:
        """Sleep until rung; whoever waits has set the bell before it looked for answers."""
        assert self.bell is not None
        self.bell.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))


class Wire:
    """A session with one of our servers, and the connection that carries it now; for many threads, and after a fork."""

    def __init__(self, endpoint: net.Endpoint, timeout_s: float) -> None:
        self.label = f"tcp://{endpoint}"
        self.beat_s = float("inf")
        """How often the heart of this process must beat, for the sake of its leases."""

        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._peer = str(endpoint)
        self._patience_s = max(timeout_s, LEAST_PATIENCE_S)
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._reader, self._sender, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._over: RallypointError | None = None
        self._core = Client(net.caller_name())
        self._grace_s = 0.0
        self._mended = 0
        self._socket = self._connect(Deadline(self._timeout_s))
        keeper.start(self)

    # Requests

    def ask(self, operation: str, kind: type[Request], *arguments: Any, wait_s: float | None = None) -> Any:
        """Send a request and wait for its answer, which the server owes us once `wait_s` have passed."""
        if os.getpid() != self._pid:
            self._after_fork()
        slot, number = Slot(), 0
        deadline = Deadline(self._patience_s)
        if wait_s is not None:
            wait_s = min(wait_s, FOREVER_S)
            arguments = (*arguments, wait_s)
            deadline = Deadline(self._patience_s + wait_s)
        try:
            with self._sender:
                number, request = self._number(kind, slot, *arguments)
                self._send(request)
            answer = self._await(slot, deadline, operation)
        except BaseException:
            self._abandon(number)
            raise
        finally:
            self._slots.pop(number, None)
            if self._slots:
                self._wake_another()
        return self._result(answer)

    def confirm(self) -> None:
        """Tell the server now what was delivered here, if that is more than a little."""
        with self._sender:
            with self._lock:
                data = self._core.confirm()
            if data:
                self._send(data)

    def ask_all(self, calls: Sequence[tuple[type[Request], tuple[Any, ...]]]) -> list[Any]:
        """Send requests together and wait for all their answers; raise the first error among them."""
        if os.getpid() != self._pid:
            self._after_fork()
        slots = [Slot() for _ in calls]
        deadline = Deadline(self._patience_s)
        with self._sender:
            asked = [self._number(kind, slot, *args) for (kind, args), slot in zip(calls, slots, strict=True)]
            self._send(b"".join(request for _, request in asked))
        try:
            answers = [self._await(slot, deadline, "pipeline") for slot in slots]
        finally:
            for number, _ in asked:
                self._slots.pop(number, None)
            self._wake_another()
        return [self._result(answer) for answer in answers]

    def _number(self, kind: type[Request], slot: Slot, *arguments: Any) -> tuple[int, bytes]:
        with self._lock:
            if self._over is not None:
                raise _again(self._over)
            number, request = self._core.ask(kind, *arguments)
            self._slots[number] = slot
            return number, request

    def _send(self, request: bytes) -> None:
        """Send, the sender's lock being held; what a cut swallows is repeated by whoever mends it."""
        try:
            sent = self._socket.send(request)
            if sent < len(request):
                self._socket.sendall(request[sent:])
        except OSError:
            self._socket.close()
        except BaseException:  # Ctrl-C between the bytes of a request: what follows would make no sense
            self._socket.close()
            raise

    def _result(self, reply: Reply | Event | RallypointError) -> Any:
        assert isinstance(reply, Reply)
        if reply.status == Status.OK:
            return reply.result
        if reply.status == Status.TIMED_OUT:
            return TimedOut(tuple(reply.result))
        raise error_of(reply, self.label)

    def _abandon(self, number: int) -> None:
        """After Ctrl-C: nobody will take this answer. The server stops waiting, and takes back what it gave."""
        if not number:
            return
        with contextlib.suppress(OSError, RallypointError), self._sender:
            with self._lock:
                self._core.forget(number)
            self._send(self._number(native.Drop, Slot(), number)[1])

    # What the keeper calls

    def look(self) -> tuple[socket.socket, bool] | None:
        """Return the socket and whether somebody reads from it; None when all is over."""
        return None if self._over is not None else (self._socket, self._reader.locked())

    def mend(self, sock: socket.socket) -> None:
        """Mend a cut of this socket, unless somebody does or did so."""
        if not self._reader.acquire(timeout=keeper.KEEP_S):
            return
        try:
            if self._socket is sock and self._over is None:
                self._mend()
        finally:
            self._reader.release()
        self._wake_another()

    # Watches, and the end

    def watch(self, prefix: bytes) -> tuple[int, Slot]:
        """Ask for the changes under a prefix; return the watch's number, and where its events come."""
        if os.getpid() != self._pid:
            self._after_fork()
        slot, number = Slot(), 0
        slot.session = self._core
        early: list[Any] = []  # events: after a cut they come before the answer, which is asked for again
        try:
            with self._sender:
                number, request = self._number(native.Watch, slot, prefix)
                self._send(request)
            while isinstance(answer := self._await(slot, Deadline(self._patience_s), "watch"), Event):
                early.append(answer)
        except BaseException:
            self._slots.pop(number, None)
            self._abandon(number)
            raise
        finally:
            self._wake_another()
        slot.answers.extendleft(reversed(early))
        self._result(answer)
        return number, slot

    def event(self, slot: Slot, deadline: Deadline) -> Event | TimedOut:
        """Return the next event of a watch."""
        if os.getpid() != self._pid or slot.session is not self._core:
            raise SessionLost(peer=self._peer, why="this process was forked off, and the watch is its parent's")
        try:
            answer = self._await(slot, deadline, "watch")
        except ConnectionLost:
            if self._over is None and deadline.expired():
                return TimedOut(())
            raise
        finally:
            self._wake_another()
        assert isinstance(answer, Event)
        return answer

    def unwatch(self, number: int, slot: Slot) -> None:
        """Give up a watch, and wake whoever waits for its events."""
        if os.getpid() == self._pid and slot.session is self._core:
            with contextlib.suppress(RallypointError):
                self.ask("watch", native.Drop, number)
            self._slots.pop(number, None)
        slot.give(StoreClosed(store=f"a watch of {self.label}"))

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked child: the connection, and perhaps a lock, are its parent's
            self._over = StoreClosed(store=self.label)
            self._socket.close()
            return
        if self._over is None and self._sender.acquire(timeout=1.0):
            with contextlib.suppress(OSError, RallypointError):
                self._socket.settimeout(1.0)
                self._socket.sendall(self._number(native.Bye, Slot())[1])
            self._sender.release()
        self._end(StoreClosed(store=self.label))

    def __del__(self) -> None:
        if "_socket" in self.__dict__ and self._over is None:
            self.close()

    # Waiting and reading

    def _await(self, slot: Slot, deadline: Deadline, operation: str) -> Reply | Event | RallypointError:
        """Return what comes for a slot, reading for all if nobody else does."""
        while not slot.answers:
            if self._reader.acquire(blocking=False):
                try:
                    self._read(slot, deadline)
                finally:
                    self._reader.release()
            else:
                self._follow(slot, deadline)
            if not slot.answers and deadline.expired():
                why = f"no answer within {deadline.timeout_s:g} s"
                raise ConnectionLost(peer=self._peer, operation=operation, why=why)
        answer = slot.answers.popleft()
        if isinstance(answer, RallypointError):
            slot.answers.append(answer)
            raise _again(answer)
        return answer

    def _follow(self, slot: Slot, deadline: Deadline) -> None:
        """Sleep while another thread reads; it hands us our answer, or the reading."""
        with self._lock:
            slot.waiting = True
            if slot.bell is None:
                slot.bell = threading.Lock()
                slot.bell.acquire()
        if not slot.answers and self._reader.locked():
            slot.wait(deadline.remaining())
        slot.waiting = False

    def _wake_another(self) -> None:
        """When we stop reading, somebody who waits must go on with it."""
        if not self._slots or self._reader.locked():
            return
        with self._lock:
            for slot in self._slots.values():
                if slot.waiting and not slot.answers:
                    slot.ring()
                    return

    def _read(self, slot: Slot, deadline: Deadline) -> None:
        """Read and hand out until our own answer is there or the deadline has passed; mend a cut on the way."""
        while not slot.answers and self._over is None:
            sock = self._socket
            try:
                data = _receive(sock, deadline)
            except OSError:
                data = b""
            if data:
                self._hand_out(data)
            elif data is None:
                if deadline.expired():
                    return
            elif sock is self._socket:
                self._mend()
        if self._over is not None and not slot.answers:
            slot.give(self._over)

    def read_idle(self) -> bool:
        """Take in what came unasked, if nobody else reads; say so."""
        if not self._reader.acquire(blocking=False):
            return False
        try:
            with contextlib.suppress(OSError):
                self._hand_out(self._socket.recv(262144, socket.MSG_DONTWAIT))
        finally:
            self._reader.release()
        self._wake_another()
        return True

    def beat(self) -> None:
        """Tell the server that this process runs."""
        with contextlib.suppress(OSError), self._sender:
            self._socket.send(native.frame(native.Beat(0)))

    def _hand_out(self, data: bytes) -> None:
        """Deliver what came; what an interruption leaves undelivered comes again after the cut that it makes."""
        try:
            with self._lock:
                replies = self._core.receive(data)
                for reply in replies:
                    self._mended = 0
                    self._deliver(reply)
            if replies and not replies[-1].number:
                self._confirm()
        except BadMessage as error:
            self._end(ConnectionLost(peer=self._peer, operation="reading", why=str(error)))
        except BaseException:
            self._socket.close()
            raise

    def _confirm(self) -> None:
        """Let the server forget pushes, which no request may follow; not while a sender waits for us to read on."""
        if not self._sender.acquire(blocking=False):
            return
        try:
            with self._lock:
                confirm = self._core.confirm()
            if self._socket.send(confirm, socket.MSG_DONTWAIT) < len(confirm):
                self._socket.close()  # in the middle of a frame; whoever mends the cut says it again
        except OSError:
            pass
        finally:
            self._sender.release()

    def _deliver(self, reply: Reply) -> None:
        if not self._core.expects(reply):
            return
        if reply.number:
            slot = self._slots.get(reply.number)
            if slot is not None:
                slot.give(reply)
        else:
            number, event = reply.event()
            slot = self._slots.get(number)
            if slot is not None:
                slot.give(event)
        self._core.settle(reply)

    # The connection

    def _connect(self, deadline: Deadline) -> socket.socket:
        """Connect, say hello, and repeat what a cut left open; try again until the deadline if that is cut, too.

        Raises ConnectFailed, or what ends the session for good.
        """
        pause_s = 0.01
        while True:
            sock = net.connect(*self._endpoint, deadline)
            try:
                sock.settimeout(max(deadline.remaining(), 0.1))
                self._introduce(sock, deadline)
                sock.settimeout(None)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
                return sock
            except NotOurs:
                raise
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError) or isinstance(error, RallypointError):
                    raise
                if deadline.expired():
                    raise self._unreached(error.strerror or str(error), deadline) from None
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, 0.5)

    def _introduce(self, sock: socket.socket, deadline: Deadline) -> None:
        sock.sendall(PREFACE)
        answer = _exactly(sock, len(ACCEPTED))
        if answer == PREFACE[-len(ACCEPTED) :]:
            raise NotOurs(sock)
        if answer != ACCEPTED:
            raise self._unreached(f"not a store: it answered {answer!r}", deadline)
        try:
            self._greet(sock)
        except BadMessage as error:
            raise self._unreached(str(error), deadline) from None

    def _unreached(self, why: str, deadline: Deadline) -> ConnectFailed:
        return ConnectFailed(peer=self._peer, timeout_s=deadline.timeout_s, tried={self._peer: why})

    def _greet(self, sock: socket.socket) -> None:
        with self._lock:
            hello = self._core.greet()
        sock.sendall(hello)
        replies: list[Reply] = []
        while not replies:
            data = _some(sock)
            with self._lock:
                replies = self._core.receive(data)
        with self._lock:
            self._grace_s = self._core.welcome(replies[0], self._peer)
            repeated = self._core.repeat()
            for reply in replies[1:]:
                self._deliver(reply)
        sock.sendall(repeated)

    def _mend(self) -> None:
        """After a cut: resume within the grace, or end. The reader's lock is held."""
        deadline = Deadline(self._grace_s)
        self._mended += 1
        with self._sender:
            self._socket.close()
            try:
                if self._mended > MENDS:
                    why = f"it was cut {MENDS} times in a row, without an answer in between"
                    raise ConnectionLost(peer=self._peer, operation="reconnecting", why=why)
                self._socket = self._connect(deadline)
                return
            except ConnectFailed as error:
                over: RallypointError = SessionLost(peer=self._peer, why=f"cut for {self._grace_s:g} s; {error}")
            except NotOurs:
                over = ServerRestarted(peer=self._peer, why="a PyTorch server answers there now")
            except RallypointError as error:
                over = error
        if self._over is None:
            self._end(over)

    def _end(self, reason: RallypointError) -> None:
        """Refuse every further call, and wake those under way."""
        with self._lock:
            if self._over is None:
                self._over = reason
            for slot in self._slots.values():
                slot.give(self._over)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _after_fork(self) -> None:
        """In a forked child: leave the parent's session to the parent, and begin one of our own."""
        self._socket.close()
        self._begin()


def _receive(sock: socket.socket, deadline: Deadline) -> bytes | None:
    """Return what came, b"" at the end, None when nothing came in a slice of the time left."""
    left_s = deadline.remaining()
    if left_s < SLICE_S and not poll(sock, select.POLLIN, left_s):
        return None
    try:
        return sock.recv(262144)
    except BlockingIOError:
        return None


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise ConnectionError("the server closed it")
    return data


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the server closed it")
        data += piece
    return data


def _again(error: RallypointError) -> RallypointError:
    """A fresh copy to raise: an exception that several threads raise collects all their tracebacks."""
    return copy.copy(error)
