"""The server's end of a connection with channels, as relays use: each channel carries the bytes of one session.

`protocol/channels.py` has the frames, `channel.py` one channel. All that the channels send in one turn of the event
loop goes out in one write. Channels with more to send, or with waiting requests, are scheduled round-robin: each sends
one frame, or executes some requests, and goes to the back of its queue. So a large reply delays a small one by one
frame at most, and a long backlog delays no other channel. All channels wait only while the peer does not read the
connection itself.

A protocol error on a channel closes that channel; one on the connection (an overrun window, a frame of an unknown kind)
drops the connection. Sessions outlive both by their grace period.

Rejected: not reading the connection while one channel is blocked, as for a connection of one session. The other
clients of the relay would wait for the slowest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING

from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import (
    CREDIT,
    CREDITS,
    DATA,
    GATHERED,
    SHARED,
    ChannelFrame,
    ChannelFrames,
    close_frame,
    gathered_frames,
    reply_frames,
    split_credits,
    split_gathered,
)
from rallypoint.protocol.native import SharedReply
from rallypoint.server.connections.arrivals import Arrivals, add, carry_out
from rallypoint.server.connections.channel import ServerChannel, end_channels
from rallypoint.server.connections.hello_timeouts import HelloTimeouts

if TYPE_CHECKING:
    from rallypoint.server.connections.connection import Connection
    from rallypoint.server.connections.limits import ConnectionMemory
    from rallypoint.server.connections.native_connection import NativeConnection
    from rallypoint.server.connections.store_access import StoreAccess

__all__ = ["MAX_CHANNELS", "MultiplexedConnection"]

MAX_CHANNELS = 16_384
"""Maximum number of open channels per connection."""

WRITE_BYTES = 256 * 1024
"""Approximate number of bytes written in one turn of the event loop."""

RUNS = 64
"""Maximum number of blocked channels resumed in one turn of the event loop."""

CHECKED = 15
"""Mask: after every sixteenth message of a frame, check whether the rest must wait for a later turn."""

SHOWN = 100
"""Number of awaited keys listed in the statistics."""


class MultiplexedConnection:
    """One peer's connection, after the preface of channels."""

    def __init__(self, server: StoreAccess, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self.log_error = connection.log_error
        self._frames = ChannelFrames()
        self._channels: dict[int, ServerChannel] = {}
        self._last = 0  # the highest channel number so far
        self._held = 0
        self._pieces: list[tuple[int, bytes]] = []  # data to send at the end of this turn, by channel
        self._out: list[bytes] = []  # frames to send then
        self._last_out: list[bytes] = []  # frames to send last: credit, and closed channels
        self._out_bytes = 0
        self._shared: list[tuple[bytes, list[tuple[int, bytes]]]] = []  # shared bodies: channels and heads of each
        self._sharing: dict[int, list[tuple[int, bytes]]] = {}  # the same lists, by the id() of the body
        self._sending: deque[ServerChannel] = deque()
        self._running: deque[ServerChannel] = deque()
        self._busy = False  # whether `_collect` is about to be called
        self._scheduled = False
        self._resuming = False  # whether blocked channels are about to be resumed
        self._turns = server.turns
        self._hello_timeouts = HelloTimeouts(server.settings.greeting_s)
        self.greeted = True
        """Whether the peer has completed its greeting: for this protocol, the preface."""

    @property
    def more_facts(self) -> dict[str, int]:
        """Additional facts for the statistics."""
        return {"channels": len(self._channels)}

    @property
    def held(self) -> int:
        """Bytes held for all channels, in both directions."""
        return self._held + self._frames.held

    @property
    def blocked(self) -> bool:
        """Whether data or requests wait for the peer to read; while it reads, they are scheduled instead."""
        return not (self._scheduled or self._resuming) and bool(
            self._pieces or self._last_out or self._shared or self._sending or self._running
        )

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The first `SHOWN` keys that requests on all channels wait for."""
        waits = (channel.handler.waits_for for channel in self._channels.values())
        return tuple(islice(chain.from_iterable(waits), SHOWN))

    @property
    def handlers(self) -> list[NativeConnection]:
        """The handlers of all channels."""
        return [channel.handler for channel in self._channels.values()]

    def receive(self, data: bytes) -> bytes:
        """Execute the requests in the data; return the data to send. Unusable after it raised BadMessage."""
        self._busy = True
        try:
            channel = self._channels.get(self._frames.sole(data))
            if channel is not None:
                channel.receive(data[8:])
            else:
                later = False
                for count, frame in enumerate(self._frames.feed(data), 1):
                    if not (count & CHECKED or later):
                        later = self._turns.spent()
                    self._take(frame, later)
            if self._running:
                self._run_some()
        finally:
            self._busy = False
        return self._collect()

    def end(self) -> None:
        """Release a closed connection and all its channels."""
        self._hello_timeouts.clear()
        gone, self._channels = list(self._channels.values()), {}
        self._turns.run(end_channels(gone))

    # Called by channels

    @property
    def paused(self) -> bool:
        """Whether the peer must read before more is written."""
        return self._connection.paused

    @property
    def closing(self) -> bool:
        """Whether the connection is closed or closing: data sent now is lost."""
        return self._connection.closing

    @property
    def memory(self) -> ConnectionMemory:
        """The bytes held for all connections."""
        return self._connection.memory

    @property
    def has_room(self) -> bool:
        """Whether a frame may go out in this turn, without queueing."""
        return self._out_bytes < WRITE_BYTES and not self._connection.paused

    def who(self) -> str:
        """Return the peer's address."""
        return self._connection.who()

    def put(self, frame: bytes) -> None:
        """Send a frame at the end of this turn, after the data of channels."""
        self._last_out.append(frame)
        if not self._busy:
            self._schedule()

    def put_piece(self, number: int, data: bytes) -> None:
        """Send data of a channel at the end of this turn, together with that of other channels."""
        self._pieces.append((number, data))
        self._out_bytes += len(data)
        if not self._busy:
            self._schedule()

    def put_shared(self, number: int, reply: SharedReply) -> None:
        """Send a reply at the end of this turn, together with replies to other channels with the same body."""
        heads = self._sharing.get(id(reply.body))
        if heads is None:
            self._sharing[id(reply.body)] = heads = []
            self._shared.append((reply.body, heads))
            self._out_bytes += len(reply.body)
        heads.append((number, reply.head))
        if not self._busy:
            self._schedule()

    def line_up_to_send(self, channel: ServerChannel) -> None:
        """Queue a channel that has data to send."""
        if not channel.sends:
            channel.sends = True
            self._sending.append(channel)
            self._schedule()

    def line_up_to_run(self, channel: ServerChannel) -> None:
        """Queue a channel that has requests to execute."""
        if not channel.runs:
            channel.runs = True
            self._running.append(channel)
            self._schedule_runs()

    def closed(self, channel: ServerChannel, why: str) -> None:
        """Forget a channel, and tell the peer why it was closed."""
        if self._forget(channel.number) is not None:
            self.put(close_frame(channel.number, why))

    def count(self, grown: int) -> None:
        """Record by how much the bytes held for a channel grew (negative: shrank)."""
        self._held += grown
        if not self._busy:  # otherwise the connection counts afterwards
            self._connection.recount()

    # Private

    def _take(self, frame: ChannelFrame, later: bool) -> None:
        number, kind, size, body = frame
        if kind == GATHERED:
            self._take_gathered(split_gathered(number, body))
            return
        if kind == CREDITS:
            for credited, more in split_credits(number, body):
                if credited in self._channels:
                    self._channels[credited].add_credit(more)
            return
        if kind == SHARED:
            raise BadMessage("a shared frame, which only servers send")
        channel = self._channels.get(number)
        if kind == DATA:
            if channel is None:
                channel = self._open(number)
            if channel is not None and body:
                channel.receive(body, later)
        elif channel is None:
            return  # closed, and the peer did not know yet
        elif kind == CREDIT:
            channel.add_credit(size)
        else:
            self._forget(number)
            channel.end()

    def _take_gathered(self, pieces: list[tuple[int, bytes]]) -> None:
        """Process data of several channels; execute the arrivals at shared objects among it together."""
        arrivals: Arrivals = {}
        channels = self._channels
        once = len(dict(pieces)) == len(pieces) and not self.paused
        later = False
        for count, (number, data) in enumerate(pieces, 1):
            if not (count & CHECKED or later):
                later = self._turns.spent()
            channel = channels.get(number) or self._open(number)
            op = channel.arrival(data) if channel is not None and once and not later else None
            if op is not None and channel is not None:
                add(arrivals, channel.handler, op, len(data))
            elif channel is not None and data:
                channel.receive(data, later)
        carry_out(self._server, arrivals)

    def _open(self, number: int) -> ServerChannel | None:
        """Open a channel; return None if it was closed before, or is over the limit."""
        if not number:
            raise BadMessage("data for channel 0; channel numbers start at 1")
        if number <= self._last:
            return None
        self._last = number
        if len(self._channels) >= MAX_CHANNELS:
            self.put(close_frame(number, f"too many channels: {MAX_CHANNELS} is the limit per connection"))
            return None
        channel = self._channels[number] = ServerChannel(self._server, self, number)
        self._hello_timeouts.add(channel)
        return channel

    def _forget(self, number: int) -> ServerChannel | None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            self._hello_timeouts.remove(channel)
        return channel

    # Turns

    def _schedule(self) -> None:
        """Schedule `_run_turn`; while the peer does not read, `blocked` leads to a call of `receive` instead."""
        if not (self._busy or self._scheduled or self._connection.paused):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _schedule_runs(self) -> None:
        """Schedule `_resume`; while the peer does not read, `blocked` leads to a call of `receive` instead."""
        if not (self._busy or self._resuming or self._connection.paused):
            self._resuming = True
            self._turns.resume(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        connection = self._connection
        if connection.paused or connection.closing:
            return
        self._busy = True
        try:
            self._run_some()
        finally:
            self._busy = False
        self._send()

    def _run_turn(self) -> None:
        self._scheduled = False
        if not (self._connection.paused or self._connection.closing):
            self._send()

    def _send(self) -> None:
        connection = self._connection
        data = self._collect()
        if data:
            connection.send(data)
        connection.recount()

    def _run_some(self) -> None:
        """Resume blocked channels, each once."""
        running = self._running
        for count in range(min(len(running), RUNS)):
            if not self.has_room or (count and self._turns.spent()):
                return
            channel = running.popleft()
            channel.runs = False
            channel.run()

    def _collect(self) -> bytes:
        """Return the data to send now: everything that was put, and frames of the queued channels, round-robin."""
        if self._pieces:
            self._out += gathered_frames(self._pieces)
            self._pieces.clear()
        if self._shared:
            for body, heads in self._shared:
                self._out += reply_frames(heads, body)
            self._shared.clear()
            self._sharing.clear()
        if self._sending:
            self._busy = True
            while self._sending and self.has_room:
                channel = self._sending.popleft()
                channel.sends = False
                self._out_bytes += channel.take(self._out)
            self._busy = False
        out, self._out_bytes = self._out, 0
        if self._last_out:
            out += self._last_out
            self._last_out.clear()
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if self._sending:
            self._schedule()
        if self._running:
            self._schedule_runs()
        return data
