"""RALLYPOINT_RELAY: sessions begin at the relay of the node, and continue at the store itself when the relay is gone.

To a client, a proxy in front of the server is a relay, and it can be cut at every byte; other tests have a real relay.
Other programs at a relay's address must never end a session, nor be taken for the store.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.test_addresses import Impostor, nobody
from tests.client.test_cuts import BLOCKED, CASES, await_waiting, measure
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, read_line, script, until
from tests.served import server_fixture

import rallypoint
from rallypoint import aio, net
from rallypoint.client import hang_check
from rallypoint.client.routing import dial, relay_address, search
from rallypoint.client.routing.relay_address import VARIABLE, RelayAddress
from rallypoint.protocol.native import ACCEPTED, PREFACE
from rallypoint.testing import DOWN, HANGS_UP, REFUSES, SILENT, UP, CuttingProxy

server = server_fixture("module", grace=AMPLE_S)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time-outs for silent addresses, so that a busy machine triggers none."""
    monkeypatch.setattr(search, "RELAY_S", AMPLE_S)
    monkeypatch.setattr(search, "RESUMING_S", (AMPLE_S / 2, AMPLE_S / 2))
    monkeypatch.setattr(hang_check, "RELAY_SILENCE_S", AMPLE_S)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def empty(server: rallypoint.Server) -> None:
    with direct(server.port) as store:
        store.delete_prefix("")


@pytest.fixture
def relay(server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    """A proxy that stands for the relay of the server."""
    with CuttingProxy(server.port) as relay:
        name(monkeypatch, relay.port, server.port)
        yield relay


def name(monkeypatch: pytest.MonkeyPatch, port: int, upstream: int, identity: bytes = b"") -> None:
    """Name a relay in the environment."""
    endpoints = net.Endpoints([net.Endpoint("127.0.0.1", upstream)])
    monkeypatch.setenv(VARIABLE, RelayAddress(f"tcp://127.0.0.1:{port}", endpoints, identity).variable)


def relayed(store: rallypoint.Store) -> bool:
    return bool(store._backend._route.relayed)  # type: ignore[attr-defined]


def session(store: rallypoint.Store) -> bytes:
    return bytes(store._backend._session._connection.core.session)  # type: ignore[attr-defined]


def direct(port: int) -> rallypoint.Store:
    """Connect without the relay: `localhost` is not how the variable spells its upstream."""
    return rallypoint.connect(f"tcp://localhost:{port}", AMPLE_S)


# Where sessions begin


def test_a_session_begins_at_the_relay_and_names_the_store(server: rallypoint.Server, relay: CuttingProxy) -> None:
    with rallypoint.connect(server.url) as store, store.clone() as clone:
        assert isinstance(store, rallypoint.TCPStore)
        assert relay.connections == 2 and relayed(store) and relayed(clone)
        assert (store.host, store.port) == ("127.0.0.1", server.port), "the address to give to others"
        store.set("k", "v")
        assert clone.get("k") == b"v"
    with rallypoint.TCPStore("127.0.0.1", server.port) as torchs:
        assert relay.connections == 3 and torchs.get("k") == b"v"


def test_only_the_relays_own_upstream_is_reached_through_it(server: rallypoint.Server, relay: CuttingProxy) -> None:
    with rallypoint.Server() as other:
        for url in (other.url, f"tcp://localhost:{server.port}", f"tcp://127.0.0.1:{relay.port}"):
            with rallypoint.connect(url) as store:
                store.set("k", url)
                assert not relayed(store)
    assert relay.connections == 1, "only by its own address"


def test_a_server_of_this_process_is_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    port = reserve_port()
    with CuttingProxy(port) as relay:
        name(monkeypatch, relay.port, port)
        with rallypoint.TCPStore("127.0.0.1", port, is_master=True) as master:
            master.set("k", "v")
            assert relay.connections == 0
            with rallypoint.TCPStore("127.0.0.1", port) as client:
                assert client.get("k") == b"v" and relay.connections == 1


@pytest.mark.parametrize("how", [REFUSES, HANGS_UP, SILENT])
def test_an_unavailable_relay_is_skipped(
    how: str, server: rallypoint.Server, relay: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == SILENT:
        monkeypatch.setattr(search, "RELAY_S", 0.2)
    relay.go_down(how)
    with rallypoint.connect(server.url, AMPLE_S) as store:
        store.set("k", "v")
        assert not relayed(store)
        relay.come_back()
        with store.clone() as clone:  # a new session, and the relay is back
            assert relayed(clone) and clone.get("k") == b"v"
        assert not relayed(store), "a session stays where it is"


@pytest.mark.parametrize("says", [PREFACE[-len(ACCEPTED) :], b"HTTP"])
def test_another_program_at_the_relays_port_is_skipped(
    says: bytes, server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Impostor(says) as other:
        name(monkeypatch, other.port, server.port)
        with rallypoint.connect(server.url, AMPLE_S) as store:
            assert store.add("n", 1) and other.calls == 1


def test_another_store_at_the_relays_port_is_recognized_by_its_identity(
    server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with direct(server.port) as plain, rallypoint.Server() as other:
        identity = plain._backend.server_id  # type: ignore[attr-defined]
        name(monkeypatch, other.port, server.port, identity)
        plain.set("k", "v")
        with rallypoint.connect(server.url, AMPLE_S) as store:
            assert not relayed(store) and store.get("k") == b"v"
        with CuttingProxy(server.port) as relay:
            name(monkeypatch, relay.port, server.port, identity)
            with rallypoint.connect(server.url, AMPLE_S) as store:
                assert relayed(store) and store.get("k") == b"v"


@pytest.mark.needs("torch")
def test_a_plain_pytorch_server_upstream_is_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = importlib.import_module("torch.distributed")
    monkeypatch.setattr(search, "RELAY_S", 0.2)
    pytorchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pytorchs.set("k", "v")
    with rallypoint.Relay(f"tcp://127.0.0.1:{pytorchs.port}") as relay:
        monkeypatch.setenv(VARIABLE, relay.environ[VARIABLE])
        with rallypoint.TCPStore("127.0.0.1", pytorchs.port, timeout=AMPLE_S) as store:
            assert store.get("k") == b"v"


def test_the_error_lists_every_address_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody() as one, nobody() as other:
        name(monkeypatch, one, other)
        with pytest.raises(rallypoint.ConnectFailed) as caught:
            rallypoint.connect(f"tcp://127.0.0.1:{other}", 0.2)
        assert set(caught.value.tried) == {f"127.0.0.1:{one}", f"127.0.0.1:{other}"}


# A relay without its server


def test_a_client_waits_for_a_relay_without_a_server(
    server: rallypoint.Server, relay: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Impostor(ACCEPTED) as alone:
        name(monkeypatch, alone.port, server.port)
        stores: list[rallypoint.Store] = []
        thread = threading.Thread(target=lambda: stores.append(rallypoint.connect(server.url, AMPLE_S * 2)))
        thread.start()
        until(lambda: alone.calls, lambda calls: calls > 2)
        assert not stores
    thread.join(AMPLE_S)  # the relay is gone: the client connects directly
    with stores[0] as store:
        assert not relayed(store) and store.add("n", 1) == 1


def test_a_relay_without_a_server_is_skipped_after_a_while(
    server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "RELAY_S", 0.2)
    with Impostor(ACCEPTED) as alone:
        name(monkeypatch, alone.port, server.port)
        with rallypoint.connect(server.url, AMPLE_S) as store:
            assert not relayed(store) and store.add("m", 1) == 1 and alone.calls


def test_a_client_waits_until_a_real_relay_has_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    port = reserve_port()
    with rallypoint.Relay(f"tcp://127.0.0.1:{port}") as relay:
        monkeypatch.setenv(VARIABLE, relay.environ[VARIABLE])
        stores: list[rallypoint.Store] = []
        thread = threading.Thread(
            target=lambda: stores.append(rallypoint.connect(f"tcp://127.0.0.1:{port}", AMPLE_S * 2))
        )
        thread.start()
        with rallypoint.Server(port=port) as server:
            thread.join(AMPLE_S)
            with stores[0] as store:
                assert relayed(store)
                store.set("k", "v")
                speaks = [client["speaks"] for client in server.statistics()["clients"]]
                assert sorted(speaks) == ["http", "rallypoint channels"], "one connection, and ours"


# When the relay goes


@pytest.mark.parametrize("case", CASES)
def test_every_byte(case: str, server: rallypoint.Server, relay: CuttingProxy) -> None:
    """Wherever the relay dies in a request or its reply, the request is executed once, directly."""
    tried = CASES[case]
    with direct(server.port) as plain:
        with rallypoint.connect(server.url, AMPLE_S) as store:
            sizes = measure(tried, plain, store, relay)
        for way in (UP, DOWN):
            for after in range(sizes[way] + 1):
                plain.delete_prefix("")
                tried.prepare(plain)
                relay.refusing = False
                with rallypoint.connect(server.url, AMPLE_S) as store:
                    own = session(store)
                    relay.refusing = True
                    relay.cut_after(way, after)
                    assert tried.act(store) == tried.returns, f"cut after {after} bytes {way}"
                    assert tried.then(plain), f"cut after {after} bytes {way}"
                    assert session(store) == own
                    relay.disarm()


@pytest.mark.parametrize("name", BLOCKED)
def test_a_blocked_call_continues(name: str, server: rallypoint.Server, relay: CuttingProxy) -> None:
    act, release, returns = BLOCKED[name]
    with direct(server.port) as plain, rallypoint.connect(server.url, AMPLE_S) as store:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(act(store)))
        thread.start()
        await_waiting(server, 1)
        relay.stop()
        until(lambda: relayed(store), lambda still: not still)
        release(plain)
        thread.join(AMPLE_S)
        assert results == [returns]


def test_an_idle_client_keeps_its_lease_and_its_session(server: rallypoint.Server, relay: CuttingProxy) -> None:
    with direct(server.port) as plain, rallypoint.connect(server.url, AMPLE_S) as store:
        store.lease("mine", "v")
        own = session(store)
        relay.stop()
        until(lambda: relayed(store), lambda still: not still)
        assert plain.get("mine") == b"v" and session(store) == own
        assert [one["here"] for one in server.statistics()["sessions"] if one["leases"] == ["/mine"]] == [True]


def test_after_a_cut_the_client_reconnects_to_the_relay(server: rallypoint.Server, relay: CuttingProxy) -> None:
    with rallypoint.connect(server.url, AMPLE_S) as store:
        for number in range(1, 4):
            relay.cut_all()
            assert store.add("n", 1) == number
        assert relayed(store) and relay.connections == 4


def test_another_store_that_takes_the_relays_port_ends_no_session(
    server: rallypoint.Server, relay: CuttingProxy
) -> None:
    with rallypoint.Server() as other, rallypoint.connect(server.url, AMPLE_S) as store:
        store.lease("mine", "v")
        relay.redirect(other.port)
        assert store.get("mine") == b"v" and not relayed(store)


def test_a_fork_begins_at_the_relay_again(server: rallypoint.Server, relay: CuttingProxy) -> None:
    with rallypoint.connect(server.url, AMPLE_S) as store:
        relay.cut_all()
        relay.refusing = True
        store.set("k", "v")
        assert not relayed(store)
        relay.refusing = False
        before = relay.connections
        child = os.fork()
        if not child:
            os._exit(0 if store.get("k") == b"v" and relayed(store) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert relay.connections == before + 1 and not relayed(store)


OWNER = """
import json, sys, rallypoint
with rallypoint.Relay(sys.argv[1], unix=(sys.argv[2:] or [None])[0]) as relay:
    print(json.dumps(relay.environ))
    print(relay.pid, flush=True)
    sys.stdin.read()
"""

WORK = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], 60)
store.lease("mine", "v")
print(store._backend._session._connection.core.session.hex(), flush=True)
for line in sys.stdin:
    print(store.add("n", 1), store._backend._route.relayed, flush=True)
print(store._backend._session._connection.core.session.hex(), flush=True)
"""


@pytest.mark.parametrize("unix", [False, True])
def test_the_session_continues_directly_when_a_real_relay_is_killed(unix: bool, tmp_path: Path) -> None:
    """It is not replaced, because its supervisor is killed with it: the worker's session continues directly."""
    path = [tmp_path / "relay"] if unix else []
    with rallypoint.Server(grace=AMPLE_S) as server, script(OWNER, server.url, *path) as owner:
        environ = json.loads(read_line(owner))
        relay = int(read_line(owner))
        with script(WORK, server.url, env={**os.environ, **environ}) as worker:
            assert worker.stdin
            own = read_line(worker)
            worker.stdin.write(b"\n")
            assert read_line(worker) == "1 True"
            for pid in (owner.pid, relay):
                os.kill(pid, signal.SIGKILL)
            for number in (2, 3):
                worker.stdin.write(b"\n")
                assert read_line(worker) == f"{number} False"
            worker.stdin.close()
            assert read_line(worker) == own
            worker.stdin = None


# A relay that is stopped


@pytest.fixture
def stopped(server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """A function that stops a real relay, which clients soon notice; at the end it continues."""
    with rallypoint.Relay(server.url) as relay:
        monkeypatch.setenv(VARIABLE, relay.environ[VARIABLE])
        until(relay.statistics, lambda facts: bool(facts["upstream_connected"]))

        def stop() -> int:
            os.kill(relay.pid, signal.SIGSTOP)
            monkeypatch.setattr(hang_check, "RELAY_SILENCE_S", 0.1)
            monkeypatch.setattr(hang_check, "RELAY_PROBE_S", 0.5)
            return relay.pid

        try:
            yield stop
        finally:
            os.kill(relay.pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["idle", "blocked", "asking"])
def test_the_session_moves_away_from_a_stopped_relay(
    how: str, server: rallypoint.Server, stopped: Callable[[], int]
) -> None:
    with direct(server.port) as plain, rallypoint.connect(server.url, AMPLE_S) as store:
        store.lease("mine", "v")
        own = session(store)
        waited: list[bytes] = []
        waits = threading.Thread(target=lambda: waited.append(store.get("late")))
        if how == "blocked":
            waits.start()
            await_waiting(server, 1)
        stopped()
        if how == "asking":
            assert store.add("n", 1) == 1
        until(lambda: relayed(store), lambda still: not still)
        plain.set("late", "v")
        if how == "blocked":
            waits.join(AMPLE_S)
            assert waited == [b"v"]
        assert store.add("n", 1) == 1 + (how == "asking") and plain.get("mine") == b"v" and session(store) == own


def test_requests_that_a_stopped_relay_forwards_later_are_not_executed_twice(
    server: rallypoint.Server, stopped: Callable[[], int]
) -> None:
    with direct(server.port) as plain, rallypoint.connect(server.url, AMPLE_S) as store:
        relay = stopped()
        assert [store.add("n", 1) for _ in range(3)] == [1, 2, 3]
        os.kill(relay, signal.SIGCONT)
        # Through the relay, behind the requests that it forwards now.
        with rallypoint.connect(server.url, AMPLE_S) as later:
            assert relayed(later) and later.add("n", 1) == 4
        assert plain.add("n", 0) == 4 and store.add("n", 1) == 5


def test_a_relay_without_its_server_keeps_its_clients(
    server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its server is down or slow, the relay itself answers probes."""
    probed = threading.Semaphore(0)
    probe = dial.serves

    def serves(*where: Any) -> bool:
        answered = probe(*where)
        assert answered
        probed.release()
        return answered

    monkeypatch.setattr(hang_check, "RELAY_SILENCE_S", 0.0)
    monkeypatch.setattr(hang_check, "RELAY_PROBE_S", AMPLE_S)
    monkeypatch.setattr(hang_check, "serves", serves)
    with rallypoint.Relay(server.url) as relay:
        monkeypatch.setenv(VARIABLE, relay.environ[VARIABLE])
        with rallypoint.connect(server.url, AMPLE_S) as store:
            os.kill(server.pid, signal.SIGSTOP)
            try:
                for _ in range(3):
                    assert probed.acquire(timeout=AMPLE_S)
                assert relayed(store)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert store.add("n", 1) == 1 and relayed(store)


# asyncio


def test_asyncio_sessions_move_away_from_a_stopped_relay(
    server: rallypoint.Server, stopped: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_check, "RELAY_SILENCE_S", 0.1)
    monkeypatch.setattr(hang_check, "RELAY_PROBE_S", AMPLE_S)

    async def main() -> None:
        async with await aio.connect(server.url, AMPLE_S) as store:
            own = store._session._core.session
            assert store._session._route.relayed
            await store.lease("mine", "v")
            waits = asyncio.ensure_future(store.get("late"))
            await asyncio.get_running_loop().run_in_executor(None, await_waiting, server, 1)
            stopped()
            assert await store.add("n", 1) == 1
            await store.set("late", "v")
            assert await waits == b"v" and await store.get("mine") == b"v"
            assert not store._session._route.relayed and store._session._core.session == own

    asyncio.run(main())


def test_asyncio_sessions_begin_at_the_relay_and_continue_directly(
    server: rallypoint.Server, relay: CuttingProxy
) -> None:
    async def main() -> None:
        async with await aio.connect(server.url, AMPLE_S) as store:
            own = store._session._core.session
            assert store._session._route.relayed and relay.connections == 1
            await store.lease("mine", "v")
            waits = asyncio.ensure_future(store.get("late"))
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, await_waiting, server, 1)
            relay.stop()
            await store.set("late", "v")
            assert await waits == b"v" and await store.get("mine") == b"v"
            assert not store._session._route.relayed and store._session._core.session == own
            async with await aio.connect(server.url, AMPLE_S) as another:
                assert await another.get("late") == b"v" and not another._session._route.relayed

    asyncio.run(main())


@pytest.mark.parametrize("says", [ACCEPTED, PREFACE[-len(ACCEPTED) :], b"HTTP"])
def test_asyncio_clients_skip_a_port_that_is_no_relay(
    says: bytes, server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "RELAY_S", 0.2)

    async def main() -> None:
        async with await aio.connect(server.url, AMPLE_S) as store:
            assert not store._session._route.relayed and await store.add("n", 1)

    with Impostor(says) as other:
        name(monkeypatch, other.port, server.port)
        asyncio.run(main())
        assert other.calls


def test_asyncio_clients_recognize_another_store_by_its_identity(
    server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(identity: bytes) -> None:
        with rallypoint.Server() as other:
            name(monkeypatch, other.port, server.port, identity)
            async with await aio.connect(server.url, AMPLE_S) as store:
                assert not store._session._route.relayed
                assert store._session._core.server == identity

    with direct(server.port) as plain:
        asyncio.run(main(plain._backend.server_id))  # type: ignore[attr-defined]


def test_asyncio_clients_by_a_unix_socket(
    server: rallypoint.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with await aio.connect(server.url, AMPLE_S) as store:
            assert store._session._route.relayed and await store.add("unix", 1) == 1

    with rallypoint.Relay(server.url, host=None, unix=tmp_path / "a relay") as relay:
        monkeypatch.setenv(VARIABLE, relay.environ[VARIABLE])
        assert relay.environ[VARIABLE].startswith(f"unix://{tmp_path}/a%20relay?upstream=")
        until(relay.statistics, lambda facts: bool(facts["upstream_connected"]))
        asyncio.run(main())


# The variable


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("tcp://127.0.0.1:4711", "the store of the relay is missing: add ?upstream=host:port"),
        ("tcp://127.0.0.1:4711?upstream=", "the store of the relay is missing"),
        ("127.0.0.1:4711?upstream=h:1", "a relay's address is tcp://host:port or unix:///path"),
        ("http://h:1?upstream=h:1", "a relay's address is tcp://host:port or unix:///path"),
        ("unix://relative?upstream=h:1", "a relay's address is tcp://host:port or unix:///path"),
        ("tcp://?upstream=h:1", "a relay's address is tcp://host:port or unix:///path"),
        ("tcp://127.0.0.1?upstream=h:1", "the relay's port is missing"),
        ("tcp://127.0.0.1:0?upstream=h:1", "the relay's port is missing"),
        ("tcp://127.0.0.1:99999?upstream=h:1", "'127.0.0.1:99999' does not end with a port number"),
        ("tcp://127.0.0.1:1?upstream=h:x", "'h:x' does not end with a port number"),
        ("tcp://127.0.0.1:1?upstream=h:1&downstream=h:2", "unknown option 'downstream'"),
        ("tcp://127.0.0.1:1?upstream=h:1&identity=xyz", "non-hexadecimal number"),
        ("tcp://127.0.0.1:1?upstream=etcd://h:1/x&servers=h:2", "servers need a store in etcd and its identity"),
        ("tcp://127.0.0.1:1?upstream=h:1&identity=ab&servers=h:2", "servers need a store in etcd"),
        ("tcp://127.0.0.1:1?upstream", "bad query field: 'upstream'"),
        ("unix:///" + "x" * 200 + "?upstream=h:1", "has 201 bytes; the limit for a Unix socket is 107"),
    ],
)
def test_an_invalid_variable_is_an_error_that_quotes_it(value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    for call in (
        lambda: rallypoint.connect("tcp://127.0.0.1:1", 0.1),
        lambda: rallypoint.TCPStore("127.0.0.1", 1, timeout=0.1),
        lambda: asyncio.run(aio.connect("tcp://127.0.0.1:1", 0.1)),
    ):
        with pytest.raises(ValueError, match=VARIABLE) as caught:
            call()
        assert str(caught.value).startswith(f"{VARIABLE}={value!r}: ") and says in str(caught.value)
    command = [sys.executable, "-m", "rallypoint", "get", "k", "--store", "tcp://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S)
    assert done.returncode == 2 and VARIABLE in done.stderr and "Traceback" not in done.stderr


def test_an_empty_variable_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = net.Endpoints([net.Endpoint("h", 1)])
    for value in ("", "  "):
        monkeypatch.setenv(VARIABLE, value)
        assert relay_address.relay_for(endpoints) is None


@pytest.mark.parametrize("identity", [b"", b"\x00\xff" * 8])
@pytest.mark.parametrize("place", ["tcp://[::1]:4711", "tcp://h:1", "unix:///run/a b?c#d%/ü"])
def test_the_variable_that_a_relay_prints_is_parsed(
    place: str, identity: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = net.parse_endpoints("Head.example.:29400,[fe80::1]:5", 0)
    relay = RelayAddress(place, endpoints, identity)
    monkeypatch.setenv(VARIABLE, relay.variable)
    assert relay_address.relay_for(net.parse_endpoints("other:1,head.EXAMPLE:29400", 0)) == relay
    assert relay_address.relay_for(net.parse_endpoints("head.example:29401", 0)) is None
