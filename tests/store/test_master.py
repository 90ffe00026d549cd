"""A master whose port is taken: it shares a server of ours where it may, and else says who has the port."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.wire import AMPLE_S, read_line, script, until, wait_for_end
from tests.wire import http as ask_http

import rallypoint
from rallypoint import AddressTaken, TCPStore, net
from rallypoint.deadline import Deadline
from rallypoint.store import master

HOST = "127.0.0.1"

TORCHS = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
print(store.port, flush=True)
sys.stdin.read()
"""

MASTER = """
import sys
from rallypoint import TCPStore
print("up", flush=True)
sys.stdin.readline()
with TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, multi_tenant=True, timeout=60) as store:
    print("hosts" if store._server else "shares", store.port, flush=True)
    store.barrier("both are here", 2)
    print(store.add("n", 1), flush=True)
    store.barrier("both are done", 2)
    store.queue_push("left", "") if store._server is None else store.queue_pop("left")
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let who answers take its time, on any machine; tests of those who do not may set a shorter one."""
    monkeypatch.setattr(master, "PROBE_S", AMPLE_S)
    return lambda probe_s: monkeypatch.setattr(master, "PROBE_S", probe_s)


def opened(port: int, multi_tenant: bool = False, timeout: float = AMPLE_S) -> TCPStore:
    return TCPStore(HOST, port, is_master=True, multi_tenant=multi_tenant, timeout=timeout)


def refused(port: int, multi_tenant: bool = False, timeout: float = AMPLE_S) -> AddressTaken:
    with pytest.raises(AddressTaken, match=f"{HOST}:{port}") as caught:
        opened(port, multi_tenant, timeout)
    assert "in use" in str(caught.value)
    return caught.value


# Ours


@pytest.fixture(scope="module")
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server() as server:
        yield server


def test_a_server_of_ours_is_named_with_its_pid(server: rallypoint.Server) -> None:
    error = refused(server.port)
    assert (error.ours, error.pid) == (True, server.pid)
    assert f"by a rallypoint server {rallypoint.__version__} (pid {server.pid}). Share" in str(error)


def test_a_server_of_another_process_is_shared(server: rallypoint.Server) -> None:
    with opened(server.port, multi_tenant=True) as one, opened(server.port, multi_tenant=True) as two:
        one.set("k", "v")
        assert two.get("k") == b"v" == rallypoint.connect(server.url).get("k")
        assert one.port == server.port
    assert server.running(), "it is not ours to end"


def test_the_master_that_shares_counts_clients_as_any(server: rallypoint.Server) -> None:
    with pytest.raises(rallypoint.WorkersMissing):
        TCPStore(HOST, server.port, 3, True, timeout=0.1, multi_tenant=True)


def test_the_masters_of_one_process_share_as_before() -> None:
    with opened(0, multi_tenant=True) as one:
        with opened(one.port, multi_tenant=True) as two:
            assert one._server is two._server is not None
            two.set("k", "v")
        assert one.get("k") == b"v"


def test_two_masters_that_start_at_the_same_moment_share_one_server() -> None:
    port = net.free_port(HOST)
    with script(MASTER, port) as one, script(MASTER, port) as two:
        for child in (one, two):
            assert read_line(child) == "up"
        for child in (one, two):
            assert child.stdin is not None
            child.stdin.write(b"go\n")
        assert sorted(read_line(child) for child in (one, two)) == [f"hosts {port}", f"shares {port}"]
        assert sorted(read_line(child) for child in (one, two)) == ["1", "2"]
        assert [child.wait(AMPLE_S) for child in (one, two)] == [0, 0]


def test_a_server_that_has_just_begun_to_listen_is_waited_for() -> None:
    # The kernel takes callers before the child is up; so it looks when two masters start at once.
    with ExitStack() as stack:
        (listener,) = net.listen([HOST], 0)
        port = listener.getsockname()[1]
        found: list[TCPStore] = []
        thread = threading.Thread(target=lambda: found.append(opened(port, multi_tenant=True)))
        thread.start()
        until(lambda: callers(port), lambda count: count >= 2)  # it has greeted, and then asked in HTTP too
        stack.enter_context(rallypoint.Server(fd=listener.detach()))
        thread.join(AMPLE_S)
        with found[0] as store:
            assert store._server is None
            store.set("k", "v")


def callers(port: int) -> int:
    """How many connections to a port stand, from the kernel's table: those to a listener that accepts none too."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_server_that_is_going_is_replaced() -> None:
    # What its end looks like from outside: it hangs up, and then the port is free.
    with listening(listener_gone) as port, opened(port, multi_tenant=True) as store:
        assert store._server is not None and store.port == port


def listener_gone(peer: socket.socket) -> bool:
    peer.close()
    return False


# Others


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Be a server that does this with each caller, until that returns False."""
    (listener,) = net.listen([HOST], 0)
    port = listener.getsockname()[1]
    kept: list[socket.socket] = []

    def accept() -> None:
        with listener:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                kept.append(peer)
                if answer(peer) is False:
                    return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        try:
            listener.shutdown(socket.SHUT_RDWR)  # wakes it
        except OSError:
            pass  # it had closed it
        thread.join(AMPLE_S)
        for peer in kept:
            peer.close()


both = pytest.mark.parametrize("multi_tenant", [False, True])


@both
@pytest.mark.needs("torch")
@pytest.mark.parametrize("backend", ["libuv", "older"])
def test_a_pytorch_server_is_named_and_not_shared(backend: str, multi_tenant: bool) -> None:
    with script(TORCHS, backend) as child:
        error = refused(int(read_line(child)), multi_tenant)
        assert error.ours is False and error.pid is None
        assert "not by one of ours: a PyTorch server answers there" in str(error)


@both
def test_a_web_server_is_not_one_of_ours(multi_tenant: bool) -> None:
    class Web(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((HOST, 0), Web) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            error = refused(web.server_port, multi_tenant)
        finally:
            web.shutdown()
            thread.join()
    assert error.ours is False and "not by one of ours: it answered HTTP with b'HTTP'" in str(error)


@both
def test_a_stranger_that_answers_is_not_one_of_ours(multi_tenant: bool) -> None:
    with listening(lambda peer: peer.sendall(b"SSH-2.0-x\r\n")) as port:
        error = refused(port, multi_tenant)
        assert error.ours is False and "it answered a greeting with b'SSH-'" in str(error)


@both
def test_who_never_answers_is_not_guessed_at(multi_tenant: bool, patience: Callable[[float], None]) -> None:
    patience(0.6)
    with listening(lambda peer: None) as port:
        error = refused(port, multi_tenant, timeout=0.5)
        within = "0.5 s" if multi_tenant else "0.6 s"
        assert error.ours is None and f"did not answer a greeting within {within}: it is not one of ours" in str(error)


def test_a_server_of_ours_that_is_stopped_is_not_guessed_at(patience: Callable[[float], None]) -> None:
    patience(0.5)
    with rallypoint.Server() as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            error = refused(server.port)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert error.ours is None and "or is stopped" in str(error)


@both
def test_who_hangs_up_is_not_guessed_at(multi_tenant: bool, patience: Callable[[float], None]) -> None:
    patience(0.5)
    with listening(socket.socket.close) as port:
        error = refused(port, multi_tenant)
        assert error.ours is None and "hung up on a greeting" in str(error)


@both
def test_a_bound_port_without_a_listener_is_not_guessed_at(
    multi_tenant: bool, patience: Callable[[float], None]
) -> None:
    patience(0.5)
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        error = refused(sock.getsockname()[1], multi_tenant)
        assert error.ours is None and "who has it could not be asked" in str(error) and "refused" in str(error)


def test_an_address_of_another_machine_is_nobody_to_ask() -> None:
    with pytest.raises(AddressTaken, match="not an address of this machine") as caught:
        TCPStore("203.0.113.7", 29501, is_master=True, multi_tenant=True, timeout=AMPLE_S)
    assert caught.value.ours is None


# What is asked


def test_about(server: rallypoint.Server) -> None:
    answer = ask_http((HOST, server.port), b"GET /about HTTP/1.0\r\n\r\n")
    facts = {"server": "rallypoint", "version": rallypoint.__version__, "pid": server.pid}
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == facts
    assert facts.items() <= server.statistics().items()


def test_an_answer_in_pieces_is_put_together(patience: Callable[[float], None]) -> None:
    patience(0.2)

    def drip(peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"RLY1":
            peer.sendall(bytes((byte,)))

    with listening(drip) as port:
        holder = master.ask_who(net.Endpoint(HOST, port), Deadline(AMPLE_S))
    assert holder.ours and holder.pid is None and "did not tell its pid" in holder.words


def test_a_killed_host_leaves_the_port_to_the_next_master() -> None:
    with rallypoint.Server() as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for_end(server.pid)
        with opened(server.port, multi_tenant=True) as store:
            assert store._server is not None
