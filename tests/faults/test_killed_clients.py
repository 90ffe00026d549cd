"""Clients killed by SIGKILL in the middle of things: the server forgets their waits, turns and arrivals, and what was
half said never happened. The others get what was meant for the dead.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.faults.conftest import Start
from tests.wire import MIB, TOLD, Peer, Serving, read_line, script

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
    """Tell a client to send this, and a ping, whose answer shows that it was received."""
    return "send:" + b"".join(messages).hex()


@pytest.fixture
def server(start: Start) -> Serving:
    return start()


@pytest.fixture
def survivor(server: Serving) -> Iterator[Peer]:
    with server.peer() as peer:
        yield peer


@contextlib.contextmanager
def client(server: Serving, *steps: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a client process up to and including these steps."""
    with script(CLIENT, *server.address, *steps) as child:
        for step in steps:
            assert read_line(child) == step.partition(":")[0]
        yield child


def kill(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_a_wait_is_forgotten(server: Serving, survivor: Peer) -> None:
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


def test_an_arrival_is_taken_back(server: Serving, survivor: Peer) -> None:
    arrive = encode(Opcode.BARRIER, b"/b", 3)
    with server.peer() as other, client(server, send(arrive, PING), "read:4") as child:
        other.send(arrive)
        other.ping()
        assert survivor.get(b"/b") == b"2"
        kill(child)
        server.until(lambda facts: facts["waiting"] == 1)
        assert survivor.get(b"/b") == b"1"
        survivor.send(arrive + PING)
        assert survivor.read(4) == b"\7\0\0\0", "the barrier let two through that was for three"
        with server.peer() as third:
            third.send(arrive)
            assert third.read(1) == other.read(1) == survivor.read(1) == TOLD


def test_a_turn_goes_to_the_next_in_line(server: Serving, survivor: Peer) -> None:
    with client(server, send(IN_LINE, PING), "read:4") as first, server.peer() as second:
        second.send(IN_LINE + PING)
        assert second.read(4) == b"\7\0\0\0"
        survivor.push(b"/q", b"item")  # the first is told, and killed before it pops
        kill(first)
        assert second.read(1) == TOLD
        assert second.pop(b"/q") == b"item"
    assert server.until(lambda facts: facts["waiting"] == 0)["queues"] == 0


def test_a_turn_that_was_told_goes_to_the_next_in_line(server: Serving, survivor: Peer) -> None:
    survivor.push(b"/q", b"item")
    with client(server, send(IN_LINE), "read:1") as first:
        survivor.send(IN_LINE)
        kill(first)
        assert survivor.read(1) == TOLD
        assert survivor.pop(b"/q") == b"item"


def test_a_turn_that_is_not_used_is_taken_back_from_the_living_too(server: Serving, survivor: Peer) -> None:
    survivor.push(b"/q", b"item")
    with client(server, send(IN_LINE), "read:1"):
        survivor.send(IN_LINE)
        assert survivor.read(1) == TOLD  # by the sweep, for the first one sits still
        assert survivor.pop(b"/q") == b"item"


def test_half_a_message_never_happened(server: Serving, survivor: Peer) -> None:
    message = encode(Opcode.MULTI_SET, 2, b"/a", b"v", b"/b", b"v" * 50_000)
    survivor.wait(b"/a")
    with client(server, send(message[:-1])) as child:
        kill(child)
        facts = server.until(lambda facts: facts["connections"] == 2)
    assert facts["keys"] == 0 and facts["waiting"] == 1
    with server.peer() as other:
        other.set(b"/a", b"")
    assert survivor.read(1) == TOLD


def test_an_answer_that_nobody_takes_is_let_go(server: Serving, survivor: Peer) -> None:
    survivor.set(b"/large", b"v" * 8 * MIB)
    with client(server, send(encode(Opcode.GET, b"/large") * 50), "read:100") as child:
        kill(child)
        facts = server.until(lambda facts: facts["connections"] == 2)
    assert facts["bytes"] < 8 * MIB + 1000


def test_a_crowd_that_waits_is_killed_at_once(server: Serving, survivor: Peer) -> None:
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
