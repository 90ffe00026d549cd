"""A value that grew by appends, in parts: an append costs what it adds, and a reply needs no copy of the whole.

Parts are never changed; small additions are collected in a tail, which becomes a part when it is long enough. So a
value of n bytes has at most n / PART_BYTES + 1 parts, and takes little more memory than its bytes.

Rejected: a bytearray. A reply, a kept answer or an event must not change with later appends, so each of them would be a
copy: 240 MB take 450 ms.
"""

from __future__ import annotations

__all__ = ["LONG_BYTES", "PART_BYTES", "LongValue"]

LONG_BYTES = 1024 * 1024
"""From this size on, a value that is appended to is kept in parts; to copy a shorter one takes less than 2 ms."""

PART_BYTES = 256 * 1024
"""The least size of a part, except for the last."""


class LongValue:
    """A value in parts. An owner that hands it out hands out a `copy`, which no longer changes."""

    __slots__ = ("_parts", "_size", "_tail")

    def __init__(self, first: bytes) -> None:
        self._parts = [first]
        self._tail = bytearray()
        self._size = len(first)

    def append(self, data: bytes) -> None:
        """Add bytes at the end."""
        self._size += len(data)
        if len(data) < PART_BYTES:
            self._tail += data
        if len(self._tail) >= PART_BYTES or (self._tail and len(data) >= PART_BYTES):
            self._parts.append(bytes(self._tail))
            self._tail = bytearray()
        if len(data) >= PART_BYTES:
            self._parts.append(data)

    def copy(self) -> LongValue:
        """Return an equal value, which shares all parts but the last."""
        copied = LongValue(b"")
        copied._parts, copied._size = self.parts, self._size
        return copied

    @property
    def parts(self) -> list[bytes]:
        """The bytes, in order."""
        return [*self._parts, bytes(self._tail)] if self._tail else self._parts.copy()

    def head(self, size: int) -> bytes:
        """Return the first bytes; how the value came to be in parts makes no difference."""
        first = self._parts[0][:size]
        return first if len(first) == size else bytes(self)[:size]

    def part(self, index: int) -> bytes | None:
        """Return one of the parts that will not change, or None."""
        return self._parts[index] if index < len(self._parts) else None

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (bytes, LongValue)) or len(other) != self._size:
            return False
        whole, at = bytes(other), 0
        for part in self.parts:
            if not whole.startswith(part, at):
                return False
            at += len(part)
        return True

    __hash__ = None  # type: ignore[assignment]  # it changes
