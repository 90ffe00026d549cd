"""A server that ends by itself when it has no clients, and one that outlives the process that started it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S, RawPeer, ServerProcess, read_line, script, wait_for_end

import rallypoint
from rallypoint.readiness import wait_readable

LEAVE = """
import sys
from rallypoint import Server
server = Server(outlive=float(sys.argv[1]))
print(server.pid, server.port, flush=True)
sys.stdin.read()
"""


def test_it_ends_when_its_last_client_disconnects(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, alone_s=0.0)
    peer, other = server.peer(), server.peer()
    peer.close()
    stays(server.child.pid, other, sweeps=2)
    other.close()
    wait_for_end(server.child.pid)
    assert server.child.wait(AMPLE_S) == 0
    assert "Traceback" not in server.log()
    assert server.child.stdout
    server.child.stdout.close()


def stays(pid: int, peer: RawPeer, sweeps: int) -> None:
    """Check that a server survives sweeps, in which it looks for clients; a sweep also takes back a turn in a queue."""
    with RawPeer(peer.socket.getpeername()[:2]) as other:
        for turn in range(sweeps):
            key = b"/swept/%d" % turn
            peer.push(key, b"item")
            other.wait(key)
            assert other.read(1) == b"\0"
            peer.wait(key)
            assert peer.read(1) == b"\0"  # by the sweep, because the other does not use its turn
            assert peer.pop(key) == b"item"
    os.kill(pid, 0)


def test_it_stays_for_the_given_time(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, alone_s=3600.0) as server, server.peer() as peer:
        stays(server.child.pid, peer, sweeps=1)


def test_it_outlives_the_process_that_started_it_by_kill_and_serves_on() -> None:
    with script(LEAVE, 0) as parent:
        pid, port = map(int, read_line(parent).split())
        peer = RawPeer(("127.0.0.1", port))
        peer.set(b"/k", b"v")
        parent.send_signal(signal.SIGKILL)
        parent.wait(AMPLE_S)
        stays(pid, peer, sweeps=2)
        with RawPeer(("127.0.0.1", port)) as other:
            assert other.get(b"/k") == b"v"
        peer.close()
        wait_for_end(pid)


def test_it_keeps_no_stream_and_no_terminal_of_the_process_that_started_it() -> None:
    # A reader of the starter's output must see its end when the starter ends, not when the server does.
    with script(LEAVE, 3600, stderr=-1) as parent:
        pid, _ = map(int, read_line(parent).split())
        try:
            assert parent.stdout is not None and parent.stderr is not None
            parent.send_signal(signal.SIGKILL)
            for stream in (parent.stdout, parent.stderr):
                assert wait_readable(stream, timeout_s=AMPLE_S) and stream.read() == b""
            os.kill(pid, 0)
            assert os.getsid(pid) == pid, "no signal to a terminal's group reaches it"
        finally:
            os.kill(pid, signal.SIGTERM)
        wait_for_end(pid)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_an_invalid_time_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="outlive"):
        rallypoint.Server(outlive=wrong)
