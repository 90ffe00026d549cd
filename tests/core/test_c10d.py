"""PyTorch's protocol as a pure decoder: how bytes are cut changes nothing, half a message does nothing, nonsense harms
only who sent it, and everything is bounded. Its semantics are in test_c10d_corners.py.

For a longer fuzz than the suite's, by hand: `RALLYPOINT_FUZZ=100000 pytest tests/core/test_c10d.py -k "fuzz or cut"`.
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
from rallypoint.server.native_connection import REPLIES_BYTES

from .fakes import value_of
from .table import CANCEL, GREETING, MIB, PING, PONG, TOLD, Table, listed, number, string, wait

FUZZ = int(os.environ.get("RALLYPOINT_FUZZ", "200"))


# How it is cut

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
    st.builds(wait, KEYS),  # often, for it is what most can go wrong with
)
NAMES = "abc"
DIALOGUES = st.lists(st.tuples(st.sampled_from(NAMES), MESSAGES), max_size=25)


def in_pieces(data: bytes, chance: random.Random) -> list[bytes]:
    if chance.random() < 0.2:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


def cut(dialogue: list[tuple[str, bytes]], chance: random.Random) -> list[tuple[str, bytes]]:
    """Cut and join a dialogue into other pieces, in which the same messages become whole in the same order."""
    pieces: list[tuple[str, bytes]] = []
    due = dict.fromkeys(NAMES, b"")
    ahead = dict.fromkeys(NAMES, 0)
    for place, (name, message) in enumerate(dialogue):
        due[name] += message[ahead[name] :]
        ahead[name] = 0
        later = dialogue[place + 1 :]
        if later and later[0][0] == name and chance.random() < 0.5:
            continue  # it goes with the next
        upcoming = next((following for other, following in later if other == name), b"")
        if upcoming:
            ahead[name] = chance.randrange(len(upcoming))
        data, due[name] = due[name] + upcoming[: ahead[name]], b""
        pieces += [(name, piece) for piece in in_pieces(data, chance)]
    return pieces


@settings(max_examples=FUZZ)
@given(DIALOGUES, st.randoms(use_true_random=False))
def test_how_messages_are_cut_changes_nothing(dialogue: list[tuple[str, bytes]], chance: random.Random) -> None:
    whole, cut_up = Table(*NAMES), Table(*NAMES)
    for name, message in dialogue:
        whole.feed(name, message)
    for name, piece in cut(dialogue, chance):
        cut_up.feed(name, piece)
    assert cut_up.heard == whole.heard
    assert cut_up.picture() == whole.picture()
    whole.check_size()
    for name in NAMES:
        assert cut_up.people[name].waits_for == whole.people[name].waits_for
        assert cut_up.people[name].held == 0
    for name in NAMES:
        whole.leave(name)
    assert not whole.waiters() and not whole.engine._turns


@settings(max_examples=FUZZ // 4)
@given(st.lists(MESSAGES, max_size=12))
def test_a_greeting_and_all_that_follows_may_come_byte_by_byte(messages: list[bytes]) -> None:
    stream = hello(9) + b"".join(messages)
    whole, slow = Table(), Table()
    whole.join("a", greeted=False)
    slow.join("a", greeted=False)
    whole.feed("a", stream)
    slow.trickle("a", stream, 1)
    assert slow.heard == whole.heard
    assert slow.picture() == whole.picture()


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


def prepared() -> Table:
    """A table where every message would change or answer something: a told popper, one in line behind, a waiter."""
    table = Table("popper", "behind", "waiter")
    table.say("waiter", encode(Opcode.SET, b"/k", b"old"), encode(Opcode.ADD, b"/n", 1), wait(b"/awaited"))
    table.say("popper", wait(b"/q"))
    table.say("behind", wait(b"/q"))
    table.say("waiter", encode(Opcode.QUEUE_PUSH, b"/q", b"item"))
    assert table.hears("popper") == TOLD and not table.hears("behind")
    return table


@pytest.mark.parametrize("name", EVERY_MESSAGE)
def test_part_of_a_message_does_nothing_at_all(name: str) -> None:
    message = EVERY_MESSAGE[name]
    for size in range(len(message)):
        table = prepared()
        before = table.picture()
        table.feed("popper", message[:size])
        assert table.picture() == before, f"{size} of {len(message)} bytes had an effect"
        assert not any(table.heard.values())
        table.leave("popper")  # and neither is it done later
        assert value_of(table.engine, b"/k") == b"old" and value_of(table.engine, b"/n") == b"1"
        assert table.hears("behind") == TOLD


def test_every_opcode_is_tried() -> None:
    opcodes = {value for name, value in vars(Opcode).items() if not name.startswith("_")} - {Opcode.VALIDATE}
    assert {message[0] for message in EVERY_MESSAGE.values()} == opcodes == set(range(1, 19))


# Nonsense

HUGE = [2**63 - 1, 2**63, 2**64 - 1, 2**40]


def raw(op: int, *fields: int | bytes) -> bytes:
    """Make a message of unsigned numbers and bare bytes, true or not."""
    parts = [struct.pack("<Q", field) if isinstance(field, int) else field for field in fields]
    return bytes((op,)) + b"".join(parts)


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_huge_length_is_refused_when_it_is_read_and_takes_no_memory(length: int, piece: int) -> None:
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
        table = Table("a")
        before = table.picture()
        tracemalloc.start()
        try:
            with pytest.raises(BadMessage, match="limit"):
                table.trickle("a", case, piece)
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()
        assert table.picture() == before


def test_a_length_that_is_allowed_reserves_nothing() -> None:
    table = Table(*(f"p{n}" for n in range(100)))
    tracemalloc.start()
    try:
        for name in table.people:
            table.feed(name, raw(Opcode.SET, 1, b"k", 8 * MIB) + b"only this")
            assert table.people[name].held < 1024
        table.join("z")
        table.feed("z", raw(Opcode.MULTI_SET, 131_072))
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
    ("expectation of COMPARE_SET", lambda n: encode(Opcode.COMPARE_SET, b"k", b"v" * n, b"w"), 8 * MIB),
    ("desire of COMPARE_SET", lambda n: encode(Opcode.COMPARE_SET, b"k", b"", b"w" * n), 8 * MIB),
    ("value of MULTI_SET", lambda n: encode(Opcode.MULTI_SET, 1, b"k", b"v" * n), 8 * MIB),
    ("count of CHECK", lambda n: raw(Opcode.CHECK, n, string(b"k") * n), 131_072),
    ("count of WAIT", lambda n: raw(Opcode.WAIT, n, string(b"k") * n), 131_072),
    ("count of MULTI_GET", lambda n: raw(Opcode.MULTI_GET, n, string(b"k") * n), 131_072),
    ("count of MULTI_SET", lambda n: raw(Opcode.MULTI_SET, n, string(b"k") * 2 * n), 131_072),
]


@pytest.mark.parametrize(("make", "limit"), [case[1:] for case in BOUNDARIES], ids=[case[0] for case in BOUNDARIES])
@pytest.mark.parametrize("piece", [60_000, 1 << 30])
def test_limits_are_exactly_those_of_the_reference(make: Callable[[int], bytes], limit: int, piece: int) -> None:
    table = Table("a")
    table.trickle("a", make(limit) + PING, piece)
    assert table.hears("a").endswith(PONG)
    table = Table("a")
    before = table.picture()
    with pytest.raises(BadMessage, match=f"{limit + 1}.*the limit is {limit}"):
        table.trickle("a", make(limit + 1), piece)
    assert table.picture() == before


def test_a_message_of_many_legal_parts_is_bounded_too() -> None:
    table = Table("a", limit=20 * MIB)
    table.feed("a", raw(Opcode.MULTI_SET, 3))
    for _ in range(2):
        table.feed("a", string(b"k") + string(b"v" * 8 * MIB))
    assert table.people["a"].held > 16 * MIB
    assert "20971520" in table.refuses("a", string(b"k") + struct.pack("<Q", 8 * MIB))
    assert not table.engine.exists(b"k")


def test_many_small_parts_count_as_what_they_cost() -> None:
    table = Table("a")
    fields = 20_000
    tracemalloc.start()
    try:
        table.feed("a", raw(Opcode.MULTI_GET, 131_072) + string(b"ab") * fields)
        cost = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cost < table.people["a"].held * 1.5


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
def test_who_does_not_greet_as_agreed_is_refused(first: bytes, why: str) -> None:
    for piece in (1, len(first)):
        table = Table()
        table.join("a", greeted=False)
        with pytest.raises(BadMessage, match=why):
            table.trickle("a", first, piece)
        assert table.engine.revision == 0


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
    """Whatever these send, only they are refused; the engine stays sound, and one more client notices nothing."""
    table = Table("well", *NAMES)
    table.say("well", encode(Opcode.SET, b"/well", b"kept"))
    gone = set()
    for name, data in streams:
        if name in gone:
            continue
        try:
            table.feed(name, data)
        except BadMessage:
            table.leave(name)
            gone.add(name)
        else:
            assert table.people[name].held <= 66 * sum(len(sent) for other, sent in streams if other == name)
        table.check_size()
    assert table.say("well", encode(Opcode.GET, b"/well"), PING) == string(b"kept") + PONG
    for name in [name for name in table.people if name != "well"]:
        table.leave(name)
    assert not table.waiters() and not table.engine._turns and not table.engine._gates


@settings(max_examples=FUZZ)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=60)), max_size=12))
def test_fuzz_random_bytes(streams: list[tuple[str, bytes]]) -> None:
    survive(streams)


@settings(max_examples=FUZZ)
@given(DIALOGUES, st.randoms(use_true_random=False))
def test_fuzz_messages_with_faults(dialogue: list[tuple[str, bytes]], chance: random.Random) -> None:
    spoilt = [(name, mutated(message, chance) if chance.random() < 0.3 else message) for name, message in dialogue]
    survive([(name, piece) for name, message in spoilt for piece in in_pieces(message, chance)])


# What it costs


class Counted(bytes):
    """Bytes that count how many of them are copied out."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        taken = super().__getitem__(place)
        if isinstance(taken, bytes):
            Counted.copied += len(taken)
        return taken


def lines_run(work: Callable[[], None]) -> int:
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
def test_byte_by_byte_costs_the_same_for_every_byte(kind: str) -> None:
    def cost(size: int) -> float:
        table = Table("a")
        receive = table.people["a"].receive
        pieces = [Counted((byte,)) for byte in SLOW[kind](size)]
        Counted.copied = 0
        lines = lines_run(lambda: [receive(piece) for piece in pieces] and None)  # type: ignore[func-returns-value]
        assert Counted.copied <= 2 * len(pieces)
        return lines / len(pieces)

    assert cost(20_000) < 1.1 * cost(2_000)


def test_one_that_waits_may_wake_many_at_the_same_cost_each() -> None:
    def cost(others: int) -> float:
        names = [f"p{n}" for n in range(others)]
        table = Table("a", *names)
        for name in names:
            table.feed(name, wait(name.encode()))
        messages = wait(b"/never") + b"".join(encode(Opcode.SET, name.encode(), b"") for name in names)
        lines = lines_run(lambda: table.people["a"].receive(messages) and None)
        assert set(table.heard.values()) == {b"", TOLD}
        return lines / others

    assert cost(1000) < 1.1 * cost(100)


def test_a_large_message_in_pieces_is_copied_once() -> None:
    table = Table("a")
    message = encode(Opcode.SET, b"k", b"v" * 4 * MIB)
    Counted.copied = 0
    for at in range(0, len(message), 65_536):
        table.people["a"].receive(Counted(message[at : at + 65_536]))
    assert value_of(table.engine, b"k") == b"v" * 4 * MIB
    assert Counted.copied <= 1.1 * len(message)


# Answers that are large


def test_large_answers_are_given_a_part_at_a_time_and_in_order() -> None:
    table = Table("a", "b")
    values = {b"/%d" % n: bytes([n]) * (REPLIES_BYTES // 3) for n in range(10)}
    for key, value in values.items():
        table.say("b", encode(Opcode.SET, key, value))
    a = table.people["a"]
    parts = [a.receive(b"".join(encode(Opcode.GET, key) for key in values) + encode(Opcode.ADD, b"/n", 1) + PING)]
    assert a.blocked and a.held > 0
    assert value_of(table.engine, b"/n") is None, "what waits has been carried out"
    table.say("b", encode(Opcode.SET, b"/9", b"changed"))  # others go on meanwhile, and this is seen
    while a.blocked:
        parts.append(a.receive(b""))
    assert max(map(len, parts)) < 2 * REPLIES_BYTES and len(parts) > 2
    values[b"/9"] = b"changed"
    assert b"".join(parts) == b"".join(map(string, values.values())) + number(1) + PONG
    assert a.held == 0


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_what_comes_while_answers_wait_keeps_its_place(piece: int) -> None:
    table = Table("a", "b")
    table.say("b", encode(Opcode.SET, b"/k", b"v" * (REPLIES_BYTES + 1)))
    a, heard = table.people["a"], b""
    stream = b"".join(encode(Opcode.GET, b"/k") + encode(Opcode.ADD, b"/n", 1) for _ in range(20))
    for at in range(0, len(stream), piece):
        heard += a.receive(stream[at : at + piece])
    while a.blocked:
        heard += a.receive(b"")
    assert heard == b"".join(string(b"v" * (REPLIES_BYTES + 1)) + number(n) for n in range(1, 21))


def test_a_peer_may_leave_while_answers_wait() -> None:
    table = Table("a", "b")
    table.say("b", encode(Opcode.SET, b"/k", b"v" * REPLIES_BYTES * 2))
    table.people["a"].receive(encode(Opcode.GET, b"/k") * 3 + encode(Opcode.SET, b"/late", b""))
    assert table.people["a"].blocked
    table.leave("a")
    assert table.say("b", encode(Opcode.GETNUMKEYS)) == number(1)


def test_an_answer_past_the_limit_is_refused_before_it_is_made() -> None:
    table = Table("a", "b", "c", "d", limit=MIB)
    for n in range(3):
        table.say("d", encode(Opcode.SET, b"/%d" % n, b"v" * (MIB // 2)))
    assert "the limit is 1048576" in table.refuses("a", listed(Opcode.MULTI_GET, b"/0", b"/1"))
    table.engine.put(b"/0", b"v" * (MIB + 1))  # as another protocol might
    assert "the limit is 1048576" in table.refuses("b", encode(Opcode.GET, b"/0"))
    table.say("d", encode(Opcode.DELETE_KEY, b"/0"))
    for n in range(300):
        table.say("d", encode(Opcode.SET, b"/%d" % n + b"k" * 8000, b""))
    assert "the limit is 1048576" in table.refuses("c", encode(Opcode.LIST_KEYS))
    assert table.say("d", PING) == PONG


def test_a_value_may_grow_only_while_it_can_be_read() -> None:
    table = Table("a", "b", limit=20 * MIB)
    for _ in range(2):
        table.say("a", encode(Opcode.APPEND, b"/k", b"v" * 8 * MIB))
    table.say("a", encode(Opcode.APPEND, b"/k", b"v" * 4 * MIB))
    assert len(table.say("a", encode(Opcode.GET, b"/k"))) == 20 * MIB + 8
    assert "value '/k' has 20,971,521 bytes and the limit is" in table.refuses("a", encode(Opcode.APPEND, b"/k", b"v"))
    assert len(table.say("b", encode(Opcode.GET, b"/k"))) == 20 * MIB + 8


def test_a_full_store_ends_only_who_writes() -> None:
    table = Table("a", "b", max_bytes=1000)
    table.say("b", encode(Opcode.SET, b"/k", b"v" * 100))
    before = table.picture()
    assert table.refuses("a", encode(Opcode.SET, b"/big", b"v" * 1000))
    assert table.picture() == before
    assert table.say("b", encode(Opcode.GET, b"/k"), listed(Opcode.CHECK, b"/big")) == string(b"v" * 100) + b"\1"
