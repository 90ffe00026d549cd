"""The relay's end of one connection with channels: bytes of many owners, gathered into one write a turn.

`protocol/channels.py` has the frames. A channel gets its number with its first bytes, for the server takes numbers in
growing order only. What owners write is sent at the end of the turn of the event loop, a chunk of each channel in turn,
as far as the server has given credit and the transport keeps up; the rest waits in the channels. A peer that breaks the
rules of credit loses the connection.

Rejected: a write for each channel. A relay of a thousand clients would make a thousand system calls for one answer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from rallypoint import net
from rallypoint.liveness import PeerWatch
from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import (
    ACCEPTED,
    CLOSE,
    CREDIT,
    CREDITS,
    DATA,
    GATHERED,
    PREFACE,
    SHARED,
    ChannelFrames,
    Frame,
    close_frame,
    credit_frames,
    gathered_frames,
    greeting_size,
    split_gathered,
    split_shared,
)
from rallypoint.relay.channel import Channel, ChannelOwner
from rallypoint.relay.traffic import Traffic

__all__ = ["ChannelConnection"]

FLUSH_BYTES = 512 * 1024
"""How much is written in one turn; then the transport, and others in this process, have theirs."""

LINGERING_BYTES = 64 * 1024 * 1024
"""How many bytes may wait for credit in channels that their owners have closed; what would be more is thrown away."""


class ChannelConnection(asyncio.Protocol):
    """One connection to the server, from its preface on; `lost` is called once, when it has ended."""

    def __init__(self, traffic: Traffic, lost: Callable[[ChannelConnection], None]) -> None:
        self._traffic = traffic
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self.greeting: asyncio.Future[bytes] = self._loop.create_future()
        """What the server answered to the preface; nothing where it ended the connection instead."""

        self.why = ""
        """Why the connection has ended."""

        self.paused = False
        """Whether the transport holds as much as it may."""

        self.channels: dict[int, Channel] = {}
        """The open channels that have a number."""

        self._new: dict[Channel, None] = {}  # those that have none yet
        self._next = 1
        self._ready: dict[Channel, None] = {}  # those with bytes to send, and credit for some, in turn
        self._credits: dict[Channel, None] = {}
        self._closes: list[bytes] = []
        self._lingering = 0
        self._writers: list[Callable[[], None]] = []
        self._flushing = False
        self._early = b""
        self._frames = ChannelFrames()
        self._watch: PeerWatch | None = None

    def open(self, owner: ChannelOwner) -> Channel:
        """Open a channel."""
        channel = Channel(self, owner)
        self._new[channel] = None
        self._traffic.channels_opened += 1
        return channel

    @property
    def count(self) -> int:
        """How many channels are open."""
        return len(self.channels) + len(self._new)

    @property
    def unsent(self) -> int:
        """How many bytes wait in channels that their owners have closed."""
        return self._lingering

    @property
    def is_closing(self) -> bool:
        """Whether what is written now reaches nobody."""
        return self._transport.is_closing()

    def abort(self, why: str) -> None:
        """End the connection at once."""
        self.why = self.why or why
        self._transport.abort()

    def close(self) -> None:
        """End the connection once what was written is sent, as far as there is credit for it."""
        self.why = self.why or "the relay closed it"
        if not self._transport.is_closing():
            self._flush()
            self._transport.close()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
            # Our ephemeral port was the very port we called. Close by reset, so that the server may have it.
            with suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.abort("refused, only this socket itself answered")
            return
        self._watch = net.watch(asyncio.get_running_loop(), transport, self._vanished)
        self._transport.write(PREFACE)

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.stop()
        self.why = self.why or (net.why_failed(error) if error else "the server closed it")
        if not self.greeting.done():
            self.greeting.set_result(b"")
        self._lost(self)
        for channel in [*self.channels.values(), *self._new]:
            channel.end(self.why)
        self.channels.clear()
        self._new.clear()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        if not self.greeting.done():
            data = self._greet(data)
            if not data:
                return
        self._traffic.bytes_received += len(data)
        try:
            channel = self.channels.get(self._frames.sole(data))
            if channel is not None:
                self._traffic.frames_received += 1
                channel.feed(data[8:])
                return
            for frame in self._frames.feed(data):
                self._traffic.frames_received += 1
                self._dispatch(frame)
                if self._transport.is_closing():
                    return
        except BadMessage as error:
            self.abort(f"it broke the protocol: {error}")

    def _greet(self, data: bytes) -> bytes:
        """Take bytes of the answer to the preface; return what is behind it, where the server accepted."""
        self._early += data
        try:
            size = greeting_size(self._early)
        except BadMessage as error:
            self.abort(str(error))
            return b""
        if not size:
            return b""
        self.greeting.set_result(self._early[:size])
        return self._early[size:] if self._early[:size] == ACCEPTED else b""

    # What channels call

    def before_flush(self, write: Callable[[], None]) -> None:
        """Have `write` called at the end of this turn of the event loop, before what channels have is sent."""
        self._writers.append(write)
        self._flush_soon()

    def has_bytes(self, channel: Channel) -> None:
        """Send what a channel has at the end of this turn."""
        if channel.sendable:
            self._ready[channel] = None
            self._flush_soon()

    def owes_credit(self, channel: Channel) -> None:
        """Give the server credit at the end of this turn."""
        self._credits[channel] = None
        self._flush_soon()

    def closing(self, channel: Channel, waiting: int) -> None:
        """See a channel to its end, whose owner has closed it."""
        if self._lingering + waiting > LINGERING_BYTES:
            channel.drop_unsent()
            waiting = 0
        self._lingering += waiting
        if not waiting:
            self._finish(channel)

    # Inside

    def _vanished(self, silent_s: float) -> None:
        self.abort(f"nothing was received for {silent_s:.1f} s; its host is gone, or the network between")

    def _dispatch(self, frame: Frame) -> None:
        if frame.kind == SHARED or frame.kind == GATHERED:
            split = split_shared if frame.kind == SHARED else split_gathered
            for number, data in split(frame.channel, frame.body):
                self._dispatch(Frame(number, DATA, len(data), data))
            return
        if frame.kind == CREDITS:
            raise BadMessage("credit for several channels, which only a relay gives")
        channel = self.channels.get(frame.channel)
        if channel is None:
            if not 0 < frame.channel < self._next:
                raise BadMessage(f"a frame for channel {frame.channel}, which was never opened")
            return  # it was closed while this was under way
        if frame.kind == DATA:
            channel.feed(frame.body)
        elif frame.kind == CREDIT:
            channel.credited(frame.size)
            self.has_bytes(channel)
        elif frame.kind == CLOSE:
            self._forget(channel)
            channel.end(frame.body.decode("utf-8", "replace"))

    def _finish(self, channel: Channel) -> None:
        """Close a channel of which everything is sent."""
        if channel.number:
            self._closes.append(close_frame(channel.number))
            self._flush_soon()
        self._forget(channel)
        channel.end("")

    def _forget(self, channel: Channel) -> None:
        if channel.closing:
            self._lingering -= channel.drop_unsent()
        self.channels.pop(channel.number, None)
        for table in (self._new, self._ready, self._credits):
            table.pop(channel, None)

    def _flush_soon(self) -> None:
        if not self._flushing and (self._writers or not self.paused):
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what is ready, a chunk of each channel in turn, until it is much."""
        while self._writers:
            self._writers.pop()()
        self._flushing = False
        if self.paused or self._transport.is_closing():
            return
        parts = self._closes
        self._closes = []
        if self._credits:
            parts += credit_frames([(channel.number, channel.take_credit()) for channel in self._credits])
            self._credits.clear()
        self._traffic.frames_sent += len(parts)
        touched = self._gather(parts)
        if parts:
            data = b"".join(parts)
            self._traffic.bytes_sent += len(data)
            self._transport.write(data)
        if self._ready and not self.paused:
            self._flush_soon()
        for channel in touched:
            if channel.closing and channel.empty and not channel.ended:
                self._finish(channel)
            else:
                channel.sent()

    def _gather(self, parts: list[bytes]) -> dict[Channel, None]:
        """Add frames of the channels that are ready; return those channels."""
        touched: dict[Channel, None] = {}
        pieces: list[tuple[int, bytes]] = []
        size = 0
        while self._ready and size < FLUSH_BYTES:
            channel = next(iter(self._ready))
            del self._ready[channel]
            data = channel.take()
            if not channel.number:
                self._number(channel)
            if channel.closing:
                self._lingering -= len(data)
            pieces.append((channel.number, data))
            size += len(data)
            touched[channel] = None
            if channel.sendable:
                self._ready[channel] = None
        if pieces:
            frames = gathered_frames(pieces)
            self._traffic.frames_sent += len(frames)
            parts += frames
        return touched

    def _number(self, channel: Channel) -> None:
        del self._new[channel]
        channel.number = self._next
        self.channels[self._next] = channel
        self._next += 1
