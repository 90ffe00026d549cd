"""Limits on all connections of a process together: how many are open, and the memory that is held for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.server.connections.connection import Connection
    from rallypoint.server.connections.outgoing import SharedPart

__all__ = ["COUNTED_BYTES", "RESERVE_BYTES", "ConnectionLimit", "ConnectionMemory"]

RESERVE_BYTES = 32 * 1024 * 1024
"""Bytes that may be in transit even if the store is full: room for a few of the largest values."""


COUNTED_BYTES = 4096
"""Bytes held for one connection are counted from this size on: counting a small request costs as much as running it."""

LARGE_BYTES = 1024 * 1024
"""A request of this size may replace values that replies hold."""

_WHY = "the server's memory limit is reached, and this connection has held memory the longest"


class ConnectionLimit:
    """The number of open connections of a process, and its limit; the listeners of a relay share one instance."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.connections = 0
        """Open connections at all listeners."""

        self.round_sockets = 0
        """Listening sockets of rounds: they use descriptors too."""

    @property
    def has_room(self) -> bool:
        """Whether another connection may be accepted."""
        return self.limit is None or self.connections + self.round_sockets < self.limit


class ConnectionMemory:
    """The bytes held for the connections of a process: waiting requests and unsent replies.

    The listeners of a relay share one instance.
    """

    def __init__(self, limit: int, state_bytes: Callable[[], int]) -> None:
        """Let connections hold the part of `limit` that the state leaves free, and a reserve even if it leaves none."""
        self.held = 0
        """Bytes held for single connections."""

        self._limit = limit
        self._reserve = max(limit // 4, RESERVE_BYTES)
        self._state_bytes = state_bytes
        self._holders: dict[Connection, None] = {}  # connections with bytes held for them, longest first
        self._shared: dict[int, tuple[SharedPart, int]] = {}
        """By `id` of the bytes: a part with these bytes, and the number of its users."""

        self._shared_bytes = 0
        self._checking = False

    @property
    def total(self) -> int:
        """Bytes held for connections, and the size of the state."""
        return self.held + self._outdated + self._state_bytes()

    @property
    def holders(self) -> int:
        """Number of connections with bytes held for them."""
        return len(self._holders)

    @property
    def room(self) -> int:
        """Bytes that may be held for connections: at most a quarter of the limit beyond it, at least a value."""
        free = self._limit - self._state_bytes()
        return max(free, self._reserve + min(free, 0), RESERVE_BYTES // 4)

    def hold(self, connection: Connection, amount: int, grown: int) -> None:
        """Account for the bytes held for a connection, `amount` in all; over the limit, drop connections."""
        self.held += grown
        if amount or connection.shares:
            self._holders[connection] = None
        else:
            self._holders.pop(connection, None)
        if grown > 0 or grown < -LARGE_BYTES:  # after a large request, replies may hold values that it replaced
            self.check()

    def share(self, part: SharedPart) -> None:
        """Account for bytes that replies share; call `hold` next."""
        known = self._shared.get(id(part.data))
        self._shared[id(part.data)] = (part, 1) if known is None else (known[0], known[1] + 1)
        if known is None:
            self._shared_bytes += len(part.data)

    def unshare(self, part: SharedPart) -> None:
        """Record that a reply no longer needs shared bytes."""
        known, users = self._shared.pop(id(part.data))
        if users > 1:
            self._shared[id(part.data)] = (known, users - 1)
        else:
            self._shared_bytes -= len(part.data)

    def check(self) -> None:
        """Over the limit, drop the connections that have held bytes the longest.

        Rejected: dropping the connection that asks for more. A few that never release memory would lock out all others.
        """
        room = self.room
        if self.held + self._shared_bytes <= room or self._checking:
            return
        self._checking = True
        try:
            while self._holders and self.held + self._outdated > room:
                next(iter(self._holders)).drop(_WHY)
        finally:
            self._checking = False

    @property
    def _outdated(self) -> int:
        """Bytes of shared parts that the state no longer holds."""
        return sum(len(part.data) for part, _ in self._shared.values() if not part.current)
