"""A master whose port is taken: it shares our server if that is allowed, and otherwise names the holder of the port."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import pytest
from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S, read_line, release, script, until, wait_for_end
from tests.raw_peer import http as ask_http
from tests.served import server_fixture

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
    """Give holders ample time to answer; tests of silent holders may set a shorter one."""
    monkeypatch.setattr(master, "PROBE_S", AMPLE_S)
    return lambda probe_s: monkeypatch.setattr(master, "PROBE_S", probe_s)


def opened(port: int, multi_tenant: bool = False, timeout: float = AMPLE_S) -> TCPStore:
    return TCPStore(HOST, port, is_master=True, multi_tenant=multi_tenant, timeout=timeout)


def refused(port: int, multi_tenant: bool = False, timeout: float = AMPLE_S) -> AddressTaken:
    with pytest.raises(AddressTaken, match=f"{HOST}:{port}") as caught:
        opened(port, multi_tenant, timeout)
    assert "in use" in str(caught.value)
    return caught.value


# Our servers


server = server_fixture("module")


def test_our_server_on_the_port_is_named_with_its_pid(server: rallypoint.Server) -> None:
    error = refused(server.port)
    assert (error.ours, error.pid) == (True, server.pid)
    assert f"by a rallypoint server {rallypoint.__version__} (pid {server.pid}). Share" in str(error)


def test_our_server_of_another_process_is_shared(server: rallypoint.Server) -> None:
    with opened(server.port, multi_tenant=True) as one, opened(server.port, multi_tenant=True) as two:
        one.set("k", "v")
        assert two.get("k") == b"v" == rallypoint.connect(server.url).get("k")
        assert one.port == server.port
    assert server.running(), "a shared server is not stopped"


def test_a_master_that_shares_waits_for_workers(server: rallypoint.Server) -> None:
    with pytest.raises(rallypoint.WorkersMissing):
        TCPStore(HOST, server.port, 3, True, timeout=0.1, multi_tenant=True)


def test_masters_of_one_process_share_a_server() -> None:
    with opened(0, multi_tenant=True) as one:
        with opened(one.port, multi_tenant=True) as two:
            assert one._server is two._server is not None
            two.set("k", "v")
        assert one.get("k") == b"v"


def test_two_masters_that_start_at_the_same_moment_share_one_server() -> None:
    port = reserve_port()
    with script(MASTER, port) as one, script(MASTER, port) as two:
        release(one, two)
        assert sorted(read_line(child) for child in (one, two)) == [f"hosts {port}", f"shares {port}"]
        assert sorted(read_line(child) for child in (one, two)) == ["1", "2"]
        assert [child.wait(AMPLE_S) for child in (one, two)] == [0, 0]


def test_a_server_that_is_still_starting_is_waited_for() -> None:
    # The kernel accepts connections before the child runs, as when two masters start at once.
    with ExitStack() as stack:
        (listener,) = net.listen([HOST], 0)
        port = listener.getsockname()[1]
        found: list[TCPStore] = []
        thread = threading.Thread(target=lambda: found.append(opened(port, multi_tenant=True)))
        thread.start()
        until(lambda: callers(port), lambda count: count >= 2)  # it has sent a greeting, and then HTTP
        stack.enter_context(rallypoint.Server(fd=listener.detach()))
        thread.join(AMPLE_S)
        with found[0] as store:
            assert store._server is None
            store.set("k", "v")


def callers(port: int) -> int:
    """Count the connections to a port in the kernel's table, including those that were not accepted."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_server_that_is_shutting_down_is_replaced() -> None:
    # Its end as seen from outside: it closes the connection, and then the port is free.
    with listening(listener_gone) as port, opened(port, multi_tenant=True) as store:
        assert store._server is not None and store.port == port


def listener_gone(peer: socket.socket) -> bool:
    peer.close()
    return False


# Other holders of the port


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Run a server that calls `answer` with each connection until that returns False."""
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
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass  # the thread has closed it
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
        assert "in use, by a PyTorch server." in str(error)


@both
def test_a_web_server_is_not_taken_for_ours(multi_tenant: bool) -> None:
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
    assert error.ours is False and "by another program, which replied b'HTTP' to HTTP" in str(error)


@both
def test_another_program_that_answers_is_not_taken_for_ours(multi_tenant: bool) -> None:
    with listening(lambda peer: peer.sendall(b"SSH-2.0-x\r\n")) as port:
        error = refused(port, multi_tenant)
        assert error.ours is False and "by another program, which replied b'SSH-' to a greeting" in str(error)


@both
def test_a_silent_holder_is_reported_as_unknown(multi_tenant: bool, patience: Callable[[float], None]) -> None:
    patience(0.6)
    with listening(lambda peer: None) as port:
        error = refused(port, multi_tenant, timeout=0.5)
        within = "0.5 s" if multi_tenant else "0.6 s"
        assert error.ours is None and f"did not reply to a greeting within {within}: another program" in str(error)


def test_a_stopped_server_of_ours_is_reported_as_unknown(patience: Callable[[float], None]) -> None:
    patience(0.5)
    with rallypoint.Server() as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            error = refused(server.port)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert error.ours is None and "or a server that is stopped" in str(error)


@contextmanager
def bound() -> Iterator[int]:
    """Bind a port, and do not listen there."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        yield sock.getsockname()[1]


@both
@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (partial(listening, socket.socket.close), ["closed the connection on a greeting"]),
        (bound, ["owner unknown", "refused"]),
    ],
    ids=["closes", "does not listen"],
)
def test_a_holder_that_does_not_speak_is_reported_as_unknown(
    holder: Callable[[], AbstractContextManager[int]],
    words: list[str],
    multi_tenant: bool,
    patience: Callable[[float], None],
) -> None:
    patience(0.5)
    with holder() as port:
        error = refused(port, multi_tenant)
        assert error.ours is None and all(word in str(error) for word in words)


def test_an_address_of_another_machine_is_not_probed() -> None:
    with pytest.raises(AddressTaken, match="not an address of this machine") as caught:
        TCPStore("203.0.113.7", 29501, is_master=True, multi_tenant=True, timeout=AMPLE_S)
    assert caught.value.ours is None


# Probing


def test_about_names_server_version_and_pid(server: rallypoint.Server) -> None:
    answer = ask_http((HOST, server.port), b"GET /about HTTP/1.0\r\n\r\n")
    facts = {"server": "rallypoint", "version": rallypoint.__version__, "pid": server.pid}
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == facts
    assert facts.items() <= server.statistics().items()


def test_an_answer_in_pieces_is_assembled(patience: Callable[[float], None]) -> None:
    patience(0.2)

    def drip(peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"RLY1":
            peer.sendall(bytes((byte,)))

    with listening(drip) as port:
        holder = master.identify_holder(net.Endpoint(HOST, port), Deadline(AMPLE_S))
    assert holder.ours and holder.pid is None and "did not report its pid" in holder.words


def test_a_killed_host_leaves_the_port_to_the_next_master() -> None:
    with rallypoint.Server() as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for_end(server.pid)
        with opened(server.port, multi_tenant=True) as store:
            assert store._server is not None
