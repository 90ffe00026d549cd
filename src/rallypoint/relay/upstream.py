"""The one connection of a relay to its server, made again whenever it is lost, and the channels on it.

A channel lives at most as long as the connection that it was opened on: when that is lost, each owner is told once,
and opens another after the next `on_connected`. Sessions outlive channels, as they do connections.

Rejected: channels that survive a reconnection. What is lost is known only to sessions, which repeat it already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rallypoint import net

__all__ = ["Channel", "ChannelOwner", "Upstream"]


class ChannelOwner(Protocol):
    """Whoever uses a channel."""

    def received(self, data: bytes) -> None:
        """Take bytes from the server; `Channel.consumed` gives the server credit for them."""

    def closed(self, why: str) -> None:
        """The server closed the channel, or the connection was lost; nothing follows."""

    def writable(self) -> None:
        """Everything that was written has been sent, after `unsent` was not 0."""


class Channel:
    """One byte stream to the server."""

    unsent: int = 0
    """How many bytes were written and wait for credit."""

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn of the event loop, as far as there is credit; never refuses."""
        raise NotImplementedError

    def consumed(self, size: int) -> None:
        """Give the server credit for bytes that were dealt with."""
        raise NotImplementedError

    def close(self) -> None:
        """End the channel; the owner hears nothing more."""
        raise NotImplementedError


class Upstream:
    """The connection to the server."""

    connected: bool = False
    """Whether channels can be opened."""

    why: str = "not connected yet"
    """Why there is no connection; "" while there is one."""

    def __init__(self, endpoints: net.Endpoints) -> None:
        self.peer = str(endpoints)
        """The server's address, for messages."""

    def open_channel(self, owner: ChannelOwner) -> Channel:
        """Open a channel; only while connected."""
        raise NotImplementedError

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Call back at every connection that is made; soon, if there is one already."""
        raise NotImplementedError
