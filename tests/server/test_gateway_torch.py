"""PyTorch's protocol on a store in etcd: order, what goes together, waits and turns, what a peer may make us hold."""

from __future__ import annotations

import asyncio
import struct

import pytest
from tests.server.fake_space import FakeEtcd, FakeSpace
from tests.server.gateways import on_fake_etcd, open_gateway
from tests.server.peers import Torch, settle

from rallypoint.errors import NoQuorum
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.server import gateway_torch

pytestmark = pytest.mark.needs("etcd")

MIB = 1024 * 1024
TOLD, CANCELLED = b"\0", b"\1"


class Held:
    """Holds every operation of a name, before it takes effect, until let go."""

    def __init__(self, etcd: FakeEtcd, operation: str, after: bool = False) -> None:
        self.reached, self._go = asyncio.Event(), asyncio.Event()
        usual = etcd.step

        async def step(space: FakeSpace, name: str, late: bool) -> None:
            if name.startswith(operation) and late == after:
                self.reached.set()
                await self._go.wait()
            await usual(space, name, late)

        etcd.step = step  # type: ignore[method-assign]

    def let_go(self) -> None:
        self._go.set()


@on_fake_etcd
async def test_everything_once(etcd: FakeEtcd) -> None:
    peer = await Torch(await open_gateway(etcd)).greets()
    peer.asks(Opcode.SET, b"/k", b"v")
    assert await peer.gets(b"/k") == b"v" and await peer.gets(b"/absent") == b""
    peer.asks(Opcode.ADD, b"/n", 5)
    assert await peer.number() == 5
    peer.asks(Opcode.COMPARE_SET, b"/k", b"v", b"w")
    assert await peer.string() == b"w"
    peer.asks(Opcode.APPEND, b"/k", b"x")
    peer.asks(Opcode.MULTI_GET, 2, b"/k", b"/n")
    assert [await peer.string(), await peer.string()] == [b"wx", b"5"]
    peer.asks(Opcode.MULTI_SET, 2, b"/a", b"1", b"/b", b"2")
    peer.asks(Opcode.CHECK, 3, b"/a", b"/b", b"/k")
    assert await peer.hears(1) == b"\0"
    peer.asks(Opcode.CHECK, 1, b"/absent")
    assert await peer.hears(1) == b"\1"
    peer.asks(Opcode.GETNUMKEYS)
    assert await peer.number() == 4
    peer.asks(Opcode.DELETE_KEY, b"/a")
    assert await peer.number() == 1
    peer.asks(Opcode.DELETE_KEY, b"/a")
    assert await peer.number() == 0
    peer.asks(Opcode.LIST_KEYS)
    assert sorted([await peer.string() for _ in range(await peer.number())]) == [b"/b", b"/k", b"/n"]
    for item in (b"one", b"two"):
        peer.asks(Opcode.QUEUE_PUSH, b"/q", item)
    peer.asks(Opcode.QUEUE_LEN, b"/q")
    assert await peer.number() == 2
    peer.asks(Opcode.QUEUE_POP, b"/q")
    assert (await peer.number(), await peer.string()) == (2, b"one")
    peer.asks(Opcode.BARRIER, b"/bar", 1)
    assert await peer.hears(1) == TOLD


@on_fake_etcd
async def test_writes_that_come_while_one_is_under_way_are_one_change(etcd: FakeEtcd) -> None:
    peer = await Torch(await open_gateway(etcd)).greets()
    held = Held(etcd, "set /0")
    peer.says(b"".join(encode(Opcode.SET, b"/%d" % n, b"v") for n in range(1)))
    await held.reached.wait()
    peer.says(b"".join(encode(Opcode.SET, b"/%d" % n, b"v") for n in range(1, 60)) + encode(Opcode.SET, b"/1", b"last"))
    held.let_go()
    assert await peer.gets(b"/1") == b"last"
    assert [what.count("/") for _, what in etcd.log] == [1, 60]


@on_fake_etcd
async def test_what_goes_together_is_bounded(etcd: FakeEtcd) -> None:
    peer = await Torch(await open_gateway(etcd)).greets()
    peer.says(b"".join(encode(Opcode.SET, b"/%d" % n, b"v") for n in range(300)))
    await peer.pings()
    assert [what.count("/") for _, what in etcd.log] == [64, 64, 64, 64, 44]
    etcd.log.clear()
    for n in range(3):
        peer.says(encode(Opcode.SET, b"/%d" % n, b"v" * 300_000))
    await peer.pings()
    assert [what.count("/") for _, what in etcd.log] == [1] * 3


@on_fake_etcd
async def test_order_is_kept_whatever_is_mixed(etcd: FakeEtcd) -> None:
    peer = await Torch(await open_gateway(etcd)).greets()
    peer.says(
        encode(Opcode.SET, b"/k", b"1")
        + encode(Opcode.APPEND, b"/k", b"2")
        + encode(Opcode.APPEND, b"/k", b"3")
        + encode(Opcode.GET, b"/k")
        + encode(Opcode.SET, b"/k", b"4")
        + encode(Opcode.ADD, b"/k", 5)
        + encode(Opcode.APPEND, b"/k", b"0")
        + encode(Opcode.APPEND, b"/j", b"x")
        + encode(Opcode.GET, b"/k")
    )
    assert (await peer.string(), await peer.number(), await peer.string()) == (b"123", 9, b"90")
    assert [what for _, what in etcd.log] == ["set /k", "append /k", "set /k", "add /k", "append /k", "append /j"]


@on_fake_etcd
async def test_a_wait_is_told_and_can_be_cancelled(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer, other = await Torch(gateway).greets(), await Torch(gateway).greets()
    for keys in ((b"/a",), (b"/a", b"/b")):
        peer.asks(Opcode.WAIT, len(keys), *keys)
        await settle()
        assert not peer.pending
        peer.asks(Opcode.CANCEL_WAIT)
        assert await peer.hears(1) == CANCELLED
    peer.asks(Opcode.CANCEL_WAIT)
    assert await peer.hears(1) == CANCELLED
    peer.asks(Opcode.WAIT, 1, b"/a")
    other.asks(Opcode.SET, b"/a", b"")
    assert await peer.hears(1) == TOLD
    peer.asks(Opcode.WAIT, 1, b"/never")
    peer.asks(Opcode.WAIT, 1, b"/a")
    assert await peer.hears(1) == TOLD
    peer.asks(Opcode.WAIT, 1, b"/never")
    assert await peer.gets(b"/a") == b"", "a wait holds up nobody"
    other.asks(Opcode.SET, b"/never", b"")
    assert await peer.hears(1) == TOLD


@on_fake_etcd
async def test_an_arrival_that_is_cancelled_is_taken_back(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer, other = await Torch(gateway).greets(), await Torch(gateway).greets()
    peer.asks(Opcode.BARRIER, b"/bar", 2)
    await settle()
    peer.asks(Opcode.CANCEL_WAIT)
    assert await peer.hears(1) == CANCELLED
    other.asks(Opcode.BARRIER, b"/bar", 2)
    await settle()
    assert not other.pending
    peer.asks(Opcode.BARRIER, b"/bar", 2)
    assert await peer.hears(1) == await other.hears(1) == TOLD


@on_fake_etcd
async def test_poppers_here_get_their_turn_in_the_order_they_came(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    poppers = [await Torch(gateway).greets() for _ in range(5)]
    pusher = await Torch(gateway).greets()
    for popper in poppers:
        popper.asks(Opcode.WAIT, 1, b"/q")
        await settle()
    for n, popper in enumerate(poppers):
        pusher.asks(Opcode.QUEUE_PUSH, b"/q", b"%d" % n)
        assert await popper.hears(1) == TOLD
        await settle()
        assert [bool(one.pending) for one in poppers] == [False] * 5, "nobody else is told of this item"
        popper.asks(Opcode.QUEUE_POP, b"/q")
        assert (await popper.number(), await popper.string()) == (1, b"%d" % n)


@pytest.mark.parametrize("how", ["moves on", "goes", "sits still"])
def test_a_turn_that_is_not_used_is_the_next_ones(how: str) -> None:
    @on_fake_etcd
    async def test(etcd: FakeEtcd) -> None:
        gateway = await open_gateway(etcd)
        first, second = await Torch(gateway).greets(), await Torch(gateway).greets()
        first.asks(Opcode.WAIT, 1, b"/q")
        await settle()
        second.asks(Opcode.WAIT, 1, b"/q")
        await settle()
        etcd.engines["p"].queue_push(b"/q", b"item")
        etcd.ring()
        assert await first.hears(1) == TOLD
        await settle()
        assert not second.pending
        if how == "moves on":
            await first.pings()
        elif how == "goes":
            first.hangs_up()
        else:
            gateway.lines.sweep()
            gateway.lines.sweep()
        assert await second.hears(1) == TOLD
        second.asks(Opcode.QUEUE_POP, b"/q")
        assert (await second.number(), await second.string()) == (1, b"item")

    test()


@on_fake_etcd
async def test_items_are_popped_once_by_poppers_at_two_gateways(etcd: FakeEtcd) -> None:
    gateways = [await open_gateway(etcd, by) for by in "ab"]
    got: list[bytes] = []

    async def pop(peer: Torch) -> None:
        while len(got) < 40:
            peer.asks(Opcode.WAIT, 1, b"/q")
            await peer.hears(1)
            peer.asks(Opcode.QUEUE_POP, b"/q")
            if await peer.number():
                got.append(await peer.string())

    poppers = [asyncio.ensure_future(pop(await Torch(gateways[n % 2]).greets())) for n in range(6)]
    pusher = await Torch(gateways[0]).greets()
    for n in range(40):
        pusher.asks(Opcode.QUEUE_PUSH, b"/q", b"%d" % n)
        if n % 7 == 0:
            await settle()
    await asyncio.wait(poppers, return_when=asyncio.FIRST_COMPLETED)
    assert sorted(got, key=int) == [b"%d" % n for n in range(40)]
    for popper in poppers:
        popper.cancel()


@on_fake_etcd
async def test_an_item_popped_for_one_that_went_goes_back(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer, other = await Torch(gateway).greets(), await Torch(gateway).greets()
    other.asks(Opcode.QUEUE_PUSH, b"/q", b"1")
    other.asks(Opcode.QUEUE_PUSH, b"/q", b"2")
    await other.pings()
    held = Held(etcd, "queue_pop", after=True)
    peer.asks(Opcode.QUEUE_POP, b"/q")
    await held.reached.wait()
    peer.hangs_up()
    await settle()
    held.let_go()
    await settle()
    other.asks(Opcode.QUEUE_POP, b"/q")
    assert (await other.number(), await other.string()) == (2, b"1")


@on_fake_etcd
async def test_what_was_sent_is_written_though_its_sender_went(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await Torch(gateway).greets()
    held = Held(etcd, "set /first")
    peer.asks(Opcode.SET, b"/first", b"")
    await held.reached.wait()
    peer.says(
        encode(Opcode.GET, b"/first")
        + encode(Opcode.WAIT, 1, b"/never")
        + encode(Opcode.QUEUE_POP, b"/q")
        + encode(Opcode.BARRIER, b"/bar", 9)
        + encode(Opcode.ADD, b"/n", 3)
        + encode(Opcode.QUEUE_PUSH, b"/q", b"item")
        + encode(Opcode.SET, b"/last", b"v")
    )
    peer.hangs_up()
    await settle()
    assert gateway.lingering > 0
    held.let_go()
    await settle()
    assert [what for _, what in etcd.log] == ["set /first", "add /n", "queue_push", "set /last"]
    assert gateway.lingering == 0 and len(gateway._tasks) == 1, "the one that keeps the gateway's own session"


@on_fake_etcd
async def test_what_those_who_went_have_left_is_bounded(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd, max_memory=MIB)
    Held(etcd, "set")
    for n in range(100):
        peer = await Torch(gateway).greets()
        peer.says(encode(Opcode.SET, b"/%d" % n, b"v" * MIB))
        peer.hangs_up()
        await settle()
    assert 31 * MIB < gateway.lingering <= 32 * MIB


@on_fake_etcd
async def test_a_write_that_fails_ends_the_connection_and_nothing_after_it_happens(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await Torch(gateway).greets()
    peer.says(encode(Opcode.SET, b"/k", b"letters") + encode(Opcode.ADD, b"/k", 1) + encode(Opcode.SET, b"/after", b""))
    await peer.ends()
    await settle()
    assert [what for _, what in etcd.log] == ["set /k"]
    assert gateway.connections == 0 and len(gateway._tasks) == 1


@on_fake_etcd
async def test_no_quorum_ends_the_connection_is_logged_once_and_shown(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    usual = etcd.step

    async def step(space: FakeSpace, name: str, after: bool) -> None:
        if name == "get":
            raise NoQuorum(store="fake", timeout_s=1.0, tried={})
        await usual(space, name, after)

    etcd.step = step  # type: ignore[method-assign]
    for _ in range(2):
        peer = await Torch(gateway).greets()
        peer.asks(Opcode.GET, b"/k")
        await peer.ends()
    assert "did not answer" in gateway.statistics()["trouble"]
    peer = await Torch(gateway).greets()
    peer.asks(Opcode.SET, b"/k", b"")
    await peer.pings()
    assert not gateway.statistics()["trouble"]


@on_fake_etcd
async def test_who_sends_more_than_can_be_written_is_not_read_from(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await Torch(gateway).greets()
    held = Held(etcd, "set /0")
    sent = 0
    while not peer.stopped:
        peer.says(encode(Opcode.SET, b"/%d" % sent, b"v" * 100))
        sent += 1
        assert sent < 20_000
    assert gateway_torch.WINDOW_BYTES <= gateway._held < 2 * gateway_torch.WINDOW_BYTES
    held.let_go()
    await settle()
    assert not peer.stopped
    await peer.pings()
    assert gateway._held == 0 and len(etcd.engines["p"].list_keys()) == sent


@on_fake_etcd
async def test_who_does_not_read_is_asked_for_nothing_more(etcd: FakeEtcd) -> None:
    gateway = await open_gateway(etcd)
    peer = await Torch(gateway).greets()
    etcd.engines["p"].set(b"/k", b"v" * 100_000)
    peer.says(encode(Opcode.GET, b"/k") * 200)
    await settle()
    assert peer.stopped and len(peer.pending) < 4 * 100_000
    for _ in range(200):
        assert await peer.string() == b"v" * 100_000
    await settle()
    assert not peer.stopped and gateway._held == 0


BAD = {
    "an oversized key": encode(Opcode.SET, b"k" * 8193, b"v"),
    "an oversized value": b"\1" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 8 * MIB + 1),
    "an endless list": b"\6" + struct.pack("<Q", 2**63),
    "an unknown opcode": b"\x80",
    "a second greeting": encode(Opcode.VALIDATE, 0x3C85F7CE),
    "HTTP in the middle": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_what_is_wrong_ends_only_who_said_it(bad: bytes) -> None:
    @on_fake_etcd
    async def test(etcd: FakeEtcd) -> None:
        gateway = await open_gateway(etcd)
        healthy, peer = await Torch(gateway).greets(), await Torch(gateway).greets()
        peer.says(encode(Opcode.SET, b"/before", b"v") + bad + encode(Opcode.SET, b"/after", b"v"))
        await peer.ends()
        await settle()
        assert await healthy.gets(b"/before") == b"v" and await healthy.gets(b"/after") == b""
        assert gateway._held == 0 and gateway.connections == 1

    test()


@on_fake_etcd
async def test_messages_come_in_pieces_of_any_size(etcd: FakeEtcd) -> None:
    peer = await Torch(await open_gateway(etcd)).greets()
    for byte in encode(Opcode.MULTI_SET, 2, b"/a", b"one", b"/b", b"two") + encode(Opcode.GET, b"/b"):
        assert not etcd.engines["p"].get(b"/a")
        peer.says(bytes((byte,)))
    assert await peer.string() == b"two"


@on_fake_etcd
async def test_a_gateway_whose_own_session_ended_begins_another(etcd: FakeEtcd) -> None:
    peer = await Torch(await open_gateway(etcd)).greets()
    peer.asks(Opcode.ADD, b"/n", 1)
    assert await peer.number() == 1
    for identity in list(etcd.records):
        etcd.end(identity)
    peer.asks(Opcode.ADD, b"/n", 1)
    assert await peer.number() == 2
