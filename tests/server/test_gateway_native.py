"""Our protocol on a store in etcd: order, sessions that move from gateway to gateway, and every change once."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from typing import Any

import pytest
from tests.server.fake_space import FakeEtcd, FakeSpace
from tests.server.gateways import kill, on_fake_etcd, open_gateway
from tests.server.peers import Ours, settle
from tests.server.test_gateway_torch import Held

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.records import Status
from rallypoint.errors import NoQuorum, SessionLost
from rallypoint.protocol import native
from rallypoint.protocol.client import Client, Reply
from rallypoint.protocol.native import frame
from rallypoint.server import gateway_session
from rallypoint.server.gateway import Gateway

pytestmark = pytest.mark.needs("etcd")

LONG_S = 1000.0


def engine(etcd: FakeEtcd) -> Any:
    return etcd.engines["p"]


async def opened(gateway: Gateway, session: bytes = b"", seen: int = 0) -> Ours:
    peer = Ours(gateway)
    answer = await peer.greets(session, seen)
    assert answer[0] == native.VERSION and answer[1] == b"p", answer
    assert answer[4] is bool(session) and answer[5] is False, "resumed or not, and it hosts no shared objects"
    return peer


@on_fake_etcd
async def test_everything_once(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    steps: list[tuple[type[ops.Op], tuple[Any, ...], Any]] = [
        (ops.Set, (b"/k", b"v"), None),
        (ops.Get, (b"/k", LONG_S), [b"v"]),
        (ops.Add, (b"/n", 5), 5),
        (ops.Check, ([b"/k", b"/n"],), True),
        (ops.Wait, ([b"/k"], LONG_S), None),
        (ops.MultiGet, ([b"/k", b"/n"], LONG_S), [b"v", b"5"]),
        (ops.MultiSet, ([(b"/a", b"1"), (b"/b", b"2")],), None),
        (ops.Append, (b"/a", b"0"), None),
        (ops.CompareSet, (b"/a", b"10", b"11"), b"11"),
        (ops.Swap, (b"/a", b"no", b"12"), [False, b"11"]),
        (ops.Delete, (b"/b",), True),
        (ops.Count, (b"/",), 3),
        (ops.List, (b"/",), [b"/a", b"/k", b"/n"]),
        (ops.Push, (b"/q", b"1"), None),
        (ops.Push, (b"/q", b"2"), None),
        (ops.QueueLen, (b"/q",), 2),
        (ops.Pop, (b"/q",), b"1"),
        (ops.Take, (b"/q", LONG_S), b"2"),
        (ops.Pop, (b"/q",), None),
        (ops.Arrive, (b"/bar", 1, LONG_S), None),
        (ops.Lease, (b"/l", b"v", 0.0), None),
        (ops.Unlease, (b"/l",), True),
        (ops.Unlease, (b"/k",), False),
        (ops.DeletePrefix, (b"/",), 4),
        (ops.Ping, (), None),
    ]
    for number, (kind, arguments, answer) in enumerate(steps, 1):
        assert await peer.asked(kind(number, *arguments)) == answer, kind


@on_fake_etcd
async def test_a_wait_that_ends_by_its_time_says_what_is_missing(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    peer.asks(ops.Wait(1, [b"/a", b"/b"], 0.0), ops.Take(2, b"/q", 0.0), ops.Arrive(3, b"/c", 2, 0.0))
    answers = sorted([await peer.reads() for _ in range(3)])
    timed_out = Status.TIMED_OUT
    assert answers == [[1, timed_out, [b"/a", b"/b"]], [2, timed_out, [b"/q"]], [3, timed_out, [b"/c"]]]
    assert engine(etcd).get(b"/c") == b"0"


@on_fake_etcd
async def test_changes_keep_their_order_and_reads_see_what_came_before(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    held = Held(etcd, "set /1")
    sets = [ops.Set(n, b"/%d" % n, b"v") for n in range(1, 40)]
    peer.asks(*sets, ops.Check(40, [b"/39"]), ops.Get(41, b"/never", LONG_S), ops.Add(42, b"/n", 1))
    await held.reached.wait()
    await settle()
    assert not peer.pending and not etcd.log
    held.let_go()
    answers = [await peer.reads() for _ in range(41)]
    assert [number for number, _, _ in answers if number not in (40, 42)] == list(range(1, 40))
    assert [40, 0, True] in answers and [42, 0, 1] in answers
    assert [what for _, what in etcd.log] == [f"set /{n}" for n in range(1, 40)] + ["add /n"]


@on_fake_etcd
async def test_what_is_blocked_holds_up_nobody(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    peer.asks(
        ops.Get(1, b"/k", LONG_S),
        ops.Wait(2, [b"/k", b"/j"], LONG_S),
        ops.MultiGet(3, [b"/k", b"/j"], LONG_S),
        ops.Take(4, b"/q", LONG_S),
        ops.Arrive(5, b"/bar", 2, LONG_S),
    )
    assert await peer.asked(ops.Set(6, b"/j", b"j")) is None
    assert await peer.asked(ops.Check(7, [b"/k"])) is False
    peer.asks(ops.Push(8, b"/q", b"item"), ops.Set(9, b"/k", b"k"), ops.Add(10, b"/bar", 1))
    answers = sorted([await peer.reads() for _ in range(8)])
    assert [number for number, _, _ in answers] == [1, 2, 3, 4, 5, 8, 9, 10]
    assert [result for _, _, result in answers[:4]] == [[b"k"], None, [b"k", b"j"], b"item"]


@on_fake_etcd
async def test_a_repeated_number_is_answered_and_not_carried_out(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    assert await peer.asked(ops.Add(1, b"/n", 5)) == 5
    peer.hangs_up()
    await settle()
    peer = await opened(gateway, peer.session)
    assert await peer.asked(ops.Add(1, b"/n", 5)) == 5
    assert await peer.asked(ops.Add(2, b"/n", 5)) == 10
    peer.asks(ops.Confirm(0, 2, [], 0))
    assert await peer.asked(ops.Get(1, b"/n", 0.0)) == [b"10"], "what only reads may be repeated"
    peer.asks(ops.Add(2, b"/n", 5))
    await peer.ends()
    assert engine(etcd).get(b"/n") == b"10"


@on_fake_etcd
async def test_a_session_goes_on_at_another_gateway(etcd: FakeEtcd) -> None:
    first, second = await open_gateway(etcd, "a"), await open_gateway(etcd, "b")
    peer = await opened(first)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    assert await peer.asked(ops.Add(2, b"/n", 1)) == 1
    kill(first)
    peer = await opened(second, peer.session)
    assert await peer.asked(ops.Add(2, b"/n", 1)) == 1
    assert await peer.asked(ops.Add(3, b"/n", 1)) == 2
    assert await peer.asked(ops.Unlease(4, b"/leased")) is True


@on_fake_etcd
async def test_a_session_that_was_left_behind_does_nothing_more_and_is_not_ended(etcd: FakeEtcd) -> None:
    first, second = await open_gateway(etcd, "a"), await open_gateway(etcd, "b")
    peer = await opened(first)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    held = Held(etcd, "add /n")
    peer.asks(ops.Add(2, b"/n", 1), ops.Add(3, b"/n", 1))
    await held.reached.wait()
    etcd.step = FakeEtcd.step.__get__(etcd)  # type: ignore[method-assign]
    moved = await opened(second, peer.session)
    assert await moved.asked(ops.Add(2, b"/n", 1)) == 1
    assert await moved.asked(ops.Add(3, b"/n", 1)) == 2
    held.let_go()
    await peer.ends()
    await settle()
    assert len(first.guests) == 0 and len(second.guests) == 1
    first.guests.expire(time.monotonic() + LONG_S)
    await settle()
    assert engine(etcd).get(b"/n") == b"2" and engine(etcd).get(b"/leased") == b"v"


SCRIPT = [
    ops.Set(1, b"/k", b"v"),
    ops.Add(2, b"/n", 1),
    ops.Append(3, b"/k", b"w"),
    ops.Push(4, b"/q", b"1"),
    ops.Push(5, b"/q", b"2"),
    ops.Pop(6, b"/q"),
    ops.Take(7, b"/q", LONG_S),
    ops.Swap(8, b"/s", None, b"x"),
    ops.CompareSet(9, b"/s", b"x", b"y"),
    ops.Arrive(10, b"/bar", 1, LONG_S),
    ops.Lease(11, b"/l", b"v", 0.0),
    ops.Delete(12, b"/k"),
    ops.Add(13, b"/n", 1),
    ops.MultiSet(14, [(b"/a", b"1"), (b"/b", b"2")]),
    ops.Unlease(15, b"/l"),
]
ANSWERS = [None, 1, None, None, None, b"1", b"2", [True, b"x"], b"y", None, None, True, 2, None, True]


def dies_at(etcd: FakeEtcd, step: int) -> None:
    """Let the gateway that takes this step, counted from now, die there."""
    usual, numbers = FakeEtcd.step.__get__(etcd), itertools.count(1)

    async def counted(space: FakeSpace, name: str, after: bool) -> None:
        if next(numbers) == step:
            space.dead = True
        await usual(space, name, after)

    etcd.step = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("pipelined", [False, True])
def test_every_change_is_made_once_wherever_gateways_die(pipelined: bool) -> None:
    """Kill the gateway at each step in turn; the client goes to another, which dies at that step too, and so on."""

    async def life(etcd: FakeEtcd, step: int) -> bool:
        """Return whether somebody died."""
        session, answers, deaths = b"", {}, 0
        while len(answers) < len(SCRIPT):
            dies_at(etcd, 0)
            gateway = await open_gateway(etcd, f"{deaths}")
            dies_at(etcd, step if deaths < 3 else 0)
            peer = Ours(gateway)
            try:
                await peer_dies(gateway, peer.greets(session))
                session = peer.session or session
                open_ones = [request for request in SCRIPT if request.number not in answers]
                batches = [open_ones] if pipelined else [[request] for request in open_ones]
                for batch in batches:
                    peer.asks(*batch)
                    for _ in batch:
                        number, status, result = await peer_dies(gateway, peer.reads())
                        assert not status and number not in answers, (number, status, result)
                        answers[number] = result
                peer.hangs_up()
            except ConnectionError:
                deaths += 1
                kill(gateway)
                await settle()
                session = session if session in etcd.records else b""
        assert [answers[request.number] for request in SCRIPT] == ANSWERS
        store = engine(etcd)
        assert (store.get(b"/n"), store.get(b"/s"), store.get(b"/bar")) == (b"2", b"y", b"1")
        assert store.get(b"/k") is store.get(b"/l") is None and store.queue_len(b"/q") == 0
        return bool(deaths)

    @on_fake_etcd
    async def test(etcd: FakeEtcd) -> None:
        step = 1
        while await life(etcd, step):
            step += 1
            etcd.__init__()  # type: ignore[misc]
        assert step > len(SCRIPT)

    test()


async def peer_dies(gateway: Gateway, work: Any) -> Any:
    """Do what a peer does, and raise ConnectionError when its gateway has died meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        if gateway.space.dead:  # type: ignore[attr-defined]
            task.cancel()
            raise ConnectionError
        await asyncio.sleep(0)
    return task.result()


@on_fake_etcd
async def test_what_is_dropped_is_given_up(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    peer.asks(ops.Take(1, b"/q", LONG_S), ops.Arrive(2, b"/bar", 2, LONG_S), ops.Get(3, b"/k", LONG_S))
    await settle()
    for number, target in enumerate((1, 2, 3), 4):
        assert await peer.asked(ops.Drop(number, target)) is None
    peer.asks(ops.Push(7, b"/q", b"item"), ops.Set(8, b"/k", b""))
    assert sorted([(await peer.reads())[0] for _ in range(2)]) == [7, 8]
    await settle()
    assert not peer.pending
    assert engine(etcd).queue_len(b"/q") == 1 and engine(etcd).get(b"/bar") == b"0"


@on_fake_etcd
async def test_an_item_whose_taker_was_interrupted_goes_back(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    for item in (b"1", b"2", b"3"):
        engine(etcd).queue_push(b"/q", item)
    assert await peer.asked(ops.Take(1, b"/q", LONG_S)) == b"1"
    assert await peer.asked(ops.Pop(2, b"/q")) == b"2"
    held = Held(etcd, "put_back")
    peer.asks(ops.Drop(3, 2), ops.Confirm(0, 3, [3], 0))
    await held.reached.wait()
    held.let_go()
    assert (await peer.reads())[:2] == [3, 0]
    assert list(engine(etcd)._queues[b"/q"]) == [b"2", b"3"], "what was confirmed was seen"
    assert await peer.asked(ops.Drop(4, 1)) is None
    assert engine(etcd).queue_len(b"/q") == 2


@on_fake_etcd
async def test_an_item_that_is_taken_while_its_taker_gives_up_goes_back(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    held = Held(etcd, "wait_item", after=True)
    peer.asks(ops.Take(1, b"/q", LONG_S))
    await settle()
    engine(etcd).queue_push(b"/q", b"item")
    etcd.ring()
    await held.reached.wait()
    assert await peer.asked(ops.Drop(2, 1)) is None
    assert engine(etcd).queue_len(b"/q") == 1


@on_fake_etcd
async def test_while_a_client_is_away_others_have_the_items_it_waits_for(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    peer.asks(ops.Take(1, b"/q", LONG_S))
    await settle()
    peer.hangs_up()
    await settle()
    other = await opened(gateway)
    assert await other.asked(ops.Push(1, b"/q", b"item")) is None
    assert await other.asked(ops.Take(2, b"/q", LONG_S)) == b"item"
    peer = await opened(gateway, peer.session)
    peer.asks(ops.Take(1, b"/q", LONG_S))
    assert await other.asked(ops.Push(3, b"/q", b"second")) is None
    assert await peer.reads() == [1, 0, b"second"]


@on_fake_etcd
async def test_after_the_grace_a_session_ends_and_gives_back_what_was_not_seen(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    for item in (b"1", b"2", b"3"):
        engine(etcd).queue_push(b"/q", item)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    assert [await peer.asked(ops.Pop(n, b"/q")) for n in (2, 3)] == [b"1", b"2"]
    peer.hangs_up()
    await settle()
    gateway.guests.expire(time.monotonic())
    await settle()
    assert engine(etcd).get(b"/leased") == b"v", "the grace is not over"
    gateway.guests.expire(time.monotonic() + LONG_S)
    await settle()
    assert engine(etcd).get(b"/leased") is None and len(gateway.guests) == 0
    assert list(engine(etcd)._queues[b"/q"]) == [b"1", b"2", b"3"]
    again = Ours(gateway)
    assert (await again.greets(peer.session))[0] == b"p", "refused by the same store: the session is lost"


@on_fake_etcd
async def test_goodbye_ends_the_session_at_once(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    peer.asks(ops.Set(2, b"/k", b"v"), ops.Bye(3))
    assert [(await peer.reads())[0] for _ in range(2)] == [2, 3]
    await settle()
    assert engine(etcd).get(b"/leased") is None and engine(etcd).get(b"/k") == b"v"
    assert len(gateway.guests) == 0 and peer.session not in etcd.records


@on_fake_etcd
async def test_a_lease_whose_heart_stops_is_given_up(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    await peer.asked(ops.Lease(1, b"/beats", b"v", 5.0))
    await peer.asked(ops.Lease(2, b"/still", b"v", 0.0))
    assert time.monotonic() < gateway.guests.next_end() <= time.monotonic() + 5.0
    gateway.guests.expire(time.monotonic() + 4.0)
    peer.asks(ops.Beat(0))
    await settle()
    assert engine(etcd).get(b"/beats") == b"v"
    gateway.guests.expire(time.monotonic() + 6.0)
    await settle()
    assert engine(etcd).get(b"/beats") is None and engine(etcd).get(b"/still") == b"v"


@on_fake_etcd
async def test_a_session_that_etcd_lost_is_hung_up_on_and_refused(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    await peer.asked(ops.Add(1, b"/n", 1))
    etcd.end(peer.session)
    peer.asks(ops.Add(2, b"/n", 1))
    await peer.ends()
    await settle()
    assert len(gateway.guests) == 0 and engine(etcd).get(b"/n") == b"1"
    again = Ours(gateway)
    identity, why = await again.greets(peer.session)
    assert identity == b"p" and "no such session" in why


@on_fake_etcd
async def test_a_gateway_that_ends_leaves_its_sessions_to_others(etcd: FakeEtcd) -> None:
    first, second = await open_gateway(etcd, "a"), await open_gateway(etcd, "b")
    peer = await opened(first)
    await peer.asked(ops.Lease(1, b"/leased", b"v", 0.0))
    peer.asks(ops.Get(2, b"/k", LONG_S))
    await settle()
    await first.close()
    assert peer.closing
    peer = await opened(second, peer.session)
    peer.asks(ops.Get(2, b"/k", LONG_S))
    peer.asks(ops.Set(3, b"/k", b"v"))
    assert sorted([await peer.reads() for _ in range(2)]) == [[2, 0, [b"v"]], [3, 0, None]]
    assert engine(etcd).get(b"/leased") == b"v"


@on_fake_etcd
async def test_changes_are_pushed_and_kept_until_seen(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    await peer.asked(ops.Watch(1, b"/w/"))
    peer.asks(ops.Set(2, b"/w/a", b"1"), ops.Set(3, b"/other", b""), ops.Delete(4, b"/w/a"))
    came = [await peer.reads() for _ in range(5)]
    assert [(number, event[0], event[2:]) for zero, number, event in came if not zero] == [
        (1, 1, [b"/w/a", b"1"]),
        (2, 1, [b"/w/a", None]),
    ]
    peer.hangs_up()
    await settle()
    engine(etcd).set(b"/w/b", b"away")
    etcd.ring()
    await settle()
    peer = await opened(gateway, peer.session, seen=1)
    assert [(await peer.reads())[1] for _ in range(2)] == [2, 3]
    peer.asks(ops.Confirm(0, 0, [], 3))
    assert await peer.asked(ops.Drop(5, 1)) is None
    await peer.asked(ops.Set(6, b"/w/c", b""))
    await settle()
    assert not peer.pending and not gateway.guests.ledger.kept > 100


@on_fake_etcd
async def test_a_watch_goes_on_at_another_gateway_without_a_gap(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    client = Client("test")
    peer = await opened(gateway)
    seen: list[bytes] = []

    async def reads(events: int) -> None:
        while len(seen) < events:
            reply = Reply(*await peer.reads())
            if client.expects(reply):
                if not reply.number:
                    seen.append(reply.event()[1].key)
                client.settle(reply)

    peer.says(client.ask(ops.Watch(0, b"/w/")))
    peer.says(client.ask(ops.Set(0, b"/w/0", b"")))
    await reads(1)
    for n in range(1, 6):
        kill(gateway)
        engine(etcd).set(b"/w/%d" % n, b"between")
        etcd.ring()
        gateway = await open_gateway(etcd)
        peer = Ours(gateway)
        welcome = await peer.greets(peer_session(etcd), n)
        client.welcome(Reply(0, 0, welcome), "there")
        peer.says(client.repeat(0.0))
        await reads(n + 1)
    assert seen == [b"/w/%d" % n for n in range(6)], "each once, in order"


def peer_session(etcd: FakeEtcd) -> bytes:
    (session,) = [identity for identity, record in etcd.records.items() if record.name == "test"]
    return session


@on_fake_etcd
async def test_a_watch_that_cannot_go_on_ends_the_session(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    await peer.asked(ops.Watch(1, b"/w/"))
    gateway.space.feeds[0].fail(SessionLost(peer="fake", why="compacted"))  # type: ignore[attr-defined]
    await peer.ends()
    await settle()
    assert peer.session not in etcd.records


@on_fake_etcd
async def test_shared_objects_are_not_hosted_here(etcd: FakeEtcd) -> None:
    from rallypoint.core.lock import Look

    peer = await opened(await open_gateway(etcd))
    peer.asks(ops.Act(1, b"/lock", "me", 1, Look(), 0.0))
    number, status, (kind, fields) = await peer.reads()
    assert (number, status, kind) == (1, Status.ERROR, "Unsupported") and "themselves" in fields["why"]


@on_fake_etcd
async def test_errors_are_answers(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    usual = etcd.step

    async def step(space: FakeSpace, name: str, after: bool) -> None:
        if name == "num_keys":
            raise NoQuorum(store="fake", timeout_s=1.0, tried={"x": "silent"})
        await usual(space, name, after)

    etcd.step = step  # type: ignore[method-assign]
    await peer.asked(ops.Set(1, b"/k", b"letters"))
    peer.asks(ops.Add(2, b"/k", 1), ops.Count(3, b""))
    answers = {number: (status, result[0]) for number, status, result in [await peer.reads() for _ in range(2)]}
    assert answers == {2: (Status.ERROR, "NotAnInteger"), 3: (Status.ERROR, "NoQuorum")}


def test_who_confirms_nothing_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_session, "MAX_KEPT", 20)
    monkeypatch.setattr(gateway_session, "MAX_PUSHES", 20)

    @on_fake_etcd
    async def test(etcd: FakeEtcd) -> None:
        gateway = await open_gateway(etcd)
        peer = await opened(gateway)
        for number in range(1, 22):
            await peer.asked(ops.Delete(number, b"/k"))
        peer.asks(ops.Delete(22, b"/k"))
        await peer.ends()
        watcher, writer = await opened(gateway), await opened(gateway)
        await watcher.asked(ops.Watch(1, b"/w"))
        for number in range(1, 22):
            await writer.asked(ops.Set(number, b"/w", b""))
            writer.asks(ops.Confirm(0, number, [], 0))
        await watcher.ends()
        await settle()
        assert watcher.session not in etcd.records and len(gateway.guests) == 2

    test()


@on_fake_etcd
async def test_who_asks_more_than_can_be_done_is_not_read_from(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await opened(gateway)
    held = Held(etcd, "set /1")
    number = 0
    while not peer.stopped:
        number += 1
        peer.asks(ops.Set(number, b"/%d" % number, b"v" * 10_000))
        assert number < 1000
    assert gateway_session.WINDOW_BYTES <= gateway._held < 2 * gateway_session.WINDOW_BYTES
    held.let_go()
    for _ in range(number):
        await peer.reads()
    await settle()
    assert not peer.stopped and gateway._held == 0
    assert len(engine(etcd).list_keys()) == number


@on_fake_etcd
async def test_a_session_outlives_its_gateway_for_as_long_as_its_client_may_take_to_notice(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    asked: list[float | None] = []
    open_session = gateway.space.open_session

    def noted(name: str, ttl_s: float | None = None) -> Any:
        asked.append(ttl_s)
        return open_session(name, ttl_s)

    gateway.space.open_session = noted  # type: ignore[method-assign]
    await opened(gateway)
    with socket.socket() as sock:
        net.keep_alive(sock)
        noticed_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
    (ttl_s,) = asked
    assert ttl_s is not None and ttl_s > 2 * gateway.settings.grace_s + noticed_s, "and to look for another"


@on_fake_etcd
async def test_requests_wait_while_the_session_is_opened(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    held = Held(etcd, "open_session")
    peer = Ours(gateway)
    peer.says(native.PREFACE + frame(native.Hello(native.VERSION, "test")) + frame(ops.Add(1, b"/n", 1)))
    await held.reached.wait()
    assert peer.stopped
    held.let_go()
    await settle()
    assert not peer.stopped and engine(etcd).get(b"/n") == b"1"


@pytest.mark.parametrize("bad", [b"\xc1", b"\x93\x01", b"", frame((3, 0, b"k", b"v"))[4:]], ids=repr)
def test_what_makes_no_sense_ends_only_who_said_it(bad: bytes) -> None:
    @on_fake_etcd
    async def test(etcd: FakeEtcd) -> None:
        gateway = await open_gateway(etcd)
        healthy, peer = await opened(gateway), await opened(gateway)
        peer.says(len(bad).to_bytes(4, "little") + bad)
        await peer.ends()
        assert await healthy.asked(ops.Add(1, b"/n", 1)) == 1

    test()


@on_fake_etcd
async def test_an_unknown_request_is_refused_by_its_number(etcd: FakeEtcd) -> None:
    peer = await opened(await open_gateway(etcd))
    peer.says(frame((99, 1, b"k")))
    number, status, (kind, _) = await peer.reads()
    assert (number, status, kind) == (1, Status.ERROR, "Misunderstood")


@on_fake_etcd
async def test_one_session_too_many_is_told_why(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd, max_sessions=1)
    await opened(gateway)
    late = Ours(gateway)
    assert "no more are allowed" in (await late.greets())[1]
    assert gateway.statistics()["refused_sessions"] == 1


@on_fake_etcd
async def test_two_connections_that_resume_one_session_at_once(etcd: FakeEtcd) -> None:
    first, second = await open_gateway(etcd, "a"), await open_gateway(etcd, "b")
    peer = await opened(first)
    kill(first)
    both = [Ours(second), Ours(second)]
    await asyncio.gather(*(one.greets(peer.session) for one in both))
    assert len(second.guests) == 1
    assert await both[1].asked(ops.Add(1, b"/n", 1)) == 1
    both[0].asks(ops.Add(2, b"/n", 1))
    await both[0].ends()
