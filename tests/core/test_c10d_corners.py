"""PyTorch's protocol, corner by corner: what its clients see of waits, turns, barriers and odd values.

What the reference does is in its own words and bytes; where this server does better, the test's message says so.
"""

from __future__ import annotations

import pytest

from rallypoint.core import ops
from rallypoint.protocol.c10d import Decoder, Opcode, Partial, encode

from .fakes import items_of, value_of
from .table import CANCEL, CANCELLED, GREETING, LIMIT, PING, PONG, TOLD, Table, listed, number, string, wait


@pytest.mark.parametrize(
    ("stored", "expected", "desired", "returned", "afterwards"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"", b"", b"", b""),
        (None, b"other", b"new", b"other", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"", b"", b"new", b"new", b"new"),
        (b"old", b"", b"new", b"old", b"old"),
        (b"old", b"other", b"new", b"old", b"old"),
        (b"", b"other", b"new", b"", b""),
        (b"new", b"other", b"new", b"new", b"new"),
    ],
)
def test_compare_set(
    stored: bytes | None, expected: bytes, desired: bytes, returned: bytes, afterwards: bytes | None
) -> None:
    table = Table("a")
    if stored is not None:
        table.say("a", encode(Opcode.SET, b"/k", stored))
    assert table.say("a", encode(Opcode.COMPARE_SET, b"/k", expected, desired)) == string(returned)
    assert value_of(table.engine, b"/k") == afterwards


def test_compare_set_wakes_who_waits_only_when_it_writes() -> None:
    table = Table("a", "b")
    table.say("a", wait(b"/k"))
    table.say("b", encode(Opcode.COMPARE_SET, b"/k", b"no", b"v"))
    assert table.hears("a") == b""
    table.say("b", encode(Opcode.COMPARE_SET, b"/k", b"", b"v"))
    assert table.hears("a") == TOLD


@pytest.mark.parametrize(
    "write",
    [
        encode(Opcode.SET, b"/k", b""),
        encode(Opcode.MULTI_SET, 2, b"/x", b"", b"/k", b""),
        encode(Opcode.ADD, b"/k", 0),
        encode(Opcode.APPEND, b"/k", b""),
        encode(Opcode.COMPARE_SET, b"/k", b"", b""),
        encode(Opcode.QUEUE_PUSH, b"/k", b""),
        encode(Opcode.BARRIER, b"/k", 1),
    ],
)
@pytest.mark.parametrize("keys", [(b"/k",), (b"/k", b"/there"), (b"/k", b"/k"), (b"/there", b"/k", b"/there")])
def test_every_write_ends_a_wait_with_one_byte(write: bytes, keys: tuple[bytes, ...]) -> None:
    table = Table("a", "b")
    table.say("b", encode(Opcode.SET, b"/there", b""))
    assert table.say("a", wait(*keys)) == b""
    assert table.people["a"].waits_for == keys
    table.say("b", write)
    assert table.hears("a") == TOLD
    table.say("b", write)
    assert table.hears("a") == b"", "told twice"
    assert table.say("a", CANCEL) == CANCELLED
    assert table.people["a"].waits_for == ()


def test_waits_that_are_true_already_end_at_once() -> None:
    table = Table("a")
    table.say(
        "a", encode(Opcode.SET, b"/k", b""), encode(Opcode.QUEUE_PUSH, b"/q", b"1"), encode(Opcode.SET, b"/j", b"")
    )
    for keys in ((), (b"/k",), (b"/k", b"/k"), (b"/k", b"/j"), (b"/q",), (b"/q", b"/k")):
        assert table.say("a", wait(*keys)) == TOLD, keys
        assert table.say("a", listed(Opcode.CHECK, *keys)) == b"\0", keys
    assert table.say("a", listed(Opcode.CHECK, b"/k", b"/no")) == b"\1"


def test_a_wait_ends_only_when_all_are_there_at_once() -> None:
    table = Table("a", "b")
    table.say("a", wait(b"/x", b"/y"))
    table.say("b", encode(Opcode.SET, b"/x", b""), encode(Opcode.DELETE_KEY, b"/x"), encode(Opcode.SET, b"/y", b""))
    assert table.hears("a") == b""
    table.say("b", encode(Opcode.SET, b"/x", b""))
    assert table.hears("a") == TOLD


def test_deleting_wakes_nobody() -> None:
    table = Table("a", "b")
    table.say("a", wait(b"/k"))
    assert table.say("b", encode(Opcode.DELETE_KEY, b"/k")) == number(0)
    assert table.hears("a") == b""
    assert table.say("b", encode(Opcode.SET, b"/j", b""), encode(Opcode.DELETE_KEY, b"/j")) == number(1)
    assert table.hears("a") == b""


def test_after_any_0_exactly_one_1_follows_a_cancellation() -> None:
    table = Table("a", "b")
    assert table.say("a", CANCEL) == CANCELLED  # with nothing to cancel
    table.say("a", wait(b"/k"))
    assert table.say("a", CANCEL) == CANCELLED
    table.say("b", encode(Opcode.SET, b"/k", b""))
    assert table.hears("a") == b"", "a wait that was cancelled was answered"
    table.say("a", wait(b"/j"))
    table.say("b", encode(Opcode.SET, b"/j", b""))  # just before the cancellation arrives
    assert table.say("a", CANCEL) == TOLD + CANCELLED
    assert table.say("a", CANCEL, PING) == CANCELLED + PONG


def test_a_client_that_ends_its_own_wait_hears_of_it_first() -> None:
    table = Table("a", "b")
    table.say("b", wait(b"/k"))
    assert (
        table.say("a", wait(b"/k"), PING, encode(Opcode.SET, b"/k", b""), PING, CANCEL)
        == PONG + TOLD + PONG + CANCELLED
    )
    assert table.hears("b") == TOLD


def test_a_new_wait_takes_the_place_of_the_old() -> None:
    table = Table("a", "b")
    table.say("a", wait(b"/old"), wait(b"/x", b"/new"))
    assert table.people["a"].waits_for == (b"/x", b"/new")
    table.say("b", encode(Opcode.SET, b"/old", b""))
    assert table.hears("a") == b""
    table.say("b", encode(Opcode.MULTI_SET, 2, b"/x", b"", b"/new", b""))
    assert table.hears("a") == TOLD
    assert not table.waiters()


@pytest.mark.parametrize("first", [wait(b"/n"), wait(b"/n", b"/k"), encode(Opcode.BARRIER, b"/n", 3)])
@pytest.mark.parametrize("second", [wait(b"/x"), wait(b"/x", b"/k"), encode(Opcode.BARRIER, b"/n", 3)])
@pytest.mark.parametrize("together", [False, True])
def test_whatever_wait_follows_whatever_wait_one_is_held(first: bytes, second: bytes, together: bool) -> None:
    table = Table("a", "b")
    for said in [first + second] if together else [first, second]:
        assert table.say("a", said) == b""
    assert len(table.waiters()) == 1
    arrived = second[0] == Opcode.BARRIER
    assert (value_of(table.engine, b"/n") or b"0") == (b"1" if arrived else b"0"), "one client arrived more than once"
    assert table.say("a", CANCEL) == CANCELLED
    assert not table.waiters() and (value_of(table.engine, b"/n") or b"0") == b"0"


def test_what_is_asked_behind_a_wait_is_answered_at_once() -> None:
    table = Table("a", "b")
    assert table.say("a", wait(b"/k"), encode(Opcode.ADD, b"/n", 2), listed(Opcode.CHECK, b"/k")) == number(2) + b"\1"
    table.say("b", encode(Opcode.SET, b"/k", b""))
    assert table.hears("a") == TOLD


def test_who_leaves_is_forgotten() -> None:
    table = Table("a", "b")
    table.say("a", wait(b"/k", b"/j"))
    assert table.waiters()
    table.leave("a")
    assert not table.waiters()
    assert table.say("b", encode(Opcode.MULTI_SET, 2, b"/k", b"", b"/j", b""), PING) == PONG
    table.check_size()


def test_a_missing_key_is_read_as_empty() -> None:
    table = Table("a")
    table.say("a", encode(Opcode.QUEUE_PUSH, b"/q", b"1"), encode(Opcode.SET, b"/k", b"v"))
    assert table.say("a", encode(Opcode.GET, b"/no"), encode(Opcode.GET, b"/q")) == string(b"") * 2
    assert table.say("a", listed(Opcode.MULTI_GET, b"/no", b"/k", b"/q")) == string(b"") + string(b"v") + string(b"")
    assert table.say("a", listed(Opcode.MULTI_GET)) == b""


def test_keys_are_bytes_of_any_kind() -> None:
    table = Table("a")
    keys = [b"", b"/", b"\0", b"/\xff\xfe", b"init/", b"/k" * 100]
    table.say("a", *(encode(Opcode.SET, key, key) for key in keys))
    assert table.say("a", encode(Opcode.GETNUMKEYS)) == number(len(keys))
    assert table.say("a", encode(Opcode.LIST_KEYS)) == number(len(keys)) + b"".join(map(string, sorted(keys)))
    assert table.say("a", listed(Opcode.MULTI_GET, *keys)) == b"".join(map(string, keys))


ADDS = [
    (None, 5, 5, b"5"),
    (None, 0, 0, b"0"),
    (b"-7", 5, -2, b"-2"),
    (b"12abc", 1, 13, b"13"),
    (b" \t+4 x", 1, 5, b"5"),
    (b"007", 1, 8, b"8"),
    (b"%d" % (2**63 - 1), 1, -(2**63), b"%d" % -(2**63)),
    (b"%d" % -(2**63), -1, 2**63 - 1, b"%d" % (2**63 - 1)),
]


@pytest.mark.parametrize(("stored", "amount", "total", "afterwards"), ADDS)
def test_add(stored: bytes | None, amount: int, total: int, afterwards: bytes) -> None:
    table = Table("a")
    if stored is not None:
        table.say("a", encode(Opcode.SET, b"/n", stored))
    assert table.say("a", encode(Opcode.ADD, b"/n", amount), encode(Opcode.GET, b"/n")) == number(total) + string(
        afterwards
    )


@pytest.mark.parametrize("stored", [b"", b"x", b"-", b"+", b" ", b"%d" % 2**63, b"%d" % (-(2**63) - 1), b"9" * 5000])
@pytest.mark.parametrize("op", [Opcode.ADD, Opcode.BARRIER])
def test_what_is_no_number_ends_the_connection_and_stays(stored: bytes, op: int) -> None:
    table = Table("a", "b")
    table.say("b", encode(Opcode.SET, b"/n", stored))
    before = table.picture()
    assert "/n" in table.refuses("a", encode(op, b"/n", 2))
    assert table.picture() == before
    assert table.say("b", encode(Opcode.GET, b"/n")) == string(stored)


def test_queues_are_apart_from_keys() -> None:
    table = Table("a")
    assert table.say("a", encode(Opcode.QUEUE_LEN, b"/q"), encode(Opcode.QUEUE_POP, b"/q")) == number(0) * 2
    table.say("a", encode(Opcode.QUEUE_PUSH, b"/q", b"one"), encode(Opcode.QUEUE_PUSH, b"/q", b""))
    assert table.say("a", encode(Opcode.QUEUE_LEN, b"/q"), encode(Opcode.GETNUMKEYS)) == number(2) + number(0)
    assert table.say("a", encode(Opcode.LIST_KEYS), encode(Opcode.DELETE_KEY, b"/q")) == number(0) * 2
    assert table.say("a", encode(Opcode.QUEUE_POP, b"/q")) == number(2) + string(b"one")
    assert table.say("a", encode(Opcode.QUEUE_POP, b"/q")) == number(1) + string(b"")
    assert table.say("a", listed(Opcode.CHECK, b"/q")) == b"\1"
    table.say("a", encode(Opcode.SET, b"/q", b"a key"))
    assert table.say("a", wait(b"/q"), encode(Opcode.QUEUE_POP, b"/q")) == TOLD + number(0)


def push(item: bytes) -> bytes:
    return encode(Opcode.QUEUE_PUSH, b"/q", item)


POP = encode(Opcode.QUEUE_POP, b"/q")
IN_LINE = wait(b"/q")


def in_line(*names: str) -> Table:
    table = Table(*names, "pusher")
    for name in names:
        assert table.say(name, IN_LINE) == b""
    return table


def test_one_push_tells_one_and_the_next_tells_the_next() -> None:
    table = in_line("a", "b")
    table.say("pusher", push(b"1"))
    assert table.hears("a") == TOLD and table.hears("b") == b""
    assert table.say("a", POP, IN_LINE) == number(1) + string(b"1")
    table.say("pusher", push(b"2"))
    assert table.hears("a") == b"" and table.hears("b") == TOLD, "who waited longer was passed over"
    assert table.say("b", POP) == number(1) + string(b"2")


def test_two_pushes_tell_two() -> None:
    table = in_line("a", "b", "c")
    table.say("pusher", push(b"1"), push(b"2"))
    assert [table.hears(name) for name in "abc"] == [TOLD, TOLD, b""]
    assert table.say("b", POP) == number(2) + string(b"1")
    assert table.hears("c") == b"", "the item that is left is kept for a"
    assert table.say("a", POP) == number(1) + string(b"2")


@pytest.mark.parametrize(
    "other", [PING, CANCEL, encode(Opcode.GET, b"/k"), IN_LINE, encode(Opcode.QUEUE_POP, b"/other")]
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_turn_that_is_not_used_goes_to_the_next(other: bytes, whole: bool) -> None:
    table = in_line("a", "b")
    table.say("pusher", push(b"1"))
    assert table.hears("a") == TOLD
    if not whole:
        table.feed("a", other[:-1])
        assert table.hears("b") == b""
        other = other[-1:]
    table.feed("a", other)
    assert table.hears("b") == TOLD
    assert table.say("b", POP) == number(1) + string(b"1")


def test_a_turn_given_at_once_is_a_turn_too() -> None:
    table = Table("a", "b", "pusher")
    table.say("pusher", push(b"1"))
    assert table.say("a", IN_LINE) == TOLD
    assert table.say("b", IN_LINE) == b""
    assert table.say("a", POP) == number(1) + string(b"1")
    assert table.hears("b") == b""


def test_the_turn_of_one_who_leaves_goes_to_the_next() -> None:
    table = in_line("a", "b")
    table.say("pusher", push(b"1"))
    table.leave("a")
    assert table.hears("b") == TOLD
    table.leave("b")
    assert not table.engine._turns and len(items_of(table.engine, b"/q")) == 1


def test_a_stale_turn_wakes_no_other_wait() -> None:
    table = in_line("a")
    table.say("pusher", push(b"1"))
    assert table.hears("a") == TOLD
    assert table.say("a", POP, wait(b"/absent")) == number(1) + string(b"1")
    table.say("pusher", push(b"2"))
    assert table.hears("a") == b""


def test_a_wait_for_a_queue_and_a_key_takes_no_turn() -> None:
    table = Table("a", "b", "pusher")
    table.say("a", wait(b"/q", b"/k"))
    table.say("b", IN_LINE)
    table.say("pusher", push(b"1"))
    assert table.hears("b") == TOLD
    table.say("pusher", encode(Opcode.SET, b"/k", b""))
    assert table.hears("a") == TOLD


def test_a_key_of_the_queues_name_tells_everyone_in_line() -> None:
    table = in_line("a", "b")
    table.say("pusher", encode(Opcode.SET, b"/q", b""))
    assert table.hears("a") == table.hears("b") == TOLD


BARRIER = encode(Opcode.BARRIER, b"/b", 3)


def test_a_barrier_counts_in_an_ordinary_key() -> None:
    table = Table("a", "b", "c", "d")
    assert table.say("a", BARRIER) == table.say("b", BARRIER) == b""
    assert value_of(table.engine, b"/b") == b"2"
    assert table.say("c", BARRIER) == TOLD
    assert table.hears("a") == table.hears("b") == TOLD
    assert table.say("d", BARRIER) == TOLD, "a second round with the same key passes at once, as with PyTorch"
    assert value_of(table.engine, b"/b") == b"4"


@pytest.mark.parametrize("size", [1, 0, -(2**63)])
def test_a_barrier_of_one_passes(size: int) -> None:
    table = Table("a")
    assert table.say("a", encode(Opcode.BARRIER, b"/b", size)) == TOLD
    assert value_of(table.engine, b"/b") == b"1"


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_an_arrival_that_gives_up_is_taken_back(how: str) -> None:
    table = Table("a", "b", "c")
    table.say("a", BARRIER)
    table.say("b", BARRIER)
    if how == "cancel":
        assert table.say("a", CANCEL) == CANCELLED
    else:
        table.leave("a")
    assert value_of(table.engine, b"/b") == b"1"
    assert table.say("c", BARRIER) == b"", "it passed one short"
    table.join("a")
    assert table.say("a", BARRIER) == TOLD
    assert table.hears("b") == table.hears("c") == TOLD


def test_who_was_let_through_is_not_taken_back() -> None:
    table = Table("a", "b", "c")
    for name in "abc":
        table.say(name, BARRIER)
    assert table.say("a", CANCEL) == TOLD + CANCELLED
    table.leave("b")
    assert value_of(table.engine, b"/b") == b"3"


def test_a_smaller_barrier_and_a_write_let_everybody_through() -> None:
    table = Table("a", "b", "c")
    table.say("a", BARRIER)
    assert table.say("b", encode(Opcode.BARRIER, b"/b", 2)) == TOLD
    assert table.hears("a") == b"", "it has its own size, and that is not reached"
    table.say("c", encode(Opcode.SET, b"/b", b"3"))
    assert table.hears("a") == TOLD


def test_strings_that_came_whole_are_not_collected_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of very many short strings comes in chunks: each has one string at most that is cut."""
    slow, one_by_one = 0, Partial._field

    def count(self: Partial, kind: str) -> None:
        nonlocal slow
        slow += 1
        one_by_one(self, kind)

    monkeypatch.setattr(Partial, "_field", count)
    parts = [b"%d" % part for part in range(2000)]
    stream = encode(Opcode.MULTI_SET, 1000, *parts)
    decoder = Decoder(LIMIT)
    decoder.read(GREETING, 0)
    slow = 0
    chunks = [stream[at : at + 1000] for at in range(0, len(stream), 1000)]
    (op,) = [op for op, _ in (decoder.read(chunk, 0) for chunk in chunks) if op is not None]
    assert isinstance(op, ops.MultiSet) and op.pairs == list(zip(parts[::2], parts[1::2], strict=True))
    assert slow <= 2 * len(chunks) + 1
