"""A relay with a real server: sessions that survive cuts, many clients on one connection, rounds, and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, RawPeer, ServerProcess, until
from tests.relay.relays import RelayThread, get, relay_process
from tests.served import server_fixture

import rallypoint
from rallypoint import aio, net
from rallypoint.core import ops
from rallypoint.protocol import native
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.relay import round_ports
from rallypoint.server.round_errors import TooLate, TooMany
from rallypoint.testing import CuttingProxy

MIB = 1024 * 1024
LONG_S = 1000.0


server = server_fixture(port=0)


@pytest.fixture
def relay(server: rallypoint.Server) -> Iterator[RelayThread]:
    with RelayThread(server.port) as relaying:
        yield relaying.connected()


def connect(*ports: int) -> rallypoint.Store:
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    return rallypoint.connect(f"tcp://{addresses}/{random.getrandbits(64):x}", timeout=AMPLE_S)


def statistics_of(server: rallypoint.Server | int) -> Any:
    """Return the statistics of a server, or of the server at a port."""
    port = server if isinstance(server, int) else server.port
    return json.loads(get(("127.0.0.1", port), "/statistics"))


def in_threads(*works: Callable[[], object]) -> None:
    """Run functions in threads; raise an error of any."""
    failed: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * AMPLE_S)
    assert not failed, failed


# Native clients


def test_native_clients_share_one_connection(server: rallypoint.Server, relay: RelayThread) -> None:
    before = statistics_of(server)["connections"]
    with connect(relay.port) as one, connect(relay.port) as other:
        one.set("key", "value")
        assert statistics_of(server)["connections"] == before
        assert relay.statistics()["channels"] == 2
        assert len(statistics_of(server)["sessions"]) == 2
        assert one.add("n", 2) == 2 and other.add("n", 3) == 3, "each has a prefix of its own"
    until(lambda: relay.statistics()["channels"], lambda count: count == 0)


def test_a_client_that_says_goodbye_leaves_no_session_behind(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, grace_s=LONG_S) as server, RelayThread(server.address[1]) as relay:
        connect(relay.connected().port).close()
        until(lambda: len(statistics_of(server.address[1])["sessions"]), lambda count: count == 0)


def test_large_values_pass(relay: RelayThread) -> None:
    value = random.Random(5).randbytes(8 * MIB)
    with connect(relay.port) as store, connect(relay.port) as other:
        store.set("large", value)
        read: list[bool] = []
        in_threads(
            lambda: read.append(store.get("large") == value),
            lambda: [other.add("n", 1) for _ in range(100)],
        )
        assert read == [True] and other.add("n", 0) == 100


def test_a_client_that_never_reads_delays_no_other_client(server: rallypoint.Server, relay: RelayThread) -> None:
    with rallypoint.connect(relay.url) as store, RawPeer(relay.address, greet=False) as silent:
        store.set("large", bytes(MIB))
        silent.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.send(_native_requests(b"/large", 64))
        until(lambda: relay.statistics()["bytes"], lambda held: held > 100_000)
        for turn in range(100):
            assert store.add("n", 1) == turn + 1
        assert relay.statistics()["bytes"] < 2 * MIB


def _native_requests(key: bytes, times: int) -> bytes:
    asked = [ops.Get(number, key, 0.0) for number in range(1, times + 1)]
    return native.PREFACE + b"".join(map(native.frame, [native.Hello(native.VERSION, "silent"), *asked]))


def test_cuts_upstream_at_random_lose_and_repeat_nothing(server: rallypoint.Server) -> None:
    chance = random.Random(11)
    with CuttingProxy(server.port) as cutter, RelayThread(cutter.port) as relay:
        relay.connected()
        stores = [connect(relay.port) for _ in range(2)]
        ended = threading.Event()

        def work(store: rallypoint.Store) -> None:
            for turn in range(300):
                assert store.add("n", 1) == turn + 1
                store.append("text", f"{turn} ")
            assert store.get("text") == "".join(f"{turn} " for turn in range(300)).encode()

        def cut() -> None:
            for _ in range(25):
                cutter.cut_after(chance.choice(["up", "down"]), chance.randrange(1, 4000))
                while not cutter.was_cut.wait(0.01):
                    if ended.is_set():
                        return
            cutter.disarm()

        def both() -> None:
            try:
                in_threads(*(partial(work, store) for store in stores))
            finally:
                ended.set()

        in_threads(both, cut)
        assert relay.server.upstream.connections > 5
        for store in stores:
            store.close()


def test_clients_wait_for_a_stopped_server() -> None:
    with rallypoint.Server(port=0) as server, RelayThread(server.port) as relay:
        store = connect(relay.connected().port)
        waited: list[bytes] = []
        os.kill(server.pid, signal.SIGSTOP)
        try:
            waiting = threading.Thread(target=lambda: waited.append(store.get("late")))
            waiting.start()
            until(lambda: relay.server.upstream.traffic.frames_sent, lambda sent: sent >= 2)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        with store.clone() as other:
            other.set("late", "value")
        waiting.join(AMPLE_S)
        assert waited == [b"value"] and relay.server.upstream.connections == 1
        store.close()


def test_a_thousand_native_clients_are_one_connection_at_the_server() -> None:
    async def work(url: str, server: rallypoint.Server) -> None:
        stores = await asyncio.gather(*(aio.connect(url, timeout=AMPLE_S) for _ in range(1000)))
        assert sorted(await asyncio.gather(*(store.add("n", 1) for store in stores))) == list(range(1, 1001))
        facts = await asyncio.to_thread(statistics_of, server)
        assert facts["connections"] == 2, "the relay's, and that of this request"
        assert len(facts["sessions"]) == 1000
        for store in stores:
            await store.close()

    net.raise_file_limit(4096)
    with rallypoint.Server(port=0) as server, RelayThread(server.port) as relay:
        asyncio.run(work(relay.connected().url, server))


def test_clients_of_a_killed_relay_continue_at_the_server(server: rallypoint.Server) -> None:
    with relay_process(server.port) as (port, kill):
        store = connect(port, server.port)
        store.lease("mine", "here")
        waited: list[bytes] = []
        waiting = threading.Thread(target=lambda: waited.append(store.get("late")))
        waiting.start()
        until(lambda: statistics_of(server)["sessions"][0]["waits_for"], bool)
        kill()
        assert store.add("n", 1) == 1
        store.set("late", "value")
        waiting.join(AMPLE_S)
        assert waited == [b"value"] and store.get("mine") == b"here", "the session continued"
        assert len(statistics_of(server)["sessions"]) == 1
        store.close()


def test_sessions_continue_at_a_restarted_relay(server: rallypoint.Server) -> None:
    with contextlib.ExitStack() as stack:
        port, kill = stack.enter_context(relay_process(server.port))
        store = stack.enter_context(connect(port))
        store.lease("mine", "here")
        kill()
        stack.enter_context(relay_process(server.port, port))
        assert store.add("n", 1) == 1 and store.get("mine") == b"here"


# PyTorch's clients


def test_torch_clients_survive_a_cut_of_the_relays_connection(server: rallypoint.Server) -> None:
    with CuttingProxy(server.port) as cutter, RelayThread(cutter.port) as relay:
        with relay.connected().peer() as peer, relay.peer() as other:
            peer.work(5)
            peer.wait(b"/late")
            cutter.cut_all()
            other.set(b"/late", b"value")
            assert peer.read(1) == b"\0"
            other.work(5)
        assert relay.server.upstream.connections == 2


def test_torch_and_native_clients_share_keys(relay: RelayThread) -> None:
    with rallypoint.connect(relay.url) as store, relay.peer() as peer:
        store.set("shared", "value")
        assert peer.get(b"/shared") == b"value"
        assert store.delete_key("shared")


# Rounds


def torch_at(port: int) -> RawPeer:
    return RawPeer(("127.0.0.1", port))


def native_at(port: int) -> rallypoint.Store:
    return rallypoint.connect(f"tcp://127.0.0.1:{port}", timeout=AMPLE_S)


def test_a_round_has_a_namespace_of_its_own(server: rallypoint.Server, relay: RelayThread) -> None:
    port = relay.open_round("apart", 1, number=4)
    assert relay.open_round("apart", 1) == port, "the port of an open round is returned"
    with torch_at(port) as peer, native_at(port) as store, relay.peer() as outside:
        outside.set(b"/key", b"outside")
        peer.set(b"/key", b"inside")
        assert store.get("key") == b"inside" and outside.get(b"/key") == b"outside"
        (described,) = relay.statistics()["round_ports"].items()
        assert described[0] == "apart"
        expected = {"round": 4, "scope": 1, "port": port, "connections": 2}
        assert expected.items() <= described[1].items()
        assert statistics_of(server)["rounds"] == 1
    assert relay.close_round("apart")


def test_relays_of_two_nodes_share_a_round(server: rallypoint.Server, relay: RelayThread) -> None:
    with RelayThread(server.port) as second:
        ports = relay.open_round("shared", 1), second.connected().open_round("shared", 1)
        with torch_at(ports[0]) as one, torch_at(ports[1]) as other, native_at(ports[1]) as store:
            one.wait(b"/key")
            other.set(b"/key", b"value")
            assert one.read(1) == b"\0" and store.get("key") == b"value"
        relay.close_round("shared")


def test_a_later_round_closes_the_earlier_one(relay: RelayThread) -> None:
    first = relay.open_round("again", 1)
    with torch_at(first) as peer, contextlib.ExitStack() as stack:
        peer.set(b"/key", b"first")
        second = relay.open_round("again", 2)
        assert second != first and peer.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            stack.enter_context(torch_at(first))
        with torch_at(second) as later:
            later.send(encode(Opcode.CHECK, 1, b"/key"))
            assert later.read(1) == b"\1", "the new round is empty"
    with pytest.raises(TooLate, match="a later round of 'again' has begun"):
        relay.open_round("again", 1)
    assert not relay.close_round("again", 1)
    assert relay.close_round("again", 2) and not relay.close_round("again", 2)


def test_closing_a_round_closes_its_namespace_at_the_server(server: rallypoint.Server, relay: RelayThread) -> None:
    with torch_at(relay.open_round("run/1", 1)) as peer:
        peer.set(b"/key", b"value")
        assert statistics_of(server)["rounds"] == 1
        assert relay.close_round("run/1")
        assert peer.rest() == b""
    assert statistics_of(server)["rounds"] == 0


def test_a_round_is_closed_at_the_relay_during_an_outage(server: rallypoint.Server) -> None:
    with CuttingProxy(server.port) as cutter, RelayThread(cutter.port) as relay:
        port = relay.connected().open_round("away", 1)
        cutter.go_down()
        assert relay.close_round("away")
        with pytest.raises(ConnectionRefusedError):
            torch_at(port)


def test_a_round_can_be_opened_during_an_outage(server: rallypoint.Server) -> None:
    with CuttingProxy(server.port) as cutter:
        cutter.go_down()
        with RelayThread(cutter.port) as relay, torch_at(relay.open_round("early", 1)) as peer:
            peer.send(encode(Opcode.ADD, b"/n", 5))
            cutter.come_back()
            assert peer.number() == 5
            relay.close_round("early")


def test_a_requested_port_is_used_if_it_is_free(relay: RelayThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert relay.open_round("taken", 1, port=port) != port
    assert relay.open_round("free", 1, port=port) == port
    for run in ("taken", "free"):
        relay.close_round(run)


def test_rounds_are_bounded(relay: RelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_ports, "MAX_ROUNDS", 2)
    with torch_at(relay.open_round("one", 1)) as one:
        one.ping()
        relay.open_round("two", 1)
        with torch_at(relay.open_round("three", 1)) as three:
            three.ping()
            assert sorted(relay.statistics()["round_ports"]) == ["one", "three"]
            with pytest.raises(TooMany, match="2 are open"):
                relay.open_round("four", 1)
    for run in ("one", "three"):
        relay.close_round(run)


def test_rounds_count_as_connections(server: rallypoint.Server) -> None:
    with RelayThread(server.port, max_connections=3) as relay:
        port = relay.connected().open_round("few", 1)
        with torch_at(port) as peer, torch_at(port):
            with pytest.raises(ConnectionError):
                torch_at(port)
            peer.work(2)
            relay.close_round("few")


# Pages, Unix sockets, the end


def test_pages(server: rallypoint.Server, relay: RelayThread) -> None:
    assert get(relay.address, "/healthz") == "ok\n"
    with relay.peer() as peer, relay.peer() as other:
        peer.set(b"/key", b"value")
        other.wait(b"/never")
        with rallypoint.connect(relay.url):
            facts = relay.statistics()
    speak = sorted(client["speaks"] for client in facts["clients"])
    assert speak == ["http", "rallypoint", "torch", "torch"]
    assert facts["upstream"] == facts["relay_of"] == f"tcp://127.0.0.1:{server.port}"
    assert facts["upstream_connected"] is True and facts["upstream_why"] == ""
    assert facts["torch_clients"] == 2 and facts["requests_asked"] >= 2 and facts["channels"] == 2
    assert min(facts[name] for name in ("frames_sent", "frames_received", "bytes_sent", "bytes_received")) > 0
    assert f"relays tcp://127.0.0.1:{server.port}" in get(relay.address, "/")


def test_rounds_by_http(relay: RelayThread) -> None:
    wanted = reserve_port()
    port = json.loads(get(relay.address, f"/rounds/by%20http/3?round=1&port={wanted}", "PUT"))["port"]
    assert port == wanted
    assert get(relay.address, "/rounds/by%20http/4?port=65536", "PUT") == "port out of range: at most 65535\n"
    with torch_at(port) as peer:
        peer.work(1)
    assert "a later round of 'by http' has begun" in get(relay.address, "/rounds/by%20http/2", "PUT")
    assert json.loads(get(relay.address, "/rounds/by%20http/3", "DELETE")) == {"closed": True}


def test_a_round_may_be_open_to_other_nodes(relay: RelayThread) -> None:
    other = "127.0.0.9"  # where the relay itself does not listen
    here = json.loads(get(relay.address, "/rounds/here/1", "PUT"))["port"]
    everywhere = json.loads(get(relay.address, "/rounds/everywhere/1?everywhere=1", "PUT"))["port"]
    with RawPeer((other, everywhere)) as peer:
        peer.work(1)
    with pytest.raises(ConnectionRefusedError):
        RawPeer((other, here))
    for run in ("here", "everywhere"):
        relay.close_round(run)


def test_health_reports_how_long_the_server_has_been_away_and_why(server: rallypoint.Server) -> None:
    with CuttingProxy(server.port) as cutter, RelayThread(cutter.port) as relay:
        relay.connected()
        cutter.go_down()
        away = f"no connection to the server at 127.0.0.1:{cutter.port} for "
        why = ": refused, nothing listens there\n"
        until(lambda: get(relay.address, "/healthz"), lambda text: text.startswith(away) and text.endswith(why))
        facts = relay.statistics()
        assert facts["upstream_connected"] is False and facts["trouble"] in why
        assert f"trouble: {away.strip()}" in get(relay.address, "/")
        cutter.come_back()
        until(lambda: get(relay.address, "/healthz"), lambda text: text == "ok\n")


def test_unix_sockets(server: rallypoint.Server, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "relay"))
    listener.listen()
    with RelayThread(server.port, sockets=[listener]) as relay:
        relay.connected()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "relay"))
            client.sendall(hello(77) + encode(Opcode.ADD, b"/unix", 4))
            assert client.recv(12, socket.MSG_WAITALL) == struct.pack("<Iq", 77, 4)
            facts, clients, _ = relay.call(relay.server.statistics)
            expected = {"peer": "unix socket", "speaks": "torch", "waits_for": []}
            assert list(clients) == [expected] and facts["torch_clients"] == 1
        with torch_at(relay.open_round("unix", 1)) as peer:
            peer.work(2)
        relay.close_round("unix")


def test_the_end_of_a_relay_ends_its_clients_and_its_session(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, grace_s=LONG_S) as server:
        port = server.address[1]
        with RelayThread(port) as relay:
            peer = relay.connected().peer()
            peer.set(b"/key", b"value")
            assert len(statistics_of(port)["sessions"]) == 1
        assert peer.rest() == b""
        peer.close()
        until(lambda: len(statistics_of(port)["sessions"]), lambda count: count == 0)
