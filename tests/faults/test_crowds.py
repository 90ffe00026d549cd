"""Thousands of connections at once, and thousands of idle ones.

RALLYPOINT_CROWD sets how many are idle. The figures for memory are printed (`pytest -s`); what is asserted is loose.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess

import pytest
from tests.faults.conftest import Start
from tests.raw_peer import AMPLE_S, MIB, ServerProcess, read_line, script, until

FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # what one process may have, and the server is one
IDLE = min(int(os.environ.get("RALLYPOINT_CROWD", "10000")), (FILES - 200) // 2 * 2)
STORM = 2000

CROWD = """
import resource, selectors, socket, struct, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 100)), hard))
hello = bytes.fromhex("00cef7853c") + b"\\x0d" + struct.pack("<I", 7)

def hang_up_hard(sock):
    "Let the number of the port be free at once when this is closed: there are not so many."
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

def say(line):
    print(line, flush=True)

def when_ready(sockets, event):
    "Yield each socket when it is ready, in any order, until none is ready for a minute."
    with selectors.DefaultSelector() as ready:
        for sock in sockets:
            ready.register(sock, event)
        while events := ready.get_map() and ready.select(60):
            for key, _ in events:
                ready.unregister(key.fileobj)
                yield key.fileobj

def all_hear(sockets):
    "Read a pong on every socket; return how many had one."
    heard = 0
    for sock in when_ready(sockets, selectors.EVENT_READ):
        try:
            heard += sock.recv(4) == struct.pack("<I", 7)
        except OSError:
            pass
    return heard
"""

STAY = """
sockets = []
for _ in range(count):
    sock = socket.create_connection((host, port))
    hang_up_hard(sock)
    sock.sendall(hello)
    sockets.append(sock)
say(all_hear(sockets))
sys.stdin.readline()
for sock in sockets:
    sock.sendall(hello[5:])
say(all_hear(sockets))
sys.stdin.readline()
"""

RUSH = """
sockets = [socket.socket() for _ in range(count)]
for sock in sockets:
    sock.setblocking(False)
    hang_up_hard(sock)
say("ready")
sys.stdin.readline()
for sock in sockets:
    sock.connect_ex((host, port))
for sock in when_ready(sockets, selectors.EVENT_WRITE):
    try:
        sock.sendall(hello)
    except OSError:
        pass
say(all_hear(sockets))
sys.stdin.readline()
"""


def crowd(
    stack: contextlib.ExitStack, code: str, server: ServerProcess, total: int, parts: int
) -> list[subprocess.Popen[bytes]]:
    """Start processes that hold this many connections together."""
    each = total // parts
    return [stack.enter_context(script(CROWD + code, *server.address, each)) for _ in range(parts)]


def tell(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        assert child.stdin
        child.stdin.write(b"\n")
        child.stdin.flush()


@pytest.mark.parametrize("uvloop", [True, False])
def test_2000_connections_at_once_are_all_accepted(start: Start, uvloop: bool) -> None:
    server = start(uvloop)
    with contextlib.ExitStack() as stack, server.peer() as healthy:
        children = crowd(stack, RUSH, server, STORM, 4)
        assert [read_line(child) for child in children] == ["ready"] * 4
        tell(children)
        healthy.work(20)
        assert sum(int(read_line(child)) for child in children) == STORM
        assert server.statistics()["connections"] == STORM + 2


def test_10000_connections_that_idle_are_cheap_and_all_answered(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start()
    with server.peer() as peer:
        peer.work(1)
        alone = server.memory()
    with contextlib.ExitStack() as stack:
        children = crowd(stack, STAY, server, IDLE, 2)
        assert sum(int(read_line(child)) for child in children) == IDLE
        each = (server.memory() - alone) / IDLE
        tell(children)
        assert sum(int(read_line(child)) for child in children) == IDLE
        assert server.statistics()["connections"] == IDLE + 1
        tell(children)
        for child in children:
            assert child.wait(AMPLE_S) == 0
    server.until(lambda facts: facts["connections"] == 1)
    with capsys.disabled():
        print(f"\n  alone {alone / MIB:.1f} MiB, each of {IDLE} idle connections {each / 1024:.2f} KiB more")
    assert alone < 60 * MIB
    assert each < 16 * 1024


def test_connections_beyond_the_descriptor_limit_are_refused(start: Start) -> None:
    server = start()
    with server.peer() as healthy, contextlib.ExitStack() as stack:
        resource.prlimit(server.child.pid, resource.RLIMIT_NOFILE, (100, 100))
        peers = [stack.enter_context(server.peer(greet=False)) for _ in range(200)]
        healthy.work(5)
        refused = peers[-1].rest()  # closed at once, not left waiting
        assert refused == b""
        for peer in peers:
            peer.close()
        healthy.work(5)
        until(lambda: let_in(server), bool)


def let_in(server: ServerProcess) -> bool:
    with contextlib.suppress(ConnectionError):
        server.peer().close()
        return True
    return False


def test_thousands_of_short_connections_leave_nothing(start: Start) -> None:
    server = start()
    with server.peer() as healthy:
        for _ in range(300):
            server.peer().close()
        server.until(lambda facts: facts["connections"] == 2)
        before = server.memory()
        for n in range(3000):
            with server.peer() as peer:
                peer.wait(b"/never/%d" % n, b"/other")
        facts = server.until(lambda facts: facts["connections"] == 2)
        assert facts["waiting"] == 0 and facts["keys"] == 0 and facts["bytes"] == 0
        assert server.memory() - before < 8 * MIB
        healthy.work(1)
