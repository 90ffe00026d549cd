"""The transport of one session's bytes, as a protocol handler sees it: a connection, or one of its channels.

`Connection` (`connection.py`) and `ServerChannel` (`channel.py`) implement it; a `NativeConnection` works with either.
Rejected: a base class for both. They share these methods, but no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rallypoint.protocol.native import Reply
from rallypoint.server.connections.outgoing import Part

__all__ = ["SessionTransport"]


class SessionTransport(Protocol):
    """Carries one session's bytes: a connection of its own, or a channel of a shared one."""

    @property
    def paused(self) -> bool:
        """Whether the peer must read before more is written."""

    @property
    def closing(self) -> bool:
        """Whether the transport is closed or closing: data sent now is lost."""

    def send(self, data: Reply) -> None:
        """Send a reply that became ready later."""

    def send_parts(self, parts: Sequence[Part]) -> None:
        """Send a long reply in parts."""

    def stall(self) -> None:
        """Stop reading until `read_on`."""

    def read_on(self) -> None:
        """Read again after `stall`, and process waiting requests."""

    def go_on(self) -> None:
        """Process waiting requests, if the peer reads."""

    def recount(self) -> None:
        """Update the count of bytes held for the peer."""

    def drop(self, why: str) -> None:
        """Close the transport because of a peer's error, and log it."""

    def close(self) -> None:
        """Close the transport once all written data is sent."""

    def who(self) -> str:
        """Return the peer's address."""
