"""Many byte streams on one connection, for a relay: version 2 of our protocol. Pure, bounded, without I/O.

A connection starts with `PREFACE`, which differs from that of a single session (`protocol/native.py`) in its last byte;
the server answers `ACCEPTED`. Then both sides send frames: a 32-bit channel, a 32-bit word with the frame's kind in its
highest byte and a size in the others, little-endian, and, if the kind has a body, that many bytes.

- DATA: the next bytes of a channel. Each channel carries what a connection of version 1 does after its preface: the
  frames of one session, starting with its hello. The connecting side numbers channels from 1 and never reuses a number;
  the first DATA opens a channel.
- CREDIT: the peer may send that many more bytes on the channel. Each direction starts with `WINDOW` bytes.
- CREDITS: the same for several channels. The channel field holds their count; the body has for each of them its number
  and the bytes, 32 bits each.
- SHARED: the same bytes for several channels, from the server only. The channel field holds their count; the body has
  for each of them its number and its own head (preceded by its length), and then the common bytes. For each channel
  it is equivalent to a DATA frame, credit included.
- GATHERED: different bytes for several channels, in one frame. The channel field holds their count; the body has for
  each of them its number and its byte count, 32 bits each, and then the bytes of all, in that order. For each channel
  it is equivalent to a DATA frame. Simultaneous requests of a node's processes (arrivals at a barrier), and the
  replies to them, thus cross the wire as one message.
- CLOSE: the channel has ended; the body is the reason, as text. Nothing follows on it in either direction except the
  peer's own CLOSE, which may have crossed it. A session outlives its channel as it does a connection.

So a session whose peer does not read stops after one window, and delays no other session. DATA bodies have at most
`MAX_CHUNK` bytes, so a large answer does not delay the small answers of others.

Rejected: msgpack frames with a channel in each. A relay would decode and re-encode every request, and an answer of 8
MiB would be one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rallypoint.protocol import BadMessage, c10d

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
    "ChannelFrame",
    "close_frame",
    "credit_frame",
    "credit_frames",
    "data_frames",
    "data_head",
    "gathered_frames",
    "reply_frames",
    "shared_frames",
    "split_credits",
    "split_gathered",
    "split_shared",
]

PREFACE = c10d.hello(0x594C4153)
"""The first bytes of a connection with channels; no process id is that large."""

ACCEPTED = b"RLY2"
"""Our server's answer to the preface; a server without channels answers the preface's last four bytes."""

DATA, CREDIT, CLOSE, SHARED, GATHERED, CREDITS = range(6)
"""The kinds of frames."""

WINDOW = 256 * 1024
"""How many bytes may be in flight on a channel, in each direction."""

MAX_CHUNK = 64 * 1024
"""The maximum size of a frame's body in bytes."""

MAX_HEAD = 255
"""The maximum size in bytes of a channel's own head before the shared bytes."""

_SHARERS = 120  # per frame: their heads take at most half a chunk
_PIECES = 1024  # per frame: the most channels in it
_HEAD = struct.Struct("<II")
_SHARER = struct.Struct("<IB")
_SIZE = (1 << 24) - 1


class ChannelFrame(NamedTuple):
    """One frame: `size` is a credit, or the length of the body."""

    channel: int
    kind: int
    size: int
    body: bytes


def data_head(channel: int, size: int) -> bytes:
    """Return the head of a DATA frame with `size` bytes, at most `MAX_CHUNK`."""
    return _HEAD.pack(channel, size)  # DATA is 0


def data_frames(channel: int, data: bytes) -> bytes:
    """Return bytes of a channel as one frame, or as several if there are more than `MAX_CHUNK`."""
    size = len(data)
    if size <= MAX_CHUNK:
        return _HEAD.pack(channel, size) + data
    starts = range(0, size, MAX_CHUNK)
    chunks = [data[at : at + MAX_CHUNK] for at in starts]
    return b"".join([part for chunk in chunks for part in (_HEAD.pack(channel, len(chunk)), chunk)])


def credit_frame(channel: int, size: int) -> bytes:
    """Return a frame that lets the peer send `size` more bytes on a channel."""
    return _HEAD.pack(channel, CREDIT << 24 | size)


def credit_frames(grants: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return frames that let the peer send more on several channels; a grant is a channel's number and a byte count."""
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
    """Return the credit of each channel in a CREDITS frame; raise BadMessage if it is malformed."""
    if len(body) != 8 * count:
        raise BadMessage(f"credit for {count} channels in {len(body)} bytes")
    flat = struct.unpack(f"<{2 * count}I", body)
    return list(zip(flat[::2], flat[1::2], strict=True))


def close_frame(channel: int, why: str = "") -> bytes:
    """Return a frame that ends a channel."""
    body = why.encode("utf-8", "replace")[:1024]
    return _HEAD.pack(channel, CLOSE << 24 | len(body)) + body


def shared_frames(heads: Sequence[tuple[int, bytes]], data: bytes) -> list[bytes]:
    """Return frames that carry to each of several channels, by number, its own head and then the same bytes."""
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
    """Return frames that carry a reply to each channel, its own head and a common body; DATA for a single channel."""
    number, head = heads[0]
    if len(heads) == 1 and len(head) + len(body) <= MAX_CHUNK:
        return data_head(number, len(head) + len(body)), head, body
    return shared_frames(heads, body)


def split_shared(count: int, body: bytes) -> list[tuple[int, bytes]]:
    """Return the bytes of each channel in a SHARED frame; raise BadMessage if it is malformed."""
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
    """Return frames that carry different bytes to several channels, by number; each piece is at most a chunk."""
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
    """Return the bytes of each channel in a GATHERED frame; raise BadMessage if it is malformed."""
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
        raise BadMessage(f"a gathered frame of {len(body)} bytes announces {at} bytes for {count} channels")
    return pieces


class ChannelFrames:
    """Splits a byte stream into frames."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def held(self) -> int:
        """How many bytes of an incomplete frame are buffered."""
        return len(self._buffer)

    def sole(self, data: bytes) -> int:
        """Return the channel of `data` if it is exactly one DATA frame, as it often is; else 0.

        After 0, pass the bytes to `feed`.
        """
        size = len(data)
        if size <= 8 or self._buffer:
            return 0
        number: int
        number, word = _HEAD.unpack_from(data)
        return number if word == size - 8 and word <= MAX_CHUNK else 0

    def feed(self, data: bytes) -> Iterator[ChannelFrame]:
        """Take received bytes, and yield each complete frame. Raises BadMessage, and is unusable after that."""
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
                yield ChannelFrame(channel, kind, size, b"")
                continue
            if kind > CREDITS:
                raise BadMessage(f"unknown kind of frame: {kind}")
            if size > MAX_CHUNK:
                raise BadMessage(f"a frame of {size} bytes, the limit is {MAX_CHUNK}")
            if start + size > end:
                break
            at = start + size
            yield ChannelFrame(channel, kind, size, data[start:at])
        self._buffer = data[at:]
