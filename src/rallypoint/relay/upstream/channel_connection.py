"""The relay's end of one connection with channels: gathers the bytes of many owners into one write per turn.

`protocol/channels.py` has the frames. A channel gets its number with its first bytes, because the server accepts only
increasing numbers. Written bytes are sent at the end of the turn of the event loop, one chunk per channel in turn, as
far as the server's credit and the transport allow; the rest waits in the channels. A peer that violates the rules of
credit is disconnected.

Rejected: a write for each channel. A relay with a thousand clients would make a thousand system calls for one answer.
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
from rallypoint.protocol.challenge import ClientGreeting, Denied
from rallypoint.protocol.channels import (
    ACCEPTED,
    CLOSE,
    CREDIT,
    CREDITS,
    DATA,
    GATHERED,
    SHARED,
    ChannelFrame,
    ChannelFrames,
    close_frame,
    credit_frames,
    gathered_frames,
    split_gathered,
    split_shared,
)
from rallypoint.relay.upstream.channel import ChannelOwner, UpstreamChannel
from rallypoint.relay.upstream.traffic import Traffic

__all__ = ["ChannelConnection"]

FLUSH_BYTES = 512 * 1024
"""Maximum number of bytes written in one turn, to let the transport and other tasks run."""

LINGERING_BYTES = 64 * 1024 * 1024
"""Maximum number of bytes that wait for credit in closed channels; further bytes are discarded."""


class ChannelConnection(asyncio.Protocol):
    """One connection to the server, from its preface on; `lost` is called once, when it has ended."""

    def __init__(self, traffic: Traffic, lost: Callable[[ChannelConnection], None], greeting: ClientGreeting) -> None:
        self._traffic = traffic
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._greeting = greeting
        self.greeted: asyncio.Future[bytes] = self._loop.create_future()
        """The server's answer to the preface; b"" if it closed the connection instead, or the error that ended it."""

        self.why = ""
        """Why the connection has ended."""

        self.paused = False
        """Whether the transport's buffer is full."""

        self.channels: dict[int, UpstreamChannel] = {}
        """The open channels that have a number."""

        self._new: dict[UpstreamChannel, None] = {}  # channels without a number
        self._next = 1
        self._ready: dict[UpstreamChannel, None] = {}  # channels with bytes and credit, in turn
        self._credits: dict[UpstreamChannel, None] = {}
        self._closes: list[bytes] = []
        self._lingering = 0
        self._writers: list[Callable[[], None]] = []
        self._flushing = False
        self._frames = ChannelFrames()
        self._watch: PeerWatch | None = None

    def open(self, owner: ChannelOwner) -> UpstreamChannel:
        """Open a channel."""
        channel = UpstreamChannel(self, owner)
        self._new[channel] = None
        self._traffic.channels_opened += 1
        return channel

    @property
    def count(self) -> int:
        """Number of open channels."""
        return len(self.channels) + len(self._new)

    @property
    def unsent(self) -> int:
        """Number of bytes that wait in closed channels."""
        return self._lingering

    @property
    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._transport.is_closing()

    def abort(self, why: str) -> None:
        """Abort the connection."""
        self.why = self.why or why
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after written bytes are sent, as far as there is credit."""
        self.why = self.why or "the relay closed it"
        if not self._transport.is_closing():
            self._flush()
            self._transport.close()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
            # The ephemeral port was the port to connect to. Close with a reset, to free it for the server.
            with suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.abort("refused, only this socket itself answered")
            return
        self._watch = net.watch(asyncio.get_running_loop(), transport, self._vanished)
        self._transport.write(self._greeting.preface)

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.stop()
        self.why = self.why or (net.why_failed(error) if error else "the server closed it")
        if not self.greeted.done() and error is not None:
            self.greeted.set_exception(error)  # by TLS 1.3, a server refuses a client's certificate only now
            self.greeted.exception()  # nobody may be waiting for it any more
        elif not self.greeted.done():
            self.greeted.set_result(b"")
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
        if not self.greeted.done():
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
            self.abort(f"protocol error by the server: {error}")

    def _greet(self, data: bytes) -> bytes:
        """Process bytes of the answer to the preface; if the server accepted, return the bytes after it."""
        greeting = self._greeting
        try:
            self._transport.write(greeting.feed(data))
        except (BadMessage, Denied) as error:
            self.why = str(error)
            self.greeted.set_exception(error)
            return b""
        if not greeting.answer:
            return b""
        self.greeted.set_result(greeting.answer)
        return greeting.rest if greeting.answer == ACCEPTED else b""

    # Called by channels

    def before_flush(self, write: Callable[[], None]) -> None:
        """Call `write` at the end of this turn of the event loop, before the channels' bytes are sent."""
        self._writers.append(write)
        self._flush_soon()

    def has_bytes(self, channel: UpstreamChannel) -> None:
        """Send a channel's bytes at the end of this turn."""
        if channel.sendable:
            self._ready[channel] = None
            self._flush_soon()

    def owes_credit(self, channel: UpstreamChannel) -> None:
        """Give the server credit at the end of this turn."""
        self._credits[channel] = None
        self._flush_soon()

    def closing(self, channel: UpstreamChannel, waiting: int) -> None:
        """Finish a channel that its owner has closed, after its bytes are sent."""
        if self._lingering + waiting > LINGERING_BYTES:
            channel.drop_unsent()
            waiting = 0
        self._lingering += waiting
        if not waiting:
            self._finish(channel)

    # Inside

    def _vanished(self, silent_s: float) -> None:
        self.abort(f"nothing was received for {silent_s:.1f} s; its host is gone, or the network between")

    def _dispatch(self, frame: ChannelFrame) -> None:
        if frame.kind == SHARED or frame.kind == GATHERED:
            split = split_shared if frame.kind == SHARED else split_gathered
            for number, data in split(frame.channel, frame.body):
                self._dispatch(ChannelFrame(number, DATA, len(data), data))
            return
        if frame.kind == CREDITS:
            raise BadMessage("credit for several channels, which only a relay gives")
        channel = self.channels.get(frame.channel)
        if channel is None:
            if not 0 < frame.channel < self._next:
                raise BadMessage(f"a frame for channel {frame.channel}, which was never opened")
            return  # closed while the frame was in flight
        if frame.kind == DATA:
            channel.feed(frame.body)
        elif frame.kind == CREDIT:
            channel.credited(frame.size)
            self.has_bytes(channel)
        elif frame.kind == CLOSE:
            self._forget(channel)
            channel.end(frame.body.decode("utf-8", "replace"))

    def _finish(self, channel: UpstreamChannel) -> None:
        """Close a channel whose bytes are all sent."""
        if channel.number:
            self._closes.append(close_frame(channel.number))
            self._flush_soon()
        self._forget(channel)
        channel.end("")

    def _forget(self, channel: UpstreamChannel) -> None:
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
        """Write what is ready, one chunk per channel in turn, up to about `FLUSH_BYTES`."""
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

    def _gather(self, parts: list[bytes]) -> dict[UpstreamChannel, None]:
        """Append frames of the ready channels to `parts`; return those channels."""
        touched: dict[UpstreamChannel, None] = {}
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

    def _number(self, channel: UpstreamChannel) -> None:
        del self._new[channel]
        channel.number = self._next
        self.channels[self._next] = channel
        self._next += 1
