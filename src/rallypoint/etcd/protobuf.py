"""The part of protobuf's wire format that etcd's messages need: numbers, bytes and nested messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["chars", "fields", "number"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _varint(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes((value,))
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def chars(field: int, value: bytes) -> bytes:
    """Encode a field of bytes or a nested message."""
    size = len(value)
    if size < 128 and field < 16:
        return bytes((field << 3 | _BYTES, size)) + value
    return _varint(field << 3 | _BYTES) + _varint(size) + value


def number(field: int, value: int) -> bytes:
    """Encode a number field."""
    return _varint(field << 3 | _VARINT) + _varint(value)


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the field numbers and values of a message; values are integers or bytes."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            yield tag >> 3, data[at : at + size]
            at += size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"not a protobuf message: wire type {kind}")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 128:
        return byte, at
    value, shift = byte & 127, 7
    while byte > 127:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
    return value - (1 << 64) if value >> 63 else value, at
