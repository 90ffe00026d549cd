"""The semantics of PyTorch's protocol in detail: waits, turns, barriers and unusual values, as its clients see them.

Expected bytes are those of PyTorch's server; where ours differs on purpose, the message of the assertion says so.
"""

from __future__ import annotations

import pytest

from rallypoint.core import ops
from rallypoint.protocol.c10d import Decoder, Opcode, Partial, encode

from .c10d_harness import (
    CANCEL,
    GREETING,
    LIMIT,
    PING,
    PONG,
    STOP_WAITING,
    WAIT_CANCELED,
    C10dHarness,
    listed,
    number,
    string,
    wait,
)
from .fake_server import items_of, value_of


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
def test_compare_set_returns_and_stores_what_pytorch_does(
    stored: bytes | None, expected: bytes, desired: bytes, returned: bytes, afterwards: bytes | None
) -> None:
    harness = C10dHarness("a")
    if stored is not None:
        harness.send("a", encode(Opcode.SET, b"/k", stored))
    assert harness.send("a", encode(Opcode.COMPARE_SET, b"/k", expected, desired)) == string(returned)
    assert value_of(harness.engine, b"/k") == afterwards


def test_compare_set_wakes_waiters_only_when_it_writes() -> None:
    harness = C10dHarness("a", "b")
    harness.send("a", wait(b"/k"))
    harness.send("b", encode(Opcode.COMPARE_SET, b"/k", b"no", b"v"))
    assert harness.received("a") == b""
    harness.send("b", encode(Opcode.COMPARE_SET, b"/k", b"", b"v"))
    assert harness.received("a") == STOP_WAITING


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
    harness = C10dHarness("a", "b")
    harness.send("b", encode(Opcode.SET, b"/there", b""))
    assert harness.send("a", wait(*keys)) == b""
    assert harness.handlers["a"].waits_for == keys
    harness.send("b", write)
    assert harness.received("a") == STOP_WAITING
    harness.send("b", write)
    assert harness.received("a") == b"", "woken twice"
    assert harness.send("a", CANCEL) == WAIT_CANCELED
    assert harness.handlers["a"].waits_for == ()


def test_waits_for_existing_keys_end_at_once() -> None:
    harness = C10dHarness("a")
    harness.send(
        "a", encode(Opcode.SET, b"/k", b""), encode(Opcode.QUEUE_PUSH, b"/q", b"1"), encode(Opcode.SET, b"/j", b"")
    )
    for keys in ((), (b"/k",), (b"/k", b"/k"), (b"/k", b"/j"), (b"/q",), (b"/q", b"/k")):
        assert harness.send("a", wait(*keys)) == STOP_WAITING, keys
        assert harness.send("a", listed(Opcode.CHECK, *keys)) == b"\0", keys
    assert harness.send("a", listed(Opcode.CHECK, b"/k", b"/no")) == b"\1"


def test_a_wait_ends_only_when_all_keys_exist_at_once() -> None:
    harness = C10dHarness("a", "b")
    harness.send("a", wait(b"/x", b"/y"))
    harness.send("b", encode(Opcode.SET, b"/x", b""), encode(Opcode.DELETE_KEY, b"/x"), encode(Opcode.SET, b"/y", b""))
    assert harness.received("a") == b""
    harness.send("b", encode(Opcode.SET, b"/x", b""))
    assert harness.received("a") == STOP_WAITING


def test_deleting_wakes_nobody() -> None:
    harness = C10dHarness("a", "b")
    harness.send("a", wait(b"/k"))
    assert harness.send("b", encode(Opcode.DELETE_KEY, b"/k")) == number(0)
    assert harness.received("a") == b""
    assert harness.send("b", encode(Opcode.SET, b"/j", b""), encode(Opcode.DELETE_KEY, b"/j")) == number(1)
    assert harness.received("a") == b""


def test_a_cancellation_is_answered_exactly_once() -> None:
    harness = C10dHarness("a", "b")
    assert harness.send("a", CANCEL) == WAIT_CANCELED  # with nothing to cancel
    harness.send("a", wait(b"/k"))
    assert harness.send("a", CANCEL) == WAIT_CANCELED
    harness.send("b", encode(Opcode.SET, b"/k", b""))
    assert harness.received("a") == b"", "a wait that was cancelled was answered"
    harness.send("a", wait(b"/j"))
    harness.send("b", encode(Opcode.SET, b"/j", b""))  # just before the cancellation arrives
    assert harness.send("a", CANCEL) == STOP_WAITING + WAIT_CANCELED
    assert harness.send("a", CANCEL, PING) == WAIT_CANCELED + PONG


def test_a_client_that_ends_its_own_wait_is_answered_in_order() -> None:
    harness = C10dHarness("a", "b")
    harness.send("b", wait(b"/k"))
    assert (
        harness.send("a", wait(b"/k"), PING, encode(Opcode.SET, b"/k", b""), PING, CANCEL)
        == PONG + STOP_WAITING + PONG + WAIT_CANCELED
    )
    assert harness.received("b") == STOP_WAITING


def test_a_new_wait_replaces_the_old_one() -> None:
    harness = C10dHarness("a", "b")
    harness.send("a", wait(b"/old"), wait(b"/x", b"/new"))
    assert harness.handlers["a"].waits_for == (b"/x", b"/new")
    harness.send("b", encode(Opcode.SET, b"/old", b""))
    assert harness.received("a") == b""
    harness.send("b", encode(Opcode.MULTI_SET, 2, b"/x", b"", b"/new", b""))
    assert harness.received("a") == STOP_WAITING
    assert not harness.waiters()


@pytest.mark.parametrize("first", [wait(b"/n"), wait(b"/n", b"/k"), encode(Opcode.BARRIER, b"/n", 3)])
@pytest.mark.parametrize("second", [wait(b"/x"), wait(b"/x", b"/k"), encode(Opcode.BARRIER, b"/n", 3)])
@pytest.mark.parametrize("together", [False, True])
def test_a_client_has_at_most_one_wait(first: bytes, second: bytes, together: bool) -> None:
    harness = C10dHarness("a", "b")
    for data in [first + second] if together else [first, second]:
        assert harness.send("a", data) == b""
    assert len(harness.waiters()) == 1
    arrived = second[0] == Opcode.BARRIER
    assert (value_of(harness.engine, b"/n") or b"0") == (b"1" if arrived else b"0"), "one client arrived more than once"
    assert harness.send("a", CANCEL) == WAIT_CANCELED
    assert not harness.waiters() and (value_of(harness.engine, b"/n") or b"0") == b"0"


def test_requests_behind_a_wait_are_answered_at_once() -> None:
    harness = C10dHarness("a", "b")
    assert (
        harness.send("a", wait(b"/k"), encode(Opcode.ADD, b"/n", 2), listed(Opcode.CHECK, b"/k")) == number(2) + b"\1"
    )
    harness.send("b", encode(Opcode.SET, b"/k", b""))
    assert harness.received("a") == STOP_WAITING


def test_waits_end_with_their_connection() -> None:
    harness = C10dHarness("a", "b")
    harness.send("a", wait(b"/k", b"/j"))
    assert harness.waiters()
    harness.disconnect("a")
    assert not harness.waiters()
    assert harness.send("b", encode(Opcode.MULTI_SET, 2, b"/k", b"", b"/j", b""), PING) == PONG
    harness.check_size()


def test_a_missing_key_is_read_as_empty() -> None:
    harness = C10dHarness("a")
    harness.send("a", encode(Opcode.QUEUE_PUSH, b"/q", b"1"), encode(Opcode.SET, b"/k", b"v"))
    assert harness.send("a", encode(Opcode.GET, b"/no"), encode(Opcode.GET, b"/q")) == string(b"") * 2
    assert harness.send("a", listed(Opcode.MULTI_GET, b"/no", b"/k", b"/q")) == string(b"") + string(b"v") + string(b"")
    assert harness.send("a", listed(Opcode.MULTI_GET)) == b""


def test_keys_are_bytes_of_any_kind() -> None:
    harness = C10dHarness("a")
    keys = [b"", b"/", b"\0", b"/\xff\xfe", b"init/", b"/k" * 100]
    harness.send("a", *(encode(Opcode.SET, key, key) for key in keys))
    assert harness.send("a", encode(Opcode.GETNUMKEYS)) == number(len(keys))
    assert harness.send("a", encode(Opcode.LIST_KEYS)) == number(len(keys)) + b"".join(map(string, sorted(keys)))
    assert harness.send("a", listed(Opcode.MULTI_GET, *keys)) == b"".join(map(string, keys))


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
def test_add_parses_and_wraps_as_pytorch_does(stored: bytes | None, amount: int, total: int, afterwards: bytes) -> None:
    harness = C10dHarness("a")
    if stored is not None:
        harness.send("a", encode(Opcode.SET, b"/n", stored))
    assert harness.send("a", encode(Opcode.ADD, b"/n", amount), encode(Opcode.GET, b"/n")) == number(total) + string(
        afterwards
    )


@pytest.mark.parametrize("stored", [b"", b"x", b"-", b"+", b" ", b"%d" % 2**63, b"%d" % (-(2**63) - 1), b"9" * 5000])
@pytest.mark.parametrize("op", [Opcode.ADD, Opcode.BARRIER])
def test_counting_on_text_ends_the_connection_and_keeps_the_value(stored: bytes, op: int) -> None:
    harness = C10dHarness("a", "b")
    harness.send("b", encode(Opcode.SET, b"/n", stored))
    before = harness.content()
    assert "/n" in harness.refuses("a", encode(op, b"/n", 2))
    assert harness.content() == before
    assert harness.send("b", encode(Opcode.GET, b"/n")) == string(stored)


def test_queues_and_keys_are_separate() -> None:
    harness = C10dHarness("a")
    assert harness.send("a", encode(Opcode.QUEUE_LEN, b"/q"), encode(Opcode.QUEUE_POP, b"/q")) == number(0) * 2
    harness.send("a", encode(Opcode.QUEUE_PUSH, b"/q", b"one"), encode(Opcode.QUEUE_PUSH, b"/q", b""))
    assert harness.send("a", encode(Opcode.QUEUE_LEN, b"/q"), encode(Opcode.GETNUMKEYS)) == number(2) + number(0)
    assert harness.send("a", encode(Opcode.LIST_KEYS), encode(Opcode.DELETE_KEY, b"/q")) == number(0) * 2
    assert harness.send("a", encode(Opcode.QUEUE_POP, b"/q")) == number(2) + string(b"one")
    assert harness.send("a", encode(Opcode.QUEUE_POP, b"/q")) == number(1) + string(b"")
    assert harness.send("a", listed(Opcode.CHECK, b"/q")) == b"\1"
    harness.send("a", encode(Opcode.SET, b"/q", b"a key"))
    assert harness.send("a", wait(b"/q"), encode(Opcode.QUEUE_POP, b"/q")) == STOP_WAITING + number(0)


def push(item: bytes) -> bytes:
    return encode(Opcode.QUEUE_PUSH, b"/q", item)


POP = encode(Opcode.QUEUE_POP, b"/q")
IN_LINE = wait(b"/q")


def in_line(*names: str) -> C10dHarness:
    harness = C10dHarness(*names, "pusher")
    for name in names:
        assert harness.send(name, IN_LINE) == b""
    return harness


def test_each_push_wakes_the_longest_waiter() -> None:
    harness = in_line("a", "b")
    harness.send("pusher", push(b"1"))
    assert harness.received("a") == STOP_WAITING and harness.received("b") == b""
    assert harness.send("a", POP, IN_LINE) == number(1) + string(b"1")
    harness.send("pusher", push(b"2"))
    assert harness.received("a") == b"" and harness.received("b") == STOP_WAITING, "the longest waiter was passed over"
    assert harness.send("b", POP) == number(1) + string(b"2")


def test_two_pushes_wake_two_waiters() -> None:
    harness = in_line("a", "b", "c")
    harness.send("pusher", push(b"1"), push(b"2"))
    assert [harness.received(name) for name in "abc"] == [STOP_WAITING, STOP_WAITING, b""]
    assert harness.send("b", POP) == number(2) + string(b"1")
    assert harness.received("c") == b"", "the remaining item is reserved for a"
    assert harness.send("a", POP) == number(1) + string(b"2")


@pytest.mark.parametrize(
    "other", [PING, CANCEL, encode(Opcode.GET, b"/k"), IN_LINE, encode(Opcode.QUEUE_POP, b"/other")]
)
@pytest.mark.parametrize("whole", [False, True])
def test_an_unused_turn_passes_to_the_next_waiter(other: bytes, whole: bool) -> None:
    harness = in_line("a", "b")
    harness.send("pusher", push(b"1"))
    assert harness.received("a") == STOP_WAITING
    if not whole:
        harness.feed("a", other[:-1])
        assert harness.received("b") == b""
        other = other[-1:]
    harness.feed("a", other)
    assert harness.received("b") == STOP_WAITING
    assert harness.send("b", POP) == number(1) + string(b"1")


def test_a_wait_that_ends_at_once_gets_a_turn() -> None:
    harness = C10dHarness("a", "b", "pusher")
    harness.send("pusher", push(b"1"))
    assert harness.send("a", IN_LINE) == STOP_WAITING
    assert harness.send("b", IN_LINE) == b""
    assert harness.send("a", POP) == number(1) + string(b"1")
    assert harness.received("b") == b""


def test_the_turn_of_a_closed_connection_passes_to_the_next_waiter() -> None:
    harness = in_line("a", "b")
    harness.send("pusher", push(b"1"))
    harness.disconnect("a")
    assert harness.received("b") == STOP_WAITING
    harness.disconnect("b")
    assert not harness.engine._turns and len(items_of(harness.engine, b"/q")) == 1


def test_a_push_does_not_wake_a_later_wait_for_another_key() -> None:
    harness = in_line("a")
    harness.send("pusher", push(b"1"))
    assert harness.received("a") == STOP_WAITING
    assert harness.send("a", POP, wait(b"/absent")) == number(1) + string(b"1")
    harness.send("pusher", push(b"2"))
    assert harness.received("a") == b""


def test_a_wait_for_a_queue_and_a_key_takes_no_turn() -> None:
    harness = C10dHarness("a", "b", "pusher")
    harness.send("a", wait(b"/q", b"/k"))
    harness.send("b", IN_LINE)
    harness.send("pusher", push(b"1"))
    assert harness.received("b") == STOP_WAITING
    harness.send("pusher", encode(Opcode.SET, b"/k", b""))
    assert harness.received("a") == STOP_WAITING


def test_a_key_with_the_name_of_a_queue_wakes_all_waiters() -> None:
    harness = in_line("a", "b")
    harness.send("pusher", encode(Opcode.SET, b"/q", b""))
    assert harness.received("a") == harness.received("b") == STOP_WAITING


BARRIER = encode(Opcode.BARRIER, b"/b", 3)


def test_a_barrier_counts_in_an_ordinary_key() -> None:
    harness = C10dHarness("a", "b", "c", "d")
    assert harness.send("a", BARRIER) == harness.send("b", BARRIER) == b""
    assert value_of(harness.engine, b"/b") == b"2"
    assert harness.send("c", BARRIER) == STOP_WAITING
    assert harness.received("a") == harness.received("b") == STOP_WAITING
    assert harness.send("d", BARRIER) == STOP_WAITING, (
        "a second round with the same key passes at once, as with PyTorch"
    )
    assert value_of(harness.engine, b"/b") == b"4"


@pytest.mark.parametrize("size", [1, 0, -(2**63)])
def test_a_barrier_of_one_passes(size: int) -> None:
    harness = C10dHarness("a")
    assert harness.send("a", encode(Opcode.BARRIER, b"/b", size)) == STOP_WAITING
    assert value_of(harness.engine, b"/b") == b"1"


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_an_arrival_that_is_cancelled_or_disconnected_is_withdrawn(how: str) -> None:
    harness = C10dHarness("a", "b", "c")
    harness.send("a", BARRIER)
    harness.send("b", BARRIER)
    if how == "cancel":
        assert harness.send("a", CANCEL) == WAIT_CANCELED
    else:
        harness.disconnect("a")
    assert value_of(harness.engine, b"/b") == b"1"
    assert harness.send("c", BARRIER) == b"", "it passed with one arrival too few"
    harness.connect("a")
    assert harness.send("a", BARRIER) == STOP_WAITING
    assert harness.received("b") == harness.received("c") == STOP_WAITING


def test_a_released_arrival_is_not_withdrawn() -> None:
    harness = C10dHarness("a", "b", "c")
    for name in "abc":
        harness.send(name, BARRIER)
    assert harness.send("a", CANCEL) == STOP_WAITING + WAIT_CANCELED
    harness.disconnect("b")
    assert value_of(harness.engine, b"/b") == b"3"


def test_a_barrier_is_released_by_its_own_world_size_or_a_write() -> None:
    harness = C10dHarness("a", "b", "c")
    harness.send("a", BARRIER)
    assert harness.send("b", encode(Opcode.BARRIER, b"/b", 2)) == STOP_WAITING
    assert harness.received("a") == b"", "its own world size is not reached"
    harness.send("c", encode(Opcode.SET, b"/b", b"3"))
    assert harness.received("a") == STOP_WAITING


def test_strings_received_whole_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of many short strings arrives in chunks; at most one string of each chunk is cut."""
    slow, bytewise = 0, Partial._field

    def count(self: Partial, kind: str) -> None:
        nonlocal slow
        slow += 1
        bytewise(self, kind)

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
