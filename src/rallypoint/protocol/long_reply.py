"""A reply in parts, of either protocol."""

from __future__ import annotations

__all__ = ["LongReply"]


class LongReply:
    """A reply in parts: it contains a value that is kept in parts, which is not copied."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)
