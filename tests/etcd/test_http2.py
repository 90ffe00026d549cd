"""The engine of HTTP/2 for calls to etcd, tested with h2: sizes, windows, cuts, every frame, and malformed input.

No sockets here. Frames that h2 does not send come from hyperframe, header blocks that it does not write from hpack.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from h2.events import PingAckReceived, RemoteSettingsChanged, StreamReset
from h2.settings import SettingCodes
from hpack import Encoder
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as some
from tests.etcd.h2_server import HEADERS, Peer, exchange, goaway, message, serialized, trailers

from rallypoint.etcd.rpc import http2
from rallypoint.etcd.rpc.http2 import MAX_PINGS, STREAM_WINDOW, Http2Connection, Http2Event, NotHttp2
from rallypoint.etcd.rpc.http2_frames import MAX_FRAME
from rallypoint.etcd.rpc.http2_headers import MAX_HEADERS, header_block
from rallypoint.etcd.rpc.status import Code

MIB = 1024 * 1024
_PATTERN = struct.pack(f">{10 * MIB // 4}I", *range(10 * MIB // 4))
BLOCK = header_block("/etcdserverpb.KV/Range", "member:2379", secure=False)


def connected(**options: Any) -> tuple[Http2Connection, Peer]:
    """Return a client and its peer, who have greeted each other."""
    client, peer = Http2Connection(), Peer(**options)
    assert exchange(client, peer) == []
    return client, peer


def greeted() -> Http2Connection:
    """Return a client that has a peer's settings, which has not yet confirmed the client's."""
    client = Http2Connection()
    client.receive(SettingsFrame(0).serialize())
    client.take_output()
    return client


def pattern(size: int) -> bytes:
    """Return bytes without repetition."""
    return _PATTERN[:size]


def body_of(events: list[Http2Event], number: int) -> bytes:
    """Return the answer of a stream, which must have ended well."""
    own = [event for event in events if event.stream == number]
    assert own[-1] == Http2Event(number, b"", 0, "") and all(event.code is None for event in own[:-1])
    return b"".join(event.data for event in own)


def end_of(events: list[Http2Event], number: int) -> tuple[int, str]:
    """Return how a stream ended, after which nothing is reported of it."""
    *_, last = (event for event in events if event.stream == number)
    assert last.code is not None and sum(event.code is not None for event in events if event.stream == number) == 1
    return last.code, last.why


def feed(client: Http2Connection, said: bytes, step: int) -> list[Http2Event]:
    """Feed bytes to a client in pieces of a size."""
    return [event for at in range(0, len(said), step) for event in client.receive(said[at : at + step])]


def table_free(*headers: tuple[str, str], huffman: bool = True) -> bytes:
    """Return a header block that uses no table."""
    return Encoder().encode([(*pair, True) for pair in headers], huffman=huffman)


def headers_frame(number: int, block: bytes, *flags: str) -> Frame:
    return HeadersFrame(number, block, flags=["END_HEADERS", *flags])


def raw_frame(kind: int, body: bytes, flags: int = 0, stream: int = 1) -> bytes:
    """Return a frame as it is, whatever it is."""
    return struct.pack(">BHBBI", len(body) >> 16, len(body) & 0xFFFF, kind, flags, stream) + body


def frames_in(output: bytes) -> list[Frame]:
    """Return the frames that a client has sent."""
    found, at = [], 0
    while at < len(output):
        frame, size = Frame.parse_frame_header(memoryview(output[at : at + 9]))
        frame.parse_body(memoryview(output[at + 9 : at + 9 + size]))
        found.append(frame)
        at += 9 + size
    return found


def whole_answer(number: int, body: bytes = b"answer") -> bytes:
    """Return an answer in three frames, without h2."""
    return serialized(
        headers_frame(number, table_free(*HEADERS)),
        DataFrame(number, message(body)),
        headers_frame(number, table_free(*trailers(0)), "END_STREAM"),
    )


# Requests


@pytest.mark.parametrize("window", [1, 7, 16_384, 65_535, 2**31 - 1])
@pytest.mark.parametrize("size", [0, 1, 100, 16_379, 16_380, 65_530, 65_531, MIB, 3 * MIB])
def test_a_request_arrives_whole_through_any_window(size: int, window: int) -> None:
    if size / window > 1000:
        size = 1000 * window  # each byte of the window is an exchange
    client, peer = connected(window=window)
    number = client.open(BLOCK, pattern(size))
    assert exchange(client, peer) == []
    assert peer.received[number] == message(pattern(size)) and peer.ended == {number}


@pytest.mark.parametrize("smaller", [0, 100, 65_535, MIB])
def test_the_window_of_open_streams_changes_with_the_setting(smaller: int) -> None:
    client, peer = connected(reads=False)
    sizes = {client.open(BLOCK, pattern(size)): size for size in (0, 30_000, 200_000)}
    exchange(client, peer)
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: smaller})
    exchange(client, peer)
    peer.reads = True
    peer.read()
    exchange(client, peer)
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2 * MIB})
    exchange(client, peer)
    assert {number: bytes(peer.received[number]) for number in sizes} == {
        number: message(pattern(size)) for number, size in sizes.items()
    }
    assert peer.ended == set(sizes)


def test_a_window_below_zero_sends_nothing_until_it_is_above() -> None:
    client, peer = connected(reads=False)
    number = client.open(BLOCK, pattern(60_000 - 5))
    exchange(client, peer)
    peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10_000})
    exchange(client, peer)
    other = client.open(BLOCK, pattern(20_000))
    exchange(client, peer)
    assert len(peer.received[number]) == 60_000
    assert len(peer.received[other]) == 65_535 - 60_000, "the window of the connection has not changed"
    peer.h2.increment_flow_control_window(100_000)
    exchange(client, peer)
    assert len(peer.received[other]) == 10_000
    peer.h2.increment_flow_control_window(1, other)
    exchange(client, peer)
    assert len(peer.received[other]) == 10_001 and other not in peer.ended


def test_messages_on_a_stream_follow_each_other() -> None:
    client, peer = connected(window=10)
    number = client.open(BLOCK, b"first", end_stream=False, manual_window=True)
    client.send(number, b"second" * 100)
    client.send(number, b"")
    exchange(client, peer)
    assert list(peer.messages(number)) == [b"first", b"second" * 100, b""]
    assert not peer.ended
    client.reset(number)
    client.send(number, b"too late")
    client.reset(number)
    exchange(client, peer)
    assert peer.reset == {number} and not peer.received[number]
    client.send(99, b"of no stream")
    assert client.take_output() == b""


@pytest.mark.parametrize("size", [0, 126, 127, 128, 254, 255, 300, 10_000])
def test_headers_of_any_length_are_read_as_written(size: int) -> None:
    client, peer = connected()
    path, token = "/" + "p" * (size // 10), "t" * size
    number = client.open(header_block(path, "[::1]:2379", True, (("token", token),)), b"")
    exchange(client, peer)
    sent = {**dict(next(event.headers for event in peer.events if hasattr(event, "headers")))}
    assert peer.paths[number] == path
    assert sent == {
        ":method": "POST", ":scheme": "https", ":path": peer.paths[number], ":authority": "[::1]:2379",
        "te": "trailers", "content-type": "application/grpc", "token": token,
    }  # fmt: skip


def test_no_frame_is_larger_than_every_peer_allows() -> None:
    client, peer = connected(window=2**24)
    peer.h2.increment_flow_control_window(2**25)
    peer.send_frames(SettingsFrame(0, settings={SettingsFrame.MAX_FRAME_SIZE: 2**32 - 1}))
    exchange(client, peer)
    client.open(BLOCK, bytes(2**24))
    assert max(frame.body_len for frame in frames_in(client.take_output())) == MAX_FRAME


# Answers


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, STREAM_WINDOW - 5, STREAM_WINDOW, 10 * MIB])
def test_an_answer_arrives_whole(size: int) -> None:
    client, peer = connected()
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.answer(number, pattern(size))
    assert body_of(exchange(client, peer), number) == message(pattern(size))


def test_many_large_answers_do_not_use_up_the_window_of_the_connection() -> None:
    client, peer = connected()
    peer.padding = 255
    before = peer.h2.outbound_flow_control_window
    for _ in range(10):
        number = client.open(BLOCK, b"")
        exchange(client, peer)
        peer.answer(number, bytes(MIB))
        assert len(body_of(exchange(client, peer), number)) == MIB + 5
    assert peer.h2.outbound_flow_control_window > before - 2 * MIB


def test_the_rest_of_an_abandoned_answer_returns_its_window() -> None:
    client = greeted()
    number = client.open(BLOCK, b"")
    client.reset(number)
    client.take_output()
    assert client.receive(DataFrame(number, bytes(MAX_FRAME)).serialize() * 256) == []
    updates = [frame for frame in frames_in(client.take_output()) if isinstance(frame, WindowUpdateFrame)]
    assert {frame.stream_id for frame in updates} == {0}
    assert sum(frame.window_increment for frame in updates) == 4 * MIB


def test_calls_are_answered_in_any_order_and_in_pieces() -> None:
    client, peer = connected()
    bodies = {client.open(BLOCK, bytes([at])): pattern(20_000 + at) for at in range(20)}
    exchange(client, peer)
    for number in bodies:
        peer.begin(number)
    events = []
    for at in range(0, 21_000, 1000):
        for number, body in reversed(bodies.items()):
            peer.send(number, message(body)[at : at + 1000])
        events += exchange(client, peer)
    for number in sorted(bodies, key=lambda number: number * 7 % 11):
        peer.end(number)
    events += exchange(client, peer)
    assert {number: body_of(events, number) for number in bodies} == {
        number: message(body) for number, body in bodies.items()
    }
    assert [bytes(peer.received[number]) for number in bodies] == [message(bytes([at])) for at in range(20)]


@pytest.mark.parametrize("padding", [None, 0, 255])
def test_a_stream_that_is_not_read_holds_its_peer_back(padding: int | None) -> None:
    client, peer = connected()
    peer.padding = padding
    number = client.open(BLOCK, b"", end_stream=False, manual_window=True)
    other = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.begin(number)
    peer.send(number, message(pattern(10 * MIB)))
    got = exchange(client, peer)
    assert peer.held_back
    assert STREAM_WINDOW - MIB < sum(len(event.data) for event in got) <= STREAM_WINDOW
    peer.answer(other, b"served")
    assert body_of(exchange(client, peer), other) == message(b"served"), "other streams continue"
    peer.end(number)
    fresh = got
    while fresh:
        client.consumed(number, sum(len(event.data) for event in fresh))
        fresh = exchange(client, peer)
        got = got + fresh
    assert body_of(got, number) == message(pattern(10 * MIB))


def test_padding_is_given_back_to_a_stream_with_a_manual_window() -> None:
    client = greeted()
    number = client.open(BLOCK, b"", end_stream=False, manual_window=True)
    padded = DataFrame(number, b"x", pad_length=255, flags=["PADDED"])
    count = STREAM_WINDOW // 257
    for event in client.receive(padded.serialize() * count):
        client.consumed(number, len(event.data))
    updates = [frame for frame in frames_in(client.take_output()) if isinstance(frame, WindowUpdateFrame)]
    renewed = sum(frame.window_increment for frame in updates if frame.stream_id == number)
    assert STREAM_WINDOW // 2 <= renewed <= 257 * count


# The end of a call


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (5, "etcdserver: requested lease not found"),
        (14, "100% of the members, ä and\nnew lines"),
        (2, ""),
        (0, ""),
        (99, "a code of the future"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_call_ends_with_the_status_and_reason_of_the_server(code: int, why: str, begun: bool) -> None:
    client, peer = connected()
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    if begun:
        peer.begin(number)
        peer.end(number, code, why)
    else:
        peer.h2.send_headers(number, [*HEADERS, *trailers(code, why)], end_stream=True)
    assert end_of(exchange(client, peer), number) == (code, why)
    assert exchange(client, peer) == []
    assert not peer.reset, "a call that both have ended is not given up"


@pytest.mark.parametrize("why", ["%", "%4", "%zz", "%ff%fe", "a%20b"])
def test_a_badly_encoded_reason_is_still_reported(why: str) -> None:
    client, peer = connected()
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.h2.send_headers(number, [*HEADERS, ("grpc-status", "9"), ("grpc-message", why)], end_stream=True)
    code, told = end_of(exchange(client, peer), number)
    assert code == 9 and told


@pytest.mark.parametrize("status", ["404", "502", "503"])
@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>"])
def test_a_proxy_that_answers_instead_is_named_by_its_status(status: str, body: bytes) -> None:
    client, peer = connected()
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.h2.send_headers(number, [(":status", status), ("content-type", "text/html")], end_stream=not body)
    if body:
        peer.h2.send_data(number, body, end_stream=True)
    assert end_of(exchange(client, peer), number) == (
        Code.UNAVAILABLE,
        f"not a gRPC server: HTTP status {status}",
    )


@pytest.mark.parametrize("how", ["data", "headers", "trailers"])
def test_an_answer_without_a_status_is_an_error(how: str) -> None:
    client, peer = connected()
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.h2.send_headers(number, HEADERS, end_stream=how == "headers")
    if how == "data":
        peer.h2.send_data(number, message(b"x"), end_stream=True)
    elif how == "trailers":
        peer.h2.send_headers(number, [("other", "x")], end_stream=True)
    assert end_of(exchange(client, peer), number) == (Code.INTERNAL, "its response has no grpc-status")


def test_a_status_before_an_empty_last_frame_counts() -> None:
    client = greeted()
    number = client.open(BLOCK, b"")
    block = table_free(*HEADERS, *trailers(7, "no"))
    said = serialized(headers_frame(number, block), DataFrame(number, b"", flags=["END_STREAM"]))
    assert end_of(client.receive(said), number) == (7, "no")


def test_informational_headers_are_skipped() -> None:
    client, peer = connected()
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.h2.send_headers(number, [(":status", "103")])
    peer.answer(number, b"x")
    assert body_of(exchange(client, peer), number) == message(b"x")


def test_a_stream_answered_before_its_request_is_sent_is_reset() -> None:
    client, peer = connected(window=100, reads=False)
    number = client.open(BLOCK, bytes(1000))
    exchange(client, peer)
    peer.h2.send_headers(number, [*HEADERS, *trailers(8, "too large")], end_stream=True)
    assert end_of(exchange(client, peer), number) == (8, "too large")
    assert peer.reset == {number}
    assert len(peer.received[number]) == 100


@pytest.mark.parametrize("kind", ["sent", "unsent", "stream"])
def test_a_reset_ends_a_call_and_is_not_answered(kind: str) -> None:
    client, peer = connected(window=100, reads=False)
    number = client.open(BLOCK, bytes(1000 if kind == "unsent" else 10), end_stream=kind != "stream")
    exchange(client, peer)
    peer.h2.reset_stream(number, 7)
    (event,) = client.receive(peer.take_output())
    assert event == Http2Event(number, b"", Code.UNAVAILABLE, "the call was reset (code 7)")
    assert client.take_output() == b"", "RFC 9113, 5.4.2"
    assert client.receive(DataFrame(number, b"late").serialize()) == []


def test_an_abandoned_call_is_reset_and_reports_nothing() -> None:
    client, peer = connected()
    number, other = client.open(BLOCK, b""), client.open(BLOCK, b"")
    exchange(client, peer)
    peer.answer(number, b"too late")
    client.reset(number)
    client.reset(other)
    assert exchange(client, peer) == []
    (event,) = (event for event in peer.events if isinstance(event, StreamReset))
    assert (event.stream_id, event.error_code) == (other, 8)


# The end of a connection


def test_goaway_fails_calls_not_yet_begun_and_lets_the_rest_finish() -> None:
    client, peer = connected()
    first, second, third = (client.open(BLOCK, b"") for _ in range(3))
    exchange(client, peer)
    assert not client.draining
    peer.send_frames(goaway(second))
    assert exchange(client, peer) == [Http2Event(third, b"", Code.UNAVAILABLE, "the member closes the connection")]
    assert client.draining
    peer.answer(second, b"2")
    peer.answer(first, b"1")
    events = exchange(client, peer)
    assert (body_of(events, first), body_of(events, second)) == (message(b"1"), message(b"2"))


def test_goaway_in_two_steps() -> None:
    client, peer = connected()
    first, second = client.open(BLOCK, b""), client.open(BLOCK, b"")
    exchange(client, peer)
    peer.send_frames(goaway(2**31 - 1))
    assert exchange(client, peer) == [] and client.draining
    peer.send_frames(goaway(first, 11, b"too_many_pings"))
    code, why = end_of(exchange(client, peer), second)
    assert code == Code.UNAVAILABLE and "too_many_pings" in why and "11" in why


def test_the_reserved_bit_of_goaway_means_nothing() -> None:
    client, _ = connected()
    number = client.open(BLOCK, b"")
    body = struct.pack(">II", 2**31, 0)
    (event,) = client.receive(struct.pack(">BHBBI", 0, len(body), 7, 0, 0) + body)
    assert event.stream == number and event.code == Code.UNAVAILABLE


def test_stream_ids_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "MAX_STREAM_ID", 7)
    client, peer = connected()
    numbers = []
    while not client.draining:
        numbers.append(client.open(BLOCK, b""))
    assert numbers == [1, 3, 5, 7]
    exchange(client, peer)
    peer.answer(7, b"the last")
    assert body_of(exchange(client, peer), 7) == message(b"the last")


# Frames of every kind, in every piece


def full_conversation() -> tuple[Callable[[], Http2Connection], bytes]:
    """Return a factory of clients with three calls, and all the bytes that a server sends to one of them."""
    encoder = Encoder()
    first, again = (encoder.encode(HEADERS) for _ in range(2))
    assert len(again) < len(first) < len(table_free(*HEADERS, huffman=False)), "Huffman's code, and the table"
    last = encoder.encode(trailers(5, "not there: ä"))
    shrunk = b"\x20" + table_free(*HEADERS)
    said = serialized(
        SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 20}),
        headers_frame(1, first),
        PingFrame(0, b"12345678"),
        DataFrame(1, message(b"one")[:4]),
        headers_frame(3, again),
        raw_frame(0xBE, b"unknown", 255, 3),
        DataFrame(3, message(b"three"), pad_length=5, flags=["PADDED"]),
        WindowUpdateFrame(1, window_increment=50),
        HeadersFrame(3, last[:7], flags=["END_STREAM"]),
        ContinuationFrame(3, last[7:8]),
        ContinuationFrame(3, b""),
        ContinuationFrame(3, last[8:], flags=["END_HEADERS"]),
        SettingsFrame(0, flags=["ACK"]),
        HeadersFrame(5, shrunk, flags=["END_HEADERS", "PADDED", "PRIORITY"], pad_length=3, stream_weight=9),
        PriorityFrame(1, depends_on=3, stream_weight=7),
        DataFrame(1, message(b"one")[4:]),
        RstStreamFrame(5, error_code=2),
        headers_frame(1, table_free(*trailers(0)), "END_STREAM"),
        goaway(5),
        AltSvcFrame(0, origin=b"example.org", field=b"x"),
    )

    def client() -> Http2Connection:
        made = Http2Connection()
        assert [made.open(BLOCK, bytes(40)) for _ in range(3)] == [1, 3, 5]
        made.take_output()
        return made

    return client, said


EXPECTED = [
    Http2Event(1, message(b"one")[:4]),
    Http2Event(3, message(b"three")),
    Http2Event(3, b"", 5, "not there: ä"),
    Http2Event(1, message(b"one")[4:]),
    Http2Event(5, b"", Code.UNAVAILABLE, "the call was reset (code 2)"),
    Http2Event(1, b"", 0, ""),
]


def test_a_conversation_of_every_frame_is_understood() -> None:
    make, said = full_conversation()
    client = make()
    assert client.receive(said) == EXPECTED and client.draining and client.pinged


def test_bytes_may_be_cut_anywhere() -> None:
    make, said = full_conversation()
    whole = make()
    whole.receive(said)
    output = whole.take_output()
    for at in range(len(said) + 1):
        client = make()
        assert client.receive(said[:at]) + client.receive(said[at:]) == EXPECTED, f"cut at {at}"
        assert client.take_output() == output
    for size in (1, 2, 3, 8, 9, 10, 17):
        client = make()
        assert feed(client, said, size) == EXPECTED
        assert client.take_output() == output


@given(some.lists(some.integers(1, 300), min_size=1, max_size=30), some.integers(0, 3000), some.integers(1, 70_000))
def test_the_size_of_pieces_changes_nothing(pieces: list[int], size: int, window: int) -> None:
    results = []
    for step in (0, *pieces):
        client, peer = connected(window=max(window, size // 10 + 1))
        numbers = [client.open(BLOCK, pattern(size)) for _ in range(3)]
        events = exchange(client, peer, step)
        for number in numbers:
            peer.answer(number, bytes(peer.received[number]))
        events += exchange(client, peer, step)
        results.append([body_of(events, number) for number in numbers])
    assert results == [[message(message(pattern(size)))] * 3] * len(results)


@pytest.mark.parametrize("kind", [2, 5, 10, 11, 12, 0x80, 0xFF])
@pytest.mark.parametrize("size", [0, 1, MAX_FRAME])
def test_frames_of_unknown_types_are_skipped(kind: int, size: int) -> None:
    client = greeted()
    number = client.open(BLOCK, b"")
    client.take_output()
    for stream in (0, number, 77):
        assert client.receive(raw_frame(kind, bytes(size), 255, stream)) == []
    assert client.take_output() == b""
    assert body_of(client.receive(whole_answer(number)), number) == message(b"answer")


@pytest.mark.parametrize("padding", [0, 1, 100, 255])
def test_padding_is_no_part_of_an_answer(padding: int) -> None:
    client, peer = connected()
    peer.padding = padding
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.answer(number, pattern(50_000))
    assert body_of(exchange(client, peer), number) == message(pattern(50_000))


def test_long_headers_continue_in_further_frames() -> None:
    client, peer = connected()
    number = client.open(BLOCK, b"")
    exchange(client, peer)
    peer.begin(number)
    why = "".join(chr(0x61 + at % 26) for at in range(50_000))
    peer.end(number, 3, why)
    assert end_of(exchange(client, peer), number) == (3, why)


def test_settings_are_told_and_confirmed() -> None:
    client, peer = connected()
    (changed,) = (event for event in peer.events if isinstance(event, RemoteSettingsChanged))
    assert {code: setting.new_value for code, setting in changed.changed_settings.items()} == {
        SettingCodes.HEADER_TABLE_SIZE: 0,
        SettingCodes.ENABLE_PUSH: 0,
        SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
    }
    peer.h2.ping(b"abcdefgh")
    exchange(client, peer)
    assert client.pinged


def test_header_blocks_use_the_table_until_the_peer_has_agreed_to_none() -> None:
    client, encoder = Http2Connection(), Encoder()
    numbers = [client.open(BLOCK, b"") for _ in range(6)]
    client.receive(SettingsFrame(0).serialize())
    codes = []
    for number in numbers[:3]:
        block = encoder.encode([*HEADERS, ("grpc-status", "11"), ("grpc-message", "said often")])
        codes += client.receive(headers_frame(number, block, "END_STREAM").serialize())
    client.receive(SettingsFrame(0, flags=["ACK"]).serialize())
    encoder.header_table_size = 0
    blocks = []
    for number in numbers[3:]:
        blocks.append(encoder.encode([*HEADERS, ("grpc-status", "11"), ("grpc-message", "said often")]))
        codes += client.receive(headers_frame(number, blocks[-1], "END_STREAM").serialize())
    assert codes == [Http2Event(number, b"", 11, "said often") for number in numbers]
    assert blocks[0] != blocks[1] == blocks[2], "the first says that there is no table, and the others are the same"


def test_the_same_block_means_the_same_however_many_there_are() -> None:
    client, peer = connected()
    for at in range(300):  # more than are remembered, and each of them twice
        number = client.open(BLOCK, b"")
        exchange(client, peer)
        peer.answer(number, b"x", at // 2 + 1, f"reason {at // 2}")
        assert end_of(exchange(client, peer), number) == (at // 2 + 1, f"reason {at // 2}")


def test_a_peer_that_uses_the_table_after_it_has_agreed_to_none_is_refused() -> None:
    client, encoder = Http2Connection(), Encoder()
    client.open(BLOCK, b"")
    client.receive(serialized(SettingsFrame(0), SettingsFrame(0, flags=["ACK"])))
    with pytest.raises(NotHttp2, match="header block"):
        client.receive(headers_frame(1, encoder.encode([("a", "b")])).serialize() * 2)


def test_pings_are_answered_when_asked_to() -> None:
    client, peer = connected()
    assert not client.pinged
    for at in range(MAX_PINGS):
        peer.h2.ping(b"ping%04d" % at)
    exchange(client, peer)
    assert client.pinged
    assert not any(isinstance(event, PingAckReceived) for event in peer.events)
    client.answer_pings()
    assert not client.pinged
    exchange(client, peer)
    answers = [event.ping_data for event in peer.events if isinstance(event, PingAckReceived)]
    assert answers == [b"ping%04d" % at for at in range(MAX_PINGS)]
    client.answer_pings()
    assert client.take_output() == b""


def test_no_more_pings_wait_than_the_limit() -> None:
    client, _ = connected()
    client.receive(PingFrame(0, b"12345678").serialize() * MAX_PINGS)
    client.receive(PingFrame(0, b"12345678", flags=["ACK"]).serialize() * MAX_PINGS)
    with pytest.raises(NotHttp2, match="too many pings"):
        client.receive(PingFrame(0, b"12345678").serialize())


# Peers that speak something else


NONSENSE = {
    "HTTP/1.1": b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n",
    "a TLS alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "Redis": b"-ERR unknown command\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "zeros": bytes(9),
    "data first": DataFrame(1, b"x").serialize(),
    "our own greeting": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a few letters": b"no.\n",
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("step", [1, 1000])
def test_bytes_that_are_not_http2_are_quoted(name: str, step: int) -> None:
    client, said = Http2Connection(), NONSENSE[name]
    with pytest.raises(NotHttp2, match="not HTTP/2: got b") as caught:
        feed(client, said, step)
    assert repr(said[:4])[2:-1] in str(caught.value)


MALFORMED = {
    "a frame that is too large": (raw_frame(0, bytes(MAX_FRAME + 1)), "frame of 16385 bytes"),
    "a frame of the largest size": (b"\xff\xff\xff" + bytes(6), "frame of 16777215 bytes"),
    "settings of an odd size": (raw_frame(4, bytes(7), stream=0), "malformed"),
    "a short ping": (raw_frame(6, bytes(7), stream=0), "bad ping"),
    "a short window update": (raw_frame(8, bytes(3)), "malformed"),
    "a short goaway": (raw_frame(7, bytes(7), stream=0), "malformed"),
    "a short reset": (raw_frame(3, bytes(3)), "malformed"),
    "nothing, padded": (raw_frame(0, b"", 8), "malformed"),
    "more padding than there is": (raw_frame(0, b"\x05abcd", 8), "padding"),
    "headers, padded": (raw_frame(1, b"\xff", 4 | 8), "padding"),
    "bad headers": (raw_frame(1, b"\xff\xff\xff\xff", 4), "header block"),
    "an integer without end": (raw_frame(1, b"\x7f" + b"\xff" * (MAX_FRAME - 1), 4), "header block"),
    "no index of that kind": (raw_frame(1, b"\xbe", 4), "header block"),
    "headers that are not text": (raw_frame(1, b"\x00\x01a\x01\xff", 4), "malformed"),
    "a status that is no number": (raw_frame(1, table_free(*HEADERS, ("grpc-status", "bad")), 4 | 1), "malformed"),
    "an interrupted block": (raw_frame(1, b"", 0) + raw_frame(0, b""), "interrupted"),
    "a block of two streams": (raw_frame(1, b"", 0) + raw_frame(9, b"", 4, stream=3), "CONTINUATION frame without"),
    "a block not begun": (raw_frame(9, b"", 4), "CONTINUATION frame without"),
    "a block that is too long": (raw_frame(1, b"", 0) + raw_frame(9, bytes(MAX_FRAME)) * 5, "too long"),
    "headers that are too long": (raw_frame(1, table_free(("a", "b" * 15_000)) + b"\x82" * 1300, 4), "header block"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("step", [1, 100_000])
def test_malformed_frames_are_named_in_the_error(name: str, step: int) -> None:
    said, why = MALFORMED[name]
    client = greeted()
    client.open(BLOCK, b"")
    with pytest.raises(NotHttp2, match=r"^malformed HTTP/2: ") as caught:
        feed(client, said, step)
    assert why in str(caught.value) and len(str(caught.value)) < 200, "a sentence"


def test_a_block_of_the_longest_length_is_taken() -> None:
    client = greeted()
    number = client.open(BLOCK, b"")
    block = table_free(*HEADERS, ("a", "b" * 60_000), *trailers(0), huffman=False)
    assert len(block) < MAX_HEADERS
    pieces = [block[at : at + MAX_FRAME] for at in range(0, len(block), MAX_FRAME)]
    said = serialized(HeadersFrame(number, pieces[0], flags=["END_STREAM"]))
    said += serialized(*(ContinuationFrame(number, piece) for piece in pieces[1:]))
    said += ContinuationFrame(number, b"", flags=["END_HEADERS"]).serialize()
    assert client.receive(said) == [Http2Event(number, b"", 0, "")]


def survives(client: Http2Connection, said: bytes) -> None:
    """Feed a client any bytes: it must accept them, or raise NotHttp2 with a short message."""
    try:
        events = client.receive(said)
    except NotHttp2 as error:
        why = str(error)
    else:
        why = ""
        assert all(event.stream % 2 == 1 for event in events)
    assert not why or (why.startswith(("not HTTP/2: got ", "malformed HTTP/2: ")) and len(why) < 200)
    number = client.open(BLOCK, b"x")
    client.answer_pings()
    client.reset(number)
    client.take_output()


@given(some.binary(max_size=300))
def test_random_bytes_raise_only_not_http2(noise: bytes) -> None:
    survives(Http2Connection(), noise)
    client = greeted()
    client.open(BLOCK, bytes(100_000))
    survives(client, noise)


frames = some.builds(
    raw_frame,
    some.sampled_from([*range(12), 255]),
    some.binary(max_size=40),
    some.integers(0, 255),
    some.sampled_from([0, 1, 3, 5, 2**31 - 1, 2**32 - 1]),
)


@given(some.lists(frames, max_size=12))
def test_random_frames_raise_only_not_http2(said: list[bytes]) -> None:
    client = greeted()
    for _ in range(2):
        client.open(BLOCK, bytes(100_000), end_stream=False, manual_window=True)
    survives(client, b"".join(said))


@given(some.data())
def test_a_conversation_with_a_wrong_byte_raises_only_not_http2(data: some.DataObject) -> None:
    make, said = full_conversation()
    spoiled = bytearray(said)
    for _ in range(data.draw(some.integers(1, 4))):
        spoiled[data.draw(some.integers(0, len(said) - 1))] = data.draw(some.integers(0, 255))
    survives(make(), bytes(spoiled))


@given(some.integers(0, 2**32 - 1), some.integers(0, 2**32 - 1))
def test_window_updates_of_any_size_raise_only_not_http2(initial: int, more: int) -> None:
    client = greeted()
    number = client.open(BLOCK, bytes(200_000))
    said = raw_frame(4, struct.pack(">HI", 4, initial), stream=0)
    said += raw_frame(8, struct.pack(">I", more), stream=0) + raw_frame(8, struct.pack(">I", more), stream=number)
    survives(client, said)


def test_goaway_may_come_first_of_all() -> None:
    client = Http2Connection()
    client.open(BLOCK, b"")
    said = serialized(SettingsFrame(0), GoAwayFrame(0, last_stream_id=0, error_code=1))
    (event,) = client.receive(said)
    assert event.code == Code.UNAVAILABLE and client.draining
