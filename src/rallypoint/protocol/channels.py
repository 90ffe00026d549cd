"""Many byte streams on one connection, as a relay has them: version 2 of our protocol. Pure, bounded, without I/O.

A connection starts with `PREFACE`, which differs from that of one session (`protocol/native.py`) in its last byte; the
server answers `ACCEPTED`. Then both sides send frames: a 32-bit channel, a 32-bit word with the kind of the frame in
its highest byte and a size in the others, little-endian, and where the kind has a body, so many bytes.

- DATA: the next bytes of a channel. Each channel carries what a connection of version 1 does behind its preface: the
  frames of one session, from its hello on. The side that connects numbers channels from 1 and never uses a number
  twice; the first DATA opens a channel.
- CREDIT: the peer may send so many more bytes on the channel. Each direction starts with `WINDOW` bytes.
- CREDITS: the same for several channels. In place of a channel stands how many there are; the body has for each of
  them its number and the bytes, 32 bits each.
- SHARED: bytes that several channels get alike, from the server only. In place of a channel stands how many there are;
  the body has for each of them its number and what it gets first (with its length before it), and then the bytes for
  all. It is to each channel what a DATA of its own would be, credit included.
- GATHERED: bytes of several channels, each its own, in one frame. In place of a channel stands how many there are; the
  body has for each of them its number and how many bytes it gets, 32 bits each, and then the bytes of all, in that
  order. It is to each channel what a DATA of its own would be. What the processes of a node say at the same moment
  (arrivals at a barrier), and what they are answered, crosses the wire as one message by it.
- CLOSE: the channel has ended; the body says why, in words. Nothing follows on it in either direction but the
  peer's own CLOSE, which may have crossed it. A session outlives its channel as it does a connection.

A session that is not read from therefore stops after a window, and no other waits for it; DATA bodies are at most
`MAX_CHUNK` bytes, so that a large answer does not hold up the small ones of others.

Rejected: frames of msgpack with a channel in each. A relay would take every request apart and put it together again,
and an answer of 8 MiB would be one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rallypoint.protocol import BadMessage, c10d
from rallypoint.protocol.native import STANDBY, read_standby

__all__ = [
    "ACCEPTED",
    "CLOSE",
    "CREDIT",
    "CREDITS",
    "DATA",
    "GATHERED",
    "MAX_CHUNK",
    "MAX_HEAD",
    "PREFACE",
    "SHARED",
    "WINDOW",
    "ChannelFrames",
    "Frame",
    "close_frame",
    "credit_frame",
    "credit_frames",
    "data_frames",
    "data_head",
    "gathered_frames",
    "greeting_size",
    "reply_frames",
    "shared_frames",
    "split_credits",
    "split_gathered",
    "split_shared",
]

PREFACE = c10d.hello(0x594C4153)
"""The first bytes of a connection with channels; no process id is that large."""

ACCEPTED = b"RLY2"
"""What our server answers to the preface; a server that knows nothing of channels answers its last four bytes."""

DATA, CREDIT, CLOSE, SHARED, GATHERED, CREDITS = range(6)
"""The kinds of frames."""

WINDOW = 256 * 1024
"""How many bytes may be under way on a channel, in each direction."""

MAX_CHUNK = 64 * 1024
"""The longest body of a frame."""

MAX_HEAD = 255
"""How much each of several channels may get before what they share."""

_SHARERS = 120  # of one frame: their heads take half a chunk at most
_PIECES = 1024  # of one frame: how many channels it may have bytes of
_HEAD = struct.Struct("<II")
_SHARER = struct.Struct("<IB")
_SIZE = (1 << 24) - 1


def greeting_size(data: bytes) -> int:
    """Return how long the server's answer to the preface is, of which this came; 0 while it is not whole.

    That of a server that stands by is all that it sends. Raises BadMessage where that makes no sense.
    """
    if data.startswith(STANDBY):
        return len(data) if read_standby(data) is not None else 0
    return len(ACCEPTED) if len(data) >= len(ACCEPTED) else 0


class Frame(NamedTuple):
    """One frame: `size` is a credit, or the length of the body."""

    channel: int
    kind: int
    size: int
    body: bytes


def data_head(channel: int, size: int) -> bytes:
    """Return what goes in front of at most `MAX_CHUNK` bytes of a channel."""
    return _HEAD.pack(channel, size)  # DATA is 0


def data_frames(channel: int, data: bytes) -> bytes:
    """Return bytes of a channel as one frame, or as several where there are more than `MAX_CHUNK`."""
    size = len(data)
    if size <= MAX_CHUNK:
        return _HEAD.pack(channel, size) + data
    starts = range(0, size, MAX_CHUNK)
    chunks = [data[at : at + MAX_CHUNK] for at in starts]
    return b"".join([part for chunk in chunks for part in (_HEAD.pack(channel, len(chunk)), chunk)])


def credit_frame(channel: int, size: int) -> bytes:
    """Let the peer send so many more bytes."""
    return _HEAD.pack(channel, CREDIT << 24 | size)


def credit_frames(grants: Sequence[tuple[int, int]]) -> list[bytes]:
    """Let the peer send more on several channels: the number of each, and how many bytes."""
    frames = []
    for at in range(0, len(grants), _PIECES):
        some = grants[at : at + _PIECES]
        if len(some) == 1:
            frames.append(credit_frame(*some[0]))
        else:
            flat = [part for pair in some for part in pair]
            frames.append(struct.pack(f"<{2 + len(flat)}I", len(some), CREDITS << 24 | 4 * len(flat), *flat))
    return frames


def split_credits(count: int, body: bytes) -> list[tuple[int, int]]:
    """Return the credit that each channel gets by a CREDITS frame; raise BadMessage where it is malformed."""
    if len(body) != 8 * count:
        raise BadMessage(f"credit for {count} channels in {len(body)} bytes")
    flat = struct.unpack(f"<{2 * count}I", body)
    return list(zip(flat[::2], flat[1::2], strict=True))


def close_frame(channel: int, why: str = "") -> bytes:
    """End a channel."""
    body = why.encode("utf-8", "replace")[:1024]
    return _HEAD.pack(channel, CLOSE << 24 | len(body)) + body


def shared_frames(heads: Sequence[tuple[int, bytes]], data: bytes) -> list[bytes]:
    """Return frames that bring each of several channels, by its number, a head of its own and then the same bytes."""
    parts: list[bytes] = []
    for at in range(0, len(heads), _SHARERS):
        some = heads[at : at + _SHARERS]
        room = MAX_CHUNK // 2
        for start in range(0, max(len(data), 1), room):
            chunk = data[start : start + room]
            own = [_SHARER.pack(number, len(head)) + head for number, head in some]
            size = sum(map(len, own)) + len(chunk)
            parts += (_HEAD.pack(len(some), SHARED << 24 | size), *own, chunk)
            some = [(number, b"") for number, _ in some]
    return parts


def reply_frames(heads: Sequence[tuple[int, bytes]], body: bytes) -> Sequence[bytes]:
    """Return frames that bring each channel a reply: its head, and the same body; to a single one as plain data."""
    number, head = heads[0]
    if len(heads) == 1 and len(head) + len(body) <= MAX_CHUNK:
        return data_head(number, len(head) + len(body)), head, body
    return shared_frames(heads, body)


def split_shared(count: int, body: bytes) -> list[tuple[int, bytes]]:
    """Return what each channel gets by a SHARED frame; raise BadMessage where it is malformed."""
    heads, at = [], 0
    try:
        for _ in range(count):
            number, size = _SHARER.unpack_from(body, at)
            start = at + _SHARER.size
            at = start + size
            heads.append((number, body[start:at]))
    except struct.error:
        raise BadMessage(f"a shared frame of {len(body)} bytes is too short for {count} channels") from None
    data = body[at:]
    return [(number, head + data) for number, head in heads]


def gathered_frames(pieces: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """Return frames that bring channels, by their numbers, bytes of their own; each piece is a chunk at most."""
    frames: list[bytes] = []
    heads: list[int] = []
    chunks: list[bytes] = []
    size = 0
    for number, data in pieces:
        length = len(data)
        if chunks and (size + length + 8 > MAX_CHUNK or len(chunks) == _PIECES):
            frames.append(_gathered(heads, chunks, size))
            heads, chunks, size = [], [], 0
        heads += (number, length)
        chunks.append(data)
        size += length + 8
    frames.append(_gathered(heads, chunks, size))
    return frames


def _gathered(heads: list[int], chunks: list[bytes], size: int) -> bytes:
    count = len(chunks)
    if count == 1:
        return _HEAD.pack(*heads) + chunks[0]
    return b"".join((struct.pack(f"<{2 + 2 * count}I", count, GATHERED << 24 | size, *heads), *chunks))


def split_gathered(count: int, body: bytes) -> list[tuple[int, bytes]]:
    """Return what each channel gets by a GATHERED frame; raise BadMessage where it is malformed."""
    at = 8 * count
    if at > len(body):
        raise BadMessage(f"a gathered frame of {len(body)} bytes is too short for {count} channels")
    heads = struct.unpack_from(f"<{2 * count}I", body)
    pieces = []
    for index in range(0, 2 * count, 2):
        end = at + heads[index + 1]
        pieces.append((heads[index], body[at:end]))
        at = end
    if at != len(body):
        raise BadMessage(f"a gathered frame of {len(body)} bytes, and {at} for {count} channels")
    return pieces


class ChannelFrames:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def held(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return len(self._buffer)

    def sole(self, data: bytes) -> int:
        """Return the channel that all of this is for, if it is one whole frame of data, as it often is; else 0.

        After 0, `feed` has to take it.
        """
        size = len(data)
        if size <= 8 or self._buffer:
            return 0
        number: int
        number, word = _HEAD.unpack_from(data)
        return number if word == size - 8 and word <= MAX_CHUNK else 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take what came, and yield each frame that is whole. Raises BadMessage, and is invalid after that."""
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        at, end = 0, len(data)
        while end - at >= 8:
            channel, word = _HEAD.unpack_from(data, at)
            kind, size = word >> 24, word & _SIZE
            start = at + 8
            if kind == CREDIT:
                at = start
                yield Frame(channel, kind, size, b"")
                continue
            if kind > CREDITS:
                raise BadMessage(f"unknown kind of frame: {kind}")
            if size > MAX_CHUNK:
                raise BadMessage(f"a frame of {size} bytes, the limit is {MAX_CHUNK}")
            if start + size > end:
                break
            at = start + size
            yield Frame(channel, kind, size, data[start:at])
        self._buffer = data[at:]
