"""Our wire protocol: what is said, and how it is cut into frames. Fed incrementally, bounded, without I/O.

A connection starts with `PREFACE`, which no other caller sends: to PyTorch's server it is a greeting and a ping,
which it answers with the ping's own number, and we know whom we met. Our server answers `ACCEPTED`. Then come frames:
a 32-bit little-endian length, and msgpack. A request is an operation of `core/ops.py`, `[tag, number, arguments...]`,
which msgspec checks as a whole while it reads it. An answer is `[number, status, result]`.
What the server sends unasked is a push: `[0, push number, [watch's request number, revision, key, value or nil]]`,
or, before or behind the welcome, a notice of what has changed about the server itself: `[0, 0, Notice]`.

The first frame is `Hello`, answered by `[0, 0, Welcome]` or `[0, REFUSED, reason]`. Numbers grow by one with each
request of a session, and many requests may be outstanding; they are answered in any order. After a cut, the client
says hello with its session's id and repeats, with their old numbers, the requests that were not answered. The server
runs none of them twice (`core/session.py`). `Confirm` tells it which answers and pushes it may forget.

Durations cross the wire, deadlines never do. Operation comes before number, the other way round from the answers,
because msgspec finds the class of a request by the first element.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rallypoint.core.limits import MAX_FORMER
from rallypoint.core.machine import Done
from rallypoint.core.ops import Act, Operation
from rallypoint.core.records import DONE, Push, Shared, Status, pack
from rallypoint.protocol import BadMessage, c10d

__all__ = [
    "ACCEPTED",
    "ACT",
    "GARBLED",
    "MAX_WHY",
    "PREFACE",
    "STANDBY",
    "VERSION",
    "Frames",
    "Hello",
    "Notice",
    "Servers",
    "SharedReply",
    "Standby",
    "Welcome",
    "decode_act",
    "decode_hello",
    "decode_request",
    "encode_answer",
    "encode_items",
    "encode_list_head",
    "frame",
    "read_standby",
    "standby",
    "unpack_length",
]

PREFACE = c10d.hello(0x594C4152)
"""The first bytes of a connection of ours; no process id is that large."""

ACCEPTED = b"RLY1"
"""What our server answers to the preface; PyTorch's answers its last four bytes."""

STANDBY = b"RLYS"
"""What a server answers to either preface that stands by for another; a frame follows, and the connection ends."""

STANDBY_BYTES = 1 << 20
"""How long that frame may be."""

MAX_WHY = 4096
"""How long the reason may be that a server gives, in characters."""

VERSION = 2
"""The protocol's version, said in `Hello`."""

GARBLED = (ValueError, TypeError, RecursionError)
"""What msgspec raises for bytes that make no sense: its own errors, and Python's for bad text and deep nesting."""

_LENGTH = struct.Struct("<I")


Servers = Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=1024)]
"""Addresses of servers, as URLs."""


class Hello(Struct, array_like=True):
    """Who calls: a name for people, the session to go on with (empty: a new one), and those that its process lost."""

    version: int
    name: Annotated[str, Meta(max_length=256)]
    session: Annotated[bytes, Meta(max_length=64)] = b""
    pushes_seen: int = 0
    credentials: Annotated[bytes, Meta(max_length=4096)] = b""
    former: Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=MAX_FORMER)] = []
    opens: bool = False
    """Whether `session` is an id that the caller chose, which is opened unless it is there already."""

    attempt: int = 0
    """Grows with each hello of a session; a delayed one must not take the session back from a later one."""

    run: Annotated[str, Meta(max_length=1024)] = ""
    """The run whose namespace the session belongs to; empty for the namespace of everybody."""

    scope: int = 0
    """The run's round: its namespace is created by the first who names it, and replaces that of an earlier round."""

    round: int | None = None
    """The number of the round for people."""

    one_port: bool = False
    """Whether the caller has its namespace only from the port where it called: it is not told of other servers, which
    would take it for a client of the namespace of everybody."""


class Welcome(Struct, array_like=True):
    """Who answers: the server's identity, which it loses with its memory, and the caller's session."""

    version: int
    server: bytes
    session: bytes
    grace_s: float
    resumed: bool
    recovery_s: float = 0.0
    """How long a session may outlive the server's absence, where that is longer than the grace."""

    servers: Servers = []
    """The addresses of all servers of a store that has several; of one that has not, none."""


class Notice(Struct):
    """What is so about the server from now on. It is a map, so that a welcome, an array, is never mistaken for one."""

    servers: Servers | None = None
    """The addresses of all servers of the store; None where they are as before, or not known."""

    trouble: Annotated[str, Meta(max_length=MAX_WHY)] = ""
    """Why the server can answer nothing at the moment, for etcd does not answer it; empty: it can."""


class Standby(Struct, array_like=True):
    """Where to go instead: the address of the server that leads (empty: none does), those of all, and why not here."""

    leader: Annotated[str, Meta(max_length=1024)]
    servers: Servers
    why: Annotated[str, Meta(max_length=MAX_WHY)] = ""
    no_quorum: bool = False
    """Whether there is no leader because etcd does not answer."""


decode_request = msgspec.msgpack.Decoder(Operation).decode
"""Read a request, checking all of it; raise one of `GARBLED` where it makes no sense."""

ACT = b"\x97\x1c"
"""How an `Act` begins, as our clients encode it."""

decode_act = msgspec.msgpack.Decoder(Act).decode
"""Read a request that is an `Act`; raise one of `GARBLED` where it is none."""

decode_hello = msgspec.msgpack.Decoder(Hello).decode
"""Read a greeting; raise one of `GARBLED` where it is none."""

_decode_standby = msgspec.msgpack.Decoder(Standby).decode
_encode = msgspec.msgpack.Encoder().encode
_pack_length = _LENGTH.pack


def frame(body: Any) -> bytes:
    """Encode one frame."""
    payload = _encode(body)
    return _pack_length(len(payload)) + payload


def standby(answer: Standby) -> bytes:
    """Return what a server that stands by answers to a preface."""
    return STANDBY + frame(answer)


def read_standby(data: bytes) -> Standby | None:
    """Read what a server that stands by answers; None where that is not whole yet. Raises BadMessage."""
    for payload in Frames(STANDBY_BYTES).feed(data[len(STANDBY) :]):
        try:
            return _decode_standby(payload)
        except GARBLED as error:
            raise BadMessage(f"malformed answer of a server that stands by: {error}") from None
    return None


@lru_cache(256)
def _head(number: int, size: int) -> bytes:
    head = _encode((number, Status.OK, (DONE, None)))[:-1]  # the answer comes last, and nil is one byte
    return _pack_length(len(head) + size) + head


class SharedReply:
    """A reply in two parts: a head with the number of the request, and a body that others get too, of one copy."""

    __slots__ = ("body", "head")

    def __init__(self, number: int, body: Shared) -> None:
        self.head = _head(number, len(body.data))
        self.body = body.data

    def __len__(self) -> int:
        return len(self.head) + len(self.body)

    def __bytes__(self) -> bytes:
        return self.head + self.body


def encode_answer(number: int, answer: Any) -> bytes | SharedReply:
    """Make the reply to a request, or a push."""
    kind = answer.__class__
    if kind in _PLAIN:
        return frame((number, Status.OK, answer))
    if kind is Done and answer.answer is None:
        return _nothing(number)
    if kind is Push:
        return frame((0, answer.push, (answer.watch, *answer.event)))
    if kind is Done and answer.answer.__class__ is Shared:
        return SharedReply(number, answer.answer)
    return frame((number, *pack(answer)))


@lru_cache(256)
def _nothing(number: int) -> bytes:
    """Make the reply to a call that came true, and brings nothing: many members have it, by about the same number."""
    return frame((number, Status.OK, (DONE, None)))


def encode_items(items: Sequence[Any]) -> bytes:
    """Encode a slice of a list, without the head that a list has."""
    return b"".join(map(_encode, items))


def encode_list_head(number: int, length: int, size: int) -> bytes:
    """Make the first part of a reply that is a list of so many items, which take so many bytes encoded."""
    head = b"\x93" + _encode(number) + _encode(Status.OK) + b"\xdd" + length.to_bytes(4, "big")
    return _pack_length(len(head) + size) + head


_PLAIN = frozenset((int, bool, type(None), bytes, list, tuple))


unpack_length = _LENGTH.unpack_from
"""Read the length in front of a frame, as a tuple of one."""


class Frames:
    """Cuts a stream of bytes into the payloads of its frames."""

    __slots__ = ("_buffer", "_limit", "held")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self.held = 0
        """How many bytes of an unfinished frame are held."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what came, and yield each payload that is whole."""
        if self._buffer:
            self._buffer += data
            self.held = len(self._buffer)
            if self.held < 4 or self.held < 4 + self._size(self._buffer, 0):
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
        self.held = len(self._buffer)

    def _size(self, data: bytes | bytearray, at: int) -> int:
        size: int = _LENGTH.unpack_from(data, at)[0]
        if size > self._limit:
            raise BadMessage(f"a frame of {size} bytes, the limit is {self._limit}")
        return size
