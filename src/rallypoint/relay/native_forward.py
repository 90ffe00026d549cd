"""The relay's end of a native client's connection: bytes are forwarded both ways, unparsed, on a channel of its own.

The relay answers the preface itself. From its hello on, the client talks to the server, which keeps its session. On the
port of a round, the relay parses the hello and adds the namespace of that round. Such a client has no other route to
the namespace, so it must not learn the addresses of other servers.

Flow control is end to end. The server gets no credit for bytes that the client's socket does not accept, so a client
that does not read stops only its own channel, after one window. When a channel's window is full, the relay stops
reading from its client. When the channel ends, so does the connection: the client resumes its session, through this
relay or directly. When the client disconnects, its bytes are forwarded, and then the channel is closed.

A client that connects during a server outage is held for a few seconds: the grace period of its session is short, and
if it had to retry, its backoff would add to the relay's. If the servers report that etcd has no quorum, the client
receives that, as from a server.

Rejected: keep a client's connection across a server outage. The relay would have to track which requests were answered,
which is the job of the client's session.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import msgspec

from rallypoint.core.records import ReplyStatus
from rallypoint.protocol import BadMessage
from rallypoint.protocol.channels import WINDOW
from rallypoint.protocol.native import GARBLED, MAX_WHY, Notice, decode_hello, frame, unpack_length
from rallypoint.relay.upstream.channel import UpstreamChannel
from rallypoint.relay.upstream.connection import Upstream
from rallypoint.server.connections.connection import Connection

__all__ = ["NativeForward", "RoundPortName"]

HELLO_BYTES = 64 * 1024
"""Maximum size of a hello; its longest field is a list of former sessions."""

HOLD_S = 5.0
"""How far into a server outage clients are held; then they are disconnected and may connect directly."""


class RoundPortName(NamedTuple):
    """The namespace of the clients of a port."""

    run: str
    scope: int
    number: int | None


class NativeForward:
    """Forwards the bytes of one client, as soon as the relay has a connection to its server."""

    def __init__(self, connection: Connection, upstream: Upstream, round_name: RoundPortName | None = None) -> None:
        self._connection = connection
        self._round_name = round_name
        self._hello = None if round_name is None else bytearray()
        self._upstream = upstream
        self._channel: UpstreamChannel | None = None
        self._early = b""  # bytes received before there was a channel
        self._holding: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes that the client has not read yet
        self.greeted = False
        if upstream.connected:
            self._channel = upstream.open_channel(self)
        else:
            left_s = HOLD_S - (time.monotonic() - upstream.since)
            self._holding = asyncio.get_running_loop().call_later(max(left_s, 0.0), connection.close)
            upstream.on_connected(self._connect)
            upstream.on_trouble(self._send_trouble)

    @property
    def held(self) -> int:
        """Number of bytes from the client that wait to be sent upstream."""
        unsent = len(self._early) if self._channel is None else self._channel.unsent
        return unsent if self._hello is None else unsent + len(self._hello)

    @property
    def blocked(self) -> bool:
        """Whether the server gets no credit until the client reads."""
        return self._unread > 0

    def receive(self, data: bytes) -> bytes:
        """Forward bytes from the client; empty data means that the client has read its replies."""
        channel = self._channel
        if channel is None:
            if self._holding is not None:
                begins = not self._early
                self._early += data
                if begins and self._upstream.trouble:
                    self._send_trouble()
                if len(self._early) >= WINDOW:
                    self._connection.stall()
            return b""
        if not self._connection.paused and self._unread:
            channel.consumed(self._unread)
            self._unread = 0
        if data:
            channel.write(data if self._hello is None else self._with_round(data))
            self.greeted = self.greeted or self._hello is None
            if channel.unsent:
                self._connection.stall()
        return b""

    def _with_round(self, data: bytes) -> bytes:
        """Return the hello with the round added, and the bytes after it; b"" while the hello is incomplete."""
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
        """Open the channel once the server is back, and forward the bytes received meanwhile."""
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

    def _send_trouble(self) -> None:
        """Send a held client that has sent its hello a notice of whether there is a quorum."""
        if self._early:
            self._connection.send(frame((0, ReplyStatus.OK, Notice(trouble=self._upstream.trouble[:MAX_WHY]))))

    def _release(self) -> None:
        """Stop holding the client."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
            self._upstream.forget(self._connect)
            self._upstream.forget_trouble(self._send_trouble)

    def end(self) -> None:
        """Close the channel after the client's last bytes."""
        self._release()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # Called by the channel

    def received(self, data: bytes) -> None:
        """Send the client bytes from the server."""
        self._connection.send(data)
        if self._connection.paused:
            self._unread += len(data)
        elif self._channel is not None:
            self._channel.consumed(len(data))

    def closed(self, why: str) -> None:
        """Disconnect; the client resumes its session here or elsewhere."""
        self._channel = None
        self._connection.close()

    def writable(self) -> None:
        """Resume reading from the client."""
        self._connection.recount()
        self._connection.read_on()
