"""The relay's end of a native client's connection: its bytes pass both ways unread, on a channel of its own.

The relay has answered the preface itself; from its hello on, the client talks to the server, which keeps its session.
On the port of a round, the relay reads the hello, and adds the namespace of that round. Such a client knows no other
way to that namespace, and must not be told of servers that it could go to instead.

Flow control is end to end. A client that does not read stops its own channel after a window, for the server gets no
credit for what its socket does not take. A channel whose window is full stops the reading from that client. When the
channel ends, so does the connection: the client resumes its session, by this relay or directly. When the client hangs
up, what it sent is passed on, and then the channel is closed.

A client that comes while the server is away is held for a while: it is back as a rule before the client's own pauses,
on top of the relay's, would have let it come again, and the grace of its session is short. Where the servers say that
etcd has no quorum, it is told so, as a server would.

Rejected: to keep a client's connection over an outage of the server. The relay would have to know which of its
requests were answered, which is what the client's own session is for.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import msgspec

from rallypoint.core.records import Status
from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import WINDOW
from rallypoint.protocol.native import GARBLED, MAX_WHY, Notice, decode_hello, frame, unpack_length
from rallypoint.relay.channel import Channel
from rallypoint.relay.upstream import Upstream
from rallypoint.server.connection import Connection

__all__ = ["NativeForward", "RoundName"]

HELLO_BYTES = 64 * 1024
"""The longest hello that is read; its longest field is a list of former sessions."""


HOLD_S = 5.0
"""For how long of the server's absence clients are held; then they are hung up on, and may go to it directly."""


class RoundName(NamedTuple):
    """Which namespace the clients of a port are to have."""

    run: str
    scope: int
    number: int | None


class NativeForward:
    """Passes the bytes of one client on, as soon as the relay has a connection to its server."""

    def __init__(self, connection: Connection, upstream: Upstream, round_name: RoundName | None = None) -> None:
        self._connection = connection
        self._round_name = round_name
        self._hello = None if round_name is None else bytearray()
        self._upstream = upstream
        self._channel: Channel | None = None
        self._early = b""  # what came before there was a channel
        self._holding: asyncio.TimerHandle | None = None
        self._owed = 0  # bytes that the client has yet to take
        self.greeted = False
        if upstream.connected:
            self._channel = upstream.open_channel(self)
        else:
            left_s = HOLD_S - (time.monotonic() - upstream.since)
            self._holding = asyncio.get_running_loop().call_later(max(left_s, 0.0), connection.close)
            upstream.on_connected(self._connect)
            upstream.on_trouble(self._tell)

    @property
    def held(self) -> int:
        """How many bytes of the client wait to be sent upstream."""
        unsent = len(self._early) if self._channel is None else self._channel.unsent
        return unsent if self._hello is None else unsent + len(self._hello)

    @property
    def blocked(self) -> bool:
        """Whether the server has no credit for what the client has to take first."""
        return self._owed > 0

    def receive(self, data: bytes) -> bytes:
        """Pass on what came from the client; without anything, note that it has taken what was sent."""
        channel = self._channel
        if channel is None:
            if self._holding is not None:
                begins = not self._early
                self._early += data
                if begins and self._upstream.trouble:
                    self._tell()
                if len(self._early) >= WINDOW:
                    self._connection.stall()
            return b""
        if not self._connection.paused and self._owed:
            channel.consumed(self._owed)
            self._owed = 0
        if data:
            channel.write(data if self._hello is None else self._with_round(data))
            self.greeted = self.greeted or self._hello is None
            if channel.unsent:
                self._connection.stall()
        return b""

    def _with_round(self, data: bytes) -> bytes:
        """Return the hello with the name of the round in it, and what came behind it; nothing before it is whole."""
        assert self._hello is not None and self._round_name is not None
        self._hello += data
        size = unpack_length(self._hello)[0] if len(self._hello) >= 4 else 0
        if size > HELLO_BYTES:
            raise BadMessage(f"a greeting of {size} bytes, the limit is {HELLO_BYTES}")
        if not size or len(self._hello) < 4 + size:
            return b""
        payload, rest = bytes(self._hello[4 : 4 + size]), bytes(self._hello[4 + size :])
        try:
            hello = decode_hello(payload)
        except GARBLED as error:
            raise BadMessage(f"not a greeting: {error}") from None
        run, scope, number = self._round_name
        if hello.run and (hello.run, hello.scope) != (run, scope):
            raise BadMessage(f"a greeting for round {hello.scope} of {hello.run!r}, at the port of another")
        self._hello = None
        return frame(msgspec.structs.replace(hello, run=run, scope=scope, round=number, one_port=True)) + rest

    def _connect(self) -> None:
        """Open the channel, for the server is back, and pass on what came meanwhile."""
        self._release()
        self._channel = self._upstream.open_channel(self)
        early, self._early = self._early, b""
        try:
            self.receive(early)
        except BadMessage as error:
            self._connection.drop(str(error))
        else:
            if not self._channel.unsent:
                self._connection.read_on()

    def _tell(self) -> None:
        """Tell a client that has said hello, and is held, whether there is no quorum."""
        if self._early:
            self._connection.send(frame((0, Status.OK, Notice(trouble=self._upstream.trouble[:MAX_WHY]))))

    def _release(self) -> None:
        """Hold the client no longer."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
            self._upstream.forget(self._connect)
            self._upstream.forget_trouble(self._tell)

    def end(self) -> None:
        """Close the channel behind what the client sent."""
        self._release()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # What the channel calls

    def received(self, data: bytes) -> None:
        """Send the client what came from the server."""
        self._connection.send(data)
        if self._connection.paused:
            self._owed += len(data)
        elif self._channel is not None:
            self._channel.consumed(len(data))

    def closed(self, why: str) -> None:
        """Hang up: the client's session goes on elsewhere, or here."""
        self._channel = None
        self._connection.close()

    def writable(self) -> None:
        """Read from the client again."""
        self._connection.recount()
        self._connection.read_on()
