"""create_c10d_store: ports, waiting for all members, errors that name the missing ones. Runs without torch."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from urllib.request import urlopen

import pytest
from tests.served import server_fixture

import rallypoint
from rallypoint import compat, net
from rallypoint.compat import distributed
from rallypoint.compat.distributed import create_c10d_store, get_free_port, get_socket_with_port
from rallypoint.deadline import Deadline
from rallypoint.store.tcp import TCPStore

HOST = "127.0.0.1"
AMPLE_S = 60.0
COUNT = "_tcp_store/num_members/num_members"
ME = f"{socket.gethostname()}:{os.getpid()}"

MEMBER = """
import os, sys
from rallypoint.compat.distributed import create_c10d_store
from rallypoint.errors import RallypointError
from rallypoint.store.tcp import TCPStore
port, world_size, timeout, together = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
TCPStore("127.0.0.1", port).barrier("ready", together)
try:
    store = create_c10d_store(False, "127.0.0.1", port, world_size, timeout)
    print(("met", store.add("after", 1)))
except RallypointError as error:
    print((type(error).__name__, vars(error), str(error), os.getpid()))
except KeyboardInterrupt:
    print(("interrupted",))
"""

Start = Callable[..., "subprocess.Popen[str]"]


server = server_fixture()


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def start(server: rallypoint.Server) -> Iterator[Start]:
    """Return a function that starts a member in a process of its own."""
    with ExitStack() as stack:

        def member(
            world_size: int, timeout: float = AMPLE_S, together: int = 1, rank: int | None = None
        ) -> subprocess.Popen[str]:
            env = os.environ | ({} if rank is None else {"RANK": str(rank)})
            arguments = map(str, (server.port, world_size, timeout, together))
            command = [sys.executable, "-c", MEMBER, *arguments]
            process = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield member


def outcome_of(member: subprocess.Popen[str]) -> Any:
    """Wait for the member to exit and return the tuple that it printed."""
    out, _ = member.communicate(timeout=AMPLE_S)
    return ast.literal_eval(out)


def until_waiting(server: rallypoint.Server, clients: int) -> None:
    """Wait until that many clients wait at the server, by its statistics."""
    deadline = Deadline(AMPLE_S)
    while not deadline.expired():
        with urlopen(f"http://{HOST}:{server.port}/statistics") as page:
            if json.load(page)["waiting"] == clients:
                return
    pytest.fail(f"never {clients} clients waiting in the server")


# One member


def test_a_server_without_workers_gets_a_free_port() -> None:
    store = create_c10d_store(is_server=True, server_addr=HOST)
    try:
        assert isinstance(store, TCPStore) and store.port > 0
        assert store.timeout == timedelta(seconds=600)
        other = create_c10d_store(False, HOST, store.port, timeout=AMPLE_S)
        other.set("k", "v")
        assert store.get("k") == b"v"
    finally:
        store.close()


def test_port_0_is_refused_when_others_must_know_the_port() -> None:
    with pytest.raises(ValueError, match="2 members must be told"):
        create_c10d_store(True, HOST, world_size=2)
    with pytest.raises(ValueError, match="a client must be told"):
        create_c10d_store(False, HOST)


@pytest.mark.parametrize(("retries", "failures"), [(3, 2), (3, 3), (1, 1), (0, 1)])
def test_a_free_port_taken_meanwhile_is_retried(monkeypatch: pytest.MonkeyPatch, retries: int, failures: int) -> None:
    ports: list[int] = []

    def taken_at_first(host: str, port: int, *rest: Any) -> TCPStore:
        ports.append(port)
        if len(ports) <= failures:
            raise rallypoint.AddressTaken(address=f"{host}:{port}", why="the port is in use")
        return TCPStore(host, port, *rest)

    monkeypatch.setattr(distributed, "TCPStore", taken_at_first)
    if failures < retries:
        create_c10d_store(True, HOST, retries=retries).close()
        assert ports == [0] * (failures + 1)
    else:
        with pytest.raises(rallypoint.AddressTaken):
            create_c10d_store(True, HOST, retries=retries)
        assert ports == [0] * max(1, retries)


def test_a_taken_fixed_port_is_not_retried(server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def counted(*arguments: Any) -> TCPStore:
        tries.append(1)
        return TCPStore(*arguments)

    monkeypatch.setattr(distributed, "TCPStore", counted)
    with pytest.raises(rallypoint.AddressTaken, match=f"{HOST}:{server.port}"):
        create_c10d_store(True, HOST, server.port)
    assert len(tries) == 1


def test_a_timeout_without_a_server_names_the_address() -> None:
    with net.bound_socket(HOST) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(rallypoint.ConnectFailed, match=f"{HOST}:{port}") as caught:
        create_c10d_store(False, HOST, port, timeout=0.2)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, compat.DistNetworkError)


def test_use_libuv_is_accepted_and_warned_about(server: rallypoint.Server) -> None:
    with pytest.warns(UserWarning, match="use_libuv") as caught:
        create_c10d_store(False, HOST, server.port, use_libuv=True)
    assert caught[0].filename == __file__


def test_members_are_not_counted_without_wait_for_workers(server: rallypoint.Server) -> None:
    store = create_c10d_store(False, HOST, server.port, 5, wait_for_workers=False)
    assert store.num_keys() == 0


# Several members


def test_the_last_member_releases_all(server: rallypoint.Server, start: Start) -> None:
    store = rallypoint.TCPStore(HOST, server.port)
    early = [start(4) for _ in range(3)]
    until_waiting(server, 3)
    assert not store.check(["after"]), "three of four is not enough"
    late = start(4)
    assert sorted(outcome_of(member) for member in (*early, late)) == [("met", n) for n in range(1, 5)]


def test_a_server_waits_for_its_workers() -> None:
    port = get_free_port()
    opened: list[TCPStore] = []
    opening = threading.Thread(target=lambda: opened.append(create_c10d_store(True, HOST, port, 2, AMPLE_S)))
    opening.start()
    client = create_c10d_store(False, HOST, port, 2, AMPLE_S)
    opening.join(AMPLE_S)
    (server,) = opened
    client.set("k", "v")
    assert server.get("k") == b"v"
    server.close()


def test_every_waiting_member_names_the_missing_ranks(server: rallypoint.Server, start: Start) -> None:
    outcomes = [outcome_of(member) for member in [start(4, 1, together=3, rank=rank) for rank in (0, 1, 3)]]
    for name, fields, sentence, _ in outcomes:
        assert name == "WorkersMissing"
        assert (fields["joined"], fields["world_size"], fields["missing"]) == (3, 4, ("rank 2",))
        assert "3 of 4 clients joined" in sentence and "missing: rank 2" in sentence and str(server.port) in sentence
        for rank, (*_, pid) in zip((0, 1, 3), outcomes, strict=True):
            here = f"rank {rank} ({socket.gethostname()}:{pid})"
            assert {here, f"{here} gave up"}.intersection(fields["members"])


def test_without_ranks_the_error_names_the_joined_and_counts_the_missing(server: rallypoint.Server) -> None:
    with pytest.raises(rallypoint.WorkersMissing, match="1 of 3 clients joined") as caught:
        create_c10d_store(False, HOST, server.port, 3, 0.1)
    error = caught.value
    assert (error.joined, error.members, error.missing, error.timeout_s) == (1, (ME,), (), 0.1)
    assert isinstance(error, TimeoutError) and isinstance(error, compat.DistStoreError)


def test_a_server_that_gives_up_frees_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    port = get_free_port()
    kept = []  # an error keeps the frames it came from, and with them the store
    for _ in range(2):
        with pytest.raises(
            rallypoint.WorkersMissing, match=r"1 of 2 .* missing: rank 1; connected: rank 0 \("
        ) as caught:
            create_c10d_store(True, HOST, port, 2, 0.1)
        kept.append(caught.value)


@pytest.mark.parametrize(
    ("who", "count", "expected"),
    [
        ("+0 a:1\n+2 b:2\n", 2, (2, ["rank 0 (a:1)", "rank 2 (b:2)"], ["rank 1", "rank 3"])),
        ("+0 a:1\n+ b:2\n", 2, (2, ["rank 0 (a:1)", "b:2"], [])),
        ("+0 a:1\n", 3, (3, ["rank 0 (a:1)", "2 unidentified (PyTorch's processes do not identify themselves)"], [])),
        ("+0 a:1\n+1 b:2\n-0 a:1\n", 1, (2, ["rank 0 (a:1) gave up", "rank 1 (b:2)"], ["rank 2", "rank 3"])),
        ("+0 a:1\n-0 a:1\n+0 a:1\n", 1, (1, ["rank 0 (a:1)"], ["rank 1", "rank 2", "rank 3"])),
        ("+0 a:1\n+0 a:2\n", 2, (2, ["rank 0 (a:1)", "rank 0 (a:2)"], [])),
        ("+9 a:1\n", 1, (1, ["rank 9 (a:1)"], [])),
        ("+1 a:1\n+2 b:2\n", 1, (2, ["rank 1 (a:1)", "rank 2 (b:2)"], ["rank 0", "rank 3"])),
        ("rubbish\n+1 a:1\n\ufffd", 1, (1, ["rank 1 (a:1)"], ["rank 0", "rank 2", "rank 3"])),
    ],
)
def test_roll_call_names_only_members_it_knows(
    who: str, count: int, expected: tuple[int, list[str], list[str]]
) -> None:
    assert distributed._roll_call(who, count, 4) == expected


def test_the_last_member_may_join_during_a_timeout(server: rallypoint.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last member joins after a wait has timed out, before the waiter has withdrawn its count."""
    last = rallypoint.TCPStore(HOST, server.port)

    def too_late(store: TCPStore, *_: Any) -> None:
        last.add(COUNT, 1)
        raise rallypoint.StoreTimeout(operation="wait", keys=["k"], missing=["k"], timeout_s=0.1, store=repr(store))

    monkeypatch.setattr(TCPStore, "wait", too_late)
    assert create_c10d_store(False, HOST, server.port, 2, AMPLE_S).get(COUNT) == b"2"
    assert last.check(["_tcp_store/num_members/last_member"]), "so that nobody else times out either"


def test_a_member_that_gave_up_is_not_counted_in_the_next_attempt(server: rallypoint.Server) -> None:
    for _ in range(3):
        with pytest.raises(rallypoint.WorkersMissing, match="1 of 2"):
            create_c10d_store(False, HOST, server.port, 2, 0.05)
    assert rallypoint.TCPStore(HOST, server.port).get(COUNT) == b"0"


def test_ctrl_c_withdraws_a_member(server: rallypoint.Server, start: Start) -> None:
    store = rallypoint.TCPStore(HOST, server.port)
    member = start(2)
    until_waiting(server, 1)
    member.send_signal(signal.SIGINT)
    assert outcome_of(member) == ("interrupted",)
    assert store.get(COUNT) == b"0"


# Ports, names


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("localhost", get_free_port())):
        pass


def test_a_listening_socket_can_be_passed_to_a_store() -> None:
    sock = get_socket_with_port()
    host, port = sock.getsockname()[:2]
    with socket.create_connection((host, port), AMPLE_S):
        pass
    with TCPStore(host, port, is_master=True, master_listen_fd=sock.detach()) as store:
        store.set("k", "v")
        assert rallypoint.TCPStore(host, port).get("k") == b"v"


def test_torchs_error_names_catch_ours() -> None:
    assert issubclass(compat.DistError, RuntimeError)
    of_processes = {"NotLaunched", "WorkerFailed", "LaunchTimeout", "LaunchFailed"}  # not of stores
    for name in sorted({*rallypoint.__all__} - of_processes):
        kind = getattr(rallypoint, name)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            continue
        if kind is not compat.DistError:
            assert issubclass(kind, (compat.DistStoreError, compat.DistNetworkError)), name
    assert issubclass(compat.QueueEmptyError, compat.DistStoreError)
    assert issubclass(rallypoint.StoreTimeout, compat.DistStoreError) and issubclass(
        rallypoint.StoreTimeout, TimeoutError
    )


def test_no_torch_is_imported() -> None:
    look = "import sys, rallypoint.compat.distributed; print('torch' in sys.modules, 'asyncio' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=AMPLE_S)
    assert run.stdout == "False False\n", run.stderr
