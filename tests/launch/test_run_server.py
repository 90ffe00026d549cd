"""The server of a run: found where it runs, started by one of those who could, and by nobody else."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from tests.launch.runs import OPEN_CLIENT
from tests.pages import pid_at
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, read_line, release, script, until, wait_for_end

import rallypoint
from rallypoint import AddressTaken, ConnectFailed, net
from rallypoint.deadline import Deadline
from rallypoint.launch import node_run
from rallypoint.launch.events import Events
from rallypoint.launch.job import Job, WorkerCommand
from rallypoint.launch.stores import run_server, store_provider
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.server.event_loop import published
from rallypoint.server.settings import Settings
from rallypoint.store import master

FIND = """
import sys
from rallypoint import net
from rallypoint.launch.stores import run_server
from rallypoint.security.client_security import ClientSecurity
print("up", flush=True)
sys.stdin.readline()
store = run_server.find_or_start(net.Endpoint("localhost", int(sys.argv[1])), None, 60, ClientSecurity())
print(store.add("came", 1), flush=True)
sys.stdin.readline()
"""


def about(endpoint: net.Endpoint) -> int:
    """Return the pid of the server at an endpoint."""
    return pid_at(str(endpoint))


@contextmanager
def found(
    host: str, port: int = 0, is_host: bool | None = None, reach: str = ""
) -> Iterator[tuple[rallypoint.TCPStore, int]]:
    """Find or start a server; yield the store and the server's pid, and end both."""
    store = run_server.find_or_start(net.Endpoint(host, port), is_host, AMPLE_S, OPEN_CLIENT)
    pid = about(net.Endpoint(reach or host, store.port))
    try:
        yield store, pid
    finally:
        store.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        wait_for_end(pid)


def listens_at(port: int) -> set[str]:
    """Return the addresses at which somebody listens on a port, from the kernel's tables."""
    places = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/net/{table}") as rows:
            for row in [line.split() for line in rows.readlines()[1:]]:
                address, _, number = row[1].partition(":")
                if row[3] == "0A" and int(number, 16) == port:
                    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                    places.add(socket.inet_ntop(family, b"".join(words)))
    return places


# Who starts it


def test_of_two_processes_at_once_one_starts_it_and_both_connect() -> None:
    port = reserve_port()
    with script(FIND, port) as one, script(FIND, port) as two:
        release(one, two)
        assert sorted(read_line(child) for child in (one, two)) == ["1", "2"]
        pid = about(net.Endpoint("localhost", port))
        for child in (one, two):
            child.send_signal(signal.SIGKILL)
            child.wait(AMPLE_S)
        with rallypoint.TCPStore("localhost", port, timeout=AMPLE_S) as store:
            assert store.get("came") == b"2", "it outlives both"
            os.kill(pid, signal.SIGTERM)
    wait_for_end(pid)


def test_one_that_runs_is_used() -> None:
    with rallypoint.Server() as server:
        for is_host in (None, True, False):
            store = run_server.find_or_start(net.Endpoint("127.0.0.1", server.port), is_host, AMPLE_S, OPEN_CLIENT)
            assert about(net.Endpoint("127.0.0.1", store.port)) == server.pid
            assert store.timeout.total_seconds() == AMPLE_S
            store.close()


def test_who_is_not_the_host_waits_for_who_is() -> None:
    with ExitStack() as stack:
        port = reserve_port()
        stores: list[rallypoint.TCPStore] = []
        endpoint = net.Endpoint("127.0.0.1", port)
        thread = threading.Thread(
            target=lambda: stores.append(run_server.find_or_start(endpoint, False, AMPLE_S, OPEN_CLIENT))
        )
        thread.start()
        _, pid = stack.enter_context(found("127.0.0.1", port))
        thread.join(AMPLE_S)
        assert about(endpoint) == pid and stores[0].add("came", 1) == 1
        stores[0].close()


def test_one_that_ends_just_then_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_server, "ATTEMPT_S", 1.0)
    serve, calls = master.serve, []

    def found_as_it_ends(*arguments: object) -> rallypoint.Server | None:
        calls.append(arguments)
        return None if len(calls) == 1 else serve(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(master, "serve", found_as_it_ends)
    with found("127.0.0.1", reserve_port()) as (store, _):
        assert len(calls) > 1 and store.add("came", 1) == 1


def test_nobody_answers() -> None:
    port = reserve_port()
    with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}.*nothing listens there"):
        run_server.find_or_start(net.Endpoint("127.0.0.1", port), False, 0.1, OPEN_CLIENT)


# Something else has the port


def test_a_port_that_something_else_has_is_said_to_be_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = net.Endpoint("127.0.0.1", other.getsockname()[1])
        thread = threading.Thread(target=hang_up, args=(other,), daemon=True)
        thread.start()
        with pytest.raises(AddressTaken, match=f"{endpoint}.*in use, by a process that closed the connection"):
            run_server.find_or_start(endpoint, None, AMPLE_S, OPEN_CLIENT)


def hang_up(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


@pytest.mark.needs("torch")
def test_a_server_of_pytorch_is_recognized() -> None:
    code = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
    with script(code) as child:
        endpoint = net.Endpoint("127.0.0.1", int(read_line(child)))
        with pytest.raises(AddressTaken, match="in use, by a PyTorch server"):
            run_server.find_or_start(endpoint, None, AMPLE_S, OPEN_CLIENT)
        with pytest.raises(ConnectFailed, match="a PyTorch server answers there; a rallypoint server is needed"):
            run_server.find_or_start(endpoint, False, AMPLE_S, OPEN_CLIENT)


# Where it listens


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5"])
def test_a_loopback_endpoint_does_not_listen_everywhere(host: str) -> None:
    with found(host) as (store, _):
        places = listens_at(store.port)
        assert places and all(net.is_loopback(place) for place in places), places


def test_an_ipv6_literal() -> None:
    with found("::1") as (store, _):
        assert listens_at(store.port) == {"::1"}
        assert store.add("k", 1) == 1


def named(monkeypatch: pytest.MonkeyPatch, name: str, address: str) -> None:
    """Let a name stand for an address, in this process."""
    ask = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: ask(told(host), *rest, **more))

    def told(host: bytes | str | None) -> bytes | str | None:
        return address if host == name else host


def test_a_name_of_this_machine_that_is_a_loopback_address_here_listens_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As Debian has it in /etc/hosts: on other machines the name stands for another address.
    named(monkeypatch, "node-7", "127.0.1.1")
    with found("node-7", reach="127.0.1.1") as (store, _):
        assert listens_at(store.port) == {"0.0.0.0"}


def test_the_designated_host_of_a_foreign_address_listens_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that a cluster forwards, which no machine can bind.
    monkeypatch.setattr(net, "is_this_host", lambda host: False)
    named(monkeypatch, "service", "127.0.0.1")
    with found("service", is_host=True, reach="127.0.0.1") as (store, _):
        assert listens_at(store.port) == {"0.0.0.0"}


# Its end


def test_it_ends_when_everybody_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_server, "OUTLIVE_S", 0.0)
    store = run_server.find_or_start(net.Endpoint("127.0.0.1", 0), None, AMPLE_S, OPEN_CLIENT)
    pid = about(net.Endpoint("127.0.0.1", store.port))
    store.close()
    wait_for_end(pid)


def test_one_with_a_data_directory_is_started_again_by_nobody_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_server, "OUTLIVE_S", 1.0)
    store = run_server.find_or_start(net.Endpoint("127.0.0.1", 0), None, AMPLE_S, OPEN_CLIENT, data_dir=str(tmp_path))
    endpoint = net.Endpoint("127.0.0.1", store.port)
    pid = about(endpoint)
    os.kill(pid, signal.SIGKILL)
    again = until(lambda: about(endpoint), lambda found: found != pid)
    store.close()
    wait_for_end(again)


@pytest.mark.parametrize("data_dir", [None, "/some/where"])
def test_the_server_of_a_single_node_gets_a_token_and_its_data_directory(
    data_dir: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartRefused(Exception):
        pass

    def start(fd: int, **options: object) -> None:
        os.close(fd)
        raise StartRefused(options)

    monkeypatch.setattr(store_provider, "Server", start)
    job = Job(command=WorkerCommand("command", "true", ()), data_dir=data_dir)
    with pytest.raises(StartRefused) as caught:
        node_run.NodeRun(job, Events("", True, False), WakeupPipe()).attach(Deadline(AMPLE_S))
    (options,) = caught.value.args
    assert options.pop("credentials").token and options == {"data_dir": data_dir}


def test_a_server_does_not_mind_that_whoever_started_it_was_killed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with published(Settings(ready_fd=writer), "tcp://localhost:1"), pytest.raises(OSError, match="Bad file"):
        os.fstat(writer)
