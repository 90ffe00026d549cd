"""The server's end of a connection with channels, as a relay has: each carries the bytes of one session.

`protocol/channels.py` has the frames, `channel.py` one channel. What all channels have to send within a turn of the
event loop goes out as one write. Channels that have more to send, or requests that wait, stand in line: each sends a
frame, or carries out some requests, and goes to the end. So a large answer holds up a small one by a frame, and a long
backlog nobody at all. Only while the peer does not read the connection itself do all channels wait.

What a peer does wrong on one channel closes that channel; what it does wrong on the connection (a window that it
overruns, a frame of an unknown kind) ends the connection. Sessions outlive both by their grace.

Rejected: to stop reading the connection while one channel is blocked, as for a connection of one session: a relay's
other clients would wait for the slowest.
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
    ChannelFrames,
    Frame,
    close_frame,
    gathered_frames,
    reply_frames,
    split_credits,
    split_gathered,
)
from rallypoint.protocol.native import SharedReply
from rallypoint.server.arrivals import Arrivals, add, carry_out
from rallypoint.server.channel import Channel, end_channels
from rallypoint.server.newcomers import Newcomers

if TYPE_CHECKING:
    from rallypoint.server.connection import Connection
    from rallypoint.server.native_connection import NativeConnection
    from rallypoint.server.server import StoreServer

__all__ = ["MAX_CHANNELS", "MultiplexedConnection"]

MAX_CHANNELS = 16_384
"""How many channels one connection may have open."""

WRITE_BYTES = 256 * 1024
"""How much of what waits is written in one turn of the event loop."""

RUNS = 64
"""How many channels that were blocked go on in one turn of the event loop."""

SHOWN = 100
"""How many keys that the channels wait for the statistics name."""


class MultiplexedConnection:
    """One peer's connection, behind the preface of channels."""

    def __init__(self, server: StoreServer, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._frames = ChannelFrames()
        self._channels: dict[int, Channel] = {}
        self._last = 0  # the highest number that a channel has had
        self._held = 0
        self._pieces: list[tuple[int, bytes]] = []  # what goes out at the end of this turn, by channel
        self._out: list[bytes] = []  # frames that do
        self._last_out: list[bytes] = []  # those of them that come last: credit, and what closes channels
        self._out_bytes = 0
        self._shared: list[tuple[bytes, list[tuple[int, bytes]]]] = []  # bodies, and who gets each behind which head
        self._sharing: dict[int, list[tuple[int, bytes]]] = {}  # the same heads, by the identity of the body
        self._sending: deque[Channel] = deque()
        self._running: deque[Channel] = deque()
        self._busy = False  # whether `_collect` is about to be called
        self._scheduled = False
        self._newcomers = Newcomers(server.settings.greeting_s)
        self.greeted = True
        """Whether the peer has done what this protocol begins with: the preface is all."""

    @property
    def more_facts(self) -> dict[str, int]:
        """What the statistics say of this connection beside what they say of all."""
        return {"channels": len(self._channels)}

    @property
    def held(self) -> int:
        """How many bytes are held for all channels, in both directions."""
        return self._held + self._frames.held

    @property
    def blocked(self) -> bool:
        """Whether something waits for the peer to read; where it does read, that has its turn without being called."""
        return not self._scheduled and bool(
            self._pieces or self._last_out or self._shared or self._sending or self._running
        )

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The first of the keys that requests on all channels wait for."""
        waits = (channel.handler.waits_for for channel in self._channels.values())
        return tuple(islice(chain.from_iterable(waits), SHOWN))

    @property
    def handlers(self) -> list[NativeConnection]:
        """The handlers of all channels."""
        return [channel.handler for channel in self._channels.values()]

    def receive(self, data: bytes) -> bytes:
        """Carry out the requests in what came; return what is to be sent. Raises BadMessage, and is invalid after."""
        self._busy = True
        try:
            channel = self._channels.get(self._frames.sole(data))
            if channel is not None:
                channel.receive(data[8:])
            else:
                for frame in self._frames.feed(data):
                    self._take(frame)
            if self._running:
                self._run_some()
        finally:
            self._busy = False
        return self._collect()

    def end(self) -> None:
        """Note that the connection is gone, and with it all channels."""
        self._newcomers.clear()
        gone, self._channels = list(self._channels.values()), {}
        end_channels(gone)

    # What channels call

    @property
    def paused(self) -> bool:
        """Whether the peer has to read before more is written for it."""
        return self._connection.paused

    @property
    def closing(self) -> bool:
        """Whether what is sent now reaches nobody."""
        return self._connection.closing

    @property
    def has_room(self) -> bool:
        """Whether a frame may go out with this turn's, without standing in line."""
        return self._out_bytes < WRITE_BYTES and not self._connection.paused

    def who(self) -> str:
        """Return the peer's address."""
        return self._connection.who()

    def put(self, frame: bytes) -> None:
        """Send a frame at the end of this turn, behind what channels have."""
        self._last_out.append(frame)
        if not self._busy:
            self._schedule()

    def put_piece(self, number: int, data: bytes) -> None:
        """Send bytes of a channel at the end of this turn, together with those of other channels."""
        self._pieces.append((number, data))
        self._out_bytes += len(data)
        if not self._busy:
            self._schedule()

    def put_shared(self, number: int, reply: SharedReply) -> None:
        """Send a reply at the end of this turn, together with those to other channels that have the same body."""
        heads = self._sharing.get(id(reply.body))
        if heads is None:
            self._sharing[id(reply.body)] = heads = []
            self._shared.append((reply.body, heads))
            self._out_bytes += len(reply.body)
        heads.append((number, reply.head))
        if not self._busy:
            self._schedule()

    def line_up_to_send(self, channel: Channel) -> None:
        """Let a channel send when its turn comes."""
        if not channel.sends:
            channel.sends = True
            self._sending.append(channel)
            self._schedule()

    def line_up_to_run(self, channel: Channel) -> None:
        """Let a channel carry out what waits when its turn comes."""
        if not channel.runs:
            channel.runs = True
            self._running.append(channel)
            self._schedule()

    def closed(self, channel: Channel, why: str) -> None:
        """Forget a channel, and tell the peer why."""
        if self._forget(channel.number) is not None:
            self.put(close_frame(channel.number, why))

    def count(self, grown: int) -> None:
        """Note that more is held for a channel, or less."""
        self._held += grown
        if not self._busy:  # else the connection counts when it is done
            self._connection.recount()

    # Inside

    def _take(self, frame: Frame) -> None:
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
            raise BadMessage("a shared frame, which only a server sends")
        channel = self._channels.get(number)
        if kind == DATA:
            if channel is None:
                channel = self._open(number)
            if channel is not None and body:
                channel.receive(body)
        elif channel is None:
            return  # it was closed, and the peer did not know yet
        elif kind == CREDIT:
            channel.add_credit(size)
        else:
            self._forget(number)
            channel.end()

    def _take_gathered(self, pieces: list[tuple[int, bytes]]) -> None:
        """Take bytes of several channels; arrivals at shared objects among them are carried out together."""
        arrivals: Arrivals = {}
        channels = self._channels
        once = len(dict(pieces)) == len(pieces) and not self.paused
        for number, data in pieces:
            channel = channels.get(number) or self._open(number)
            op = channel.arrival(data) if channel is not None and once else None
            if op is not None and channel is not None:
                add(arrivals, channel.handler, op, len(data))
            elif channel is not None and data:
                channel.receive(data)
        carry_out(self._server, arrivals)

    def _open(self, number: int) -> Channel | None:
        """Open a channel; return None for one that was closed before, or must be now."""
        if not number:
            raise BadMessage("data for channel 0, and channels count from 1")
        if number <= self._last:
            return None
        self._last = number
        if len(self._channels) >= MAX_CHANNELS:
            self.put(close_frame(number, f"too many channels: {MAX_CHANNELS} is the limit of one connection"))
            return None
        channel = self._channels[number] = Channel(self._server, self, number)
        self._newcomers.add(channel)
        return channel

    def _forget(self, number: int) -> Channel | None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            self._newcomers.remove(channel)
        return channel

    # Turns

    def _schedule(self) -> None:
        """Have a turn of our own; while the peer does not read, `blocked` brings one."""
        if not (self._busy or self._scheduled or self._connection.paused):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._have_turn)

    def _have_turn(self) -> None:
        self._scheduled = False
        connection = self._connection
        if connection.paused or connection.closing:
            return
        self._busy = True
        try:
            self._run_some()
        finally:
            self._busy = False
        data = self._collect()
        if data:
            connection.send(data)
        connection.recount()

    def _run_some(self) -> None:
        """Let channels that were blocked go on, each once."""
        running = self._running
        for _ in range(min(len(running), RUNS)):
            if not self.has_room:
                return
            channel = running.popleft()
            channel.runs = False
            channel.run()

    def _collect(self) -> bytes:
        """Return what goes out now: what was put, and a frame of each channel in line, round after round."""
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
        if self._sending or self._running:
            self._schedule()
        return data
