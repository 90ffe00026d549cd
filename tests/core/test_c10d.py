"""PyTorch's protocol as a pure decoder: how a stream is cut does not matter, an incomplete message has no effect,
invalid bytes harm only their sender, and everything is bounded. test_c10d_corners.py covers the semantics.

For a longer fuzz than the suite's: `RALLYPOINT_FUZZ=100000 pytest tests/core/test_c10d.py -k "fuzz or cut"`.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import MAGIC, Opcode, encode, hello
from rallypoint.server.connections.native_connection import REPLIES_BYTES

from .c10d_harness import CANCEL, GREETING, MIB, PING, PONG, STOP_WAITING, C10dHarness, listed, number, string, wait
from .fake_server import value_of

FUZZ = int(os.environ.get("RALLYPOINT_FUZZ", "200"))


# Cuts of the stream

KEYS = st.sampled_from([b"", b"/a", b"/b", b"/q", b"/long" * 40])
COUNTERS = st.sampled_from([b"/n", b"/m"])  # never anything but a number, so that no message here is refused
ANY_KEY = KEYS | COUNTERS
VALUES = st.sampled_from([b"", b"1", b"x" * 9]) | st.binary(max_size=12)
LISTS = st.lists(ANY_KEY, max_size=4)

MESSAGES = st.one_of(
    st.builds(encode, st.sampled_from([Opcode.SET, Opcode.APPEND, Opcode.QUEUE_PUSH]), KEYS, VALUES),
    st.builds(encode, st.just(Opcode.COMPARE_SET), KEYS, VALUES, VALUES),
    st.builds(encode, st.sampled_from([Opcode.GET, Opcode.DELETE_KEY, Opcode.QUEUE_POP, Opcode.QUEUE_LEN]), ANY_KEY),
    st.builds(encode, st.just(Opcode.ADD), COUNTERS, st.integers(-3, 3)),
    st.builds(encode, st.just(Opcode.BARRIER), COUNTERS, st.integers(-1, 4)),
    st.builds(
        lambda op, keys: listed(op, *keys), st.sampled_from([Opcode.CHECK, Opcode.WAIT, Opcode.MULTI_GET]), LISTS
    ),
    st.builds(
        lambda pairs: encode(Opcode.MULTI_SET, len(pairs), *(part for pair in pairs for part in pair)),
        st.lists(st.tuples(KEYS, VALUES), max_size=4),
    ),
    st.builds(encode, st.sampled_from([Opcode.CANCEL_WAIT, Opcode.GETNUMKEYS, Opcode.LIST_KEYS])),
    st.builds(encode, st.just(Opcode.PING), st.integers(0, 2**32 - 1)),
    st.builds(wait, KEYS),  # often: most of the state is about waits
)
NAMES = "abc"
DIALOGUES = st.lists(st.tuples(st.sampled_from(NAMES), MESSAGES), max_size=25)


def in_pieces(data: bytes, chance: random.Random) -> list[bytes]:
    if chance.random() < 0.2:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


def cut(dialogue: list[tuple[str, bytes]], chance: random.Random) -> list[tuple[str, bytes]]:
    """Cut and join a dialogue into other pieces, which complete the same messages in the same order."""
    pieces: list[tuple[str, bytes]] = []
    due = dict.fromkeys(NAMES, b"")
    ahead = dict.fromkeys(NAMES, 0)
    for place, (name, message) in enumerate(dialogue):
        due[name] += message[ahead[name] :]
        ahead[name] = 0
        later = dialogue[place + 1 :]
        if later and later[0][0] == name and chance.random() < 0.5:
            continue  # sent with the next message
        upcoming = next((following for other, following in later if other == name), b"")
        if upcoming:
            ahead[name] = chance.randrange(len(upcoming))
        data, due[name] = due[name] + upcoming[: ahead[name]], b""
        pieces += [(name, piece) for piece in in_pieces(data, chance)]
    return pieces


@settings(max_examples=FUZZ)
@given(DIALOGUES, st.randoms(use_true_random=False))
def test_how_messages_are_cut_does_not_matter(dialogue: list[tuple[str, bytes]], chance: random.Random) -> None:
    whole, cut_up = C10dHarness(*NAMES), C10dHarness(*NAMES)
    for name, message in dialogue:
        whole.feed(name, message)
    for name, piece in cut(dialogue, chance):
        cut_up.feed(name, piece)
    assert cut_up.inboxes == whole.inboxes
    assert cut_up.content() == whole.content()
    whole.check_size()
    for name in NAMES:
        assert cut_up.handlers[name].waits_for == whole.handlers[name].waits_for
        assert cut_up.handlers[name].held == 0
    for name in NAMES:
        whole.disconnect(name)
    assert not whole.waiters() and not whole.engine._turns


@settings(max_examples=FUZZ // 4)
@given(st.lists(MESSAGES, max_size=12))
def test_a_stream_may_arrive_cut_into_single_bytes(messages: list[bytes]) -> None:
    stream = hello(9) + b"".join(messages)
    whole, slow = C10dHarness(), C10dHarness()
    whole.connect("a", greeted=False)
    slow.connect("a", greeted=False)
    whole.feed("a", stream)
    slow.trickle("a", stream, 1)
    assert slow.inboxes == whole.inboxes
    assert slow.content() == whole.content()


EVERY_MESSAGE = {
    "SET": encode(Opcode.SET, b"/k", b"new"),
    "COMPARE_SET": encode(Opcode.COMPARE_SET, b"/k", b"old", b"new"),
    "GET": encode(Opcode.GET, b"/k"),
    "ADD": encode(Opcode.ADD, b"/n", 5),
    "CHECK": listed(Opcode.CHECK, b"/k"),
    "CHECK two": listed(Opcode.CHECK, b"/k", b"/n"),
    "WAIT": wait(b"/never"),
    "WAIT two": wait(b"/k", b"/n"),
    "GETNUMKEYS": encode(Opcode.GETNUMKEYS),
    "DELETE_KEY": encode(Opcode.DELETE_KEY, b"/k"),
    "APPEND": encode(Opcode.APPEND, b"/k", b"new"),
    "MULTI_GET": listed(Opcode.MULTI_GET, b"/k", b"/n"),
    "MULTI_SET": encode(Opcode.MULTI_SET, 2, b"/k", b"new", b"/awaited", b"new"),
    "CANCEL_WAIT": CANCEL,
    "PING": PING,
    "QUEUE_PUSH": encode(Opcode.QUEUE_PUSH, b"/q", b"new"),
    "QUEUE_POP": encode(Opcode.QUEUE_POP, b"/q"),
    "QUEUE_LEN": encode(Opcode.QUEUE_LEN, b"/q"),
    "LIST_KEYS": encode(Opcode.LIST_KEYS),
    "BARRIER": encode(Opcode.BARRIER, b"/n", 2),
}


def prepared() -> C10dHarness:
    """A harness in which every message has an effect: a client with a turn to pop, one in line behind it, a waiter."""
    harness = C10dHarness("popper", "behind", "waiter")
    harness.send("waiter", encode(Opcode.SET, b"/k", b"old"), encode(Opcode.ADD, b"/n", 1), wait(b"/awaited"))
    harness.send("popper", wait(b"/q"))
    harness.send("behind", wait(b"/q"))
    harness.send("waiter", encode(Opcode.QUEUE_PUSH, b"/q", b"item"))
    assert harness.received("popper") == STOP_WAITING and not harness.received("behind")
    return harness


@pytest.mark.parametrize("name", EVERY_MESSAGE)
def test_an_incomplete_message_has_no_effect(name: str) -> None:
    message = EVERY_MESSAGE[name]
    for size in range(len(message)):
        harness = prepared()
        before = harness.content()
        harness.feed("popper", message[:size])
        assert harness.content() == before, f"{size} of {len(message)} bytes had an effect"
        assert not any(harness.inboxes.values())
        harness.disconnect("popper")  # which has no delayed effect either
        assert value_of(harness.engine, b"/k") == b"old" and value_of(harness.engine, b"/n") == b"1"
        assert harness.received("behind") == STOP_WAITING


def test_every_opcode_is_covered() -> None:
    opcodes = {value for name, value in vars(Opcode).items() if not name.startswith("_")} - {Opcode.VALIDATE}
    assert {message[0] for message in EVERY_MESSAGE.values()} == opcodes == set(range(1, 19))


# Invalid input

HUGE = [2**63 - 1, 2**63, 2**64 - 1, 2**40]


def raw(op: int, *fields: int | bytes) -> bytes:
    """Make a message of unsigned numbers and raw bytes, valid or not."""
    parts = [struct.pack("<Q", field) if isinstance(field, int) else field for field in fields]
    return bytes((op,)) + b"".join(parts)


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_huge_length_is_refused_at_once_without_memory(length: int, piece: int) -> None:
    keyed = [
        op for name, op in vars(Opcode).items() if not name.startswith("_") and op in (1, 2, 3, 4, 8, 9, 14, 15, 18)
    ]
    cases = [raw(op, length) for op in keyed]
    cases += [raw(op, 1, b"k", length) for op in (Opcode.SET, Opcode.COMPARE_SET, Opcode.APPEND, Opcode.QUEUE_PUSH)]
    cases += [raw(Opcode.COMPARE_SET, 1, b"k", 0, length)]
    cases += [raw(op, length) for op in (Opcode.CHECK, Opcode.WAIT, Opcode.MULTI_GET, Opcode.MULTI_SET)]
    cases += [raw(op, 1, length) for op in (Opcode.CHECK, Opcode.WAIT, Opcode.MULTI_GET, Opcode.MULTI_SET)]
    cases += [raw(op, 2, 1, b"k", length) for op in (Opcode.CHECK, Opcode.WAIT, Opcode.MULTI_GET, Opcode.MULTI_SET)]
    for case in cases:
        harness = C10dHarness("a")
        before = harness.content()
        tracemalloc.start()
        try:
            with pytest.raises(BadMessage, match="limit"):
                harness.trickle("a", case, piece)
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()
        assert harness.content() == before


def test_an_announced_length_reserves_no_memory() -> None:
    harness = C10dHarness(*(f"p{n}" for n in range(100)))
    tracemalloc.start()
    try:
        for name in harness.handlers:
            harness.feed(name, raw(Opcode.SET, 1, b"k", 8 * MIB) + b"only this")
            assert harness.handlers[name].held < 1024
        harness.connect("z")
        harness.feed("z", raw(Opcode.MULTI_SET, 131_072))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


BOUNDARIES: list[tuple[str, Callable[[int], bytes], int]] = [
    ("key of SET", lambda n: encode(Opcode.SET, b"k" * n, b"v"), 8192),
    ("key of GET", lambda n: encode(Opcode.GET, b"k" * n), 8192),
    ("key of ADD", lambda n: encode(Opcode.ADD, b"k" * n, 1), 8192),
    ("key of CHECK", lambda n: listed(Opcode.CHECK, b"k" * n), 8192),
    ("key of WAIT", lambda n: wait(b"k" * n), 8192),
    ("second key of CHECK", lambda n: listed(Opcode.CHECK, b"k", b"k" * n), 8192),
    ("key of MULTI_SET", lambda n: encode(Opcode.MULTI_SET, 1, b"k" * n, b"v"), 8192),
    ("key of BARRIER", lambda n: encode(Opcode.BARRIER, b"k" * n, 1), 8192),
    ("value of SET", lambda n: encode(Opcode.SET, b"k", b"v" * n), 8 * MIB),
    ("value of APPEND", lambda n: encode(Opcode.APPEND, b"k", b"v" * n), 8 * MIB),
    ("value of QUEUE_PUSH", lambda n: encode(Opcode.QUEUE_PUSH, b"k", b"v" * n), 8 * MIB),
    ("expected value of COMPARE_SET", lambda n: encode(Opcode.COMPARE_SET, b"k", b"v" * n, b"w"), 8 * MIB),
    ("desired value of COMPARE_SET", lambda n: encode(Opcode.COMPARE_SET, b"k", b"", b"w" * n), 8 * MIB),
    ("value of MULTI_SET", lambda n: encode(Opcode.MULTI_SET, 1, b"k", b"v" * n), 8 * MIB),
    ("count of CHECK", lambda n: raw(Opcode.CHECK, n, string(b"k") * n), 131_072),
    ("count of WAIT", lambda n: raw(Opcode.WAIT, n, string(b"k") * n), 131_072),
    ("count of MULTI_GET", lambda n: raw(Opcode.MULTI_GET, n, string(b"k") * n), 131_072),
    ("count of MULTI_SET", lambda n: raw(Opcode.MULTI_SET, n, string(b"k") * 2 * n), 131_072),
]


@pytest.mark.parametrize(("make", "limit"), [case[1:] for case in BOUNDARIES], ids=[case[0] for case in BOUNDARIES])
@pytest.mark.parametrize("piece", [60_000, 1 << 30])
def test_limits_are_exactly_those_of_pytorch_s_server(make: Callable[[int], bytes], limit: int, piece: int) -> None:
    harness = C10dHarness("a")
    harness.trickle("a", make(limit) + PING, piece)
    assert harness.received("a").endswith(PONG)
    harness = C10dHarness("a")
    before = harness.content()
    with pytest.raises(BadMessage, match=f"{limit + 1}.*the limit is {limit}"):
        harness.trickle("a", make(limit + 1), piece)
    assert harness.content() == before


def test_a_message_of_many_valid_parts_is_bounded() -> None:
    harness = C10dHarness("a", limit=20 * MIB)
    harness.feed("a", raw(Opcode.MULTI_SET, 3))
    for _ in range(2):
        harness.feed("a", string(b"k") + string(b"v" * 8 * MIB))
    assert harness.handlers["a"].held > 16 * MIB
    assert "20971520" in harness.refuses("a", string(b"k") + struct.pack("<Q", 8 * MIB))
    assert not harness.engine.exists(b"k")


def test_many_small_parts_are_counted_at_their_real_cost() -> None:
    harness = C10dHarness("a")
    fields = 20_000
    tracemalloc.start()
    try:
        harness.feed("a", raw(Opcode.MULTI_GET, 131_072) + string(b"ab") * fields)
        cost = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cost < harness.handlers["a"].held * 1.5


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (PING, "no greeting"),
        (encode(Opcode.SET, b"k", b"v"), "no greeting"),
        (encode(Opcode.GETNUMKEYS), "no greeting"),
        (encode(Opcode.VALIDATE, MAGIC ^ 1), "greeting 0x3c85f7cf"),
        (encode(Opcode.VALIDATE, MAGIC)[::-1], "unknown opcode"),
        (GREETING + GREETING, "second greeting"),
        (hello(1) + PING + encode(Opcode.VALIDATE, 0), "second greeting"),
        (GREETING + b"\x13", "unknown opcode 19"),
        (GREETING + b"\xff" * 100, "unknown opcode 255"),
        (b"\x16\x03\x01", "unknown opcode 22"),
    ],
)
def test_an_invalid_greeting_is_refused(first: bytes, why: str) -> None:
    for piece in (1, len(first)):
        harness = C10dHarness()
        harness.connect("a", greeted=False)
        with pytest.raises(BadMessage, match=why):
            harness.trickle("a", first, piece)
        assert harness.engine.revision == 0


def mutated(message: bytes, chance: random.Random) -> bytes:
    data = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if data:
                data[at % len(data)] = chance.randrange(256)
            case 1:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 2:
                del data[at : at + chance.randrange(1, 9)]
            case _:
                data[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 2, 8192, 131_072, *HUGE]))
    return bytes(data)


def survive(streams: list[tuple[str, bytes]]) -> None:
    """Feed these bytes: only their senders are refused, the engine stays sound, and another client is unaffected."""
    harness = C10dHarness("well", *NAMES)
    harness.send("well", encode(Opcode.SET, b"/well", b"kept"))
    gone = set()
    for name, data in streams:
        if name in gone:
            continue
        try:
            harness.feed(name, data)
        except BadMessage:
            harness.disconnect(name)
            gone.add(name)
        else:
            assert harness.handlers[name].held <= 66 * sum(len(sent) for other, sent in streams if other == name)
        harness.check_size()
    assert harness.send("well", encode(Opcode.GET, b"/well"), PING) == string(b"kept") + PONG
    for name in [name for name in harness.handlers if name != "well"]:
        harness.disconnect(name)
    assert not harness.waiters() and not harness.engine._turns and not harness.engine._barriers


@settings(max_examples=FUZZ)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=60)), max_size=12))
def test_fuzz_random_bytes(streams: list[tuple[str, bytes]]) -> None:
    survive(streams)


@settings(max_examples=FUZZ)
@given(DIALOGUES, st.randoms(use_true_random=False))
def test_fuzz_mutated_messages(dialogue: list[tuple[str, bytes]], chance: random.Random) -> None:
    spoilt = [(name, mutated(message, chance) if chance.random() < 0.3 else message) for name, message in dialogue]
    survive([(name, piece) for name, message in spoilt for piece in in_pieces(message, chance)])


# Costs


class Counted(bytes):
    """Bytes that count how many bytes are copied from them."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        taken = super().__getitem__(place)
        if isinstance(taken, bytes):
            Counted.copied += len(taken)
        return taken


def lines_run(work: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


SLOW: dict[str, Callable[[int], bytes]] = {
    "one value": lambda n: encode(Opcode.SET, b"k", b"v" * n),
    "many keys": lambda n: listed(Opcode.CHECK, *[b"k" * 8] * (n // 16)),
    "many messages": lambda n: PING * (n // 5),
}


@pytest.mark.parametrize("kind", SLOW)
def test_the_cost_of_single_bytes_does_not_grow_with_the_message(kind: str) -> None:
    def cost(size: int) -> float:
        harness = C10dHarness("a")
        receive = harness.handlers["a"].receive
        pieces = [Counted((byte,)) for byte in SLOW[kind](size)]
        Counted.copied = 0
        lines = lines_run(lambda: [receive(piece) for piece in pieces])
        assert Counted.copied <= 2 * len(pieces)
        return lines / len(pieces)

    assert cost(20_000) < 1.1 * cost(2_000)


def test_the_cost_of_a_wakeup_does_not_grow_with_the_number_of_waiters() -> None:
    def cost(others: int) -> float:
        names = [f"p{n}" for n in range(others)]
        harness = C10dHarness("a", *names)
        for name in names:
            harness.feed(name, wait(name.encode()))
        messages = wait(b"/never") + b"".join(encode(Opcode.SET, name.encode(), b"") for name in names)
        lines = lines_run(lambda: harness.handlers["a"].receive(messages))
        assert set(harness.inboxes.values()) == {b"", STOP_WAITING}
        return lines / others

    assert cost(1000) < 1.1 * cost(100)


def test_a_large_message_in_pieces_is_copied_once() -> None:
    harness = C10dHarness("a")
    message = encode(Opcode.SET, b"k", b"v" * 4 * MIB)
    Counted.copied = 0
    for at in range(0, len(message), 65_536):
        harness.handlers["a"].receive(Counted(message[at : at + 65_536]))
    assert value_of(harness.engine, b"k") == b"v" * 4 * MIB
    assert Counted.copied <= 1.1 * len(message)


# Large answers


def test_large_answers_are_sent_in_parts_and_in_order() -> None:
    harness = C10dHarness("a", "b")
    values = {b"/%d" % n: bytes([n]) * (REPLIES_BYTES // 3) for n in range(10)}
    for key, value in values.items():
        harness.send("b", encode(Opcode.SET, key, value))
    a = harness.handlers["a"]
    parts = [a.receive(b"".join(encode(Opcode.GET, key) for key in values) + encode(Opcode.ADD, b"/n", 1) + PING)]
    assert a.blocked and a.held > 0
    assert value_of(harness.engine, b"/n") is None, "a request behind unsent answers was executed"
    harness.send("b", encode(Opcode.SET, b"/9", b"changed"))  # other clients are not blocked, and later reads see this
    while a.blocked:
        parts.append(a.receive(b""))
    assert max(map(len, parts)) < 2 * REPLIES_BYTES and len(parts) > 2
    values[b"/9"] = b"changed"
    assert b"".join(parts) == b"".join(map(string, values.values())) + number(1) + PONG
    assert a.held == 0


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_requests_received_behind_unsent_answers_keep_their_order(piece: int) -> None:
    harness = C10dHarness("a", "b")
    harness.send("b", encode(Opcode.SET, b"/k", b"v" * REPLIES_BYTES))
    a, heard = harness.handlers["a"], b""
    stream = b"".join(encode(Opcode.GET, b"/k") + encode(Opcode.ADD, b"/n", 1) for _ in range(20))
    for at in range(0, len(stream), piece):
        heard += a.receive(stream[at : at + piece])
    while a.blocked:
        heard += a.receive(b"")
    assert heard == b"".join(string(b"v" * REPLIES_BYTES) + number(n) for n in range(1, 21))


def test_a_peer_may_disconnect_before_its_answers_are_sent() -> None:
    harness = C10dHarness("a", "b")
    harness.send("b", encode(Opcode.SET, b"/k", b"v" * REPLIES_BYTES * 2))
    harness.handlers["a"].receive(encode(Opcode.GET, b"/k") * 3 + encode(Opcode.SET, b"/late", b""))
    assert harness.handlers["a"].blocked
    harness.disconnect("a")
    assert harness.send("b", encode(Opcode.GETNUMKEYS)) == number(1)


def test_an_answer_past_the_limit_is_refused_before_it_is_made() -> None:
    harness = C10dHarness("a", "b", "c", "d", limit=MIB)
    for n in range(3):
        harness.send("d", encode(Opcode.SET, b"/%d" % n, b"v" * (MIB // 2)))
    assert "the limit is 1048576" in harness.refuses("a", listed(Opcode.MULTI_GET, b"/0", b"/1"))
    harness.engine.put(b"/0", b"v" * (MIB + 1))  # as another protocol might
    assert "the limit is 1048576" in harness.refuses("b", encode(Opcode.GET, b"/0"))
    harness.send("d", encode(Opcode.DELETE_KEY, b"/0"))
    for n in range(300):
        harness.send("d", encode(Opcode.SET, b"/%d" % n + b"k" * 8000, b""))
    assert "the limit is 1048576" in harness.refuses("c", encode(Opcode.LIST_KEYS))
    assert harness.send("d", PING) == PONG


def test_append_is_refused_when_the_value_could_not_be_read() -> None:
    harness = C10dHarness("a", "b", limit=20 * MIB)
    for _ in range(2):
        harness.send("a", encode(Opcode.APPEND, b"/k", b"v" * 8 * MIB))
    harness.send("a", encode(Opcode.APPEND, b"/k", b"v" * 4 * MIB))
    assert len(harness.send("a", encode(Opcode.GET, b"/k"))) == 20 * MIB + 8
    assert "value '/k' has 20,971,521 bytes; the limit is" in harness.refuses("a", encode(Opcode.APPEND, b"/k", b"v"))
    assert len(harness.send("b", encode(Opcode.GET, b"/k"))) == 20 * MIB + 8


def test_a_full_store_ends_only_the_writer_s_connection() -> None:
    harness = C10dHarness("a", "b", max_bytes=1000)
    harness.send("b", encode(Opcode.SET, b"/k", b"v" * 100))
    before = harness.content()
    assert harness.refuses("a", encode(Opcode.SET, b"/big", b"v" * 1000))
    assert harness.content() == before
    assert harness.send("b", encode(Opcode.GET, b"/k"), listed(Opcode.CHECK, b"/big")) == string(b"v" * 100) + b"\1"
