"""The channels of one connection that have not said who calls: each must within a time, or is closed.

One timer, for the channel that has been silent the longest: they came in that order, and have the same time each.
Rejected: a timer for each channel. A relay that comes back opens a thousand at once, and nearly all of them say hello.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.server.channel import Channel

__all__ = ["Newcomers"]


class Newcomers:
    """Channels that were opened, and when, in that order."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._since: dict[Channel, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, channel: Channel) -> None:
        """Note that a channel was opened."""
        loop = asyncio.get_running_loop()
        self._since[channel] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._allowed_s, self._close_silent)

    def remove(self, channel: Channel) -> None:
        """Note that a channel is closed."""
        self._since.pop(channel, None)

    def clear(self) -> None:
        """Note that the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._since.clear()

    def _close_silent(self) -> None:
        """Close the channels that have not said who calls in time."""
        self._timer = None
        loop = asyncio.get_running_loop()
        for channel, since in list(self._since.items()):
            left_s = since + self._allowed_s - loop.time()
            if left_s > 0:
                self._timer = loop.call_later(left_s, self._close_silent)
                break
            self._since.pop(channel, None)
            if not channel.handler.greeted:
                channel.drop(f"did not say who calls within {self._allowed_s:g} s")
