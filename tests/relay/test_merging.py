"""Requests of many clients of a relay are merged into fewer, which the replies do not show.

The test plays the server: it sees each request, and answers in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest

from rallypoint.core import ops
from rallypoint.core.records import PopResult
from rallypoint.errors import NotAnInteger, StoreFull
from rallypoint.relay.torch import client as torch_client
from rallypoint.relay.torch.client import MAX_CALLS, MAX_LARGE, VALUE_BYTES

from .merger_harness import K, MergerHarness, N, Q, shown

READS: dict[str, tuple[Callable[[], ops.Op], Any]] = {
    "await": (lambda: ops.WaitOrTurn(0, K), None),
    "peek": (lambda: ops.Peek(0, K), b"v"),
    "check": (lambda: ops.Check(0, [K, N]), True),
    "wait": (lambda: ops.Wait(0, [K, N], ops.MAX_WAIT_S), None),
    "multi_peek": (lambda: ops.MultiPeek(0, [K, N]), [b"v", None]),
    "count": (lambda: ops.Count(0, b""), 3),
    "queue_len": (lambda: ops.QueueLen(0, Q), 2),
    "list": (lambda: ops.List(0, b""), [K]),
}
WRITES: dict[str, Callable[[], ops.Op]] = {
    "set": lambda: ops.Set(0, K, b"v"),
    "append": lambda: ops.Append(0, K, b"v"),
    "multi_set": lambda: ops.MultiSet(0, [(K, b"v")]),
    "compare_set": lambda: ops.CompareSet(0, K, b"", b"v"),
    "delete": lambda: ops.Delete(0, K),
    "push": lambda: ops.Push(0, Q, b"v"),
    "draw": lambda: ops.TurnPop(0, Q),
    "arrive": lambda: ops.Arrive(0, K, 9),
}


# Reads


@pytest.mark.parametrize("name", READS)
def test_equal_reads_not_yet_sent_are_sent_once(name: str) -> None:
    make, answer = READS[name]
    table = MergerHarness()
    for client in "abc":
        table.ask(client, make())
    assert table.sends() == [shown(make())]
    table.answer(1, answer)
    assert [table.hears(client) for client in "abc"] == [[answer]] * 3
    assert (table.merger.asked, table.merger.sent) == (3, 1)


@pytest.mark.parametrize("name", READS)
def test_a_read_in_flight_is_not_joined(name: str) -> None:
    make, answer = READS[name]
    table = MergerHarness()
    table.ask("a", make())
    assert len(table.sends()) == 1
    table.ask("b", make())
    table.ask("c", make())
    assert table.sends() == []
    table.answer(1, answer)
    assert [table.hears(client) for client in "abc"] == [[answer], [], []]
    assert table.sends() == [shown(make())]  # a fresh one, for both
    table.answer(2, answer)
    assert [table.hears(client) for client in "bc"] == [[answer], [answer]]


@pytest.mark.parametrize("name", WRITES)
def test_changes_are_never_merged(name: str) -> None:
    table = MergerHarness()
    for client in "abc":
        table.ask(client, WRITES[name]())
    assert table.sends() == [shown(WRITES[name]())] * 3


def test_different_reads_are_sent_at_once() -> None:
    table = MergerHarness()
    table.ask("a", ops.Peek(0, K))
    assert len(table.sends()) == 1
    table.ask("b", ops.Peek(0, N))
    table.ask("c", ops.Check(0, [K]))
    assert table.sends() == [("Peek", N), ("Check", [K])]


def test_a_read_does_not_overtake_its_own_clients_write_by_joining() -> None:
    table = MergerHarness()
    table.ask("a", ops.Peek(0, K))
    table.ask("b", ops.Set(0, K, b"new"), ops.Peek(0, K))
    assert table.sends() == [("Peek", K), ("Set", K, b"new"), ("Peek", K)]
    table.answer(1, b"old")
    table.answer(2, None)
    table.answer(3, b"new")
    assert (table.hears("a"), table.hears("b")) == ([b"old"], [None, b"new"])


def test_requests_behind_a_merged_read_are_held_back() -> None:
    table = MergerHarness()
    table.ask("a", ops.Peek(0, K))
    table.sends()
    table.ask("b", ops.Peek(0, K), ops.Set(0, K, b"later"), ops.Ping(7))
    assert table.sends() == []
    table.answer(1, b"old")
    assert table.sends() == [("Peek", K), ("Set", K, b"later")]
    table.answer(3, None)
    assert table.hears("b") == []
    table.answer(2, b"old")
    assert table.hears("b") == [b"old", None, None]


# Additions


@pytest.mark.parametrize(
    ("amounts", "total", "each"),
    [
        ((1, 1, 1), 13, [11, 12, 13]),
        ((5, 0, 7), 22, [15, 15, 22]),
        ((-1, -2, -3), 4, [9, 7, 4]),
        ((1, 2**62, 2**62), -(2**63) + 1, [-(2**63) + 1 - 2**63 + 2**64, -(2**63) + 1 - 2**62 + 2**64, -(2**63) + 1]),
    ],
)
def test_queued_additions_are_summed(amounts: tuple[int, ...], total: int, each: list[int]) -> None:
    table = MergerHarness("xabc")
    table.ask("x", ops.Add(0, N, amounts[0]))
    table.sends()
    for client, amount in zip("abc", amounts, strict=True):
        table.ask(client, ops.Add(0, N, amount))
    assert table.sends() == []
    table.answer(1, 10)
    ((kind, key, amount),) = table.sends()
    assert (kind, key) == ("Add", N) and (amount - sum(amounts)) % 2**64 == 0 and -(2**63) <= amount < 2**63
    table.answer(2, total)
    heard = [answer for client in "abc" for answer in table.hears(client)]
    assert [(answer - wanted) % 2**64 for answer, wanted in zip(heard, each, strict=True)] == [0, 0, 0]
    assert all(-(2**63) <= answer < 2**63 for answer in heard)


def test_additions_of_different_signs_stay_apart() -> None:
    table = MergerHarness()
    table.ask("a", ops.Add(0, N, 1))
    table.ask("b", ops.Add(0, N, -1))
    table.ask("c", ops.Add(0, N, 2))
    assert table.sends() == [("Add", N, 3), ("Add", N, -1)]


def test_a_failed_sum_fails_for_every_client() -> None:
    table = MergerHarness()
    for client in "abc":
        table.ask(client, ops.Add(0, N, 1))
    table.sends()
    error = NotAnInteger(key="n", value=b"x")
    table.answer(1, error)
    assert [table.hears(client) for client in "abc"] == [[error]] * 3


def test_one_clients_additions_in_a_row_are_one() -> None:
    table = MergerHarness()
    table.ask("a", *[ops.Add(0, N, 1) for _ in range(3)])
    assert table.sends() == [("Add", N, 3)]
    table.answer(1, 8)
    assert table.hears("a") == [6, 7, 8]


# Waits, and the value that comes with them


def test_the_value_that_came_with_a_wait_answers_the_get() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    assert table.under_way[1].op.limit == VALUE_BYTES
    table.answer(1, b"v")
    assert table.hears("a") == [b"v"]  # the codec makes the same byte of every answer to a wait
    table.ask("a", ops.Peek(0, K))
    assert (table.sends(), table.hears("a")) == ([], [b"v"])
    table.ask("a", ops.Peek(0, K))
    assert table.sends() == [("Peek", K)]  # it was for one


@pytest.mark.parametrize(
    "between",
    [ops.Ping(1), ops.Set(0, N, b""), ops.Peek(0, N), ops.Drop(0, 0), ops.WaitOrTurn(0, N), ops.Arrive(0, N, 1)],
)
def test_anything_else_discards_the_value(between: ops.Op) -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    table.answer(1, b"v")
    table.ask("a", between, ops.Peek(0, K))
    assert table.sends()[-1] == ("Peek", K)


@pytest.mark.parametrize("answer", [None, True])
def test_a_wait_without_a_value_leaves_the_get_to_the_server(answer: bool | None) -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    table.answer(1, answer)
    table.ask("a", ops.Peek(0, K))
    assert table.sends()[-1] == ("Peek", K)


def test_a_write_behind_a_merged_wait_is_not_held_back() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    table.ask("b", ops.WaitOrTurn(0, K))
    assert table.sends() == []
    table.ask("b", ops.Set(0, K, b"v"), ops.Peek(0, N))  # no other client may ever set it
    assert table.sends() == [("WaitOrTurn", K), ("Set", K, b"v"), ("Peek", N)]
    table.answer(4, b"n")
    table.answer(3, None)
    assert table.hears("b") == [None, b"n"]
    table.answer(2, b"v")
    assert table.hears("b") == [b"v"]


def test_a_merged_wait_sent_early_leaves_the_others_their_own_request() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    table.ask("b", ops.WaitOrTurn(0, K))
    table.ask("c", ops.WaitOrTurn(0, K))
    table.ask("b", ops.Check(0, [N]))
    table.sends()
    table.answer(1, b"v")
    table.sends()
    numbers = [request.op for request in table.under_way.values()]
    assert len({id(op) for op in numbers}) == len(numbers)  # a record has one number


def test_a_new_wait_takes_the_place_of_the_old() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    table.ask("a", ops.Wait(0, [K, N], ops.MAX_WAIT_S))
    assert table.sends() == [("Drop", 1), ("Wait", K, N)]
    assert table.under_way[1].dropped
    table.answer(3, None)
    assert table.hears("a") == [None]


def test_replies_keep_the_order_of_the_calls_but_for_waits() -> None:
    table = MergerHarness()
    table.ask("a", ops.List(0, b""), ops.WaitOrTurn(0, K), ops.Peek(0, N))
    table.sends()
    table.answer(2, b"v")
    assert table.hears("a") == []  # the list comes first
    table.answer(3, b"n")
    table.answer(1, [N])
    assert table.hears("a") == [[N], b"v", b"n"]


# Cancelling


def test_a_cancelled_wait_is_dropped_at_the_server() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    table.ask("a", ops.Drop(0, 0))
    assert table.hears("a") == [None]
    assert table.sends() == [("Drop", 1)]


def test_a_cancelled_wait_that_others_share_is_kept() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.ask("b", ops.WaitOrTurn(0, K))
    table.sends()
    table.ask("a", ops.Drop(0, 0))
    assert (table.hears("a"), table.sends()) == ([None], [])
    table.answer(1, b"v")
    assert (table.hears("a"), table.hears("b")) == ([], [b"v"])


def test_waits_queued_behind_a_cancelled_wait_are_sent() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.sends()
    table.ask("b", ops.WaitOrTurn(0, K))
    table.ask("a", ops.Drop(0, 0))
    assert table.sends() == [("Drop", 1), ("WaitOrTurn", K)]


def test_an_unsent_wait_that_is_cancelled_is_never_sent() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K), ops.Drop(0, 0))
    assert (table.hears("a"), table.sends()) == ([None], [])
    table.ask("b", ops.WaitOrTurn(0, K))
    assert table.sends() == [("WaitOrTurn", K)]


def test_a_cancellation_without_a_wait_is_answered() -> None:
    table = MergerHarness()
    table.ask("a", ops.Drop(0, 0))
    assert (table.hears("a"), table.sends()) == ([None], [])


# Turns


def test_the_first_client_gets_the_turn_and_the_others_wait_again() -> None:
    table = MergerHarness()
    for client in "abc":
        table.ask(client, ops.WaitOrTurn(0, Q))
    assert table.sends() == [("WaitOrTurn", Q)]
    table.answer(1, True)
    assert [table.hears(client) for client in "abc"] == [[True], [], []]
    assert table.sends() == [("WaitOrTurn", Q), ("WaitOrTurn", Q)]  # each for itself
    table.ask("a", ops.TurnPop(0, Q))
    assert table.sends() == [("TurnPop", Q, 1)]
    table.answer(4, PopResult(1, b"item"))
    assert table.hears("a") == [PopResult(1, b"item")]
    table.ask("a", ops.WaitOrTurn(0, Q))
    assert table.sends() == [("WaitOrTurn", Q)]  # it is known as a queue
    table.answer(2, None)  # it is a key now
    for client in "ab":
        table.ask(client, ops.Drop(0, 0), ops.WaitOrTurn(0, Q))
    assert table.sends().count(("WaitOrTurn", Q)) == 1


def test_merged_waits_for_a_turn_are_sent_again_one_by_one() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, Q))
    table.sends()
    table.ask("b", ops.WaitOrTurn(0, Q))
    table.ask("c", ops.WaitOrTurn(0, Q))
    table.answer(1, True)
    assert table.sends() == [("WaitOrTurn", Q), ("WaitOrTurn", Q)]


def with_a_turn() -> MergerHarness:
    """Return clients of which one, "a", has its turn at the queue."""
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, Q))
    table.sends()
    table.answer(1, True)
    return table


@pytest.mark.parametrize(
    "other", [ops.Ping(1), ops.Peek(0, Q), ops.Set(0, K, b""), ops.Drop(0, 0), ops.WaitOrTurn(0, K)]
)
def test_any_other_call_ends_a_turn(other: ops.Op) -> None:
    table = with_a_turn()
    table.ask("a", other)
    assert table.sends()[0] == ("Drop", 1)


def test_a_pop_sent_behind_its_wait_uses_its_turn() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, Q), ops.TurnPop(0, Q))
    assert table.sends() == [("WaitOrTurn", Q), ("TurnPop", Q, 1)]


def test_a_pop_behind_a_merged_wait_has_no_turn() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, Q))
    table.ask("b", ops.WaitOrTurn(0, Q), ops.TurnPop(0, Q))
    assert table.sends() == [("WaitOrTurn", Q), ("TurnPop", Q, 0)]


# Clients that disconnect


def test_the_wait_of_a_disconnected_client_is_cancelled() -> None:
    for op in (ops.WaitOrTurn(0, K), ops.Wait(0, [K, N], 1.0), ops.Arrive(0, N, 3)):
        table = MergerHarness()
        table.ask("a", op)
        table.sends()
        assert table.end("a") == [("Drop", 1)]


def test_the_turn_of_a_disconnected_client_is_released() -> None:
    table = with_a_turn()
    table.hears("a")
    assert table.end("a") == [("Drop", 1)]


def test_an_item_in_flight_to_a_disconnected_client_is_returned() -> None:
    table = with_a_turn()
    table.ask("a", ops.TurnPop(0, Q))
    table.sends()
    # The turn, too: after a cut, nobody repeats the pop that would have ended it.
    assert table.end("a") == [("Drop", 2), ("Drop", 1)]


def test_an_item_received_but_not_delivered_is_returned() -> None:
    table = MergerHarness()
    table.ask("a", ops.Peek(0, K), ops.TurnPop(0, Q))
    table.sends()
    table.answer(2, PopResult(1, b"item"))
    assert table.hears("a") == []
    assert table.end("a") == [("Drop", 2)]


def test_a_delivered_item_is_not_returned() -> None:
    table = MergerHarness()
    table.ask("a", ops.TurnPop(0, Q))
    table.sends()
    table.answer(1, PopResult(1, b"item"))
    assert table.hears("a") == [PopResult(1, b"item")]
    assert table.end("a") == []


def test_an_unsent_pop_of_a_disconnected_client_is_dropped_with_its_turn() -> None:
    table = with_a_turn()
    table.ask("a", ops.TurnPop(0, Q))
    assert table.end("a") == [("Drop", 1)]


def test_the_writes_of_a_disconnected_client_are_executed() -> None:
    table = MergerHarness()
    table.ask("b", ops.Add(0, N, 1))
    table.ask("c", ops.Peek(0, K))
    table.sends()
    table.ask("a", ops.Add(0, N, 2), ops.Set(0, K, b"1"), ops.Peek(0, K), ops.Delete(0, K), ops.TurnPop(0, Q))
    table.clients["a"].end()
    table.answer(1, 1)
    assert table.sends() == [("Add", N, 2), ("Set", K, b"1"), ("Delete", K)]
    for number, answer in ((3, 3), (4, None), (5, 1)):
        table.answer(number, answer)
    assert table.hears("a") == []


def test_a_disconnected_client_does_not_cancel_the_waits_of_others() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K))
    table.ask("b", ops.WaitOrTurn(0, K))
    table.ask("c", ops.Add(0, N, 1))
    table.ask("a", ops.Add(0, N, 2))
    table.sends()
    assert table.end("a") == []
    table.answer(1, b"v")
    table.answer(2, 3)
    assert (table.hears("b"), table.hears("c")) == ([b"v"], [1])


# Order and limits


def test_a_ping_waits_for_the_writes_before_it_and_for_nothing_else() -> None:
    table = MergerHarness()
    table.ask("a", ops.Ping(1))
    assert (table.hears("a"), table.sends()) == ([None], [])
    table.ask("a", ops.Set(0, K, b"1"), ops.Ping(2))
    assert table.sends() == [("Set", K, b"1")]
    assert table.hears("a") == []
    table.answer(1, None)
    assert table.hears("a") == [None, None]


def test_a_ping_behind_a_wait_comes_after_a_wait_that_is_over_at_once() -> None:
    table = MergerHarness()
    table.ask("a", ops.WaitOrTurn(0, K), ops.Ping(7))
    assert table.sends() == [("WaitOrTurn", K), ("Ping",)]
    assert table.hears("a") == []
    table.answer(2, None)
    call = table.clients["a"].next_reply()
    assert call is not None and call.op == ops.Ping(7)  # its own number
    table.answer(1, b"v")
    assert table.hears("a") == [b"v"]


def test_a_set_that_fails_says_so_to_its_own_client() -> None:
    table = MergerHarness()
    table.ask("a", ops.Set(0, K, b"1"))
    table.ask("b", ops.Set(0, K, b"2"))
    table.sends()
    error = StoreFull(key="k", size=2, limit=1)
    table.answer(1, error)
    table.answer(2, None)
    assert (table.hears("a"), table.hears("b")) == ([error], [None])


def test_a_clients_unanswered_calls_are_limited() -> None:
    table = MergerHarness()
    client = table.clients["a"]
    table.ask("a", *[ops.Set(0, K, b"") for _ in range(MAX_CALLS - 1)])
    assert not client.full
    table.ask("a", ops.Set(0, K, b""))
    assert client.full and not client.has_room_again
    table.sends()
    for number in range(1, MAX_CALLS // 2 + 1):
        table.answer(number, None)
    table.hears("a")
    assert client.has_room_again and client.bytes == 10 * MAX_CALLS // 2


def test_a_clients_unanswered_bytes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_client, "MAX_CALL_BYTES", 30)
    table = MergerHarness()
    table.ask("a", ops.Set(0, K, b""), ops.Set(0, K, b""))
    assert not table.clients["a"].full
    table.ask("a", ops.Set(0, K, b""))
    assert table.clients["a"].full


def test_a_wait_however_long_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_client, "MAX_CALL_BYTES", 30)
    client = MergerHarness().clients["a"]
    client.ask(ops.Wait(0, [K, N], ops.MAX_WAIT_S), 1000)
    assert not client.full and client.has_room_again and (client.bytes, client.owed_bytes) == (1000, 0)
    client.ask(ops.Drop(0, 0), 1)
    assert client.next_reply() is not None and client.bytes == 0


def test_reads_with_large_replies_are_sent_a_few_at_a_time() -> None:
    table = MergerHarness()
    keys = [b"/%d" % each for each in range(MAX_LARGE + 2)]
    table.ask("a", *[ops.Peek(0, key) for key in keys], ops.Set(0, K, b""))
    assert table.sends() == [("Peek", key) for key in keys[:MAX_LARGE]]
    table.answer(1, b"v")
    assert table.hears("a") == [b"v"]
    assert table.sends() == [("Peek", keys[MAX_LARGE])]
    table.clients["a"].paused = True  # it does not read its replies
    table.answer(2, b"v")
    table.hears("a")
    assert table.sends() == [] and table.clients["a"].held_back
    table.clients["a"].paused = False
    table.clients["a"].issue_held()
    assert table.sends() == [("Peek", keys[-1]), ("Set", K, b"")]


def test_large_replies_count_until_they_are_delivered() -> None:
    table = MergerHarness()
    table.ask("a", *[ops.Peek(0, b"/%d" % each) for each in range(9)])
    assert len(table.sends()) == MAX_LARGE
    for number in range(1, MAX_LARGE + 1):
        table.answer(number, b"v")  # and its connection is busy with something else
    table.clients["a"].issue_held()
    assert not table.sends()
    assert len(table.hears("a")) == MAX_LARGE
    assert len(table.sends()) == MAX_LARGE


ALONE = [
    ops.Add(0, N, 1), ops.Set(0, K, b"v"), ops.WaitOrTurn(0, K), ops.Peek(0, K), ops.TurnPop(0, Q), ops.Ping(7),
    ops.Drop(0, 0),
    ops.Check(0, [K]), ops.Wait(0, [K, Q], 1.0), ops.Arrive(0, N, 2), ops.List(0, b""), ops.CompareSet(0, K, b"", b"v"),
]  # fmt: skip


@pytest.mark.parametrize("wait_brought", [None, b"v", True], ids=["nothing", "a value", "a turn"])
@pytest.mark.parametrize("op", ALONE, ids=lambda op: type(op).__name__)
def test_ask_alone_has_the_same_effect_as_ask(op: ops.Op, wait_brought: bytes | bool | None) -> None:
    seen = []
    for alone in (True, False):
        table = MergerHarness()
        client = table.clients["a"]
        if wait_brought is not None:
            client.ask(ops.WaitOrTurn(0, K), 10)
            table.sends()
            table.answer(1, wait_brought)
            table.hears("a")
        value = None
        if alone:
            value = client.ask_alone(copy(op), 10)
        else:
            client.ask(copy(op), 10)
        answers = table.hears("a") if value is None else [value]
        seen.append((answers, table.sends(), client.bytes, client.waits_for, table.merger.asked, len(client.calls)))
    assert seen[0] == seen[1]


def test_a_client_knows_the_keys_that_it_waits_for() -> None:
    table = MergerHarness()
    client = table.clients["a"]
    assert list(client.waits_for) == []
    table.ask("a", ops.Wait(0, [K, N], 1.0))
    assert list(client.waits_for) == [K, N]
    table.ask("a", ops.WaitOrTurn(0, K))
    assert list(client.waits_for) == [K]
    table.sends()
    table.answer(1, b"v")
    assert list(client.waits_for) == []
