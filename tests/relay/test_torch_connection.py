"""PyTorch clients of a relay with a real server, over real sockets, behave like direct clients, even after cuts."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.core.c10d_harness import CANCEL, PING, PONG, listed, number, string, wait
from tests.core.c10d_harness import STOP_WAITING as TOLD
from tests.core.c10d_harness import WAIT_CANCELED as CANCELLED
from tests.raw_peer import AMPLE_S, RawPeer, until
from tests.served import server_fixture

import rallypoint
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.relay.torch.client import MAX_LARGE
from rallypoint.server.connections.limits import RESERVE_BYTES
from rallypoint.testing import DOWN, UP, CuttingProxy

from .relays import RelayThread, get, relay_process

MIB = 1024 * 1024


def port_of(server: rallypoint.Server) -> int:
    return int(server.url.rsplit(":", 1)[1])


server = server_fixture("module", grace=30.0)


@pytest.fixture
def cutter(server: rallypoint.Server) -> Iterator[CuttingProxy]:
    with rallypoint.connect(server.url) as store:
        store.delete_prefix("")
    with CuttingProxy(port_of(server)) as cutter:
        yield cutter


@pytest.fixture
def relay(cutter: CuttingProxy) -> Iterator[RelayThread]:
    with RelayThread(cutter.port) as relay:
        yield relay.connected()


def says(peer: RawPeer, *messages: bytes) -> None:
    peer.send(b"".join(messages))


# One client, compared with a direct one


def messages(chance: random.Random) -> list[bytes]:
    """Return valid messages of all kinds."""
    keys, counters = [b"/", b"/a", b"/b", b"/q"], [b"/n", b"/m"]
    values = [b"", b"1", b"x" * 9]

    def some(*names: bytes) -> bytes:
        return chance.choice(names)

    makers: list[Callable[[], bytes]] = [
        lambda: encode(Opcode.SET, some(*keys), some(*values)),
        lambda: encode(Opcode.APPEND, some(*keys), some(*values)),
        lambda: encode(Opcode.QUEUE_PUSH, some(*keys), some(*values)),
        lambda: encode(Opcode.COMPARE_SET, some(*keys), some(*values), some(*values)),
        lambda: encode(Opcode.GET, some(*keys, *counters)),
        lambda: encode(Opcode.DELETE_KEY, some(*keys, *counters)),
        lambda: encode(Opcode.QUEUE_POP, some(*keys)),
        lambda: encode(Opcode.QUEUE_LEN, some(*keys)),
        lambda: encode(Opcode.ADD, some(*counters), chance.randint(-3, 3)),
        lambda: encode(Opcode.BARRIER, some(*counters), chance.randint(-1, 4)),
        lambda: listed(chance.choice([Opcode.CHECK, Opcode.WAIT, Opcode.MULTI_GET]), some(*keys), some(*counters)),
        lambda: wait(some(*keys, *counters)),
        lambda: encode(Opcode.MULTI_SET, 2, some(*keys), b"2", some(*keys), b"3"),
        lambda: encode(Opcode.GETNUMKEYS),
        lambda: encode(Opcode.LIST_KEYS),
        lambda: CANCEL,
    ]
    return [chance.choice(makers)() for _ in range(60)]


def test_one_client_cannot_tell_a_relay_from_the_server(server: rallypoint.Server, relay: RelayThread) -> None:
    for seed in range(40):
        said = messages(random.Random(seed))
        heard = []
        for address in (("127.0.0.1", port_of(server)), relay.address):
            with RawPeer(address) as peer:
                answers = b""
                for message in said:
                    says(peer, message, PING)
                    answer = b""
                    while not answer.endswith(PONG):
                        answer += peer.socket.recv(MIB)
                    answers += answer
                heard.append(answers)
            clear(server)
        assert heard[0] == heard[1], f"seed {seed}"


def clear(server: rallypoint.Server) -> None:
    """Return when nothing is stored and no client waits."""
    with rallypoint.connect(server.url) as store:
        until(lambda: (store.delete_prefix(""), server.statistics()["waiting"])[1], lambda waiters: waiters == 0)


def test_get_is_one_request(relay: RelayThread) -> None:
    with relay.peer() as a, relay.peer() as b:
        b.set(b"/k", b"v")
        before = relay.statistics()["requests_sent"]
        a.wait(b"/k")
        assert a.read(1) == TOLD
        assert a.get(b"/k") == b"v"
        assert relay.statistics()["requests_sent"] == before + 1


def test_a_request_in_pieces_and_many_in_one(relay: RelayThread) -> None:
    with relay.peer() as peer:
        data = encode(Opcode.SET, b"/k", b"value") + encode(Opcode.GET, b"/k") + encode(Opcode.ADD, b"/n", 3) + PING
        for at in range(len(data)):
            peer.send(data[at : at + 1])
        wanted = string(b"value") + number(3) + PONG
        assert peer.read(len(wanted)) == wanted
        says(peer, *[encode(Opcode.ADD, b"/n", 1)] * 1000)
        assert [peer.number() for _ in range(1000)] == list(range(4, 1004))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\x63", "unknown opcode 99"),
        (encode(Opcode.VALIDATE, 0x3C85F7CE), "a second greeting"),
        (encode(Opcode.SET, b"/n", b"x") + encode(Opcode.ADD, b"/n", 1), "not a 64-bit decimal integer"),
    ],
    ids=["opcode", "greeting", "add"],
)
def test_a_bad_request_closes_its_own_connection(
    relay: RelayThread, message: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with relay.peer() as a, relay.peer() as b:
        a.send(message)
        assert a.rest() == b""
        b.work(2)
    assert any(why in record.getMessage() for record in caplog.records)


def test_a_set_that_fails_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with (
        rallypoint.Server(max_memory=2 * MIB) as server,
        RelayThread(port_of(server)) as relay,
        relay.peer() as a,
        relay.peer() as b,
    ):
        says(a, encode(Opcode.SET, b"/big", b"x" * 3 * MIB), PING)
        assert a.rest() == b""
        b.work(2)
    assert any("would bring the store to" in record.getMessage() for record in caplog.records)


def test_long_lists_come_whole_and_in_order(relay: RelayThread) -> None:
    names = [b"/%06d" % each for each in range(10_000)]
    with relay.peer() as peer:
        says(peer, encode(Opcode.MULTI_SET, len(names), *[part for name in names for part in (name, name)]))
        says(
            peer, listed(Opcode.MULTI_GET, *names, b"/none"), encode(Opcode.GETNUMKEYS), encode(Opcode.LIST_KEYS), PING
        )
        assert [peer.string() for _ in names] == names and peer.string() == b""
        assert peer.number() == len(names)
        assert peer.number() == len(names)
        assert sorted(peer.string() for _ in names) == names
        assert peer.read(4) == PONG


# Several clients


def test_waits_of_many_clients_for_one_key_are_a_few_requests(relay: RelayThread) -> None:
    peers = [relay.peer() for _ in range(20)]
    before = relay.statistics()["requests_sent"]
    for peer in peers[1:]:
        peer.wait(b"/k")
    until(lambda: len([1 for client in relay.statistics()["clients"] if client["waits_for"]]), lambda n: n == 19)
    peers[0].set(b"/k", b"v")
    for peer in peers[1:]:
        assert peer.read(1) == TOLD
        assert peer.get(b"/k") == b"v"
    assert relay.statistics()["requests_sent"] <= before + 4  # a few waits, and the set
    for peer in peers:
        peer.close()


def test_a_turn_goes_on_when_its_client_dies(relay: RelayThread) -> None:
    with relay.peer() as a, relay.peer() as b, relay.peer() as c:
        a.wait(b"/q")
        until(lambda: relay.statistics()["clients"], lambda seen: any(each["waits_for"] for each in seen))
        b.wait(b"/q")
        c.push(b"/q", b"item")
        assert a.read(1) == TOLD
        a.close()
        assert b.read(1) == TOLD
        assert b.pop(b"/q") == b"item"


def test_an_arrival_is_taken_back_when_its_client_dies(relay: RelayThread) -> None:
    with relay.peer() as a, relay.peer() as b:
        a.send(encode(Opcode.BARRIER, b"/b", 2))
        until(lambda: b.get(b"/b"), lambda count: count == b"1")
        a.close()
        until(lambda: b.get(b"/b"), lambda count: count == b"0")


def test_writes_of_a_killed_client_are_executed(relay: RelayThread) -> None:
    with relay.peer() as a, relay.peer() as b:
        says(a, *[encode(Opcode.APPEND, b"/a", b"%d;" % each) for each in range(500)], encode(Opcode.ADD, b"/n", 7))
        a.socket.shutdown(socket.SHUT_WR)
        until(lambda: b.add(b"/n", 0), lambda count: count == 7)
        assert b.get(b"/a") == b"".join(b"%d;" % each for each in range(500))


def test_a_cancelled_wait_is_answered_and_leaves_nothing(server: rallypoint.Server, relay: RelayThread) -> None:
    with relay.peer() as peer:
        for keys in ((b"/x",), (b"/x", b"/y")):
            says(peer, wait(*keys), CANCEL, PING)
            assert peer.read(5) == CANCELLED + PONG
        until(lambda: server.statistics()["waiting"], lambda waiters: waiters == 0)


# Limits


def test_a_client_that_never_reads_stops_only_itself(relay: RelayThread) -> None:
    with relay.peer() as slow, relay.peer() as quick:
        quick.set(b"/big", b"x" * MIB)
        before = relay.statistics()["requests_sent"]
        slow.send(encode(Opcode.GET, b"/big") * 300 + PING)
        until(lambda: relay.statistics()["requests_sent"], lambda sent: sent > before)
        quick.work(50)
        asked = relay.statistics()["requests_sent"] - before - 50 * 10
        assert asked < 100, "its replies are held in memory"
        for _ in range(300):
            assert len(slow.string()) == MIB
        assert slow.read(4) == PONG


BIG = [b"/big/%d" % each for each in range(8)]
HUGE = 4 * MIB


def asks_for_all(peer: RawPeer, times: int) -> None:
    """Ask for values of 4 MiB, and read none."""
    peer.send(b"".join(encode(Opcode.GET, key) for key in BIG) * times)


@pytest.fixture
def big(server: rallypoint.Server, cutter: CuttingProxy) -> None:
    with rallypoint.connect(server.url) as store:
        for key in BIG:
            store.set(key.decode()[1:], b"x" * HUGE)


def test_unread_large_values_take_little_memory(server: rallypoint.Server, big: None) -> None:
    with relay_process(port_of(server)) as (port, _), RawPeer(("127.0.0.1", port)) as slow:
        before = high_water(slow)
        asks_for_all(slow, 40)
        with RawPeer(("127.0.0.1", port)) as quick:
            for _ in range(2):  # its replies come behind those that the relay has requested
                quick.work(20)
        assert high_water(slow) - before < 20 * HUGE, "a few of 320 values are held, and copies of those being received"
        for _ in range(320):
            assert len(slow.string()) == HUGE


def high_water(peer: RawPeer) -> int:
    """Return the most memory that the process at the other end of a connection has ever used."""
    statistics = json.loads(get(peer.socket.getpeername(), "/statistics"))
    status = Path(f"/proc/{statistics['pid']}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def test_unread_large_values_are_counted(server: rallypoint.Server, big: None) -> None:
    most = (
        RESERVE_BYTES + 2 * HUGE
    )  # beside what the clients hold, a value arrives from the server, and another follows
    with RelayThread(port_of(server), max_memory=1) as relay, contextlib.ExitStack() as stack:
        relay.connected()
        first, *others = [stack.enter_context(relay.peer()) for _ in range(6)]
        asks_for_all(first, 2)
        held = until(lambda: relay.statistics()["bytes"], lambda held: held > HUGE)
        assert held < (MAX_LARGE + 2) * HUGE
        for slow in others:
            asks_for_all(slow, 2)
            assert relay.statistics()["bytes"] < most
        until(lambda: relay.statistics()["connections"], lambda left: left <= len(others))  # one is dropped
        assert relay.statistics()["bytes"] < most
        with relay.peer() as quick:
            quick.work(20)


def test_sets_during_an_outage_wait_and_the_rest_is_not_read(relay: RelayThread, cutter: CuttingProxy) -> None:
    with relay.peer() as peer:
        peer.ping()
        cutter.go_down()
        until(lambda: relay.server.upstream.connected, lambda connected: not connected)
        data = b"".join(encode(Opcode.APPEND, b"/a", b"%d;" % each) for each in range(30_000)) + PING
        sender = threading.Thread(target=peer.send, args=[data])
        sender.start()
        held = until(lambda: relay.server.port.session.held, lambda held: held > 4096 * 20)
        assert held < len(data) // 4
        cutter.come_back()
        sender.join(AMPLE_S)
        assert peer.read(4) == PONG
        assert peer.get(b"/a") == b"".join(b"%d;" % each for each in range(30_000))


# Cuts


def test_waits_continue_after_a_cut(relay: RelayThread, cutter: CuttingProxy) -> None:
    with relay.peer() as a, relay.peer() as b, relay.peer() as c, relay.peer() as d:
        a.wait(b"/k")
        b.wait(b"/k", b"/l")
        c.send(encode(Opcode.BARRIER, b"/b", 2))
        until(lambda: len([1 for client in relay.statistics()["clients"] if client["waits_for"]]), lambda n: n == 3)
        cutter.cut_all()
        d.set(b"/k", b"1")
        assert (a.read(1), a.get(b"/k")) == (TOLD, b"1")
        cutter.cut_all()
        d.set(b"/l", b"1")
        assert b.read(1) == TOLD
        cutter.cut_all()
        d.send(encode(Opcode.BARRIER, b"/b", 2))
        assert c.read(1) + d.read(1) == TOLD * 2


def test_clients_of_a_server_that_lost_their_session_are_disconnected(relay: RelayThread, cutter: CuttingProxy) -> None:
    with relay.peer() as peer, rallypoint.Server() as other:
        peer.set(b"/k", b"1")
        peer.wait(b"/never")
        cutter.redirect(port_of(other))
        assert peer.rest() == b""
        with relay.peer() as later:
            assert later.get(b"/k") == b""
            later.work(2)


class Worker(threading.Thread):
    """Adds, appends, pushes and pops, and records the replies."""

    def __init__(self, relay: RelayThread, name: str, rounds: int) -> None:
        super().__init__(name=name, daemon=True)
        self._relay, self._rounds = relay, rounds
        self.totals: list[int] = []
        self.items: list[bytes] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with self._relay.peer() as peer:
                for turn in range(self._rounds):
                    self._work(peer, b"%s-%d" % (self.name.encode(), turn))
        except Exception as error:
            self.failure = error

    def _work(self, peer: RawPeer, token: bytes) -> None:
        self.totals.append(peer.add(b"/n", 1))
        says(peer, encode(Opcode.APPEND, b"/a", token + b";"), encode(Opcode.QUEUE_PUSH, b"/q", token))
        peer.wait(b"/q")
        assert peer.read(1) == TOLD
        item = peer.pop(b"/q")
        assert item is not None, "another client had the turn"
        self.items.append(item)
        says(peer, wait(b"/n"), PING)
        heard = peer.read(5)
        assert sorted(heard) == sorted(TOLD + PONG)
        assert int(peer.get(b"/n")) >= self.totals[-1]


@pytest.mark.parametrize("seed", range(3))
def test_eight_clients_under_cuts_do_everything_exactly_once(
    relay: RelayThread, cutter: CuttingProxy, seed: int
) -> None:
    chance = random.Random(seed)
    workers = [Worker(relay, f"w{each}", rounds=40) for each in range(8)]
    for worker in workers:
        worker.start()
    cuts = 0
    while any(worker.is_alive() for worker in workers):
        cutter.cut_after(chance.choice((UP, DOWN)), chance.randint(0, 3000))
        if cutter.was_cut.wait(0.05):
            cuts += 1
    cutter.disarm()
    assert [worker.failure for worker in workers] == [None] * 8
    assert cuts > 5
    assert sorted(total for worker in workers for total in worker.totals) == list(range(1, 321))
    tokens = sorted(b"w%d-%d" % (each, turn) for each in range(8) for turn in range(40))
    assert sorted(item for worker in workers for item in worker.items) == tokens
    with relay.peer() as peer:
        assert sorted(peer.get(b"/a").split(b";")[:-1]) == tokens
        assert peer.pop(b"/q") is None


def test_a_reset_by_the_client_is_no_bug(relay: RelayThread, caplog: pytest.LogCaptureFixture) -> None:
    with relay.peer() as a, relay.peer() as b:
        b.set(b"/big", b"x" * MIB)
        says(a, encode(Opcode.GET, b"/big"), wait(b"/q"), encode(Opcode.GET, b"/big"))
        a.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        a.close()
        b.work(5)
    assert not [record for record in caplog.records if record.exc_info]
