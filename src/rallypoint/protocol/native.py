"""Our wire protocol: its messages, and their framing. Incremental, bounded, without I/O.

A connection starts with `PREFACE`, which no other client sends: PyTorch's server takes it for a greeting and a ping,
and answers with the ping's own number, which identifies it. Our server answers `ACCEPTED`. Then come frames: a 32-bit
little-endian length, and msgpack. A request is an operation of `core/ops.py`, `[tag, number, arguments...]`, which
msgspec validates while it decodes. A reply is `[number, status, result]`. An unsolicited message of the server is a
push: `[0, push number, [watch's request number, revision, key, value or nil]]`, or, before or after the welcome, a
notice of a change of the server itself: `[0, 0, Notice]`.

The first frame is `Hello`, answered by `[0, 0, Welcome]` or `[0, REFUSED, reason]`. Numbers grow by one with each
request of a session; many requests may be outstanding, and their replies come in any order. After a lost connection,
the client says hello with its session's id and repeats the unanswered requests under their old numbers. The server runs
none of them twice (`core/session.py`). `Confirm` tells it which answers and pushes it may forget.

Durations cross the wire, deadlines never do. In a request the operation comes before the number, unlike in a reply,
because msgspec selects the class of a request by its first element.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rallypoint.core.limits import MAX_FORMER
from rallypoint.core.long_value import LongValue
from rallypoint.core.machines.machine import Done
from rallypoint.core.ops import Act, Operation
from rallypoint.core.records import DONE, PushedEvent, ReplyStatus, SharedAnswer, pack
from rallypoint.protocol import BadMessage, c10d
from rallypoint.protocol.long_reply import LongReply

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
    "Reply",
    "Servers",
    "SharedReply",
    "Standby",
    "Welcome",
    "decode_act",
    "decode_hello",
    "decode_request",
    "encode_answer",
    "encode_item_head",
    "encode_items",
    "encode_list_head",
    "encode_value_head",
    "frame",
    "read_standby",
    "standby",
    "unpack_length",
]

PREFACE = c10d.hello(0x594C4152)
"""The first bytes of a native connection; no process id is that large."""

ACCEPTED = b"RLY1"
"""Our server's answer to the preface; PyTorch's server answers the preface's last four bytes."""

STANDBY = b"RLYS"
"""A standby server's answer to either preface; one frame follows, then the connection ends."""

STANDBY_BYTES = 1 << 20
"""The longest such frame."""

MAX_WHY = 4096
"""The longest reason that a server gives, in characters."""

VERSION = 2
"""The protocol version, sent in `Hello`."""

GARBLED = (ValueError, TypeError, RecursionError)
"""What msgspec raises for malformed bytes: its own errors, and Python's for bad text and deep nesting."""

_LENGTH = struct.Struct("<I")


Servers = Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=1024)]
"""Server addresses, as URLs."""


class Hello(Struct, array_like=True):
    """The client: a readable name, the session to resume (empty: a new one), and its process's lost sessions."""

    version: int
    name: Annotated[str, Meta(max_length=256)]
    session: Annotated[bytes, Meta(max_length=64)] = b""
    pushes_seen: int = 0
    credentials: Annotated[bytes, Meta(max_length=4096)] = b""
    former: Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=MAX_FORMER)] = []
    opens: bool = False
    """Whether the client chose the id in `session`, which is opened unless it exists."""

    attempt: int = 0
    """Grows with each hello of a session; a delayed hello must not take the session from a later one."""

    run: Annotated[str, Meta(max_length=1024)] = ""
    """The run whose namespace the session belongs to; empty for the default namespace."""

    scope: int = 0
    """The run's round: the first hello that names it creates its namespace, which replaces an earlier round's."""

    round: int | None = None
    """The round's number, for people."""

    one_port: bool = False
    """Whether the client has its namespace only from the port that it connected to: it is not given other servers,
    which would place it in the default namespace.
    """


class Welcome(Struct, array_like=True):
    """The server: its identity, which it loses with its memory, and the client's session."""

    version: int
    server: bytes
    session: bytes
    grace_s: float
    resumed: bool
    recovery_s: float = 0.0
    """How long a session may outlive the server's absence, if longer than the grace period."""

    servers: Servers = []
    """The addresses of all servers of a replicated store; empty for a single server."""


class Notice(Struct):
    """A change of the server's condition. It is a map, so that a welcome, an array, is never mistaken for one."""

    servers: Servers | None = None
    """The addresses of all servers of the store; None if unchanged or unknown."""

    trouble: Annotated[str, Meta(max_length=MAX_WHY)] = ""
    """Why the server cannot answer now: etcd does not answer it. Empty if it can."""

    denied: Annotated[str, Meta(max_length=MAX_WHY)] = ""
    """A host that just failed to authenticate, and why; empty for other notices."""


class Standby(Struct, array_like=True):
    """Where to go instead: the leader's address (empty: no leader), all addresses, and why not here."""

    leader: Annotated[str, Meta(max_length=1024)]
    servers: Servers
    why: Annotated[str, Meta(max_length=MAX_WHY)] = ""
    no_quorum: bool = False
    """Whether there is no leader because etcd does not answer."""


decode_request = msgspec.msgpack.Decoder(Operation).decode
"""Decode and validate a request; raise one of `GARBLED` if it is malformed."""

ACT = b"\x97\x1c"
"""The first bytes of an `Act`, as our clients encode it."""

decode_act = msgspec.msgpack.Decoder(Act).decode
"""Decode a request that is an `Act`; raise one of `GARBLED` if it is not."""

decode_hello = msgspec.msgpack.Decoder(Hello).decode
"""Decode a hello; raise one of `GARBLED` if it is malformed."""

_decode_standby = msgspec.msgpack.Decoder(Standby).decode
_encode = msgspec.msgpack.Encoder().encode
_pack_length = _LENGTH.pack


def frame(body: Any) -> bytes:
    """Encode one frame."""
    payload = _encode(body)
    return _pack_length(len(payload)) + payload


def standby(answer: Standby) -> bytes:
    """Return a standby server's answer to a preface."""
    return STANDBY + frame(answer)


def read_standby(data: bytes) -> Standby | None:
    """Decode a standby server's answer; return None while it is incomplete. Raises BadMessage."""
    for payload in Frames(STANDBY_BYTES).feed(data[len(STANDBY) :]):
        try:
            return _decode_standby(payload)
        except GARBLED as error:
            raise BadMessage(f"malformed reply from standby server: {error}") from None
    return None


@lru_cache(256)
def _head(number: int, size: int) -> bytes:
    head = _encode((number, ReplyStatus.OK, (DONE, None)))[:-1]  # the answer comes last; nil is one byte
    return _pack_length(len(head) + size) + head


class SharedReply:
    """A reply in two parts: a head with the request's number, and a body shared by several replies as one copy."""

    __slots__ = ("answer", "body", "head")

    def __init__(self, number: int, answer: SharedAnswer) -> None:
        self.head = _head(number, len(answer.data))
        self.answer = answer
        self.body = answer.data

    def __len__(self) -> int:
        return len(self.head) + len(self.body)

    def __bytes__(self) -> bytes:
        return self.head + self.body


def encode_answer(number: int, answer: Any) -> Reply:
    """Encode the reply to a request, or a push."""
    kind = answer.__class__
    try:
        if kind in _PLAIN:
            return frame((number, ReplyStatus.OK, answer))
        if kind is Done and answer.answer is None:
            return _nothing(number)
        if kind is PushedEvent:
            return frame((0, answer.push, (answer.watch, *answer.event)))
        if kind is Done and answer.answer.__class__ is SharedAnswer:
            return SharedReply(number, answer.answer)
        return frame((number, *pack(answer)))
    except TypeError:  # it contains a value in parts
        body = (0, answer.push, (answer.watch, *answer.event)) if kind is PushedEvent else (number, *pack(answer))
        parts = _in_parts(body)
        return LongReply([_pack_length(sum(map(len, parts))), *parts])


def _in_parts(data: Any) -> list[bytes]:
    """Encode data that may contain values in parts, without copying them."""
    if isinstance(data, LongValue):
        return [b"\xc6" + len(data).to_bytes(4, "big"), *data.parts]
    if isinstance(data, (list, tuple)):
        size = len(data)
        head = bytes((0x90 | size,)) if size < 16 else b"\xdd" + size.to_bytes(4, "big")
        return [head, *chain.from_iterable(map(_in_parts, data))]
    return [_encode(data)]


@lru_cache(256)
def _nothing(number: int) -> bytes:
    """Encode a reply without a result; cached, because many members get it under about the same number."""
    return frame((number, ReplyStatus.OK, (DONE, None)))


def encode_items(items: Sequence[Any]) -> bytes:
    """Encode a slice of a list, without the list's head."""
    return b"".join(map(_encode, items))


def encode_list_head(number: int, length: int, size: int) -> bytes:
    """Encode the first part of a reply that is a list of `length` items, `size` bytes when encoded."""
    head = b"\x93" + _encode(number) + _encode(ReplyStatus.OK) + b"\xdd" + length.to_bytes(4, "big")
    return _pack_length(len(head) + size) + head


def encode_value_head(number: int, size: int) -> bytes:
    """Encode the first part of a reply that is one value, `size` bytes when encoded."""
    head = b"\x93" + _encode(number) + _encode(ReplyStatus.OK)
    return _pack_length(len(head) + size) + head


def encode_item_head(size: int) -> bytes:
    """Encode what precedes the bytes of an item of more than 65,535 bytes, or of fewer."""
    return b"\xc6" + size.to_bytes(4, "big")


_PLAIN = frozenset((int, bool, type(None), bytes, list, tuple))

Reply = bytes | SharedReply | LongReply
"""An encoded reply."""


unpack_length = _LENGTH.unpack_from
"""Read the length before a frame, as a tuple of one."""


class Frames:
    """Splits a byte stream into the payloads of its frames."""

    __slots__ = ("_buffer", "_limit", "held")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self.held = 0
        """How many bytes of an unfinished frame are held."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take received bytes, and yield each complete payload."""
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
