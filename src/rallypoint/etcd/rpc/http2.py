"""The client side of HTTP/2 and gRPC, as far as calls to etcd need it. Pure: no sockets.

`receive` takes bytes from the peer and returns events; `take_output` returns bytes for the peer. A stream is one call:
`open` sends its headers and first message, `send` further messages, `reset` cancels it.

Flow control works in both directions: large requests wait for the peer's windows. The windows granted to the peer are
renewed when bytes arrive or, for a stream with `manual_window`, when its reader has `consumed` them.

etcd sends a ping whenever it has received data and no ping is in flight, to estimate the bandwidth. Immediate answers
would add a packet each way to every call, so they are delayed until `answer_pings`, a moment later.

Rejected: grpcio, whose asyncio interface costs 250 µs a call, a third of a commit, and whose threads do not survive a
fork. Rejected: the library h2, a complete HTTP/2 in Python: 100 µs a call where this takes 10.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rallypoint.etcd.rpc.http2_frames import (
    HEAD,
    MAX_FRAME,
    NUMBER,
    PREFACE,
    SETTING,
    Flag,
    FrameType,
    Setting,
    cancel,
    frame,
    message,
    unpadded,
    window_update,
)
from rallypoint.etcd.rpc.http2_headers import MAX_HEADERS, HeaderDecoder, status
from rallypoint.etcd.rpc.status import Code

__all__ = ["Http2Event", "Http2Connection", "NotHttp2"]

MAX_STREAM_ID = 2**31 - 1
STREAM_WINDOW = 4 * 1024 * 1024
"""Bytes of one response that the peer may send ahead of our acknowledgement."""

CONNECTION_WINDOW = 2**31 - 1
RENEW_BYTES = 1024 * 1024
"""Number of received bytes after which the connection's window is renewed."""

MAX_PINGS = 100
"""Maximum number of unanswered pings."""

_DEFAULT_WINDOW = 65_535


class NotHttp2(Exception):
    """The peer sent invalid HTTP/2; the connection is unusable."""


class Http2Event(NamedTuple):
    """An event of one stream: bytes of its messages, or its end with a status code and the reason."""

    stream: int
    data: bytes
    code: int | None = None
    why: str = ""


class _Http2Stream:
    """The state of one call."""

    __slots__ = ("end_stream", "headers", "manual_window", "unacknowledged", "unsent", "window")

    def __init__(self, window: int, end_stream: bool, manual_window: bool) -> None:
        self.window, self.end_stream, self.manual_window = window, end_stream, manual_window
        self.unsent = b""
        self.unacknowledged = 0  # received bytes for which the peer has no WINDOW_UPDATE yet
        self.headers: dict[str, str] = {}


class Http2Connection:
    """One connection: its streams, its windows and its output."""

    def __init__(self) -> None:
        self.draining = False
        """Whether no more streams may be opened: the peer sent GOAWAY, or the stream ids are exhausted."""

        self._streams: dict[int, _Http2Stream] = {}
        self._next_id = 1
        self._window = _DEFAULT_WINDOW
        self._initial_window = _DEFAULT_WINDOW
        self._unacknowledged = 0
        self._buffer = b""
        self._has_settings = False  # whether the peer has sent its settings
        self._block: tuple[int, int, bytes] | None = None  # stream, flags and bytes of an incomplete header block
        self._headers = HeaderDecoder()
        settings = ((Setting.TABLE_SIZE, 0), (Setting.ENABLE_PUSH, 0), (Setting.INITIAL_WINDOW, STREAM_WINDOW))
        first = frame(FrameType.SETTINGS, 0, 0, b"".join(SETTING.pack(*setting) for setting in settings))
        self._ping_acks: list[bytes] = []
        self._output = [PREFACE, first, window_update(0, CONNECTION_WINDOW - _DEFAULT_WINDOW)]

    def take_output(self) -> bytes:
        """Remove and return the bytes to send."""
        output, self._output = self._output, []
        return b"".join(output)

    @property
    def pinged(self) -> bool:
        """Whether there are pings to answer."""
        return bool(self._ping_acks)

    def answer_pings(self) -> None:
        """Queue the answers to all pings."""
        self._output += self._ping_acks
        self._ping_acks.clear()

    # Calls

    def open(self, block: bytes, body: bytes, end_stream: bool = True, manual_window: bool = False) -> int:
        """Begin a call with its first message, the only one if `end_stream`; return the id of its stream."""
        number = self._next_id
        self._next_id += 2
        if self._next_id > MAX_STREAM_ID:
            self.draining = True
        stream = self._streams[number] = _Http2Stream(self._initial_window, end_stream, manual_window)
        self._output.append(frame(FrameType.HEADERS, Flag.END_HEADERS, number, block))
        stream.unsent = message(body)
        self._pump(number, stream)
        return number

    def send(self, number: int, body: bytes) -> None:
        """Send a further message on an open stream; do nothing if it has ended."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.unsent += message(body)
            self._pump(number, stream)

    def reset(self, number: int) -> None:
        """Cancel a call; it has no further events."""
        if self._streams.pop(number, None) is not None:
            self._output.append(cancel(number))

    def consumed(self, number: int, size: int) -> None:
        """Renew the window of a stream with `manual_window` by the bytes read from it."""
        stream = self._streams.get(number)
        if stream is not None:
            self._renew(number, stream, size)

    def _pump(self, number: int, stream: _Http2Stream) -> None:
        """Send a stream's unsent bytes, as far as the windows allow."""
        unsent, sent = stream.unsent, 0
        room = min(len(unsent), self._window, stream.window)
        while sent < room:
            piece = unsent[sent : min(sent + MAX_FRAME, room)]
            sent += len(piece)
            last = stream.end_stream and sent == len(unsent)
            self._output.append(frame(FrameType.DATA, Flag.END_STREAM if last else 0, number, piece))
        if sent:
            self._window -= sent
            stream.window -= sent
            stream.unsent = unsent[sent:]

    def _renew(self, number: int, stream: _Http2Stream, size: int) -> None:
        stream.unacknowledged += size
        if stream.unacknowledged >= STREAM_WINDOW // 2:
            self._output.append(window_update(number, stream.unacknowledged))
            stream.unacknowledged = 0

    # From the peer

    def receive(self, data: bytes) -> list[Http2Event]:
        """Process bytes from the peer; return the events. Raises NotHttp2."""
        buffer = self._buffer + data if self._buffer else data
        events: list[Http2Event] = []
        at, end = 0, len(buffer)
        if not self._has_settings and end > 3 and (buffer[0] or buffer[3] != FrameType.SETTINGS):
            raise NotHttp2(f"not HTTP/2: got {buffer[:16]!r}")  # at once: there may be no more bytes
        while end - at >= 9:
            high, low, kind, flags, number = HEAD.unpack_from(buffer, at)
            size = high << 16 | low
            if size > MAX_FRAME:
                raise NotHttp2(f"malformed HTTP/2: a frame of {size} bytes, the limit is {MAX_FRAME}")
            if end - at - 9 < size:
                break
            self._take(kind, flags, number & MAX_STREAM_ID, buffer[at + 9 : at + 9 + size], events)
            at += 9 + size
        self._buffer = buffer[at:]
        return events

    def _take(self, kind: int, flags: int, number: int, body: bytes, events: list[Http2Event]) -> None:
        if self._block is not None and kind != FrameType.CONTINUATION:
            raise NotHttp2("malformed HTTP/2: a header block is interrupted")
        try:
            if kind == FrameType.DATA:
                self._take_data(flags, number, body, events)
            elif kind == FrameType.HEADERS:
                body = unpadded(flags, body)
                self._take_block(number, flags, body[5:] if flags & Flag.PRIORITY else body, events)
            elif kind == FrameType.CONTINUATION:
                self._continue(flags, number, body, events)
            else:
                self._take_control(kind, flags, number, body, events)
        except (struct.error, IndexError, ValueError) as error:
            raise NotHttp2(f"malformed HTTP/2: {error}") from None

    def _take_data(self, flags: int, number: int, body: bytes, events: list[Http2Event]) -> None:
        size = len(body)
        self._unacknowledged += size
        if self._unacknowledged >= RENEW_BYTES:
            self._output.append(window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        stream = self._streams.get(number)
        if stream is None:
            return
        body = unpadded(flags, body)
        self._renew(number, stream, size - len(body) if stream.manual_window else size)  # padding is never read
        events.append(Http2Event(number, body))
        if flags & Flag.END_STREAM:
            self._end(number, *status(stream.headers), events)

    def _continue(self, flags: int, number: int, body: bytes, events: list[Http2Event]) -> None:
        if self._block is None or self._block[0] != number:
            raise ValueError("a CONTINUATION frame without a header block")
        _, first_flags, begun = self._block
        if len(begun) + len(body) > MAX_HEADERS:
            raise ValueError("a header block is too long")
        self._take_block(number, first_flags | flags & Flag.END_HEADERS, begun + body, events)

    def _take_block(self, number: int, flags: int, block: bytes, events: list[Http2Event]) -> None:
        if not flags & Flag.END_HEADERS:
            self._block = number, flags, block
            return
        self._block = None
        headers = self._headers.decode(block)
        stream = self._streams.get(number)
        if stream is None:
            return
        if flags & Flag.END_STREAM:
            code, why = status({**stream.headers, **headers})
            self._end(number, code, why, events)
        else:
            stream.headers = headers

    def _take_control(self, kind: int, flags: int, number: int, body: bytes, events: list[Http2Event]) -> None:
        if kind == FrameType.SETTINGS:
            self._take_settings(flags, body)
        elif kind == FrameType.PING:
            if not flags & Flag.ACK:
                if len(body) != 8 or len(self._ping_acks) >= MAX_PINGS:
                    raise ValueError("too many pings" if len(body) == 8 else "bad ping")
                self._ping_acks.append(frame(FrameType.PING, Flag.ACK, 0, body))
        elif kind == FrameType.WINDOW_UPDATE:
            self._take_window_update(number, NUMBER.unpack(body)[0] & MAX_STREAM_ID)
        elif kind == FrameType.RST_STREAM:
            if self._streams.pop(number, None) is not None:
                why = f"the call was reset (code {NUMBER.unpack(body)[0]})"
                events.append(Http2Event(number, b"", Code.UNAVAILABLE, why))
        elif kind == FrameType.GOAWAY:
            self._take_goaway(body, events)

    def _take_settings(self, flags: int, body: bytes) -> None:
        self._has_settings = True
        if flags & Flag.ACK:
            self._headers.drop_table()
            return
        for name, value in SETTING.iter_unpack(body):
            if name == Setting.INITIAL_WINDOW:
                for stream in self._streams.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
        self._output.append(frame(FrameType.SETTINGS, Flag.ACK, 0))
        self._pump_all()

    def _take_window_update(self, number: int, size: int) -> None:
        if not number:
            self._window += size
            self._pump_all()
        elif number in self._streams:
            stream = self._streams[number]
            stream.window += size
            self._pump(number, stream)

    def _pump_all(self) -> None:
        for number, stream in self._streams.items():
            if stream.unsent:
                self._pump(number, stream)

    def _take_goaway(self, body: bytes, events: list[Http2Event]) -> None:
        """Stop opening streams, and fail the calls that the peer has not begun."""
        self.draining = True
        last, code = NUMBER.unpack_from(body)[0] & MAX_STREAM_ID, NUMBER.unpack_from(body, 4)[0]
        reason = f": {str(body[8:], 'utf-8', 'replace')} (code {code})" if code else ""
        for number in [number for number in self._streams if number > last]:
            self._end(number, Code.UNAVAILABLE, f"the member closes the connection{reason}", events)

    def _end(self, number: int, code: int, why: str, events: list[Http2Event]) -> None:
        """Report the end of a stream; cancel it if its request is not completely sent."""
        stream = self._streams.pop(number)
        if stream.unsent or not stream.end_stream:
            self._output.append(cancel(number))
        events.append(Http2Event(number, b"", code, why))
