"""Long replies on their way out: the parts that the transport has not taken yet.

A large value is not copied into a reply: all replies that contain it share its bytes with the store, and
`ConnectionMemory` counts them, once, from when the store no longer holds them. The transport gets a copy of one piece
at a time, as the peer reads. So a hundred peers that ask for one value and read nothing cost a hundred pieces.

Rejected: passing the parts to the transport at once. It frees them in a later turn of the event loop after the
connection is dropped, when a hundred others may have asked for theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from rallypoint.core.engine import Engine
from rallypoint.core.records import SharedAnswer

if TYPE_CHECKING:
    from rallypoint.server.connections.limits import ConnectionMemory

__all__ = ["PIECE_BYTES", "TURN_BYTES", "Outgoing", "Part", "SharedPart", "ValuePart", "AnswerPart"]

PIECE_BYTES = 256 * 1024
"""Bytes passed to the transport at a time."""

TURN_BYTES = 4 * PIECE_BYTES
"""Bytes passed to the transport in one turn of the event loop."""


class SharedPart(Protocol):
    """A part of a reply that others share."""

    @property
    def data(self) -> bytes:
        """Its bytes."""

    @property
    def current(self) -> bool:
        """Whether the state holds and counts these bytes."""


class ValuePart:
    """The value of a key, or one part of a value in parts, as part of a reply."""

    __slots__ = ("_engine", "_index", "_key", "data")

    def __init__(self, data: bytes, engine: Engine | None, key: bytes | None, index: int = 0) -> None:
        self.data = data
        self._engine = engine
        self._key = key
        self._index = index

    @property
    def current(self) -> bool:
        """Whether the key still has this value, or part."""
        if self._key is None or self._engine is None:
            return False
        return self._engine.part_of(self._key, self._index) is self.data


class AnswerPart:
    """The body of an answer that several sessions share."""

    __slots__ = ("_answer",)

    def __init__(self, answer: SharedAnswer) -> None:
        self._answer = answer

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return self._answer.data

    @property
    def current(self) -> bool:
        """Whether a session keeps it."""
        return self._answer.holders > 0


Part = bytes | SharedPart
"""A part of a reply: bytes of its own, or shared ones."""


class Outgoing:
    """The unsent parts of one connection, in order."""

    __slots__ = ("_at", "_memory", "_parts", "owned", "shared")

    def __init__(self, memory: ConnectionMemory) -> None:
        self._memory = memory
        self._parts: deque[Part] = deque()
        self._at = 0  # bytes of the first part already taken
        self.owned = 0
        """Bytes of the parts that are not shared."""

        self.shared = 0
        """Number of shared parts."""

    def add(self, parts: Iterable[Part]) -> None:
        """Append parts."""
        for part in parts:
            if isinstance(part, bytes):
                self.owned += len(part)
            else:
                self.shared += 1
                self._memory.share(part)
            self._parts.append(part)

    def take(self) -> bytes:
        """Return the next piece; empty if there is none."""
        while self._parts:
            part = self._parts[0]
            data = part if isinstance(part, bytes) else part.data
            piece = data[self._at : self._at + PIECE_BYTES]
            self._at += len(piece)
            if self._at == len(data):
                self._at = 0
                self._release(self._parts.popleft())
            if piece:
                return piece
        return b""

    def clear(self) -> None:
        """Drop all parts."""
        while self._parts:
            self._release(self._parts.popleft())
        self._at = 0

    def _release(self, part: Part) -> None:
        if isinstance(part, bytes):
            self.owned -= len(part)
        else:
            self.shared -= 1
            self._memory.unshare(part)
