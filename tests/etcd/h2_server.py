"""Servers of HTTP/2 and gRPC for tests of our client, based on the library h2, so that no code is shared.

`Peer` is the server's end of one connection without sockets; `exchange` carries bytes between it and a client until
both are idle. `RpcServer` is the same on a real socket: it records every request, and the test answers it.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame

from rallypoint import net
from rallypoint.etcd.rpc import http2

HEADERS = [(":status", "200"), ("content-type", "application/grpc")]


def message(body: bytes) -> bytes:
    """Return a message as gRPC frames it."""
    return struct.pack(">BI", 0, len(body)) + body


def trailers(code: int, why: str = "") -> list[tuple[str, str]]:
    """Return the headers that end a call."""
    return [("grpc-status", str(code)), *([("grpc-message", quote(why))] if why else [])]


class Peer:
    """The server's end of one connection; with `reads`, it renews its windows as bytes come."""

    def __init__(self, window: int = 65_535, reads: bool = True) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.local_settings = Settings(client=False, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.h2.initiate_connection()
        self.reads = reads
        self.events: list[Event] = []
        self.paths: dict[int, str] = {}
        self.received: defaultdict[int, bytearray] = defaultdict(bytearray)
        self.sent: defaultdict[int, int] = defaultdict(int)
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self.padding: int | None = None
        self._unread: defaultdict[int, int] = defaultdict(int)
        self._unsent: dict[int, bytearray] = {}
        self._ends: dict[int, list[tuple[str, str]]] = {}
        self._raw = b""

    def receive(self, data: bytes) -> None:
        """Take bytes from the client."""
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if isinstance(event, RequestReceived):
                headers: dict[Any, Any] = dict(event.headers)  # text, because of header_encoding
                self.paths[event.stream_id] = headers[":path"]
            elif isinstance(event, DataReceived):
                self.received[event.stream_id] += event.data
                self._unread[event.stream_id] += event.flow_controlled_length
            elif isinstance(event, StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset.add(event.stream_id)
                self._unsent.pop(event.stream_id, None)
        if self.reads:
            self.read()
        self._pump()

    def read(self) -> None:
        """Renew the windows of all streams."""
        for stream, size in self._unread.items():
            self.h2.acknowledge_received_data(size, stream)
        self._unread.clear()

    def messages(self, stream: int) -> Iterator[bytes]:
        """Yield the complete messages of a request, and remove them."""
        data = self.received[stream]
        while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5], "big")):
            yield bytes(data[5:end])
            del data[:end]

    def begin(self, stream: int) -> None:
        """Send the headers of an answer."""
        self.h2.send_headers(stream, HEADERS)

    def send(self, stream: int, data: bytes) -> None:
        """Send bytes of an answer, as far as the windows allow."""
        self._unsent.setdefault(stream, bytearray()).extend(data)
        self._pump()

    def end(self, stream: int, code: int = 0, why: str = "") -> None:
        """End an answer, once all of it is sent."""
        self._unsent.setdefault(stream, bytearray())
        self._ends[stream] = trailers(code, why)
        self._pump()

    def answer(self, stream: int, body: bytes, code: int = 0, why: str = "") -> None:
        """Send a whole answer."""
        self.begin(stream)
        self.send(stream, message(body))
        self.end(stream, code, why)

    def send_frames(self, *frames: Frame | bytes) -> None:
        """Send frames that bypass h2."""
        self._raw += self.h2.data_to_send() + serialized(*frames)

    def take_output(self) -> bytes:
        """Return the bytes to send."""
        raw, self._raw = self._raw, b""
        return raw + self.h2.data_to_send()

    @property
    def held_back(self) -> bool:
        """Whether the client's windows hold back bytes."""
        return any(self._unsent.values())

    def _pump(self) -> None:
        for stream, unsent in list(self._unsent.items()):
            extra = 0 if self.padding is None else self.padding + 1
            while unsent and (room := self._room(stream) - extra) > 0:
                piece = bytes(unsent[:room])
                del unsent[: len(piece)]
                self.h2.send_data(stream, piece, pad_length=self.padding)
                self.sent[stream] += len(piece)
            if not unsent and stream in self._ends:
                del self._unsent[stream]
                self.h2.send_headers(stream, self._ends.pop(stream), end_stream=True)

    def _room(self, stream: int) -> int:
        return min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)


def serialized(*frames: Frame | bytes) -> bytes:
    """Return frames as bytes."""
    return b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames)


def goaway(last: int, code: int = 0, why: bytes = b"") -> Frame:
    """Return a GOAWAY frame: the server serves only streams up to `last`."""
    return GoAwayFrame(0, last_stream_id=last, error_code=code, additional_data=why)


def exchange(client: http2.Http2Connection, peer: Peer, step: int = 0) -> list[http2.Http2Event]:
    """Carry bytes both ways until there are no more, to the client in pieces of `step` bytes; return its events."""
    events: list[http2.Http2Event] = []
    while True:
        sent = client.take_output()
        if sent:
            peer.receive(sent)
        got = peer.take_output()
        if not sent and not got:
            return events
        size = step or len(got) or 1
        for at in range(0, len(got), size):
            events += client.receive(got[at : at + size])


class Request(NamedTuple):
    """One message of a client, and the way to answer it."""

    connection: ServedConnection
    stream: int
    path: str
    body: bytes

    def answer(self, body: bytes, code: int = 0, why: str = "") -> None:
        """Send a whole answer."""
        self.peer.answer(self.stream, body, code, why)
        self.connection.flush()

    @property
    def peer(self) -> Peer:
        """The engine of the connection; flush the connection after sending through it."""
        return self.connection.peer


class ServedConnection(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, server: RpcServer) -> None:
        self.peer = Peer()
        self.lost = False
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._server.connections.append(self)
        self.flush()
        self._server.changed.set()

    def data_received(self, data: bytes) -> None:
        self.peer.receive(data)
        for stream in list(self.peer.received):
            for body in self.peer.messages(stream):
                request = Request(self, stream, self.peer.paths[stream], body)
                self._server.requests.append(request)
                self._server.handle(request)
        self.flush()
        self._server.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._server.changed.set()

    def flush(self) -> None:
        """Send the output of the engine."""
        self.transport.write(self.peer.take_output())


class RpcServer:
    """A server on a free port of loopback; an asynchronous context manager.

    `handle` is called with every message received. `until` waits for a condition.
    """

    def __init__(self, handle: Callable[[Request], object], tls: ssl.SSLContext | None = None) -> None:
        self.handle = handle
        self.connections: list[ServedConnection] = []
        self.requests: list[Request] = []
        self.changed = asyncio.Event()
        self._tls = tls

    async def __aenter__(self) -> RpcServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ServedConnection(self), "127.0.0.1", 0, ssl=self._tls)
        self.endpoint = net.Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self.connections:
            connection.transport.abort()

    async def until(self, true: Callable[[], object]) -> None:
        """Wait until a condition is true; it is checked whenever data arrives."""
        while not true():
            self.changed.clear()
            await self.changed.wait()


def echo(request: Request) -> None:
    """Answer with the request itself."""
    request.answer(request.body)
