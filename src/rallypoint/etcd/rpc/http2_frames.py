"""Encodes HTTP/2 frames and gRPC messages. Pure."""

from __future__ import annotations

import struct

__all__ = [
    "HEAD", "MAX_FRAME", "NUMBER", "PREFACE", "SETTING", "Flag", "FrameType", "Setting",
    "cancel", "frame", "message", "unpadded", "window_update",
]  # fmt: skip

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes from a client."""


class FrameType:
    """Frame types."""

    DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9


class Flag:
    """Frame flags."""

    END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32


class Setting:
    """Settings: the size of the header table, whether the peer may push, and the initial window of a stream."""

    TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW = 1, 2, 4


_CANCEL = 8  # the error code of a cancelled call

MAX_FRAME = 16_384
"""Maximum size of a frame in both directions, even if the peer allows larger frames."""

HEAD = struct.Struct(">BHBBI")
"""The head of a frame: the length in three bytes, the type, the flags and the stream."""

SETTING = struct.Struct(">HI")
"""A setting: its id and its value."""

NUMBER = struct.Struct(">I")
"""A window, a length or an error code."""


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(body)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + body


def message(body: bytes) -> bytes:
    """Return a message in gRPC's framing: uncompressed, after its length."""
    return b"\0" + NUMBER.pack(len(body)) + body


def cancel(stream: int) -> bytes:
    """Return the frame that cancels a call."""
    return frame(FrameType.RST_STREAM, 0, stream, NUMBER.pack(_CANCEL))


def window_update(stream: int, size: int) -> bytes:
    """Return the frame that widens the peer's window on a stream, or on the connection for stream 0."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream, NUMBER.pack(size))


def unpadded(flags: int, body: bytes) -> bytes:
    """Return the body of a frame without its padding; raise ValueError if the padding is malformed."""
    if not flags & Flag.PADDED:
        return body
    padding = body[0]
    if padding >= len(body):
        raise ValueError("padding longer than the frame")
    return body[1 : len(body) - padding]
