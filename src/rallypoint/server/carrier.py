"""What carries one session's bytes, as the end of a protocol sees it: a connection, or one channel of many on one.

`Connection` (`connection.py`) and `Channel` (`channel.py`) are carriers; a `NativeConnection` knows not which it has.
Rejected: a base class for both. They have these calls in common, and nothing of how they are answered.
"""

from __future__ import annotations

from typing import Protocol

from rallypoint.protocol.native import SharedReply

__all__ = ["Carrier"]


class Carrier(Protocol):
    """What carries one session's bytes: a connection, or a channel of one that many sessions share."""

    @property
    def paused(self) -> bool:
        """Whether the peer has to read before more is written for it."""

    @property
    def closing(self) -> bool:
        """Whether what is sent now reaches nobody."""

    def send(self, data: bytes | SharedReply) -> None:
        """Send an answer that became ready later."""

    def send_parts(self, parts: list[bytes]) -> None:
        """Send a long answer."""

    def stall(self) -> None:
        """Read no more until `read_on`."""

    def read_on(self) -> None:
        """Read again after `stall`, and go on with what waits."""

    def go_on(self) -> None:
        """Carry out what waits, if the peer reads."""

    def recount(self) -> None:
        """Count again what is held for the peer."""

    def drop(self, why: str) -> None:
        """Close it because of what the peer did, and say so in the log."""

    def close(self) -> None:
        """Close it once what was written is sent."""

    def who(self) -> str:
        """Return the peer's address."""
