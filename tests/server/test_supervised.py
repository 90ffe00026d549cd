"""A server with a data directory: when it dies another takes its place, on the same port, until it is told to end.

What is stored is another matter: here the children are memory servers, or programs that are no servers at all.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.server.test_spawn import executable, may_listen, serves
from tests.wire import Peer, read_line, script, until, wait_for_end

import rallypoint
from rallypoint import net, supervisor
from rallypoint.deadline import Deadline
from rallypoint.server.settings import Settings
from rallypoint.store import master
from rallypoint.supervisor import Supervisor

AMPLE_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[rallypoint.Server]:
    with rallypoint.Server(data_dir=tmp_path / "data") as server:
        yield server


def kill(server: rallypoint.Server) -> int:
    """Kill the child, and return the process id of the one that follows it, when that serves."""
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


def test_whoever_calls_meanwhile_is_answered_by_the_next_child(server: rallypoint.Server) -> None:
    peers: list[Peer] = []
    os.kill(server.pid, signal.SIGKILL)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), AMPLE_S):
            pass  # nobody is refused at any moment
    peers = [Peer(("127.0.0.1", server.port)) for _ in range(20)]
    for peer in peers:
        peer.ping()
        peer.close()
    assert server.restarts == 1


def test_clients_go_on_with_the_same_store(server: rallypoint.Server) -> None:
    with rallypoint.connect(server.url, timeout=AMPLE_S) as store:
        store.set("k", "v")
        kill(server)
        assert store.get("k") == b"v"


def test_one_that_was_told_to_end_is_not_started_again(server: rallypoint.Server) -> None:
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(AMPLE_S) == 0
    assert not server.running() and server.restarts == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), AMPLE_S)
    assert may_listen(server.port)


def test_without_a_data_directory_death_is_the_end() -> None:
    with rallypoint.Server() as server:
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(AMPLE_S) == -signal.SIGKILL
        assert not server.running() and server.restarts == 0


def refusing(path: Path) -> str:
    """A child that says why it does not come up."""
    says = (
        "import json, os, sys\nos.write(json.loads(sys.stdin.readline())['ready_fd'], b'! no room\\n')\nsys.exit(1)\n"
    )
    path.write_text(f"#!{sys.executable}\n{says}")
    path.chmod(0o755)
    return str(path)


def test_it_is_given_up_when_it_cannot_start_and_the_log_says_why(
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
    assert said[0].startswith(where) and said[0].endswith("ended with SIGKILL; starting it again")
    assert said[1:-1] == [f"{where} did not start: no room"] * supervisor.TRIES
    assert said[-1] == f"{where} is given up: {supervisor.TRIES} starts in a row failed: no room"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), AMPLE_S)


def test_a_few_failures_are_not_the_end(
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
    with rallypoint.Server(data_dir=tmp_path) as server:  # while a child comes up that never does
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
        assert may_listen(port), "though the fork of its parent lives on"


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


def test_it_is_closed_when_nobody_refers_to_it(tmp_path: Path) -> None:
    server = rallypoint.Server(data_dir=tmp_path)
    kill(server)
    pid, port = server.pid, server.port
    del server
    wait_for_end(pid)
    assert may_listen(port)


# The pauses


class Clock:
    """A clock that moves on when a child lives, and a note of the pauses, which pass at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def pause(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return False


class Child:
    """A child that lives for a while, by the clock."""

    pid = 1

    def __init__(self, clock: Clock, life_s: float, code: int = 1) -> None:
        self._clock, self._life_s, self._code = clock, life_s, code

    def wait(self) -> int:
        self._clock.now += self._life_s
        self._life_s = 0.0
        return self._code


def test_pauses_double_and_begin_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock.now)
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


# One that outlives who started it

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
    return master.ask_who(net.Endpoint("127.0.0.1", port), Deadline(AMPLE_S)).pid or 0


def test_one_that_outlives_its_parent_is_supervised_by_a_process_of_its_own(tmp_path: Path) -> None:
    with script(OUTLIVING, tmp_path, 3.0, "leave") as parent:
        keeper, port = map(int, read_line(parent).split())
        parent.wait(AMPLE_S)
    with Peer(("127.0.0.1", port)):  # so that it is not alone
        first = until(lambda: asks(port), bool)
        assert first != keeper
        os.kill(first, signal.SIGKILL)
        second = until(lambda: asks(port), lambda pid: pid not in (0, first))
    wait_for_end(second)  # with nobody connected it ends, and so does what supervised it
    wait_for_end(keeper)
    assert may_listen(port)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_who_supervises_ends_and_so_does_the_server(how: str, tmp_path: Path) -> None:
    with script(OUTLIVING, tmp_path, AMPLE_S, "close") as parent:
        keeper, port = map(int, read_line(parent).split())
        server = until(lambda: asks(port), bool)
        if how == "kill":
            os.kill(keeper, signal.SIGKILL)
        else:
            assert parent.stdin is not None
            parent.stdin.write(b"\n")
        wait_for_end(server)
        wait_for_end(keeper) if how == "close" else None
        assert may_listen(port)


# What it is told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recovery": 5}, "recovery is for a server with data_dir or storage"),
        ({"data_dir": "d", "storage": "etcd://h:1/s"}, "not in both"),
        ({"data_dir": "d", "engine": "etcd://h:1/s"}, "not in both"),
        ({"storage": "etcd://h:1/s", "engine": "etcd://h:1/s"}, "give one of them"),
        ({"data_dir": ""}, "data_dir is empty"),
        ({"data_dir": "d", "recovery": -1}, "recovery must not be negative"),
        ({"data_dir": "d", "recovery": 1e6}, "recovery must be at most 86400 s"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rallypoint.Server(**options)  # type: ignore[arg-type]


def test_the_child_is_told_where_and_for_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shows = f'read -r told; echo "$told" > {tmp_path}/told; exec {sys.executable} "$@" <<END\n$told\nEND'
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", shows))
    monkeypatch.chdir(tmp_path)
    with rallypoint.Server(data_dir="data", recovery=12.5):
        told = msgspec.json.decode((tmp_path / "told").read_bytes(), type=Settings)
    assert (told.data_dir, told.recovery_s) == (str(tmp_path / "data"), 12.5)
