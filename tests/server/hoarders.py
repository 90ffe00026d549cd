"""Clients that make a server hold as much as it lets them, each in another way.

`HOARDERS` has each way by name: a context manager that takes a server and how many things to make it hold. Its block
begins when the server holds them, has refused some, or has dropped the clients.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from tests.raw_peer import RawPeer, ServerProcess

from rallypoint.core import ops
from rallypoint.core.machines.exchange import ExchangeGive
from rallypoint.core.machines.lock import LockAcquire
from rallypoint.core.machines.work_queue import MAX_BATCH, WorkPut
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.protocol.native import ACCEPTED, PREFACE, VERSION, Hello, frame

__all__ = ["HOARDERS", "SessionPeer"]

MIB = 1024 * 1024
CHUNK = 4096
"""Requests sent at a time; the peer then reads the replies, and confirms them."""


class SessionPeer(RawPeer):
    """A native client that sends raw frames."""

    def __init__(self, address: tuple[str, int], run: str = "") -> None:
        super().__init__(address, greet=False)
        self.send(PREFACE + frame(Hello(VERSION, "hoarder", run=run)))
        assert self.read(4) == ACCEPTED
        self.welcome = self.reply()
        self._numbers = itertools.count(1)

    def __enter__(self) -> SessionPeer:
        return self

    def next(self) -> int:
        """Return the number of the next request."""
        return next(self._numbers)

    def reply(self) -> Any:
        """Read a frame, and return what it contains."""
        return msgspec.msgpack.decode(self.read(struct.unpack("<I", self.read(4))[0]))

    def ask(self, op: ops.Op) -> Any:
        """Make a request, and return its reply."""
        op.number = number = self.next()
        self.send(frame(op))
        while (reply := self.reply())[0] != number:
            pass
        return reply

    def ask_all(self, requests: Iterable[ops.Op], answered: bool = True) -> int:
        """Make many requests, until some are refused or the connection is dropped; return how many were refused.

        If they wait, or are not to be confirmed, they are not `answered`.
        """
        refused = 0
        requests = iter(requests)
        while chunk := list(itertools.islice(requests, CHUNK)):
            for op in chunk:
                op.number = self.next()
                if isinstance(op, ops.Act):
                    op.call = op.number
            last = self.next()
            try:
                self.send(b"".join(map(frame, chunk)) + frame(ops.Ping(last)))
                while (reply := self.reply())[0] != last:
                    refused += reply[1] != 0
                if answered:
                    self.send(frame(ops.Confirm(0, last, [], 0)))
            except ConnectionError:
                return refused + 1
            if refused:
                break
        return refused


@contextlib.contextmanager
def peers(server: ServerProcess, count: int, native: bool = False, run: str = "") -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        made = [SessionPeer(server.address, run) if native else server.peer() for _ in range(count)]
        yield [stack.enter_context(one) for one in made]


def flood(peer: RawPeer, requests: Iterable[bytes]) -> None:
    """Send requests of PyTorch's protocol without reading replies, until the server drops the connection."""
    requests = iter(requests)
    with contextlib.suppress(ConnectionError):
        while chunk := b"".join(itertools.islice(requests, CHUNK)):
            peer.send(chunk)
            peer.ping()


# Things in the store


@contextlib.contextmanager
def torch_keys(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1) as (peer,):
        flood(peer, (encode(Opcode.SET, b"/%d" % number, b"") for number in range(count)))
    yield


@contextlib.contextmanager
def native_keys(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all(ops.Set(0, b"%d" % number, b"v") for number in range(count))
    yield


@contextlib.contextmanager
def multi_set(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        for start in range(0, count, 100_000):
            pairs = [(b"%d" % number, b"") for number in range(start, start + 100_000)]
            if peer.ask(ops.MultiSet(0, pairs))[1]:
                break
            peer.send(frame(ops.Confirm(0, 1 << 30, [], 0)))
    yield


@contextlib.contextmanager
def torch_queues(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1) as (peer,):
        flood(peer, (encode(Opcode.QUEUE_PUSH, b"/%d" % number, b"") for number in range(count)))
    yield


@contextlib.contextmanager
def native_queues(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all(ops.Push(0, b"%d" % number, b"v") for number in range(count))
    yield


@contextlib.contextmanager
def queue_items(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all(ops.Push(0, b"q", b"%d" % number) for number in range(count))
    yield


@contextlib.contextmanager
def namespaces(server: ServerProcess, count: int) -> Iterator[None]:
    """20 namespaces, each with its share of the keys."""
    with contextlib.ExitStack() as stack:
        for number in range(20):
            (peer,) = stack.enter_context(peers(server, 1, native=True, run=f"run {number}"))
            keys = range(max(1, count // 20))
            peer.ask_all(ops.Set(0, b"%d" % key, bytes(100_000)) for key in keys)
    yield


# Things of sessions


@contextlib.contextmanager
def leases(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all(ops.SetLease(0, b"%d" % number, b"v", 1000.0) for number in range(count))
        yield


@contextlib.contextmanager
def watches(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1 + count // 60_000, native=True) as several:
        for peer in several:
            keys = (b"%d %06d" % (id(peer), number) for number in range(60_000))
            if peer.ask_all(ops.WatchPrefix(0, key) for key in keys):
                break
        yield


@contextlib.contextmanager
def waits(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all((ops.Get(0, b"%d" % number, 1e6) for number in range(count)), answered=False)
        yield


@contextlib.contextmanager
def waits_for_items(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all((ops.BlockingPop(0, b"%d" % number, 1e6) for number in range(count)), answered=False)
        yield


@contextlib.contextmanager
def waits_for_many_keys(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        for start in range(0, count, 100_000):
            keys = [b"%d" % number for number in range(start, start + 100_000)]
            number = peer.next()
            peer.send(frame(ops.MultiGet(number, keys, 1e6)))
            peer.ask(ops.Ping(0))
        yield


@contextlib.contextmanager
def torch_waits(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 4) as several:
        for peer in several:
            keys = [b"/%d" % number for number in range(count // 4)]
            with contextlib.suppress(ConnectionError):
                peer.wait(*keys[:100_000])
        yield


@contextlib.contextmanager
def locks(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all(ops.Act(0, b"%d" % number, "m", 0, LockAcquire(), 0.0) for number in range(count))
        yield


@contextlib.contextmanager
def work_items(server: ServerProcess, count: int) -> Iterator[None]:
    with peers(server, 1, native=True) as (peer,):
        put = WorkPut([b"%d" % number for number in range(MAX_BATCH)], 5)
        peer.ask_all(ops.Act(0, b"w", "m", number, put, 0.0) for number in range(count // MAX_BATCH))
        yield


@contextlib.contextmanager
def exchanges(server: ServerProcess, count: int) -> Iterator[None]:
    """Exchanges of two members, of whom one comes."""
    with peers(server, 1, native=True) as (peer,):
        peer.ask_all(
            (ops.Act(0, b"%d" % number, "0", 0, ExchangeGive(2, 0, b"", "all_gather"), 1e6) for number in range(count)),
            answered=False,
        )
        yield


@contextlib.contextmanager
def sessions(server: ServerProcess, count: int) -> Iterator[None]:
    """Sessions that detach, and so need no connection each."""
    for _ in range(count):
        with SessionPeer(server.address):
            pass
    yield


@contextlib.contextmanager
def kept_replies(server: ServerProcess, count: int) -> Iterator[None]:
    """Replies that are never confirmed, in several sessions."""
    with contextlib.ExitStack() as stack:
        for _ in range(1 + count // 8000):
            (peer,) = stack.enter_context(peers(server, 1, native=True))
            peer.ask_all((ops.Add(0, b"n", 1) for _ in range(min(count, 8000))), answered=False)
        yield


@contextlib.contextmanager
def pushes(server: ServerProcess, count: int) -> Iterator[None]:
    """Watches of all keys, many in one session, and one multi_set of many keys."""
    yield from _pushes(server, count, 1)


@contextlib.contextmanager
def pushes_of_sessions(server: ServerProcess, count: int) -> Iterator[None]:
    yield from _pushes(server, count, count // 40)


def _pushes(server: ServerProcess, count: int, holders: int) -> Iterator[None]:
    with peers(server, holders, native=True) as several:
        for peer in several:
            peer.ask_all(ops.WatchPrefix(0, b"") for _ in range(count // 40 // holders))
        with server.peer() as writer:
            fields = [field for number in range(count) for field in (b"/%d" % number, b"")]
            writer.send(encode(Opcode.MULTI_SET, len(fields) // 2, *fields))
            writer.ping()
        yield


# Replies that nobody reads


def _value(server: ServerProcess, count: int) -> None:
    """Store a value of so many bytes."""
    with server.peer() as peer:
        for start in range(0, count, 8 * MIB):
            peer.send(encode(Opcode.APPEND, b"/large", b"v" * min(8 * MIB, count - start)))
            peer.ping()


@contextlib.contextmanager
def unread_values(server: ServerProcess, count: int) -> Iterator[None]:
    _value(server, count)
    with peers(server, 20) as several:
        for peer in several:
            peer.send(encode(Opcode.GET, b"/large"))
        yield


@contextlib.contextmanager
def unread_native_values(server: ServerProcess, count: int) -> Iterator[None]:
    _value(server, count)
    with peers(server, 20, native=True) as several:
        for peer in several:
            peer.send(frame(ops.Get(peer.next(), b"/large", 0.0)))
        yield


@contextlib.contextmanager
def unread_lists(server: ServerProcess, count: int) -> Iterator[None]:
    """Lists with many values of 60,000 bytes."""
    with peers(server, 1) as (peer,):
        keys = [b"/%d" % number for number in range(max(1, count // 60_000))]
        flood(peer, (encode(Opcode.SET, key, b"v" * 60_000) for key in keys))
    with peers(server, 20) as several:
        for peer in several:
            peer.send(encode(Opcode.MULTI_GET, len(keys), *keys))
        yield


@contextlib.contextmanager
def unread_native_lists(server: ServerProcess, count: int) -> Iterator[None]:
    """Lists of more items than are encoded at a time."""
    with peers(server, 1) as (peer,):
        keys = [b"/%d" % number for number in range(max(1, count // 10_000))]
        flood(peer, (encode(Opcode.SET, key, b"v" * 10_000) for key in keys))
    with peers(server, 20, native=True) as several:
        for peer in several:
            peer.send(frame(ops.MultiGet(peer.next(), keys, 0.0)))
        yield


HOARDERS: dict[str, Callable[[ServerProcess, int], contextlib.AbstractContextManager[None]]] = {
    one.__name__: one
    for one in (
        torch_keys, native_keys, multi_set, torch_queues, native_queues, queue_items, namespaces, leases, watches,
        waits, waits_for_items, waits_for_many_keys, torch_waits, locks, work_items, exchanges, sessions, kept_replies,
        pushes, pushes_of_sessions, unread_values, unread_native_values, unread_lists, unread_native_lists
    )
}  # fmt: skip
"""Each way to make a server hold much, by name."""
