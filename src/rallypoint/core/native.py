"""Our wire protocol: what is said, and how it is cut into frames. Fed incrementally, bounded, without I/O.

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
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rallypoint.core import barrier, c10d, exchange, lock, rendezvous, roster
from rallypoint.core.c10d import BadMessage
from rallypoint.core.limits import MAX_FORMER, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from rallypoint.core.machine import Name

__all__ = [
    "ACCEPTED",
    "MAX_WAIT_S",
    "PREFACE",
    "VERSION",
    "Frames",
    "GARBLED",
    "Hello",
    "Request",
    "Status",
    "Welcome",
    "encode",
    "frame",
    "pack_length",
    "unpack_length",
]

PREFACE = c10d.hello(0x594C4152)
"""The first bytes of a connection of ours; no process id is that large."""

ACCEPTED = b"RLY1"
"""What our server answers to the preface; PyTorch's answers its last four bytes."""

VERSION = 1
"""The protocol's version, said in `Hello`."""

MAX_OPEN = 65_536
"""How many requests of a session may be open at once."""

MAX_WAIT_S = 1e9
"""The longest wait that can be asked for."""

GARBLED = (ValueError, TypeError, RecursionError)
"""What msgspec raises for bytes that make no sense: its own errors, and Python's for bad text and deep nesting."""

_LENGTH = struct.Struct("<I")

Key = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]


class Status:
    """How a request ended."""

    OK, TIMED_OUT, ERROR, REFUSED = range(4)


class Hello(Struct, array_like=True):
    """Who calls: a name for people, the session to go on with (empty: a new one), and those that its process lost."""

    version: int
    name: Annotated[str, Meta(max_length=256)]
    session: Annotated[bytes, Meta(max_length=64)] = b""
    pushes_seen: int = 0
    credentials: Annotated[bytes, Meta(max_length=4096)] = b""
    former: Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=MAX_FORMER)] = []


class Welcome(Struct, array_like=True):
    """Who answers: the server's identity, which it loses with its memory, and the caller's session."""

    version: int
    server: bytes
    session: bytes
    grace_s: float
    resumed: bool
    hosts_objects: bool = True
    """Whether it carries out `Act`; where not, the members of a shared object host it."""

    kept_watches: bool = True
    """Whether it knows the watches of a session that is resumed; where not, they have to be asked for again."""


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
    """Answered by the revision after which it begins, or nil. Asked for again, it begins after the last one seen."""

    prefix: Key
    after: int = -1


class Drop(Request, tag=23):
    """Give up an earlier request of this session: a wait, which then stays unanswered, or a watch."""

    target: int


class Confirm(Request, tag=24):
    """Not numbered or answered: all requests up to `last` but the open ones were answered, all pushes seen."""

    last: int
    open: Annotated[list[int], Meta(max_length=MAX_OPEN)]
    pushes: int


class Beat(Request, tag=27):
    """Not numbered, not answered: keep the leases that have a time to live for another one."""


Commands = (
    barrier.Arrive | barrier.Withdraw | barrier.Leave | barrier.Stay
    | exchange.Give | exchange.TakeBack
    | lock.Acquire | lock.Look | lock.Release
    | roster.Join | roster.Leave | roster.Watch | roster.Look
    | rendezvous.Join | rendezvous.Withdraw | rendezvous.Leave | rendezvous.Watch
    | rendezvous.Close | rendezvous.Open | rendezvous.Look
)  # fmt: skip
"""What can be asked of a shared object."""


class Act(Request, tag=28):
    """A command to a shared object. `call` tells it from the session's other calls, and is the same again when its
    caller has heard why it waits, and waits on. Answered by `[DONE, answer]`, `[REFUSED, error, fields]` or, when
    `timeout_s` have passed, `[WAITING, reason, missing, withdrawn]`."""

    name: Key
    member: Name
    call: int
    command: Commands
    timeout_s: Seconds


DONE, REFUSED, WAITING = range(3)


class Ping(Request, tag=25):
    pass


class Bye(Request, tag=26):
    """End the session now, without grace."""


READS = (Get, Check, Wait, MultiGet, Count, List, QueueLen, Ping)
"""Requests that may run again after a cut; the answers of all others are kept until they are confirmed."""


def frame(body: Any) -> bytes:
    """Encode one frame."""
    payload = encode(body)
    return pack_length(len(payload)) + payload


encode = msgspec.msgpack.Encoder().encode
"""Encode what is in a frame."""

pack_length = _LENGTH.pack
"""Write the length in front of a frame."""

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
