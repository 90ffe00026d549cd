"""A relay for tests: one connection with channels, and native clients on them, whose credit the test controls.

`FakeRelay` is a `FakeTransport` (`peers.py`), so the test controls its transport, or it is a real socket. By default
every channel returns credit for what it reads, as a relay does; one whose `credits` is False reads nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from tests.server.peers import FakeTransport, Listening, NativeCaller

from rallypoint.protocol import channels, native
from rallypoint.protocol.channels import CLOSE, CREDIT, DATA, GATHERED, SHARED, ChannelFrame, ChannelFrames
from rallypoint.protocol.native import Frames, Hello, frame

__all__ = ["ChannelClient", "FakeRelay"]


class ChannelClient(NativeCaller):
    """A client of ours on one channel."""

    def __init__(self, relay: FakeRelay, number: int) -> None:
        self.number = number
        self.session = b""
        self.received = 0
        """How many bytes it has received."""

        self.window = channels.WINDOW
        """How many more bytes the server may send."""

        self.credit = channels.WINDOW
        self.credits = True
        """Whether it returns credit for what it reads."""

        self.closed: str | None = None
        """Why the server closed the channel."""

        self.frames = Frames(1 << 30)
        self.inbox: list[Any] = []
        self._relay = relay

    def says(self, data: bytes) -> None:
        """Send bytes; the server must have granted credit for them."""
        self.credit -= len(data)
        assert self.credit >= 0, "the server has granted no credit"
        self._relay.says(channels.data_frames(self.number, data))

    async def streams(self, data: bytes) -> None:
        """Send bytes as the server grants credit for them."""
        while data:
            if self.credit:
                data, piece = data[self.credit :], data[: self.credit]
                self.says(piece)
            else:
                await self._relay.reads()

    def hello(self, session: bytes = b"", seen: int = 0, **more: Any) -> bytes:
        return frame(Hello(native.VERSION, f"client {self.number}", session, seen, **more))

    async def greets(self, session: bytes = b"", seen: int = 0, **more: Any) -> Any:
        """Send a hello; return the reply."""
        self.says(self.hello(session, seen, **more))
        _, status, answer = await self.reads()
        self.session = answer[2] if not status else b""
        return answer

    async def reads(self) -> Any:
        """Return the next frame received on this channel."""
        while not self.inbox:
            assert self.closed is None, f"channel {self.number} was closed: {self.closed}"
            await self._relay.reads()
        return self.inbox.pop(0)

    async def ends(self) -> str:
        """Return why the server has closed the channel."""
        while self.closed is None:
            await self._relay.reads()
        return self.closed

    def grants(self, size: int) -> None:
        """Let the server send more bytes."""
        self.window += size
        self._relay.says(channels.credit_frame(self.number, size))

    def closes(self) -> None:
        self._relay.says(channels.close_frame(self.number, "done"))

    def takes(self, one: ChannelFrame) -> None:
        """Read a frame of the channel."""
        if one.kind == CREDIT:
            self.credit += one.size
        elif one.kind == CLOSE:
            self.closed = one.body.decode()
        else:
            assert one.kind == DATA and self.closed is None
            self.received += one.size
            self.window -= one.size
            assert self.window >= 0, f"channel {self.number} was sent more than its window allows"
            self.inbox += [msgspec.msgpack.decode(payload) for payload in self.frames.feed(one.body)]
            if self.credits and not self._relay.closing:
                self.grants(one.size)


class FakeRelay(FakeTransport):
    """A connection with channels."""

    def __init__(self, server: Listening | None) -> None:
        self.clients: dict[int, ChannelClient] = {}
        self.order: list[ChannelFrame] = []
        """All frames received, in order; gathered frames are split."""

        self.gathered = 0
        """How many frames carried data for several channels."""

        self.writes = 0
        self._cut = ChannelFrames()
        self._late = b""  # unsent until the server reads
        super().__init__(server)

    async def opens(self) -> FakeRelay:
        self.says(channels.PREFACE)
        assert await self.hears(4) == channels.ACCEPTED
        return self

    def client(self) -> ChannelClient:
        """Return a client on the next channel, which has sent nothing yet."""
        number = len(self.clients) + 1
        self.clients[number] = ChannelClient(self, number)
        return self.clients[number]

    async def greeted(self, session: bytes = b"", **more: Any) -> ChannelClient:
        """Return a client that has a session."""
        client = self.client()
        await client.greets(session, **more)
        assert client.session
        return client

    async def reads(self) -> None:
        """Process the bytes received, or wait for some."""
        while not self.pending:
            assert not self.closing, "disconnected"
            self.changed.clear()
            await self.changed.wait()
        self.drain()

    def drain(self) -> None:
        """Process the bytes received."""
        data, self.pending = self.pending, b""
        self._drained()
        for one in self._cut.feed(data):
            if one.kind == GATHERED:
                self.gathered += 1
                pieces = channels.split_gathered(one.channel, one.body)
                self.order += [ChannelFrame(number, DATA, len(piece), piece) for number, piece in pieces]
            else:
                self.order.append(one)
            if one.kind in (SHARED, GATHERED):
                split = channels.split_shared if one.kind == SHARED else channels.split_gathered
                for number, piece in split(one.channel, one.body):
                    self.clients[number].takes(ChannelFrame(number, DATA, len(piece), piece))
            else:
                self.clients[one.channel].takes(one)

    def says(self, data: bytes) -> None:
        """Send in order, as soon as the server reads."""
        if self.stopped or self._late:
            self._late += data
        else:
            super().says(data)

    # What the server calls

    def write(self, data: Any) -> None:
        self.writes += 1
        super().write(data)

    def resume_reading(self) -> None:
        super().resume_reading()
        if self._late:
            asyncio.get_running_loop().call_soon(self._say_late)

    def _say_late(self) -> None:
        if not self.stopped and not self.closing:
            late, self._late = self._late, b""
            self.says(late)
