"""The client of our server: one connection, one session, any number of threads.

A call takes no thread hop. The calling thread numbers and sends its request, and then one of the waiting threads reads for
all: whoever finds nobody reading reads until its own answer is there, hands out the others' on the way, and wakes another
waiting thread to read on. A thread with nobody to wake costs nothing.

A cut is mended by whoever notices it: a reading thread, or, when no call is under way, the keeper, a daemon thread that
sleeps on the socket's hang-up alone. It connects again, resumes the session and repeats what was not answered. When the
server has no such session any more, or the grace has passed, the backend is over for good: `SessionLost`, or
`ServerRestarted` when it was another server that answered.

Locks, always taken in this order: `_reader` (who reads, and mends), `_sender` (the order of requests on the wire), `_lock`
(the protocol core and the table of waiting calls; never held over I/O).
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
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from rallypoint import errors, net
from rallypoint.core import native
from rallypoint.core.c10d import BadMessage
from rallypoint.core.native import ACCEPTED, PREFACE, Client, Reply, Request, Status
from rallypoint.core.records import Event, Swap, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import (
    ConnectFailed,
    ConnectionLost,
    RallypointError,
    ServerRestarted,
    SessionLost,
    StoreClosed,
    StoreError,
)
from rallypoint.store.base import Backend, Feed

__all__ = ["NotOurs", "SessionBackend", "caller_name", "error_of", "welcomed"]

MAX_FRAME_BYTES = 1 << 30
SLICE_S = 1.0
"""How long one blocking read lasts at most; a longer wait is several."""

KEEP_S = 0.25
"""How often the keeper looks around, when the socket does not wake it."""

LEAST_TTL_S = 1.0
"""The fastest heartbeat that the keeper can be trusted with."""

LEAST_PATIENCE_S = 10.0
"""How long a server may take to answer, however short the store's timeout is."""

FOREVER_S = 1e9
"""The longest wait that is asked of a server."""

MENDS = 5
"""How many cuts in a row, with no answer in between, are taken for bad luck."""

WINDOW = 512
"""How many requests of a pipeline are under way at once."""

_SLICE = struct.pack("ll", int(SLICE_S), 0)
_BULK: dict[str, type[Request]] = {
    "set": native.Set,
    "append": native.Append,
    "add": native.Add,
    "delete": native.Delete,
    "queue_push": native.Push,
}
_ERRORS = {"NotAnInteger": errors.NotAnInteger, "StoreFull": errors.StoreFull}


class NotOurs(Exception):
    """The server answered the greeting as PyTorch's does; the connection can be used for its protocol."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.socket = sock


class _Slot:
    """Where one call, or one watch, gets what came for it."""

    __slots__ = ("answers", "bell", "waiting")

    def __init__(self) -> None:
        self.answers: deque[Reply | Event | RallypointError] = deque()
        self.bell: threading.Lock | None = None
        self.waiting = False

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


class SessionBackend(Backend):
    """A session with one of our servers."""

    root = b"/"

    def __init__(self, host: str, port: int, timeout_s: float, name: str) -> None:
        self.name = f"tcp://{net.Endpoint(host, port)}"
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self._patience_s = max(timeout_s, LEAST_PATIENCE_S)
        self._peer = str(net.Endpoint(host, port))
        self._begin(name, Deadline(timeout_s))

    def _begin(self, name: str, deadline: Deadline) -> None:
        self._pid = os.getpid()
        self._reader, self._sender, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._over: RallypointError | None = None
        self._core = Client(name, MAX_FRAME_BYTES)
        self._grace_s = 0.0
        self._beat_s = float("inf")
        self._mended = 0
        self._socket = self._connect(deadline)
        threading.Thread(target=_keep, args=[weakref.ref(self)], name=f"keeper of {self.name}", daemon=True).start()

    # Calls that answer at once

    def set(self, key: bytes, value: bytes) -> None:
        self._ask("set", native.Set, key, value)

    def add(self, key: bytes, amount: int) -> int:
        return int(self._ask("add", native.Add, key, amount))

    def append(self, key: bytes, value: bytes) -> None:
        self._ask("append", native.Append, key, value)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._ask("compare_set", native.CompareSet, key, expected, desired))

    def swap(self, key: bytes, expected: bytes | None, desired: bytes) -> Swap:
        return Swap(*self._ask("swap", native.Swap, key, expected, desired))

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._ask("multi_set", native.MultiSet, list(pairs))

    def check(self, keys: Sequence[bytes]) -> bool:
        return bool(self._ask("check", native.Check, list(keys)))

    def delete(self, key: bytes) -> bool:
        return bool(self._ask("delete_key", native.Delete, key))

    def delete_prefix(self, prefix: bytes) -> int:
        return int(self._ask("delete_prefix", native.DeletePrefix, prefix))

    def num_keys(self, prefix: bytes) -> int:
        return int(self._ask("num_keys", native.Count, prefix))

    def list_keys(self, prefix: bytes) -> list[bytes]:
        return list(self._ask("list_keys", native.List, prefix))

    def queue_push(self, key: bytes, value: bytes) -> None:
        self._ask("queue_push", native.Push, key, value)

    def queue_pop(self, key: bytes) -> bytes | None:
        item: bytes | None = self._ask("queue_pop", native.Pop, key)
        return item

    def queue_len(self, key: bytes) -> int:
        return int(self._ask("queue_len", native.QueueLen, key))

    def lease(self, key: bytes, value: bytes, ttl_s: float) -> None:
        if 0 < ttl_s < LEAST_TTL_S:
            raise ValueError(f"a heartbeat of {ttl_s:g} s is too fast to be kept; {LEAST_TTL_S:g} s is the least")
        self._ask("lease", native.Lease, key, value, ttl_s)
        if ttl_s:
            self._beat_s = min(self._beat_s, ttl_s / 3)

    def unlease(self, key: bytes) -> bool:
        return bool(self._ask("lease", native.Unlease, key))

    # Calls that may wait

    def wait(self, keys: Sequence[bytes], deadline: Deadline) -> TimedOut | None:
        outcome: TimedOut | None = self._ask("wait", native.Wait, list(keys), wait_s=deadline.remaining())
        return outcome

    def wait_values(self, keys: Sequence[bytes], deadline: Deadline) -> list[bytes] | TimedOut:
        values: list[bytes] | TimedOut
        if len(keys) == 1:
            values = self._ask("get", native.Get, keys[0], wait_s=deadline.remaining())
        else:
            values = self._ask("multi_get", native.MultiGet, list(keys), wait_s=deadline.remaining())
        return values

    def wait_item(self, key: bytes, deadline: Deadline) -> bytes | TimedOut:
        item: bytes | TimedOut = self._ask("queue_pop", native.Take, key, wait_s=deadline.remaining())
        return item

    def barrier(self, key: bytes, size: int, deadline: Deadline) -> TimedOut | None:
        outcome: TimedOut | None = self._ask("barrier", native.Arrive, key, size, wait_s=deadline.remaining())
        return outcome

    def watch(self, prefix: bytes) -> Feed:
        return _SessionFeed(self, prefix)

    def pipeline(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        results: list[Any] = []
        for start in range(0, len(calls), WINDOW):
            results += self._ask_all([(_BULK[name], arguments) for name, arguments in calls[start : start + WINDOW]])
        return results

    def clone(self) -> SessionBackend:
        return SessionBackend(self.host, self.port, self.timeout_s, self._core.name)

    def close(self) -> None:
        if self._over is None and os.getpid() == self._pid and self._sender.acquire(timeout=1.0):
            with contextlib.suppress(OSError, RallypointError):
                self._socket.settimeout(1.0)
                self._socket.sendall(self._number(native.Bye, _Slot())[1])
            self._sender.release()
        self._end(StoreClosed(store=self.name))

    def __del__(self) -> None:
        if "_socket" in self.__dict__ and self._over is None:
            self.close()

    # One request

    def _ask(self, operation: str, kind: type[Request], *arguments: Any, wait_s: float | None = None) -> Any:
        """Send a request and wait for its answer, which the server owes us once `wait_s` have passed."""
        if os.getpid() != self._pid:
            self._after_fork()
        slot, number = _Slot(), 0
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

    def _ask_all(self, calls: Sequence[tuple[type[Request], tuple[Any, ...]]]) -> list[Any]:
        """Send requests together and wait for all their answers; raise the first error among them."""
        if os.getpid() != self._pid:
            self._after_fork()
        slots = [_Slot() for _ in calls]
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

    def _number(self, kind: type[Request], slot: _Slot, *arguments: Any) -> tuple[int, bytes]:
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
        raise error_of(reply, self.name)

    def _abandon(self, number: int) -> None:
        """After Ctrl-C: nobody will take this answer. The server stops waiting, and takes back what it gave."""
        if not number:
            return
        with contextlib.suppress(OSError, RallypointError), self._sender:
            with self._lock:
                self._core.forget(number)
            self._send(self._number(native.Drop, _Slot(), number)[1])

    # Waiting and reading

    def _await(self, slot: _Slot, deadline: Deadline, operation: str) -> Reply | Event | RallypointError:
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

    def _follow(self, slot: _Slot, deadline: Deadline) -> None:
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

    def _read(self, slot: _Slot, deadline: Deadline) -> None:
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

    def _read_idle(self) -> bool:
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

    def _beat(self) -> None:
        with contextlib.suppress(OSError), self._sender:
            self._socket.send(native.frame(native.Beat(0)))

    def _hand_out(self, data: bytes) -> None:
        """Deliver what came; what an interruption leaves undelivered comes again after the cut that it makes."""
        try:
            with self._lock:
                for reply in self._core.receive(data):
                    self._mended = 0
                    self._deliver(reply)
        except BadMessage as error:
            self._end(ConnectionLost(peer=self._peer, operation="reading", why=str(error)))
        except BaseException:
            self._socket.close()
            raise

    def _deliver(self, reply: Reply) -> None:
        if not self._core.expects(reply):
            return
        if reply.number:
            slot = self._slots.get(reply.number)
            if slot is not None:
                slot.give(reply)
        else:
            number, revision, key, value = reply.result
            slot = self._slots.get(number)
            if slot is not None:
                slot.give(Event(revision, key, value))
        self._core.settle(reply)

    # The connection

    def _connect(self, deadline: Deadline) -> socket.socket:
        """Connect, say hello, and repeat what a cut left open; try again until the deadline if that is cut, too.

        Raises ConnectFailed, or what ends the session for good.
        """
        pause_s = 0.01
        while True:
            sock = net.connect(self.host, self.port, deadline)
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
            self._grace_s = welcomed(self._core, replies[0], self._peer)
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
        self._begin(self._core.name, Deadline(self.timeout_s))


class _SessionFeed(Feed):
    def __init__(self, backend: SessionBackend, prefix: bytes) -> None:
        self._backend = backend
        self._slot = _Slot()
        answer = _Slot()
        with backend._sender:
            self._number, request = backend._number(native.Watch, answer, prefix)
            backend._send(request)
        backend._await(answer, Deadline(backend.timeout_s), "watch")
        with backend._lock:
            backend._slots[self._number] = self._slot
            self._slot.answers.extend(event for event in answer.answers if isinstance(event, Event))

    def next(self, deadline: Deadline) -> Event | TimedOut:
        try:
            answer = self._backend._await(self._slot, deadline, "watch")
        except ConnectionLost:
            if self._backend._over is None and deadline.expired():
                return TimedOut(())
            raise
        finally:
            self._backend._wake_another()
        assert isinstance(answer, Event)
        return answer

    def close(self) -> None:
        backend = self._backend
        with contextlib.suppress(OSError, RallypointError):
            backend._ask("watch", native.Drop, self._number)
        self._slot.give(StoreClosed(store=backend.name))
        backend._slots.pop(self._number, None)


def caller_name() -> str:
    """Return how a client introduces itself, for people who look at the server: host, process, and rank if known."""
    rank = os.environ.get("RANK")
    return f"{socket.gethostname()}:{os.getpid()}" + (f" rank {rank}" if rank else "")


def welcomed(core: Client, reply: Reply, peer: str) -> float:
    """Read the answer to a greeting and note the session; return its grace. Raises why there is none."""
    if reply.status != Status.OK:
        identity, why = reply.result
        if not core.session:
            raise ConnectionError(f"refused: {why}")
        raise (SessionLost if identity == core.server else ServerRestarted)(peer=peer, why=why)
    welcome = core.welcome(reply)
    core.server, core.session = welcome.server, welcome.session
    return welcome.grace_s


def error_of(reply: Reply, store: str) -> StoreError:
    """Make the error that a server reported."""
    kind, fields = reply.result
    if "key" in fields:
        fields["key"] = fields["key"].removeprefix("/")
    return _ERRORS[kind](**fields) if kind in _ERRORS else StoreError(f"{store} refused: {kind} {fields}")


def _keep(reference: weakref.ref[SessionBackend]) -> None:
    """Look after a backend while no call is under way: mend cuts, read pushes, keep hearts beating. Ends with it.

    It listens for data only when nobody else reads; woken by an answer that a call will read, it leaves that be.
    """
    hung_up = getattr(select, "POLLRDHUP", 0)
    wanted, beaten_at = hung_up, time.monotonic()
    while (backend := reference()) is not None and backend._over is None:
        sock, reader, beat_s = backend._socket, backend._reader, backend._beat_s
        del backend
        events = _poll(sock, wanted, KEEP_S)
        if (backend := reference()) is None:
            return
        if time.monotonic() - beaten_at >= beat_s:
            beaten_at = time.monotonic()
            backend._beat()
        if not events:
            wanted = hung_up if reader.locked() else hung_up | select.POLLIN
        elif events == select.POLLIN:
            wanted = hung_up
            if backend._read_idle():
                wanted |= select.POLLIN
        elif reader.acquire(timeout=KEEP_S):
            try:
                if backend._socket is sock and backend._over is None:
                    backend._mend()
            finally:
                reader.release()
            backend._wake_another()
        del backend


def _poll(sock: socket.socket, events: int, timeout_s: float) -> int:
    """Return what happened to a socket; a closed one has hung up."""
    poller = select.poll()
    try:
        poller.register(sock, events)
        happened = poller.poll(timeout_s * 1000)
    except (OSError, ValueError):
        return select.POLLHUP
    return happened[0][1] if happened else 0


def _receive(sock: socket.socket, deadline: Deadline) -> bytes | None:
    """Return what came, b"" at the end, None when nothing came in a slice of the time left."""
    left_s = deadline.remaining()
    if left_s < SLICE_S and not _poll(sock, select.POLLIN, left_s):
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
