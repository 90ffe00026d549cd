"""Clients killed by SIGKILL in mid-request: the server drops their waits, turns and arrivals, and half a request has no
effect. Other clients get the items and turns of the dead.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.faults.conftest import Start
from tests.raw_peer import MIB, WAITED, RawPeer, ServerProcess, read_line, script

from rallypoint.protocol.c10d import Opcode, encode

CLIENT = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sock.sendall(bytes.fromhex("00cef7853c0d07000000"))
sock.recv(4, socket.MSG_WAITALL)
for message in sys.argv[3:]:
    kind, _, rest = message.partition(":")
    if kind == "send":
        sock.sendall(bytes.fromhex(rest))
    elif kind == "read":
        assert len(sock.recv(int(rest), socket.MSG_WAITALL)) == int(rest)
    print(kind, flush=True)
sys.stdin.read()
"""

PING = encode(Opcode.PING, 7)
IN_LINE = encode(Opcode.WAIT, 1, b"/q")


def send(*messages: bytes) -> str:
    """Return the step that makes a client send these bytes."""
    return "send:" + b"".join(messages).hex()


@pytest.fixture
def server(start: Start) -> ServerProcess:
    return start()


@pytest.fixture
def survivor(server: ServerProcess) -> Iterator[RawPeer]:
    with server.peer() as peer:
        yield peer


@contextlib.contextmanager
def client(server: ServerProcess, *steps: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a client process up to and including these steps."""
    with script(CLIENT, *server.address, *steps) as child:
        for step in steps:
            assert read_line(child) == step.partition(":")[0]
        yield child


def kill(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_a_wait_is_forgotten(server: ServerProcess, survivor: RawPeer) -> None:
    keys = [b"/never/%d" % n for n in range(1000)]
    waits = [encode(Opcode.WAIT, 1, b"/never"), encode(Opcode.WAIT, len(keys), *keys), IN_LINE]
    for wait in waits:
        with client(server, send(wait, PING), "read:4") as child:
            assert server.statistics()["waiting"] == 1
            kill(child)
            facts = server.until(lambda facts: facts["waiting"] == 0)
            assert facts["bytes"] == 0
    survivor.set(b"/never", b"")
    survivor.push(b"/q", b"item")
    assert survivor.pop(b"/q") == b"item"


def test_an_arrival_is_taken_back(server: ServerProcess, survivor: RawPeer) -> None:
    arrive = encode(Opcode.BARRIER, b"/b", 3)
    with server.peer() as other, client(server, send(arrive, PING), "read:4") as child:
        other.send(arrive)
        other.ping()
        assert survivor.get(b"/b") == b"2"
        kill(child)
        server.until(lambda facts: facts["waiting"] == 1)
        assert survivor.get(b"/b") == b"1"
        survivor.send(arrive + PING)
        assert survivor.read(4) == b"\7\0\0\0", "a barrier of three released two members"
        with server.peer() as third:
            third.send(arrive)
            assert third.read(1) == other.read(1) == survivor.read(1) == WAITED


def test_a_turn_goes_to_the_next_in_line(server: ServerProcess, survivor: RawPeer) -> None:
    with client(server, send(IN_LINE, PING), "read:4") as first, server.peer() as second:
        second.send(IN_LINE + PING)
        assert second.read(4) == b"\7\0\0\0"
        survivor.push(b"/q", b"item")  # the first gets the turn, and is killed before it pops
        kill(first)
        assert second.read(1) == WAITED
        assert second.pop(b"/q") == b"item"
    assert server.until(lambda facts: facts["waiting"] == 0)["queues"] == 0


def test_a_turn_announced_to_a_killed_client_goes_to_the_next_in_line(server: ServerProcess, survivor: RawPeer) -> None:
    survivor.push(b"/q", b"item")
    with client(server, send(IN_LINE), "read:1") as first:
        survivor.send(IN_LINE)
        kill(first)
        assert survivor.read(1) == WAITED
        assert survivor.pop(b"/q") == b"item"


def test_an_unused_turn_is_taken_back_from_a_live_client(server: ServerProcess, survivor: RawPeer) -> None:
    survivor.push(b"/q", b"item")
    with client(server, send(IN_LINE), "read:1"):
        survivor.send(IN_LINE)
        assert survivor.read(1) == WAITED  # by the sweep, because the first client does nothing
        assert survivor.pop(b"/q") == b"item"


def test_half_a_message_never_happened(server: ServerProcess, survivor: RawPeer) -> None:
    message = encode(Opcode.MULTI_SET, 2, b"/a", b"v", b"/b", b"v" * 50_000)
    survivor.wait(b"/a")
    with client(server, send(message[:-1])) as child:
        kill(child)
        facts = server.until(lambda facts: facts["connections"] == 2)
    assert facts["keys"] == 0 and facts["waiting"] == 1
    with server.peer() as other:
        other.set(b"/a", b"")
    assert survivor.read(1) == WAITED


def test_replies_for_a_killed_client_are_dropped(server: ServerProcess, survivor: RawPeer) -> None:
    survivor.set(b"/large", b"v" * 8 * MIB)
    with client(server, send(encode(Opcode.GET, b"/large") * 50), "read:100") as child:
        kill(child)
        facts = server.until(lambda facts: facts["connections"] == 2)
    assert facts["bytes"] < 8 * MIB + 1000


def test_many_waiting_clients_are_killed_at_once(server: ServerProcess, survivor: RawPeer) -> None:
    steps = [
        send(encode(Opcode.WAIT, 2, b"/x", b"/y"), PING),
        send(encode(Opcode.BARRIER, b"/b", 100), PING),
        send(IN_LINE, PING),
        send(encode(Opcode.SET, b"/half", b"v" * 1000)[:-1]),
    ]
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(client(server, steps[n % 4])) for n in range(24)]
        server.until(lambda facts: facts["waiting"] == 18)
        for child in children:
            child.send_signal(signal.SIGKILL)
        for child in children:
            child.wait()
        facts = server.until(lambda facts: facts["connections"] == 2)
    assert facts["waiting"] == 0 and facts["keys"] == 1 and facts["queues"] == 0
    assert survivor.get(b"/b") == b"0"
    survivor.push(b"/q", b"item")
    assert survivor.pop(b"/q") == b"item"
