"""One connection to a member of etcd, and the calls on it; for asyncio.

If a connection receives nothing during the whole timeout of a call, it is closed as the call fails: after the loss of a
host it would stay open for many minutes. So no pings are needed; etcd disconnects clients that send many. A call with a
very short timeout says nothing about the connection.

The window limits the peer of a stream that is not read. At most one window of messages waits to be read, and after them
a part of the next message. That part alone does not use up the window, or a message larger than the window could never
be completed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from rallypoint import net
from rallypoint.etcd.rpc.http2 import Http2Connection, Http2Event, NotHttp2
from rallypoint.etcd.rpc.status import Code, RpcError

__all__ = ["UnaryCall", "RpcConnection", "RpcStream"]

PING_ACK_S = 0.1
"""How long the acknowledgement of a ping is delayed."""

SILENT_S = 0.25
"""Minimum duration of a call whose timeout counts as a sign of a dead connection."""


class UnaryCall:
    """A call with one answer."""

    __slots__ = ("answer", "began_at", "body", "number", "receives")

    def __init__(self, loop: asyncio.AbstractEventLoop, receives: int) -> None:
        self.number = 0
        self.receives, self.began_at = receives, loop.time()
        self.answer: asyncio.Future[bytes] = loop.create_future()
        self.body: list[bytes] = []

    def take(self, event: Http2Event) -> None:
        """Process a part of the answer, or its end."""
        if event.code is None:
            self.body.append(event.data)
        elif event.code:
            self.fail(RpcError(event.code, event.why))
        elif not self.answer.done():
            body = b"".join(self.body)
            if len(body) < 5 or body[0] or len(body) - 5 != int.from_bytes(body[1:5], "big"):
                self.fail(RpcError(Code.INTERNAL, f"malformed answer of {len(body)} bytes"))
            else:
                self.answer.set_result(body[5:])

    def fail(self, error: RpcError) -> None:
        """End with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class RpcStream:
    """A bidirectional streaming call."""

    def __init__(self, connection: RpcConnection) -> None:
        self.number = 0
        self._connection = connection
        self._buffer = bytearray()
        self._messages: deque[bytes] = deque()
        self._unread = 0  # received bytes for which the peer has no new window yet
        self._error: RpcError | None = None
        self._ended = False
        self._wakeup: asyncio.Future[None] | None = None

    def write(self, message: bytes) -> None:
        """Send a message; do nothing if the stream has ended, which `read` reports."""
        self._connection.send(self.number, message)

    async def read(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None when there are no more.

        Raises RpcError if the call has failed, and asyncio.TimeoutError if no message arrives in time.
        """
        if not self._messages and self._error is None and not self._ended:
            loop = asyncio.get_running_loop()
            self._wakeup = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._wakeup
            finally:
                timer.cancel()
        if not self._messages:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            raise asyncio.TimeoutError
        message = self._messages.popleft()
        self._renew()
        return message

    def cancel(self) -> None:
        """Cancel the call."""
        self._connection.leave(self)

    def take(self, event: Http2Event) -> None:
        """Process bytes of messages, or the end."""
        if event.code is None:
            self._buffer += event.data
            self._unread += len(event.data)
            self._split()
            self._renew()
        elif event.code:
            self.fail(RpcError(event.code, event.why))
        elif self._buffer:
            self.fail(RpcError(Code.INTERNAL, "malformed answer: it ends within a message"))
        else:
            self._ended = True
            self._wake()

    def fail(self, error: RpcError) -> None:
        """End with an error."""
        self._error = self._error or error
        self._wake()

    def _split(self) -> None:
        buffer = self._buffer
        while len(buffer) >= 5:
            end = 5 + int.from_bytes(buffer[1:5], "big")
            if buffer[0]:
                self.fail(RpcError(Code.INTERNAL, "malformed answer: a compressed message"))
            if buffer[0] or len(buffer) < end:
                return
            self._messages.append(bytes(buffer[5:end]))
            del buffer[:end]
            self._wake()

    def _renew(self) -> None:
        """Widen the peer's window, unless a message waits to be read."""
        if not self._messages:
            self._connection.consumed(self.number, self._unread)
            self._unread = 0

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class RpcConnection(asyncio.Protocol):
    """A socket, its HTTP/2 state, and the unanswered calls."""

    def __init__(self) -> None:
        self._http2 = Http2Connection()
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, UnaryCall | RpcStream] = {}
        self._transport: Any = None
        self._failure: RpcError | None = None
        self._receives = 0  # number of receives
        self._ping_timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """Whether the connection has ended, and all calls with it."""
        return self._failure is not None

    @property
    def usable(self) -> bool:
        """Whether new calls can be made."""
        return self._failure is None and not self._http2.draining

    def alpn(self) -> str:
        """Return the protocol negotiated under TLS."""
        return str(self._transport.get_extra_info("ssl_object").selected_alpn_protocol())

    def call(self, block: bytes, request: bytes) -> UnaryCall:
        """Begin a unary call."""
        call = UnaryCall(self._loop, self._receives)
        self._begin(call, self._http2.open(block, request))
        return call

    def stream(self, block: bytes, request: bytes) -> RpcStream:
        """Begin a bidirectional streaming call."""
        stream = RpcStream(self)
        self._begin(stream, self._http2.open(block, request, end_stream=False, manual_window=True))
        return stream

    def _begin(self, call: UnaryCall | RpcStream, number: int) -> None:
        call.number = number
        self._calls[number] = call
        if self._failure is not None:
            call.fail(self._failure)
        self._flush()

    def send(self, number: int, message: bytes) -> None:
        """Send a further message on a stream."""
        self._http2.send(number, message)
        self._flush()

    def consumed(self, number: int, size: int) -> None:
        """Renew the peer's window of a stream by the bytes read from it."""
        self._http2.consumed(number, size)
        self._flush()

    def leave(self, call: UnaryCall | RpcStream) -> None:
        """Forget a call; cancel it if it has not ended."""
        if self._calls.pop(call.number, None) is not None:
            self._http2.reset(call.number)
            self._flush()
            self._end_if_drained()

    def expire(self, call: UnaryCall) -> None:
        """Fail a call at its timeout, and the connection with it if nothing was received since the call began."""
        error = RpcError(Code.DEADLINE_EXCEEDED, "no answer in time")
        call.fail(error)
        if call.receives == self._receives and self._loop.time() - call.began_at >= SILENT_S:
            self.give_up(RpcError(Code.UNAVAILABLE, "the connection is silent"))

    def give_up(self, error: RpcError) -> None:
        """Abort the connection and fail all of its calls."""
        if self._failure is None:
            self._failure = error
            for call in self._calls.values():
                call.fail(error)
            if self._transport is not None:
                self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._receives += 1
        if self._failure is not None:
            return
        try:
            events = self._http2.receive(data)
        except NotHttp2 as error:
            self.give_up(RpcError(Code.UNAVAILABLE, str(error)))
            return
        calls = self._calls
        for event in events:
            call = calls.get(event.stream)
            if call is not None:
                if event.code is not None:
                    del calls[event.stream]
                call.take(event)
        self._flush()
        self._end_if_drained()
        if self._http2.pinged and self._ping_timer is None:
            self._ping_timer = self._loop.call_later(PING_ACK_S, self._answer_pings)

    def _answer_pings(self) -> None:
        self._ping_timer = None
        self._http2.answer_pings()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        why = "it closed the connection" if error is None else net.why_failed(error)
        self.give_up(RpcError(Code.UNAVAILABLE, why))

    def _end_if_drained(self) -> None:
        if self._http2.draining and not self._calls and self._failure is None:
            self.give_up(RpcError(Code.UNAVAILABLE, "the member closed the connection"))

    def _flush(self) -> None:
        output = self._http2.take_output()
        if output and self._failure is None and self._transport is not None:
            self._transport.write(output)
