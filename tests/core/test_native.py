"""Our wire protocol: frames however they are cut, and bytes that make no sense, which harm neither end."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core import client as client_core
from rallypoint.core import native
from rallypoint.core.c10d import BadMessage
from rallypoint.core.caller import Caller, Sessions
from rallypoint.core.client import Client, Reply, error_of
from rallypoint.core.engine import Engine
from rallypoint.core.native import Frames, Hello, Status, Welcome, frame
from rallypoint.core.records import Event
from rallypoint.errors import NotAnInteger, ServerRestarted, SessionLost, StoreError, StoreFull

LIMIT = 1 << 20


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut bytes at these places."""
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(at)]


def caller(engine: Engine | None = None) -> Caller:
    """A connection that has said hello."""
    sessions = Sessions(engine or Engine(), b"server", 2.0)
    caller = Caller(sessions, object(), LIMIT, b"session")
    caller.receive(frame(Hello(native.VERSION, "test")), 0.0)
    return caller


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
    client = Client("test")
    number, _ = client.number, client.ask(native.Add, b"/n", 1)
    assert client.sole(frame((number, Status.OK, 1)), number) == Reply(number, Status.OK, 1)
    assert client.repeat() == b""


NOT_SOLE = {
    "nothing": b"",
    "a part": frame((1, Status.OK, 1))[:-1],
    "a part of the length": b"\5\0\0",
    "more": frame((1, Status.OK, 1)) + b"x",
    "two": frame((1, Status.OK, 1)) * 2,
    "another's": frame((2, Status.OK, 1)),
    "a push": frame((0, 1, (1, 1, b"/k", b"v"))),
    "garbage": b"\1\0\0\0\xc1",
    "an empty frame": b"\0\0\0\0",
}


@pytest.mark.parametrize("name", NOT_SOLE)
def test_what_is_not_the_sole_answer_is_left_to_receive(name: str) -> None:
    client = Client("test")
    number, request = client.number, client.ask(native.Add, b"/n", 1)
    assert client.sole(NOT_SOLE[name], number) is None
    assert client.repeat() == request


def test_an_answer_that_comes_behind_half_of_another_is_left_to_receive() -> None:
    client = Client("test")
    number, _ = client.number, client.ask(native.Add, b"/n", 1)
    half, rest = frame((0, 1, (1, 1, b"/k", b"v")))[:6], frame((0, 1, (1, 1, b"/k", b"v")))[6:]
    assert client.receive(half) == []
    assert client.sole(rest, number) is None
    assert [reply.number for reply in client.receive(rest + frame((number, Status.OK, 1)))] == [0, number]


def test_an_answer_that_came_before_is_not_taken_again() -> None:
    client = Client("test")
    number, _ = client.number, client.ask(native.Add, b"/n", 1)
    answer = frame((number, Status.OK, 1))
    assert client.sole(answer, number) is not None
    assert client.sole(answer, number) is None


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.lists(st.integers(0, 500), max_size=6))
def test_the_client_reads_answers_however_they_are_cut(values: list[bytes], cuts: list[int]) -> None:
    client = Client("test")
    data = b"".join(frame((number, Status.OK, value)) for number, value in enumerate(values, 1))
    out = [reply for piece in pieces(data, cuts) for reply in client.receive(piece)]
    assert out == [Reply(number, Status.OK, value) for number, value in enumerate(values, 1)]


# Bytes that make no sense


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=4))
def test_random_bytes_do_not_harm_the_server(noise: bytes, cuts: list[int]) -> None:
    engine = Engine()
    engine.set(b"/k", b"v")
    for greeted in (False, True):
        victim = caller(engine) if greeted else Caller(Sessions(engine, b"server", 2.0), object(), LIMIT, b"id")
        try:
            for piece in pieces(noise, cuts):
                victim.receive(piece, 0.0)
        except BadMessage:
            pass
        victim.end(0.0)
    assert engine.get(b"/k") == b"v"


@given(st.binary(max_size=60))
def test_a_random_payload_is_answered_or_refused(payload: bytes) -> None:
    victim = caller()
    try:
        victim.receive(len(payload).to_bytes(4, "little") + payload, 0.0)
    except BadMessage:
        return
    assert replies(victim.receive(frame(native.Ping(1 << 40)), 0.0)) == [[1 << 40, Status.OK, None]]


REQUESTS = [
    native.Set(7, b"/k", b"v"),
    native.Get(7, b"/k", 0.0),
    native.Add(7, b"/n", 2),
    native.MultiSet(7, [(b"/a", b"1"), (b"/b", b"2")]),
    native.Swap(7, b"/k", None, b"w"),
    native.Take(7, b"/q", 5.0),
    native.Arrive(7, b"/b", 2, 5.0),
    native.Drop(7, 3),
    native.Confirm(0, 3, [2], 1),
    Hello(native.VERSION, "again"),
]


@given(st.sampled_from(REQUESTS), st.integers(0, 60), st.integers(0, 255))
def test_a_mutated_request_does_not_harm_the_server(request: Any, at: int, byte: int) -> None:
    payload = bytearray(msgspec.msgpack.encode(request))
    payload[at % len(payload)] = byte
    engine = Engine()
    victim = caller(engine)
    try:
        victim.receive(len(payload).to_bytes(4, "little") + payload, 0.0)
        victim.receive(frame(native.Ping(1 << 62)), 0.0)
    except BadMessage:
        pass
    victim.end(0.0)
    engine.end(victim.session)
    assert engine.statistics().waiters == 0


@given(st.binary(max_size=60))
def test_a_random_payload_does_not_harm_the_client(payload: bytes) -> None:
    client = Client("test")
    number, _ = client.number, client.ask(native.Set, b"/k", b"v")
    try:
        for reply in client.receive(len(payload).to_bytes(4, "little") + payload):
            client.expects(reply)
            if not reply.number:
                reply.event()
            elif reply.status == Status.ERROR:
                assert isinstance(error_of(reply, "store"), StoreError)
    except BadMessage:
        pass
    assert client.repeat() == frame(native.Set(number, b"/k", b"v"))


def welcomed(client: Client, server: bytes, *said: object) -> float:
    return client.welcome(Reply(0, Status.OK, [native.VERSION, server, b"session", 2.0, False, *said]), "a:1")


def test_a_server_that_does_not_say_so_hosts_objects() -> None:
    client = Client("test")
    for said, hosts in (((), True), ((True,), True), ((False,), False)):
        welcomed(client, b"server", *said)
        assert client.hosts_objects is hosts


def test_a_client_takes_only_the_server_that_it_was_told_of() -> None:
    client = Client("test", b"server")
    with pytest.raises(ServerRestarted, match="its identity is another"):
        welcomed(client, b"stranger")
    assert client.greet() == Client("test").greet(), "it has no session there"
    assert welcomed(client, b"server") == 2.0


DEEP, BAD_TEXT = b"\x91" * 100_000, b"\xa2\xff\xff"


@pytest.mark.parametrize("payload", [DEEP, b"\x93\x19\x07" + DEEP, BAD_TEXT, b"\x93\x01\x07" + BAD_TEXT, b"\xc1", b""])
def test_nesting_and_bad_text_are_refused(payload: bytes) -> None:
    data = len(payload).to_bytes(4, "little") + payload
    with contextlib.suppress(BadMessage):  # with a number it is answered, and nothing of the rest is looked at
        assert b"Misunderstood" in caller().receive(data, 0.0)
    with pytest.raises(BadMessage):
        Caller(Sessions(Engine(), b"server", 2.0), object(), LIMIT, b"id").receive(data, 0.0)
    with pytest.raises(BadMessage):
        Client("test").receive(data)


def test_a_greeting_with_a_name_that_is_no_text_is_refused() -> None:
    payload = b"\x92\x01\xa2\xff\xff"
    with pytest.raises(BadMessage, match="not a greeting"):
        Caller(Sessions(Engine(), b"server", 2.0), object(), LIMIT, b"id").receive(b"\x05\0\0\0" + payload, 0.0)


WRONG = {
    "no such operation": ([99, 7, b"/k"], "99"),
    "a text for a key": ([1, 7, "/k", b"v"], "bytes"),
    "a missing argument": ([1, 7, b"/k"], "length"),
    "no time at all": ([2, 7, b"/k", -1.0], "0.0"),
    "no number for a time": ([2, 7, b"/k", float("nan")], ""),
    "an endless time": ([2, 7, b"/k", float("inf")], "1000000000"),
    "a fraction to add": ([3, 7, b"/n", 1.5], "int"),
    "more than 64 bits": ([3, 7, b"/n", 2**63], "9223372036854775807"),
    "a key too long": ([1, 7, b"/" * 9000, b"v"], "8192"),
    "a key that is nothing": ([11, 7, None], "bytes"),
    "a pair of three": ([7, 7, [[b"/a", b"b", b"c"]]], "length"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_that_makes_no_sense_is_answered_by_why(name: str) -> None:
    body, why = WRONG[name]
    engine = Engine()
    victim = caller(engine)
    ((number, status, (kind, fields)),) = replies(victim.receive(frame(body), 0.0))
    assert (number, status, kind) == (7, Status.ERROR, "Misunderstood")
    assert why in fields["why"]
    assert engine.num_keys() == 0 and engine.statistics().waiters == 0
    assert replies(victim.receive(frame(native.Add(8, b"/n", 1)), 0.0)) == [[8, Status.OK, 1]]
    assert replies(victim.receive(frame(body), 0.0))[0][1] == Status.ERROR, "and repeated, it is as wrong"


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("kind", [native.Ping, native.Bye])
def test_a_request_needs_a_number(number: int, kind: type[native.Request]) -> None:
    with pytest.raises(BadMessage, match="count from 1"):
        caller().receive(frame(kind(number)), 0.0)


# Errors and welcomes, as the client reads them


@pytest.mark.parametrize("result", [None, 5, [], ["NotAnInteger"], ["NotAnInteger", {}], [{}, {}], ["X", None], "ab"])
def test_an_error_that_makes_no_sense_is_still_one(result: Any) -> None:
    error = error_of(Reply(1, Status.ERROR, result), "tcp://here:1")
    assert type(error) is StoreError
    assert "tcp://here:1 refused" in str(error)


def test_errors_come_back_as_what_they_were() -> None:
    error = error_of(Reply(1, Status.ERROR, ["NotAnInteger", {"key": "/n", "value": b"x"}]), "s")
    assert isinstance(error, NotAnInteger) and (error.key, error.value) == ("n", b"x")
    full = error_of(Reply(1, Status.ERROR, ["StoreFull", {"key": "/n", "size": 5, "limit": 4}]), "s")
    assert isinstance(full, StoreFull) and full.limit == 4
    assert "Misunderstood" in str(error_of(Reply(1, Status.ERROR, ["Misunderstood", {"why": "so"}]), "s"))


@pytest.mark.parametrize("result", [None, 5, [], [1, b"a"], ["a", b"", b"", 0.0, True], {"a": 1}])
@pytest.mark.parametrize("status", [Status.OK, Status.REFUSED])
def test_a_welcome_that_makes_no_sense_is_refused(status: int, result: Any) -> None:
    with pytest.raises(BadMessage):
        Client("test").welcome(Reply(0, status, result), "peer")


def test_a_lost_session_and_another_server_are_told_apart() -> None:
    client = Client("test")
    welcome = msgspec.to_builtins(Welcome(1, b"server", b"id", 2.0, False), builtin_types=[bytes])
    assert client.welcome(Reply(0, Status.OK, welcome), "peer") == 2.0
    with pytest.raises(SessionLost, match="gone for good"):
        client.welcome(Reply(0, Status.REFUSED, [b"server", "gone for good"]), "peer")
    with pytest.raises(ServerRestarted, match="gone for good"):
        client.welcome(Reply(0, Status.REFUSED, [b"other", "gone for good"]), "peer")


def test_pushes_are_seen_once() -> None:
    client = Client("test")
    pushes = [Reply(0, number, [1, number, b"/k", b"v"]) for number in (1, 2, 1, 2, 3)]
    new = []
    for push in pushes:
        if client.expects(push):
            client.settle(push)
            new.append(push.event())
    assert new == [(1, Event(number, b"/k", b"v")) for number in (1, 2, 3)]


@pytest.mark.parametrize("result", [None, 3, [], [1, 2, b"/k"], ["1", 2, b"/k", None], [1, 2, "/k", None]])
def test_a_push_that_makes_no_sense_is_refused(result: Any) -> None:
    with pytest.raises(BadMessage, match="push makes no sense"):
        Reply(0, 1, result).event()


def test_answers_are_confirmed_after_a_while_and_open_requests_are_not() -> None:
    client = Client("test")
    waiting, _ = client.number, client.ask(native.Take, b"/q", 5.0)
    sent = b""
    for _ in range(client_core.CONFIRM_EVERY + 1):
        number, sent = client.number, client.ask(native.Add, b"/n", 1)
        for reply in client.receive(frame((number, Status.OK, 1))):
            client.settle(reply)
    confirm, add = replies(sent)
    assert confirm == [24, 0, number - 1, [waiting], 0]
    assert add[:2] == [3, number]
