"""A work queue in the state of a server: sessions that detach and end, memory, snapshots, repeated requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rallypoint.core import entries, ops
from rallypoint.core.entries import AttachSession, DetachOwner, EndSession
from rallypoint.core.machines.machine import Call, Done, Refused, Waiting
from rallypoint.core.machines.work_commands import HEADROOM_BYTES
from rallypoint.core.machines.work_queue import (
    MAX_BATCH,
    PAGE_BYTES,
    WorkAbandon,
    WorkDead,
    WorkDone,
    WorkJoin,
    WorkPut,
    WorkQuery,
    WorkQueueMachine,
    WorkRelease,
    WorkRemoveDead,
    WorkTake,
    WorkWithdraw,
)
from rallypoint.core.records import LATER
from rallypoint.core.snapshot import CHUNK_BYTES, read, write
from rallypoint.errors import StoreFull

from .logged_state import Server


def machine_of(server: Server) -> Any:
    return server.objects.machines[WorkQueueMachine, b"/o"]


def answers(server: Server) -> list[tuple[int, int, Any]]:
    """Return the answers to calls that waited, decoded."""
    return [
        (owner, number, msgspec.msgpack.decode(msgspec.msgpack.encode(later.answer)))
        for owner, number, later in server.take_outputs()
    ]


def test_items_outlive_the_session_that_put_them() -> None:
    server = Server(2)
    assert server.act(1, 1, 1, WorkPut([b"x"], 5)) == Done(["1-1"])
    server.apply(DetachOwner(1))
    server.apply(EndSession(1))
    assert server.act(2, 1, 1, WorkTake()) == Done(["1-1", 1, b"x"])


def test_an_item_of_an_ended_session_goes_to_the_one_that_waits() -> None:
    server = Server(2)
    server.act(1, 1, 1, WorkPut([b"x"], 5))
    server.act(1, 2, 2, WorkTake())
    assert server.act(2, 1, 1, WorkTake()) is LATER
    server.apply(DetachOwner(1))
    assert not server.take_outputs(), "it may come back"
    server.apply(EndSession(1))
    assert answers(server) == [(2, 1, ["1-1", 2, b"x"])]


def test_a_repeated_request_has_one_effect() -> None:
    server = Server(1)
    server.act(1, 1, 1, WorkPut([b"x", b"y"], 5))
    assert server.act(1, 1, 1, WorkPut([b"x", b"y"], 5)) == Done(["1-1", "1-2"])
    took = [server.act(1, 2, 2, WorkTake()) for _ in range(2)]
    assert took == [Done(["1-1", 1, b"x"])] * 2
    assert [server.act(1, 3, 3, WorkDone(2, "1-1")) for _ in range(2)] == [Done(), Done()]
    assert server.act(1, 4, 4, WorkDone(2, "1-1")) == Refused("ItemLost", {"item": "1-1", "holder": ""})
    machine = machine_of(server)
    assert (machine.made, machine.done, len(machine.ready)) == (2, 1, 1)


def test_a_taker_without_a_connection_gets_no_item_and_asks_again() -> None:
    server = Server(2)
    assert server.act(1, 1, 1, WorkTake()) is LATER
    server.apply(DetachOwner(1))
    server.act(2, 1, 1, WorkPut([b"x"], 5))
    assert server.act(2, 2, 2, WorkTake()) == Done(["3-1", 1, b"x"]), "the one that is away may be dead"
    server.apply(AttachSession(b"id 1", 0, 0))
    assert server.act(1, 1, 1, WorkTake()) is LATER
    server.act(2, 3, 3, WorkPut([b"y"], 5))
    assert (1, 1, ["3-2", 1, b"y"]) in answers(server)


def test_a_take_between_two_polls_keeps_its_item() -> None:
    server = Server(2)
    server.act(1, 1, 1, WorkTake())
    server.apply(entries.TimeOutRequest(1, 1))
    assert isinstance(server.take_outputs()[0][2], Waiting)
    server.act(2, 1, 1, WorkPut([b"x"], 5))
    assert server.act(1, 2, 1, WorkTake()) == Done(["2-1", 1, b"x"])


def test_a_finished_queue_costs_little_and_is_forgotten_by_its_namespace() -> None:
    server = Server(1)
    empty = server.engine.size
    server.act(1, 1, 1, WorkPut([b"x" * 1000] * 10, 1))
    for number in range(10):
        item = server.act(1, 2 + 2 * number, number, WorkTake()).answer[0]
        ending = WorkDone(number, item) if number % 2 else WorkRelease(number, item, "why")
        server.act(1, 3 + 2 * number, 100 + number, ending)
    assert server.act(1, 50, 50, WorkRemoveDead([1, 2, 3], requeue=False)) == Done(3)
    assert server.act(1, 51, 51, WorkRemoveDead([4, 5], requeue=True)) == Done(2)
    for number in (60, 61):
        item = server.act(1, number, number, WorkTake()).answer[0]
        server.act(1, number + 10, number + 10, WorkDone(number, item))
    assert machine_of(server).idle and machine_of(server).done == 7
    assert server.engine.size < empty + 2000


def test_a_store_full_of_items_has_room_to_take_them() -> None:
    server = Server(1, max_bytes=HEADROOM_BYTES + 100_000)
    number = 1
    while not isinstance(server.act(1, number, number, WorkPut([b"x" * 1000], 5)), StoreFull):
        number += 1
    made = machine_of(server).made
    assert number == made + 1 > 50, "a refused put changes nothing"
    for take in range(number + 1, number + 51):
        assert isinstance(server.act(1, take, take, WorkTake()), Done)
    assert len(machine_of(server).taken) == 50
    assert isinstance(server.ask(1, ops.Set(1000, b"k", bytes(HEADROOM_BYTES))), StoreFull)
    item = machine_of(server).taken[f"1/{number + 1}"].item.id
    assert server.act(1, 1001, 1001, WorkDone(number + 1, item)) == Done()


def test_a_long_queue_is_written_in_chunks_and_restored() -> None:
    server = Server(2)
    for number in range(1, 31):
        server.act(1, number, number, WorkPut([bytes(100_000)], 1))
    for number in range(31, 41):
        server.act(1, number, number, WorkTake())
    for number in range(31, 36):
        server.act(1, number + 10, number + 10, WorkRelease(number, f"1-{number - 30}", "why"))
    chunks = list(write(server.state))
    assert max(map(len, chunks)) < 2 * CHUNK_BYTES
    assert sum(map(len, chunks)) > 30 * 100_000
    restored = read(chunks).namespaces[0].objects.machines[WorkQueueMachine, b"/o"]
    assert restored == machine_of(server)


def test_a_wait_for_the_end_is_over_when_the_last_taker_dies_for_the_last_time() -> None:
    server = Server(2)
    server.act(1, 1, 1, WorkPut([b"x"], 1))
    server.act(1, 2, 2, WorkTake())
    assert server.act(2, 1, 1, WorkJoin()) is LATER
    server.apply(DetachOwner(1))
    server.apply(EndSession(1))
    assert server.take_outputs() == [(2, 1, Done())]


def test_pages_of_dead_letters_are_bounded() -> None:
    machine = WorkQueueMachine()
    call = Call("a", "1", 1)
    machine.apply(call, WorkPut([bytes(PAGE_BYTES // 4)] * 10 + [b""] * (MAX_BATCH - 10), 1), 1)
    for number in range(MAX_BATCH):
        machine.apply(Call("a", "1", number), WorkTake(), 1)
        machine.apply(call, WorkRelease(number, f"1-{number + 1}"), 1)
    at, pages = 0, []
    while at < MAX_BATCH:
        outcome = machine.apply(call, WorkDead(at), 1).outcome
        assert isinstance(outcome, Done)
        at, end, rows = outcome.answer
        pages.append(len(rows))
        assert end == MAX_BATCH and sum(len(row[4]) for row in rows) <= PAGE_BYTES
    assert sum(pages) == MAX_BATCH and len(pages) > 2
    assert machine.apply(call, WorkDead(10**9), 1).outcome == Done([10**9, MAX_BATCH, []])


@pytest.mark.parametrize("undo", [WorkWithdraw, WorkAbandon])
def test_nothing_is_left_of_a_take_that_is_undone(undo: type[Any]) -> None:
    server = Server(1)
    empty = server.engine.size
    server.act(1, 1, 1, WorkTake())
    server.act(1, 2, 2, undo(1))
    assert server.engine.size == empty and not server.objects.machines


def test_the_query_counts_and_names_the_holders() -> None:
    server = Server(2)
    server.act(1, 1, 1, WorkPut([b"x", b"y", b"z"], 1))
    server.act(1, 2, 2, WorkTake(), member="ann")
    server.act(1, 3, 3, WorkTake(), member="bob")
    server.act(1, 4, 4, WorkRelease(2, "1-1", "broke"))
    assert server.act(2, 1, 1, WorkQuery()).answer == {
        "ready": 1,
        "taken": 1,
        "dead": 1,
        "done": 0,
        "waiting": 0,
        "holders": [["bob", "1-2", 1]],
    }
