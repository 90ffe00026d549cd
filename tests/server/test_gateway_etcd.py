"""Gateways on a real cluster: they are one store, in both protocols and behind doors, and any of them may be killed."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.etcd.cluster import Cluster
from tests.wire import AMPLE_S, Peer, Serving, until

import rallypoint
from rallypoint import aio
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.protocol.client import Client
from rallypoint.store import peer_check
from rallypoint.store.url import parse_url

pytestmark = pytest.mark.needs("etcd")


@pytest.fixture(params=["uvloop", "asyncio"])
def gateway(request: pytest.FixtureRequest, tmp_path: Path, etcd_url: str) -> Iterator[Serving]:
    with Serving(tmp_path, request.param == "uvloop", engine=etcd_url) as serving:
        yield serving


@pytest.fixture
def gateways(tmp_path: Path, etcd_url: str) -> Iterator[tuple[Serving, Serving]]:
    with Serving(tmp_path, engine=etcd_url) as one, Serving(tmp_path, engine=etcd_url) as other:
        yield one, other


def ask(where: tuple[str, int], method: str, path: str) -> Any:
    connection = http.client.HTTPConnection(*where, timeout=AMPLE_S)
    try:
        connection.request(method, path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def both(gateways: tuple[Serving, Serving]) -> str:
    """The URL of a store that has these two servers."""
    return "tcp://" + ",".join(gateway.url.removeprefix("tcp://") for gateway in gateways)


def test_a_peer_that_speaks_pytorchs_protocol_works(gateway: Serving) -> None:
    with gateway.peer() as peer:
        peer.work()
        values = [b"v" * 3 * 1024 * 1024, b"", b"\0rp\0"]
        for n, value in enumerate(values):
            peer.set(b"/%d" % n, value)
        assert [peer.get(b"/%d" % n) for n in range(3)] == values
    page = ask(gateway.address, "GET", "/statistics")
    assert page["engine"].startswith("etcd://") and page["trouble"] == "" and page["sessions_here"] == 0


def test_two_gateways_are_one_store(gateways: tuple[Serving, Serving]) -> None:
    one, other = gateways
    with one.peer() as writer, other.peer() as reader, rallypoint.connect(other.url) as ours:
        reader.wait(b"/k")
        writer.set(b"/k", b"v")
        assert reader.read(1) == b"\0" and reader.get(b"/k") == b"v" == ours.get("k")
        assert (writer.add(b"/n", 2), reader.add(b"/n", 3), ours.add("n", 4)) == (2, 5, 9)
        ours.queue_push("q", "item")
        assert writer.pop(b"/q") == b"item" and reader.pop(b"/q") is None
        writer.send(encode(Opcode.BARRIER, b"/bar", 2))
        ours.barrier("bar", 2)
        assert writer.read(1) == b"\0"


def test_order_is_kept_though_writes_go_together(gateways: tuple[Serving, Serving]) -> None:
    """Whoever sees a client's later write sees its earlier ones."""
    one, other = gateways
    count = 400
    with one.peer() as writer, other.peer() as reader:
        writer.send(b"".join(encode(Opcode.SET, b"/order/%d" % n, b"%d" % n) for n in range(count)))
        writer.send(encode(Opcode.SET, b"/order/done", b""))
        reader.wait(b"/order/done")
        assert reader.read(1) == b"\0"
        reader.send(encode(Opcode.MULTI_GET, count, *(b"/order/%d" % n for n in range(count))))
        assert [reader.string() for _ in range(count)] == [b"%d" % n for n in range(count)]


def test_every_popper_gets_an_item_and_no_item_comes_twice(gateways: tuple[Serving, Serving]) -> None:
    taken: list[bytes] = []

    def pop(gateway: Serving) -> None:
        with gateway.peer() as peer:
            while len(taken) < 60:
                peer.wait(b"/q")
                peer.read(1)
                item = peer.pop(b"/q")
                if item is not None:
                    taken.append(item)

    poppers = [threading.Thread(target=pop, args=(gateways[n % 2],), daemon=True) for n in range(6)]
    for popper in poppers:
        popper.start()
    with gateways[0].peer() as pusher:
        for n in range(60):
            pusher.push(b"/q", b"%d" % n)
        until(lambda: (pusher.ping(), len(taken))[1], lambda count: count == 60)
        for n in range(6):
            pusher.push(b"/q", b"end %d" % n)
    for popper in poppers:
        popper.join(AMPLE_S)
    numbers = [item for item in taken if not item.startswith(b"end")]
    assert sorted(numbers, key=int) == [b"%d" % n for n in range(60)] and len(set(taken)) == len(taken)


def test_a_door_is_the_same_store_at_both_gateways(gateways: tuple[Serving, Serving]) -> None:
    ports = [ask(gateway.address, "PUT", "/rounds/a%20run/3")["port"] for gateway in gateways]
    with Peer(("127.0.0.1", ports[0])) as one, Peer(("127.0.0.1", ports[1])) as other, gateways[0].peer() as front:
        one.set(b"/k", b"behind")
        assert other.get(b"/k") == b"behind" and front.get(b"/k") == b""
        later = ask(gateways[0].address, "PUT", "/rounds/a%20run/4")["port"]
        assert one.rest() == b"", "the door of a later round closes the one before"
        with Peer(("127.0.0.1", later)) as new:
            assert new.get(b"/k") == b""
    assert ask(gateways[0].address, "GET", "/statistics")["doors"]["a run"]["scope"] == 4


def test_who_closes_the_last_door_of_a_round_leaves_nothing(gateways: tuple[Serving, Serving], etcd_url: str) -> None:
    ports = [ask(gateway.address, "PUT", "/rounds/run/1")["port"] for gateway in gateways]
    with Peer(("127.0.0.1", ports[0])) as one, Peer(("127.0.0.1", ports[1])) as other:
        one.set(b"/k", b"v")
        assert ask(gateways[0].address, "DELETE", "/rounds/run/1") == {"closed": True}
        assert one.rest() == b"" and other.get(b"/k") == b"v"

    from rallypoint.etcd.space import Space

    async def behind() -> int:
        space = await Space.connect(parse_url(etcd_url).etcd(), "test", AMPLE_S)
        try:
            return await space.below("doors/run/1").num_keys(b"")
        finally:
            await space.close()

    assert asyncio.run(behind()) == 1
    assert ask(gateways[1].address, "DELETE", "/rounds/run/1") == {"closed": True}
    until(lambda: asyncio.run(behind()), lambda left: not left)


def test_our_client_goes_on_at_another_gateway_when_its_own_is_killed(etcd_url: str) -> None:
    one, other = (rallypoint.Server(engine=etcd_url) for _ in range(2))
    with other, rallypoint.connect(f"{one.url},{other.url.removeprefix('tcp://')}") as store:
        threads, each = 4, 40
        seen: list[int] = []
        under_way = threading.Event()

        def count() -> None:
            for _ in range(each):
                seen.append(store.add("n", 1))
                if len(seen) == threads * each // 4:
                    under_way.set()

        counters = [threading.Thread(target=count) for _ in range(threads)]
        for counter in counters:
            counter.start()
        assert under_way.wait(AMPLE_S)
        one._child.send_signal(signal.SIGKILL)
        for counter in counters:
            counter.join(AMPLE_S)
        assert sorted(seen) == list(range(1, threads * each + 1)), "each once, none twice"
        assert store.add("n", 0) == threads * each
    one.close()


@pytest.mark.parametrize("under_way", [True, False])
def test_our_client_leaves_a_gateway_that_hangs_with_its_session(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch, under_way: bool
) -> None:
    monkeypatch.setattr(peer_check, "PING_S", 0.1)
    monkeypatch.setattr(peer_check, "PROBE_S", 0.5)
    one, other = (rallypoint.Server(engine=etcd_url) for _ in range(2))
    with one, other, rallypoint.connect(f"{one.url},{other.url.removeprefix('tcp://')}") as store:
        assert isinstance(store, rallypoint.TCPStore)
        store.lease("mine", "v")
        assert store.add("n", 1) == 1
        one._child.send_signal(signal.SIGSTOP)
        try:
            if under_way:
                assert store.add("n", 1) == 2
            until(lambda: store.port, lambda port: port == other.port)
        finally:
            one._child.send_signal(signal.SIGCONT)
        assert store.add("n", 1) == 2 + under_way and store.get("mine") == b"v"
        with rallypoint.connect(one.url) as there:
            assert there.get("mine") == b"v" and there.add("n", 0) == 2 + under_way


def test_a_gateway_that_is_only_slow_is_not_left(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = threading.Semaphore(0)
    probe = peer_check.answers

    def answers(*where: Any) -> bool:
        answered = probe(*where)
        probed.release()
        return answered

    monkeypatch.setattr(peer_check, "PING_S", 0.0)
    monkeypatch.setattr(peer_check, "PROBE_S", AMPLE_S)
    monkeypatch.setattr(peer_check, "answers", answers)
    monkeypatch.setattr(Client, "answered", lambda core, number: False)
    one, other = (rallypoint.Server(engine=etcd_url) for _ in range(2))
    with one, other, rallypoint.connect(f"{one.url},{other.url.removeprefix('tcp://')}") as store:
        assert isinstance(store, rallypoint.TCPStore)
        for _ in range(3):
            assert probed.acquire(timeout=AMPLE_S)
        assert store.add("n", 1) == 1 and store.port == one.port


def test_the_asyncio_client_leaves_a_gateway_that_hangs(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_check, "PING_S", 0.1)
    monkeypatch.setattr(peer_check, "PROBE_S", 0.5)
    one, other = (rallypoint.Server(engine=etcd_url) for _ in range(2))

    async def main() -> None:
        async with await aio.connect(f"{one.url},{other.url.removeprefix('tcp://')}") as store:
            await store.lease("mine", "v")
            assert await store.add("n", 1) == 1
            one._child.send_signal(signal.SIGSTOP)
            try:
                assert await store.add("n", 1) == 2
            finally:
                one._child.send_signal(signal.SIGCONT)
            assert await store.get("mine") == b"v" and store._session._route.at.port == other.port

    with one, other:
        asyncio.run(asyncio.wait_for(main(), AMPLE_S))


def test_a_watch_goes_on_at_another_gateway_without_a_gap(etcd_url: str) -> None:
    one, other = (rallypoint.Server(engine=etcd_url) for _ in range(2))
    watched = rallypoint.connect(f"{one.url},{other.url.removeprefix('tcp://')}")
    with other, watched, rallypoint.connect(other.url) as writer, watched.watch("w/") as feed:
        writer.multi_set(["w/1", "w/2", "w/3"], ["", "", ""])
        seen = [feed.next(AMPLE_S).key for _ in range(2)]
        one._child.send_signal(signal.SIGKILL)
        writer.set("w/4", "")
        seen += [feed.next(AMPLE_S).key for _ in range(2)]
        assert seen == ["w/1", "w/2", "w/3", "w/4"]
    one.close()


@pytest.mark.needs("torch")
def test_torchs_own_client_on_two_gateways(gateways: tuple[Serving, Serving]) -> None:
    code = """
import sys, datetime
import torch.distributed as dist
ports = [int(port) for port in sys.argv[1:]]
wait = datetime.timedelta(seconds=60)
one, other = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=wait) for port in ports]
one.set("k", "v"); assert other.get("k") == b"v"
assert one.add("n", 2) == 2 and other.add("n", 3) == 5
assert one.compare_set("k", "v", "w") == b"w" == other.get("k")
one.multi_set(["a", "b"], ["1", "2"]); assert other.multi_get(["a", "b"]) == [b"1", b"2"]
one.append("k", "x"); assert one.get("k") == b"wx"
assert other.check(["a", "b"]) and not other.check(["absent"])
assert one.delete_key("a") and not other.delete_key("a")
one.queue_push("q", "1"); assert other.queue_pop("q") == b"1" and one.queue_len("q") == 0
other.wait(["k", "b"])
try:
    one.wait(["never"], datetime.timedelta(milliseconds=50)); raise SystemExit("waited for nothing")
except dist.DistStoreError: pass
assert one.num_keys() == other.num_keys() == 3, one.num_keys()
assert sorted(one.list_keys()) == ["b", "k", "n"]
both = dist.TCPStore("127.0.0.1", ports[0], 1, is_master=False, timeout=wait)
print("all is well")
"""
    ports = [str(gateway.address[1]) for gateway in gateways]
    done = subprocess.run([sys.executable, "-c", code, *ports], capture_output=True, text=True, timeout=AMPLE_S)
    assert done.stdout.strip() == "all is well", done.stderr


def test_what_is_no_store_in_etcd_is_said_in_one_line() -> None:
    for url in ("etcd://", "tcp://x:1", "etcd://a:99999", "nonsense"):
        with pytest.raises(rallypoint.ServerFailed) as failed:
            rallypoint.Server(engine=url)
        assert "\n" not in str(failed.value) and url in str(failed.value)
        command = [sys.executable, "-m", "rallypoint", "serve", "--port", "0", "--engine", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and url in done.stderr


def test_while_etcd_is_silent_the_gateway_lives_and_says_so(tmp_path: Path) -> None:
    with (
        Cluster(members=1) as cluster,
        Serving(tmp_path, engine=f"{cluster.url}/x") as gateway,
        rallypoint.connect(gateway.url) as store,
        gateway.peer() as peer,
    ):
        store.set("k", "v")
        cluster.stop(0)
        peer.send(encode(Opcode.GET, b"/k"))
        with pytest.raises(rallypoint.NoQuorum):
            store.add("n", 1)
        assert peer.rest() == b""
        facts = ask(gateway.address, "GET", "/statistics")
        assert "did not answer" in facts["trouble"] and gateway.log().count("etcd does not answer") == 1
        cluster.cont(0)
        with gateway.peer() as later:
            assert later.get(b"/k") == b"v"
        assert ask(gateway.address, "GET", "/statistics")["trouble"] == ""
