"""Our wire protocol: what is said, and the client's end of it. Fed incrementally, bounded, without I/O.

A connection starts with `PREFACE`, which no other caller sends: to PyTorch's server it is a greeting and a ping,
which it answers with the ping's own number, and we know whom we met. Our server answers `ACCEPTED`. Then come frames:
a 32-bit little-endian length, and msgpack. A request is an array `[operation, number, arguments...]`, one `Request`
class an operation, so that msgspec checks a whole request while it reads it. An answer is `[number, status, result]`.
What the server sends unasked is a push: `[0, push number, [watch's request number, revision, key, value or nil]]`.

The first frame is `Hello`, answered by `[0, 0, Welcome]` or `[0, REFUSED, reason]`. Numbers grow by one with each
request of a session, and many requests may be outstanding; they are answered in any order. After a cut, the client
says hello with its session's id and repeats, with their old numbers, the requests that were not answered. The server
runs none of them twice (`core/session.py`). `Confirm` tells it which answers and pushes it may forget.

Durations cross the wire, deadlines never do. Operation comes before number, the other way round from the answers,
because msgspec finds the class of a request by the first element.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from rallypoint.core import c10d
from rallypoint.core.c10d import BadMessage
from rallypoint.core.limits import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from rallypoint.core.records import Event
from rallypoint.errors import LimitExceeded, NotAnInteger, ServerRestarted, SessionLost, StoreError, StoreFull

__all__ = [
    "ACCEPTED",
    "PREFACE",
    "VERSION",
    "Client",
    "Frames",
    "GARBLED",
    "Hello",
    "Reply",
    "Request",
    "Status",
    "Welcome",
    "error_of",
    "frame",
    "whole",
]

PREFACE = c10d.hello(0x594C4152)
"""The first bytes of a connection of ours; no process id is that large."""

ACCEPTED = b"RLY1"
"""What our server answers to the preface; PyTorch's answers its last four bytes."""

VERSION = 1
"""The protocol's version, said in `Hello`."""

MAX_FRAME_BYTES = 1 << 30
"""The longest frame that a client takes from a server, which it trusts more than the server trusts it."""

MAX_OPEN = 65_536
"""How many requests of a session may be open at once."""

CONFIRM_EVERY = 64
"""How many answers a client takes before it tells the server to forget them."""

GARBLED = (ValueError, TypeError, RecursionError)
"""What msgspec raises for bytes that make no sense: its own errors, and Python's for bad text and deep nesting."""

_LENGTH = struct.Struct("<I")

Key = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class Status:
    """How a request ended."""

    OK, TIMED_OUT, ERROR, REFUSED = range(4)


class Hello(Struct, array_like=True):
    """Who calls: a name for people, and the session to go on with (empty: a new one)."""

    version: int
    name: Annotated[str, Meta(max_length=256)]
    session: Annotated[bytes, Meta(max_length=64)] = b""
    pushes_seen: int = 0
    credentials: Annotated[bytes, Meta(max_length=4096)] = b""


class Welcome(Struct, array_like=True):
    """Who answers: the server's identity, which it loses with its memory, and the caller's session."""

    version: int
    server: bytes
    session: bytes
    grace_s: float
    resumed: bool


class Request(Struct, array_like=True, gc=False):
    """One request; all but those in `READS` must not happen twice."""

    number: int


class Set(Request, tag=1):
    key: Key
    value: Value


class Get(Request, tag=2):
    """Answered by a list of one value, as MultiGet is by a list of all."""

    key: Key
    timeout_s: Seconds


class Add(Request, tag=3):
    key: Key
    amount: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Check(Request, tag=4):
    keys: Keys


class Wait(Request, tag=5):
    keys: Keys
    timeout_s: Seconds


class MultiGet(Request, tag=6):
    keys: Keys
    timeout_s: Seconds


class MultiSet(Request, tag=7):
    pairs: Annotated[list[tuple[Key, Value]], Meta(max_length=MAX_KEYS)]


class Append(Request, tag=8):
    key: Key
    value: Value


class CompareSet(Request, tag=9):
    key: Key
    expected: Value
    desired: Value


class Swap(Request, tag=10):
    key: Key
    expected: Value | None
    desired: Value


class Delete(Request, tag=11):
    key: Key


class DeletePrefix(Request, tag=12):
    prefix: Key


class Count(Request, tag=13):
    prefix: Key


class List(Request, tag=14):
    prefix: Key


class Push(Request, tag=15):
    key: Key
    value: Value


class Pop(Request, tag=16):
    key: Key


class Take(Request, tag=17):
    key: Key
    timeout_s: Seconds


class QueueLen(Request, tag=18):
    key: Key


class Arrive(Request, tag=19):
    key: Key
    size: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    timeout_s: Seconds


class Lease(Request, tag=20):
    """Bind a key to the session, and if `ttl_s` is not 0, to its heartbeat too."""

    key: Key
    value: Value
    ttl_s: Seconds


class Unlease(Request, tag=21):
    key: Key


class Watch(Request, tag=22):
    prefix: Key


class Drop(Request, tag=23):
    """Give up an earlier request of this session: a wait, which then stays unanswered, or a watch."""

    target: int


class Confirm(Request, tag=24):
    """Not numbered, not answered: every request up to `last` but the open ones was answered, and every push up to
    `pushes` was seen."""

    last: int
    open: Annotated[list[int], Meta(max_length=MAX_OPEN)]
    pushes: int


class Beat(Request, tag=27):
    """Not numbered, not answered: keep the leases that have a time to live for another one."""


class Ping(Request, tag=25):
    pass


class Bye(Request, tag=26):
    """End the session now, without grace."""


READS = (Get, Check, Wait, MultiGet, Count, List, QueueLen, Ping)
"""Requests that may run again after a cut; the answers of all others are kept until they are confirmed."""


def frame(body: Any) -> bytes:
    """Encode one frame."""
    payload = _encode(body)
    return _LENGTH.pack(len(payload)) + payload


_encode = msgspec.msgpack.Encoder().encode


def whole(data: bytes) -> bytes | None:
    """Return the payload of data that is exactly one frame, which is how nearly all of them come; else None."""
    if len(data) >= 4 and _LENGTH.unpack_from(data)[0] == len(data) - 4:
        return data[4:]
    return None


class Frames:
    """Cuts a stream of bytes into the payloads of its frames."""

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def held(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what came, and yield each payload that is whole."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < 4 or len(self._buffer) < 4 + self._size(self._buffer, 0):
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        at, end = 0, len(data)
        while end - at >= 4:
            stop = at + 4 + self._size(data, at)
            if stop > end:
                break
            yield data[at + 4 : stop]
            at = stop
        self._buffer += data[at:]

    def _size(self, data: bytes | bytearray, at: int) -> int:
        size: int = _LENGTH.unpack_from(data, at)[0]
        if size > self._limit:
            raise BadMessage(f"a frame of {size} bytes, the limit is {self._limit}")
        return size


class Reply(NamedTuple):
    """What came for a request, or (number 0) a push with its number as status."""

    number: int
    status: int
    result: Any

    def event(self) -> tuple[int, Event]:
        """Read a push: the number of its watch's request, and what happened."""
        try:
            number, revision, key, value = msgspec.convert(self.result, tuple[int, int, bytes, bytes | None])
        except msgspec.ValidationError as error:
            raise BadMessage(f"the server's push makes no sense: {error}") from None
        return number, Event(revision, key, value)


_decode = msgspec.msgpack.Decoder(Reply).decode


def error_of(reply: Reply, store: str) -> StoreError:
    """Make the error that a server answered with."""
    try:
        kind, fields = reply.result
        if "key" in fields:
            fields["key"] = fields["key"].removeprefix("/")
        return _ERRORS[kind](**fields)
    except (KeyError, TypeError, ValueError, AttributeError):
        return StoreError(f"{store} refused: {reply.result}")


_ERRORS: dict[str, type[StoreError]] = {
    "LimitExceeded": LimitExceeded,
    "NotAnInteger": NotAnInteger,
    "StoreFull": StoreFull,
}


class Client:
    """The client's end of one session, over as many connections as it takes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._server = b""
        self._session = b""
        self._frames = Frames(MAX_FRAME_BYTES)
        self._next = 1
        self._open: dict[int, bytes] = {}
        self._pushes_seen = 0
        self._unconfirmed = 0

    def greet(self) -> bytes:
        """Return the hello of a new connection, sent behind the preface; it resumes the session if there is one."""
        self._frames = Frames(MAX_FRAME_BYTES)
        return frame(Hello(VERSION, self._name, self._session, self._pushes_seen))

    def welcome(self, reply: Reply, peer: str) -> float:
        """Read the answer to the greeting, and return the session's grace; raise why there is no session."""
        try:
            if reply.status != Status.OK:
                identity, why = reply.result
                if not self._session:
                    raise BadMessage(f"refused: {why}")
                raise (SessionLost if identity == self._server else ServerRestarted)(peer=peer, why=why)
            welcome = msgspec.convert(reply.result, Welcome)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise BadMessage(f"the server's welcome makes no sense: {error}") from None
        self._server, self._session = welcome.server, welcome.session
        return welcome.grace_s

    def repeat(self) -> bytes:
        """Return, after a resumption, all requests that were not answered, as they were."""
        return b"".join(self._open.values())

    def ask(self, kind: type[Request], *arguments: Any) -> tuple[int, bytes]:
        """Number a request; return the number and what to send."""
        number = self._next
        request = frame(kind(number, *arguments))
        sent = request if self._unconfirmed < CONFIRM_EVERY else self.confirm() + request
        self._next = number + 1
        self._open[number] = request
        return number, sent

    def confirm(self) -> bytes:
        """Return what tells the server to forget what was delivered, or nothing when that was little."""
        if self._unconfirmed < CONFIRM_EVERY:
            return b""
        self._unconfirmed = 0
        return frame(Confirm(0, self._next - 1, list(self._open), self._pushes_seen))

    def receive(self, data: bytes) -> list[Reply]:
        """Take what came; return what is in it, in order. Each is to be settled once it was delivered."""
        payload = whole(data) if not self._frames.held else None
        payloads = self._frames.feed(data) if payload is None else (payload,)
        return [self._read(payload) for payload in payloads]

    def _read(self, payload: bytes) -> Reply:
        self._unconfirmed += 1 + (len(payload) >> 14)
        try:
            return _decode(payload)
        except GARBLED as error:
            raise BadMessage(f"the server said what makes no sense: {error}") from None

    def expects(self, reply: Reply) -> bool:
        """Say whether a reply is new; a cut may make answers and pushes come twice."""
        return reply.number in self._open if reply.number else reply.status > self._pushes_seen

    def settle(self, reply: Reply) -> None:
        """Note that a reply was delivered: its request is not repeated, and its push not sent again."""
        if reply.number:
            self._open.pop(reply.number, None)
            if isinstance(reply.result, bytes):  # an item, which goes back to its queue if we die unconfirmed
                self._unconfirmed += CONFIRM_EVERY
        else:
            self._pushes_seen = reply.status

    def forget(self, number: int) -> None:
        """Take a request off the list of those to repeat."""
        self._open.pop(number, None)
