"""The native protocol: frames however the stream is cut, and invalid bytes, which harm neither end."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core import ops
from rallypoint.core.entries import EndSession
from rallypoint.core.machines import lock
from rallypoint.core.machines.machine import Disconnected, Waiting
from rallypoint.core.records import Event, ReplyStatus
from rallypoint.errors import NotAnInteger, ServerRestarted, SessionLost, StoreError, StoreFull
from rallypoint.protocol import BadMessage, native
from rallypoint.protocol import native_client as client_module
from rallypoint.protocol.native import Frames, Hello, Welcome, frame
from rallypoint.protocol.native_client import ClientProtocol, Reply
from rallypoint.protocol.reported_errors import error_of
from rallypoint.server.server import StoreServer

from .fake_server import Clock, FakeConnection, new_server, value_of, waiting

LIMIT = 1 << 20


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut bytes at these places."""
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(at)]


class NativeHarness:
    """A connection that has said hello, to a new server or a given one."""

    def __init__(self, greeted: bool = True, server: StoreServer | None = None) -> None:
        self.server = server or new_server(limit=LIMIT)
        self.engine = self.server.state.namespaces[0].engine
        self.sent = b""
        connection: Any = FakeConnection(Clock(), self._deliver)
        connection.handler = self.server.native_handler(connection)
        self._connection = connection
        if greeted:
            self.receive(frame(Hello(native.VERSION, "test")))

    def _deliver(self, data: bytes) -> None:
        self.sent += data

    def receive(self, data: bytes) -> bytes:
        """Deliver bytes to the server, and return its replies."""
        self._connection.receive(data)
        sent, self.sent = self.sent, b""
        return sent

    def end(self) -> None:
        self._connection.end()


def replies(data: bytes) -> list[list[Any]]:
    return [msgspec.msgpack.decode(payload) for payload in Frames(LIMIT).feed(data)]


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 1000), max_size=12))
def test_frames_are_the_same_however_they_are_cut(values: list[bytes], cuts: list[int]) -> None:
    frames = Frames(LIMIT)
    out = [payload for piece in pieces(b"".join(map(frame, values)), cuts) for payload in frames.feed(piece)]
    assert [msgspec.msgpack.decode(payload) for payload in out] == values
    assert frames.held == 0


@given(st.integers(1, 20), st.integers(0, 23))
def test_an_unfinished_frame_is_held(size: int, missing: int) -> None:
    data = frame(b"x" * size)
    part = data[: max(0, len(data) - 1 - missing)]
    frames = Frames(LIMIT)
    assert list(frames.feed(part)) == []
    assert frames.held == len(part)
    assert list(frames.feed(data[len(part) :])) == [data[4:]]


@pytest.mark.parametrize("cut", [None, 2, 4, 6])
def test_a_frame_past_the_limit_is_refused_by_its_length(cut: int | None) -> None:
    frames = Frames(8)
    data = frame(b"x" * 20)
    assert list(frames.feed(frame(b"123456"))) == [msgspec.msgpack.encode(b"123456")]
    with pytest.raises(BadMessage, match="a frame of 22 bytes, the limit is 8"):
        [list(frames.feed(piece)) for piece in pieces(data, [] if cut is None else [cut])]


def test_the_sole_answer_is_taken_and_settled() -> None:
    client = ClientProtocol("test")
    number, _ = client.number, client.ask(ops.Add(0, b"/n", 1))
    assert client.sole(frame((number, ReplyStatus.OK, 1)), number) == Reply(number, ReplyStatus.OK, 1)
    assert client.repeat(0.0) == b""


TIMED: dict[type[Any], tuple[Any, ...]] = {
    ops.Get: (b"/k",),
    ops.Wait: ([b"/k"],),
    ops.MultiGet: ([b"/k"],),
    ops.BlockingPop: (b"/q",),
    ops.Arrive: (b"/b", 2),
    ops.Act: (b"/l", "m", 7, lock.LockAcquire()),
}


@pytest.mark.parametrize("kind", TIMED)
def test_a_blocking_request_is_repeated_with_the_remaining_time(kind: type[Any]) -> None:
    client = ClientProtocol("test")
    sent = client.ask(kind(0, *TIMED[kind], 5.0), 105.0)
    assert sent == frame(kind(1, *TIMED[kind], 5.0))
    for now, left_s in ((99.0, 5.0), (100.0, 5.0), (102.0, 3.0), (105.0, 0.0), (1e9, 0.0)):
        assert client.repeat(now) == frame(kind(1, *TIMED[kind], left_s))


def test_a_request_without_a_timeout_is_repeated_unchanged() -> None:
    client = ClientProtocol("test")
    sent = client.ask(ops.Add(0, b"/n", 1)) + client.ask(ops.WatchPrefix(0, b"/w"))
    sent += client.ask(ops.SetLease(0, b"/l", b"", 9.0))
    assert client.repeat(1e9) == sent


NOT_SOLE = {
    "nothing": b"",
    "a part": frame((1, ReplyStatus.OK, 1))[:-1],
    "a part of the length": b"\5\0\0",
    "more": frame((1, ReplyStatus.OK, 1)) + b"x",
    "two": frame((1, ReplyStatus.OK, 1)) * 2,
    "another's": frame((2, ReplyStatus.OK, 1)),
    "a push": frame((0, 1, (1, 1, b"/k", b"v"))),
    "garbage": b"\1\0\0\0\xc1",
    "an empty frame": b"\0\0\0\0",
}


@pytest.mark.parametrize("name", NOT_SOLE)
def test_data_other_than_the_sole_answer_is_left_to_receive(name: str) -> None:
    client = ClientProtocol("test")
    number, request = client.number, client.ask(ops.Add(0, b"/n", 1))
    assert client.sole(NOT_SOLE[name], number) is None
    assert client.repeat(0.0) == request


def test_an_answer_behind_an_incomplete_frame_is_left_to_receive() -> None:
    client = ClientProtocol("test")
    number, _ = client.number, client.ask(ops.Add(0, b"/n", 1))
    half, rest = frame((0, 1, (1, 1, b"/k", b"v")))[:6], frame((0, 1, (1, 1, b"/k", b"v")))[6:]
    assert client.receive(half) == []
    assert client.sole(rest, number) is None
    assert [reply.number for reply in client.receive(rest + frame((number, ReplyStatus.OK, 1)))] == [0, number]


def test_a_repeated_answer_is_not_the_sole_answer() -> None:
    client = ClientProtocol("test")
    number, _ = client.number, client.ask(ops.Add(0, b"/n", 1))
    answer = frame((number, ReplyStatus.OK, 1))
    assert client.sole(answer, number) is not None
    assert client.sole(answer, number) is None


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.lists(st.integers(0, 500), max_size=6))
def test_the_client_reads_answers_however_they_are_cut(values: list[bytes], cuts: list[int]) -> None:
    client = ClientProtocol("test")
    data = b"".join(frame((number, ReplyStatus.OK, value)) for number, value in enumerate(values, 1))
    out = [reply for piece in pieces(data, cuts) for reply in client.receive(piece)]
    assert out == [Reply(number, ReplyStatus.OK, value) for number, value in enumerate(values, 1)]


# Invalid bytes


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=4))
def test_random_bytes_do_not_harm_the_server(noise: bytes, cuts: list[int]) -> None:
    server = new_server(limit=LIMIT)
    engine = server.state.namespaces[0].engine
    engine.put(b"/k", b"v")
    for greeted in (False, True):
        victim = NativeHarness(greeted, server)
        try:
            for piece in pieces(noise, cuts):
                victim.receive(piece)
        except BadMessage:
            pass
        victim.end()
    assert value_of(engine, b"/k") == b"v"


@given(st.binary(max_size=60))
def test_a_random_payload_is_answered_or_refused(payload: bytes) -> None:
    victim = NativeHarness()
    try:
        victim.receive(len(payload).to_bytes(4, "little") + payload)
    except BadMessage:
        return
    assert replies(victim.receive(frame(ops.Ping(1 << 40)))) == [[1 << 40, ReplyStatus.OK, None]]


REQUESTS = [
    ops.Set(7, b"/k", b"v"),
    ops.Get(7, b"/k", 0.0),
    ops.Add(7, b"/n", 2),
    ops.MultiSet(7, [(b"/a", b"1"), (b"/b", b"2")]),
    ops.CompareSwap(7, b"/k", None, b"w"),
    ops.BlockingPop(7, b"/q", 5.0),
    ops.Arrive(7, b"/b", 2, 5.0),
    ops.Drop(7, 3),
    ops.Confirm(0, 3, [2], 1),
    Hello(native.VERSION, "again"),
]


@given(st.sampled_from(REQUESTS), st.integers(0, 60), st.integers(0, 255))
def test_a_mutated_request_does_not_harm_the_server(request: Any, at: int, byte: int) -> None:
    payload = bytearray(msgspec.msgpack.encode(request))
    payload[at % len(payload)] = byte
    victim = NativeHarness()
    try:
        victim.receive(len(payload).to_bytes(4, "little") + payload)
        victim.receive(frame(ops.Ping(1 << 62)))
    except BadMessage:
        pass
    victim.end()
    for serial in list(victim.server.state.sessions):
        victim.server.state.apply(EndSession(serial))
    assert waiting(victim.engine) == 0 and victim.server.state.memory.kept == 0


@given(st.binary(max_size=60))
def test_a_random_payload_does_not_harm_the_client(payload: bytes) -> None:
    client = ClientProtocol("test")
    number, _ = client.number, client.ask(ops.Set(0, b"/k", b"v"))
    try:
        for reply in client.receive(len(payload).to_bytes(4, "little") + payload):
            client.expects(reply)
            if not reply.number:
                reply.event()
            elif reply.status == ReplyStatus.ERROR:
                assert isinstance(error_of(reply, "store"), StoreError)
    except BadMessage:
        pass
    assert client.repeat(0.0) == frame(ops.Set(number, b"/k", b"v"))


def welcomed(client: ClientProtocol, server: bytes, *more: object) -> float:
    return client.welcome(Reply(0, ReplyStatus.OK, [native.VERSION, server, b"session", 2.0, False, *more]), "a:1")


def test_a_session_lasts_for_the_longer_of_grace_and_recovery_time() -> None:
    client = ClientProtocol("test")
    for recovery, lasts_s in (((), 2.0), ((0.0,), 2.0), ((60.0,), 60.0), ((0.5,), 2.0)):
        assert welcomed(client, b"server", *recovery) == lasts_s


def test_a_client_refuses_a_server_with_another_identity() -> None:
    client = ClientProtocol("test", b"server")
    with pytest.raises(ServerRestarted, match="its identity has changed"):
        welcomed(client, b"stranger")
    assert client.greet() == ClientProtocol("test").greet(), "it has no session there"
    assert welcomed(client, b"server") == 2.0


DEEP, BAD_TEXT = b"\x91" * 100_000, b"\xa2\xff\xff"


@pytest.mark.parametrize("payload", [DEEP, b"\x93\x19\x07" + DEEP, BAD_TEXT, b"\x93\x01\x07" + BAD_TEXT, b"\xc1", b""])
def test_nesting_and_bad_text_are_refused(payload: bytes) -> None:
    data = len(payload).to_bytes(4, "little") + payload
    with contextlib.suppress(BadMessage):  # a request with a readable number is answered by an error
        assert b"Misunderstood" in NativeHarness().receive(data)
    with pytest.raises(BadMessage):
        NativeHarness(greeted=False).receive(data)
    with pytest.raises(BadMessage):
        ClientProtocol("test").receive(data)


def test_a_hello_with_an_invalid_name_is_refused() -> None:
    payload = b"\x92\x01\xa2\xff\xff"
    with pytest.raises(BadMessage, match="malformed hello"):
        NativeHarness(greeted=False).receive(b"\x05\0\0\0" + payload)


WRONG = {
    "no such operation": ([99, 7, b"/k"], "99"),
    "a text for a key": ([1, 7, "/k", b"v"], "bytes"),
    "a missing argument": ([1, 7, b"/k"], "length"),
    "a negative time": ([2, 7, b"/k", -1.0], "0.0"),
    "a time that is not a number": ([2, 7, b"/k", float("nan")], ""),
    "an endless time": ([2, 7, b"/k", float("inf")], "1000000000"),
    "a fraction to add": ([3, 7, b"/n", 1.5], "int"),
    "more than 64 bits": ([3, 7, b"/n", 2**63], "9223372036854775807"),
    "a key too long": ([1, 7, b"/" * 9000, b"v"], "8192"),
    "a key that is nothing": ([11, 7, None], "bytes"),
    "a pair of three": ([7, 7, [[b"/a", b"b", b"c"]]], "length"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_request_is_answered_with_the_reason(name: str) -> None:
    body, why = WRONG[name]
    victim = NativeHarness()
    ((number, status, (kind, fields)),) = replies(victim.receive(frame(body)))
    assert (number, status, kind) == (7, ReplyStatus.ERROR, "Misunderstood")
    assert why in fields["why"]
    held = victim.engine.statistics()
    assert (held.keys, held.waiters) == (0, 0)
    assert replies(victim.receive(frame(ops.Add(8, b"/n", 1)))) == [[8, ReplyStatus.OK, 1]]
    assert replies(victim.receive(frame(body)))[0][1] == ReplyStatus.ERROR, "repeated, it is still invalid"


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("kind", [ops.Ping, ops.Bye])
def test_a_request_needs_a_number(number: int, kind: type[ops.Op]) -> None:
    with pytest.raises(BadMessage, match="start at 1"):
        NativeHarness().receive(frame(kind(number)))


def test_the_fields_of_a_wait_s_reason_are_stable() -> None:
    assert Waiting._fields == ("reason", "missing", "withdrawn", "waited_s", "is_spare")
    assert Disconnected("the server is down")._replace(waited_s=3.0) == Waiting("the server is down", waited_s=3.0)
    assert isinstance(Disconnected("")._replace(waited_s=3.0), Disconnected)


# Errors and welcomes, as the client reads them


@pytest.mark.parametrize("result", [None, 5, [], ["NotAnInteger"], ["NotAnInteger", {}], [{}, {}], ["X", None], "ab"])
def test_a_malformed_error_is_still_an_error(result: Any) -> None:
    error = error_of(Reply(1, ReplyStatus.ERROR, result), "tcp://here:1")
    assert type(error) is StoreError
    assert "tcp://here:1 refused" in str(error)


def test_errors_keep_their_class_and_fields_over_the_protocol() -> None:
    error = error_of(Reply(1, ReplyStatus.ERROR, ["NotAnInteger", {"key": "/n", "value": b"x"}]), "s")
    assert isinstance(error, NotAnInteger) and (error.key, error.value) == ("n", b"x")
    full = error_of(Reply(1, ReplyStatus.ERROR, ["StoreFull", {"key": "/n", "size": 5, "limit": 4}]), "s")
    assert isinstance(full, StoreFull) and full.limit == 4
    assert "Misunderstood" in str(error_of(Reply(1, ReplyStatus.ERROR, ["Misunderstood", {"why": "so"}]), "s"))


@pytest.mark.parametrize("result", [None, 5, [], [1, b"a"], ["a", b"", b"", 0.0, True], {"a": 1}])
@pytest.mark.parametrize("status", [ReplyStatus.OK, ReplyStatus.REFUSED])
def test_a_malformed_welcome_is_refused(status: int, result: Any) -> None:
    with pytest.raises(BadMessage):
        ClientProtocol("test").welcome(Reply(0, status, result), "peer")


def test_a_lost_session_and_another_server_raise_different_errors() -> None:
    client = ClientProtocol("test")
    welcome = msgspec.to_builtins(Welcome(1, b"server", b"id", 2.0, False), builtin_types=[bytes])
    assert client.welcome(Reply(0, ReplyStatus.OK, welcome), "peer") == 2.0
    with pytest.raises(SessionLost, match="gone for good"):
        client.welcome(Reply(0, ReplyStatus.REFUSED, [b"server", "gone for good"]), "peer")
    with pytest.raises(ServerRestarted, match="gone for good"):
        client.welcome(Reply(0, ReplyStatus.REFUSED, [b"other", "gone for good"]), "peer")


def test_repeated_pushes_are_ignored() -> None:
    client = ClientProtocol("test")
    pushes = [Reply(0, number, [1, number, b"/k", b"v"]) for number in (1, 2, 1, 2, 3)]
    new = []
    for push in pushes:
        if client.expects(push):
            client.settle(push)
            new.append(push.event())
    assert new == [(1, Event(number, b"/k", b"v")) for number in (1, 2, 3)]


@pytest.mark.parametrize("result", [None, 3, [], [1, 2, b"/k"], ["1", 2, b"/k", None], [1, 2, "/k", None]])
def test_a_malformed_push_is_refused(result: Any) -> None:
    with pytest.raises(BadMessage, match="malformed push from server"):
        Reply(0, 1, result).event()


def test_answers_are_confirmed_in_batches_without_open_requests() -> None:
    client = ClientProtocol("test")
    waiting, _ = client.number, client.ask(ops.BlockingPop(0, b"/q", 5.0))
    sent = b""
    for _ in range(client_module.CONFIRM_EVERY + 1):
        number, sent = client.number, client.ask(ops.Add(0, b"/n", 1))
        for reply in client.receive(frame((number, ReplyStatus.OK, 1))):
            client.settle(reply)
    confirm, add = replies(sent)
    assert confirm == [24, 0, number - 1, [waiting], 0]
    assert add[:2] == [3, number]
