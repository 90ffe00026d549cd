"""Hello timeouts: a channel that does not send its hello in time is closed.

One timer serves all channels of a connection: they time out in the order in which they were opened.
Rejected: a timer for each channel. A relay that reconnects opens a thousand at once, and nearly all of them say hello.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.server.connections.channel import ServerChannel

__all__ = ["HelloTimeouts"]


class HelloTimeouts:
    """The channels of one connection without a hello, in the order in which they were opened."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._since: dict[ServerChannel, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, channel: ServerChannel) -> None:
        """Note that a channel was opened."""
        loop = asyncio.get_running_loop()
        self._since[channel] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._allowed_s, self._close_silent)

    def remove(self, channel: ServerChannel) -> None:
        """Note that a channel is closed."""
        self._since.pop(channel, None)

    def clear(self) -> None:
        """Note that the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._since.clear()

    def _close_silent(self) -> None:
        """Close the channels whose time is over."""
        self._timer = None
        loop = asyncio.get_running_loop()
        for channel, since in list(self._since.items()):
            left_s = since + self._allowed_s - loop.time()
            if left_s > 0:
                self._timer = loop.call_later(left_s, self._close_silent)
                break
            self._since.pop(channel, None)
            if not channel.handler.greeted:
                channel.drop(f"no complete greeting within {self._allowed_s:g} s")
