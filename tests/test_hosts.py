"""The hosts of `tests/hosts.py`: they resolve each other, can be cut off and reconnected, and leave nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hosts import FILES, Host, hosts
from tests.raw_peer import AMPLE_S

CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])); print('met')"


def call(caller: Host, callee: Host, port: int, timeout_s: float = AMPLE_S) -> str:
    """Connect from one host to another; return "met" or the error."""
    process = caller.popen(
        [sys.executable, "-c", CALL, callee.name, str(port), str(timeout_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return str(process.communicate(timeout=AMPLE_S)[0].splitlines()[-1])


@pytest.mark.needs("netns")
def test_hosts_know_each_other_and_are_cut_and_mended() -> None:
    with hosts(2) as (a, b):
        name = a.popen([sys.executable, "-c", "import socket; print(socket.gethostname())"], stdout=subprocess.PIPE)
        assert name.communicate(timeout=AMPLE_S)[0] == b"host-a\n"
        with a.inside():
            server = socket.create_server((a.address, 0))
        port = server.getsockname()[1]
        assert call(b, a, port) == "met"
        for sever in (a.cut, b.cut, a.carrier_lost):
            sever()
            assert "timed out" in call(b, a, port, timeout_s=0.1)
            a.mend()
            b.mend()
            assert call(b, a, port) == "met"
        server.close()


@pytest.mark.needs("netns")
def test_cut_from_affects_one_other_host_only() -> None:
    with hosts(3) as (a, b, c):
        with a.inside():
            server = socket.create_server((a.address, 0))
        port = server.getsockname()[1]
        with b.inside():
            connection = socket.create_connection(server.getsockname(), AMPLE_S)
        accepted, _ = server.accept()
        b.cut_from(a)
        with pytest.raises(ConnectionAbortedError):
            connection.recv(1)
        assert "No route to host" in call(b, a, port) or "unreachable" in call(b, a, port)
        assert call(c, a, port) == "met"
        b.mend_to(a)
        assert call(b, a, port) == "met"
        for sock in (connection, accepted, server):
            sock.close()


@pytest.mark.needs("netns")
def test_hosts_leave_nothing_behind() -> None:
    with hosts(2) as (_, b):
        process = b.popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"], stdout=-1)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert process.wait(AMPLE_S) == -signal.SIGKILL
    process.stdout.close()
    assert not Path("/run/netns", b.namespace).exists() and not (FILES / b.namespace).exists()
