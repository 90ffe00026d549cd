"""Arrivals of several clients of one relay in one message: one entry of the log, and one reply.

The relay is a fake whose transport the test controls (`fake_relay.py`); the server is real, in memory or on a log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, both, disk_full, in_memory, on_log
from tests.server.fake_relay import ChannelClient, FakeRelay
from tests.server.peers import NativePeer, settle

from rallypoint.core import entries, ops
from rallypoint.core.machines import barrier, exchange
from rallypoint.core.records import DONE, REFUSED, ReplyStatus
from rallypoint.protocol.channels import credit_frames, gathered_frames
from rallypoint.protocol.native import frame
from rallypoint.server.server import StoreServer

LONG_S = 1000.0
COMMANDS: dict[str, Callable[[int, int], barrier.BarrierArrive | exchange.ExchangeGive]] = {
    "barrier": lambda size, rank: barrier.BarrierArrive(size),
    "exchange": lambda size, rank: exchange.ExchangeGive(size, rank, b"%d" % rank, "all_gather"),
}


def act(kind: str, size: int, rank: int, number: int = 1) -> ops.Act:
    return ops.Act(number, b"/o", str(rank), number, COMMANDS[kind](size, rank), LONG_S)


async def relay_of(server: StoreServer, clients: int) -> tuple[FakeRelay, list[ChannelClient]]:
    """Return a relay, and clients on it that have sessions."""
    relay = await FakeRelay(server).opens()
    return relay, [await relay.greeted() for _ in range(clients)]


def say(one: FakeRelay, clients: list[ChannelClient], requests: list[ops.Op]) -> None:
    """Send one request of each client, all in one message."""
    pieces = [(client.number, frame(request)) for client, request in zip(clients, requests, strict=True)]
    for client, (_, data) in zip(clients, pieces, strict=True):
        client.credit -= len(data)
    (message,) = gathered_frames(pieces)
    one.says(message)


def logged(log: FakeLog) -> list[Any]:
    return [
        entry
        for entry in map(entries.decode, log.records)
        if isinstance(entry, (entries.Arrivals, entries.SessionRequest))
    ]


@pytest.mark.parametrize("kind", list(COMMANDS))
@pytest.mark.parametrize("kept", ["memory", "log"])
def test_one_message_is_one_entry_and_one_answer(kind: str, kept: str) -> None:
    async def test(server: StoreServer, log: FakeLog | None) -> None:
        one, direct = await FakeRelay(server).opens(), NativePeer(server)
        await direct.greets()
        clients = [await one.greeted() for _ in range(4)]
        one.order.clear()
        one.gathered = 0
        say(one, clients, [act(kind, 5, rank) for rank in range(4)])
        await settle()
        if log is not None:
            assert [type(entry) for entry in logged(log)] == [entries.Arrivals]
        assert server.state.namespaces[0].objects.waiting == 4 and not one.order
        await direct.asked(act(kind, 5, 4))
        given = None if kind == "barrier" else [b"%d" % rank for rank in range(5)]
        assert [await client.reads() for client in clients] == [[1, ReplyStatus.OK, [DONE, given]]] * 4
        assert one.gathered == 1 and len(server.clock.deadlines) == 0

    (in_memory()(test) if kept == "memory" else on_log(test))()


@both
async def test_a_message_that_completes_a_barrier_is_answered_for_all_its_clients(
    server: StoreServer, log: FakeLog | None
) -> None:
    one, clients = await relay_of(server, 3)
    for number in (1, 2, 3):
        say(one, clients, [act("barrier", 3, rank, number) for rank in range(3)])
        assert [await client.reads() for client in clients] == [[number, ReplyStatus.OK, [DONE, None]]] * 3


@both
async def test_other_requests_among_arrivals_are_answered_too(server: StoreServer, log: FakeLog | None) -> None:
    one, clients = await relay_of(server, 4)
    say(one, clients, [act("barrier", 2, 0), ops.Set(1, b"/k", b"v"), act("barrier", 2, 1), ops.Peek(1, b"/k")])
    for client, answer in ((clients[0], [DONE, None]), (clients[1], None), (clients[2], [DONE, None])):
        assert await client.reads() == [1, ReplyStatus.OK, answer]
    assert (await clients[3].reads())[:2] == [1, ReplyStatus.OK]


@both
async def test_a_session_that_dies_in_the_group_breaks_the_round(server: StoreServer, log: FakeLog | None) -> None:
    one, clients = await relay_of(server, 3)
    say(one, clients, [act("barrier", 5, rank) for rank in range(3)])
    await settle()
    server.submit(entries.DetachOwner(1))
    server.submit(entries.EndSession(1))
    for client in clients[1:]:
        number, status, (what, error, fields) = await client.reads()
        assert (number, status, what, error) == (1, ReplyStatus.OK, REFUSED, "MembersLost")
        assert fields["lost"][0].startswith("0")


@both
async def test_a_member_may_continue_on_its_own_connection(server: StoreServer, log: FakeLog | None) -> None:
    one, clients = await relay_of(server, 3)
    say(one, clients, [act("barrier", 4, rank) for rank in range(3)])
    await settle()
    moved = NativePeer(server)
    await moved.greets(clients[0].session)
    moved.asks(act("barrier", 4, 0))
    last = await one.greeted()
    last.asks(act("barrier", 4, 3))
    assert await moved.reads() == [1, ReplyStatus.OK, [DONE, None]]
    for client in (*clients[1:], last):
        assert await client.reads() == [1, ReplyStatus.OK, [DONE, None]]


def test_a_full_disk_refuses_all_of_them() -> None:
    @on_log
    async def test(server: StoreServer, log: FakeLog) -> None:
        one, clients = await relay_of(server, 3)
        log.error = disk_full()
        say(one, clients, [act("barrier", 3, rank) for rank in range(3)])
        assert [(await client.reads())[1] for client in clients] == [ReplyStatus.ERROR] * 3
        log.error = None
        say(one, clients, [act("barrier", 3, rank) for rank in range(3)])
        assert [await client.reads() for client in clients] == [[1, ReplyStatus.OK, [DONE, None]]] * 3

    test()


@both
async def test_a_message_cut_anywhere_takes_effect_once_or_not_at_all(server: StoreServer, log: FakeLog | None) -> None:
    requests = [act("barrier", 3, rank) for rank in range(3)]
    (message,) = gathered_frames([(number, frame(op)) for number, op in enumerate(requests, 1)])
    for cut in range(0, len(message) + 1, 7):
        one, clients = await relay_of(server, 3)
        one.says(message[:cut])
        await settle()
        one.hangs_up()
        await settle()
        again = await FakeRelay(server).opens()
        back = [await again.greeted(client.session) for client in clients]
        say(again, back, list(requests))
        assert [await client.reads() for client in back] == [[1, ReplyStatus.OK, [DONE, None]]] * 3, f"cut at {cut}"


@both
async def test_credit_for_several_channels_comes_in_one_frame(server: StoreServer, log: FakeLog | None) -> None:
    one, clients = await relay_of(server, 2)
    direct = NativePeer(server)
    await direct.greets()
    await direct.asked(ops.Set(1, b"/k", b"v" * 400_000))
    for client in clients:
        client.credits = False
        client.asks(ops.Peek(1, b"/k"))
    while any(client.window for client in clients):
        await one.reads()
    for client in clients:
        client.window += 200_000
    (credit,) = credit_frames([(client.number, 200_000) for client in clients])
    one.says(credit)
    assert [len((await client.reads())[2]) for client in clients] == [400_000] * 2
