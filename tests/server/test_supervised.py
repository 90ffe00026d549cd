"""A server with a data directory: when it dies it is replaced, on the same port, until it is closed.

Durability is tested elsewhere: here the children are memory servers, or programs that are no servers at all.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.raw_peer import RawPeer, may_listen, read_line, script, until, wait_for_end
from tests.server.test_spawn import executable, serves

import rallypoint
from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.process import supervisor
from rallypoint.process.supervisor import Supervisor
from rallypoint.server.settings import Settings
from rallypoint.store import master

AMPLE_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[rallypoint.Server]:
    with rallypoint.Server(data_dir=tmp_path / "data") as server:
        yield server


def kill(server: rallypoint.Server) -> int:
    """Kill the child; return the process id of its successor once that serves."""
    died = server.pid
    os.kill(died, signal.SIGKILL)
    return int(until(lambda: server.statistics()["pid"], lambda pid: pid != died))


def test_a_child_that_dies_is_followed_by_another_on_the_same_port(server: rallypoint.Server) -> None:
    port, url, pids = server.port, server.url, {server.pid}
    for restarts in range(1, 4):
        pids.add(kill(server))
        assert (server.restarts, server.port, server.url) == (restarts, port, url)
        assert server.running() and server.wait(0.0) is None and server.pid in pids
        assert serves(port)
    assert len(pids) == 4
    server.close()
    assert not server.running() and server.wait(0.0) == 0 and "ended" in repr(server)
    assert may_listen(port)


def test_calls_between_two_children_are_answered_by_the_next(server: rallypoint.Server) -> None:
    peers: list[RawPeer] = []
    os.kill(server.pid, signal.SIGKILL)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), AMPLE_S):
            pass  # no connection is refused at any moment
    peers = [RawPeer(("127.0.0.1", server.port)) for _ in range(20)]
    for peer in peers:
        peer.ping()
        peer.close()
    assert server.restarts == 1


def test_clients_continue_with_the_same_store(server: rallypoint.Server) -> None:
    with rallypoint.connect(server.url, timeout=AMPLE_S) as store:
        store.set("k", "v")
        kill(server)
        assert store.get("k") == b"v"


def test_a_terminated_child_is_not_restarted(server: rallypoint.Server) -> None:
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(AMPLE_S) == 0
    assert not server.running() and server.restarts == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), AMPLE_S)
    assert may_listen(server.port)


def test_without_a_data_directory_a_dead_child_is_not_restarted() -> None:
    with rallypoint.Server() as server:
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(AMPLE_S) == -signal.SIGKILL
        assert not server.running() and server.restarts == 0


def refusing(path: Path) -> str:
    """A child that reports why it cannot start."""
    says = (
        "import json, os, sys\nos.write(json.loads(sys.stdin.readline())['ready_fd'], b'! no room\\n')\nsys.exit(1)\n"
    )
    path.write_text(f"#!{sys.executable}\n{says}")
    path.chmod(0o755)
    return str(path)


def test_repeated_failures_to_start_end_supervision_and_are_logged(
    server: rallypoint.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", (0.01, 0.02))
    with caplog.at_level(logging.WARNING, "rallypoint.server"):
        monkeypatch.setattr(sys, "executable", refusing(tmp_path / "python"))
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(AMPLE_S) == 1
    assert not server.running() and server.restarts == supervisor.TRIES
    said = [record.getMessage() for record in caplog.records]
    where = f"the server at 127.0.0.1:{server.port}"
    assert said[0].startswith(where) and said[0].endswith("ended with SIGKILL; restarting it")
    assert said[1:-1] == [f"{where} did not start: no room"] * supervisor.TRIES
    assert said[-1] == f"giving up on {where}: {supervisor.TRIES} starts in a row failed: no room"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), AMPLE_S)


def test_a_few_failures_to_start_are_survived(
    server: rallypoint.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", (0.01, 0.02))
    tries = tmp_path / "tries"
    fails = f'echo >> {tries}; [ $(wc -l < {tries}) -ge {supervisor.TRIES} ] || exit 7; exec {sys.executable} "$@"'
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", fails))
    for _ in range(2):
        kill(server)
        assert server.running() and serves(server.port)
        tries.unlink()


def test_close_ends_it_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", (AMPLE_S, AMPLE_S))
    with rallypoint.Server(data_dir=tmp_path) as server:  # in the pause before a start
        os.kill(server.pid, signal.SIGKILL)
        until(server._child.poll, lambda code: code is not None)
        assert server.running() and server.wait(0.0) is None
    assert not server.running() and server.wait(AMPLE_S) == -signal.SIGKILL
    assert may_listen(server.port)
    monkeypatch.setattr(supervisor, "PAUSE_S", (0.0, 0.0))
    with rallypoint.Server(data_dir=tmp_path) as server:  # while a child starts and never finishes starting
        monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", "exec sleep 600"))
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: server.restarts, lambda restarts: restarts == 1)
    assert not server.running()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    assert may_listen(server.port)


def test_a_forked_child_does_not_keep_the_port(tmp_path: Path) -> None:
    code = """
import os, sys
from rallypoint import Server
server = Server(data_dir=sys.argv[1])
print(server.port, flush=True)
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
server.close()
print("closed", flush=True)
sys.stdin.read()
"""
    with script(code, tmp_path) as parent:
        port = int(read_line(parent))
        assert read_line(parent) == "closed"
        assert may_listen(port), "although a fork of its parent still runs"


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(death: signal.Signals, tmp_path: Path) -> None:
    code = """
import os, signal, sys
from rallypoint import Server
server = Server(data_dir=sys.argv[1])
first = server.pid
os.kill(first, signal.SIGKILL)
while server.statistics()["pid"] == first:
    pass
print(server.pid, server.port, flush=True)
sys.stdin.read()
"""
    with script(code, tmp_path) as parent:
        pid, port = map(int, read_line(parent).split())
        parent.send_signal(death)
        wait_for_end(pid)
        assert may_listen(port)


def test_it_is_closed_with_its_last_reference(tmp_path: Path) -> None:
    server = rallypoint.Server(data_dir=tmp_path)
    kill(server)
    pid, port = server.pid, server.port
    del server
    wait_for_end(pid)
    assert may_listen(port)


# The pauses


class Clock:
    """A clock that advances while a child lives, and a record of the pauses, which take no time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def pause(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return False


class Child:
    """A child that lives for some time of the clock."""

    pid = 1

    def __init__(self, clock: Clock, life_s: float, code: int = 1) -> None:
        self._clock, self._life_s, self._code = clock, life_s, code

    def wait(self) -> int:
        self._clock.now += self._life_s
        self._life_s = 0.0
        return self._code


def test_pauses_double_and_begin_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    children = [*(Child(clock, life_s) for life_s in (1, 1, 1, 1, 1, 1, 1, 29, 31, 1)), Child(clock, 1, code=0)]
    (sock,) = net.listen(["127.0.0.1"], 0)

    def start() -> tuple[Child, int]:
        reading, writing = os.pipe()
        os.write(writing, b"tcp://here\n")
        os.close(writing)
        return children.pop(0), reading

    kept = Supervisor(Child(clock, 1), start, [sock])  # type: ignore[arg-type]
    monkeypatch.setattr(kept._closing, "wait", clock.pause)
    assert kept.run() == 0
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.05, 0.1]
    assert kept.restarts == 11 and not kept.running() and sock.fileno() == -1


# A server that outlives its parent

OUTLIVING = """
import sys
from rallypoint import Server
server = Server(data_dir=sys.argv[1], outlive=float(sys.argv[2]))
print(server.pid, server.port, flush=True)
if sys.argv[3] == "close":
    sys.stdin.readline()
    server.close()
"""


def asks(port: int) -> int:
    """Return the process id of the server at a port."""
    return master.identify_holder(net.Endpoint("127.0.0.1", port), Deadline(AMPLE_S)).pid or 0


def test_a_server_that_outlives_its_parent_has_a_supervising_process(tmp_path: Path) -> None:
    with script(OUTLIVING, tmp_path, 3.0, "leave") as parent:
        holder, port = map(int, read_line(parent).split())
        parent.wait(AMPLE_S)
    with RawPeer(("127.0.0.1", port)):  # so that it has a client
        first = until(lambda: asks(port), bool)
        assert first != holder
        os.kill(first, signal.SIGKILL)
        second = until(lambda: asks(port), lambda pid: pid not in (0, first))
    wait_for_end(second)  # without clients it ends, and so does its supervising process
    wait_for_end(holder)
    assert may_listen(port)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_the_server_ends_with_its_supervising_process(how: str, tmp_path: Path) -> None:
    with script(OUTLIVING, tmp_path, AMPLE_S, "close") as parent:
        holder, port = map(int, read_line(parent).split())
        server = until(lambda: asks(port), bool)
        if how == "kill":
            os.kill(holder, signal.SIGKILL)
        else:
            assert parent.stdin is not None
            parent.stdin.write(b"\n")
        wait_for_end(server)
        wait_for_end(holder) if how == "close" else None
        assert may_listen(port)


# Settings of the child


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recovery": 5}, "recovery needs data_dir or storage"),
        ({"data_dir": "d", "storage": "etcd://h:1/s"}, "not both"),
        ({"data_dir": "d", "engine": "etcd://h:1/s"}, "not both"),
        ({"storage": "etcd://h:1/s", "engine": "etcd://h:1/s"}, "give only one of them"),
        ({"data_dir": ""}, "data_dir is empty"),
        ({"data_dir": "d", "recovery": -1}, "recovery must not be negative"),
        ({"data_dir": "d", "recovery": 1e6}, "recovery must be at most 86400 s"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rallypoint.Server(**options)  # type: ignore[arg-type]


def test_the_child_gets_the_data_directory_and_the_recovery_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows = f'read -r told; echo "$told" > {tmp_path}/told; exec {sys.executable} "$@" <<END\n$told\nEND'
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", shows))
    monkeypatch.chdir(tmp_path)
    with rallypoint.Server(data_dir="data", recovery=12.5):
        told = msgspec.json.decode((tmp_path / "told").read_bytes(), type=Settings)
    assert (told.data_dir, told.recovery_s) == (str(tmp_path / "data"), 12.5)
