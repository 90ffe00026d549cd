"""`rallypoint etcd` and the cluster behind it, as real processes: what is started, found again, ended, left alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.etcd.cluster import Board
from tests.wire import AMPLE_S

from rallypoint.cli import main
from rallypoint.deadline import Deadline
from rallypoint.etcd import local
from rallypoint.etcd.local import LocalCluster, LocalClusterError
from rallypoint.etcd.member import Member, ask
from rallypoint.etcd.process import Process

pytestmark = pytest.mark.needs("etcd")

GARBAGE = [b"", b"{", b"[]", b'{"token": "x", "members": []}', b'{"token": "x", "members": [{"name": 1}]}']


class Place:
    """A folder, and the commands on it. What was started in it ends with the test."""

    def __init__(self, folder: Path, board: Board) -> None:
        self.folder, self._board = folder, board
        self.cluster = LocalCluster(folder)
        self.file = folder / "cluster.json"

    def run(self, name: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rallypoint", "etcd", name, "--dir", self.folder, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def up(self, *words: object) -> list[Member]:
        done = self.run("up", *words)
        assert done.returncode == 0, done.stderr
        members = self.guarded()
        assert done.stdout == f"etcd://{','.join(f'127.0.0.1:{one.client_port}' for one in members)}\n"
        assert f"to end it: rallypoint etcd down --dir {self.folder}" in done.stderr
        return members

    def guarded(self) -> list[Member]:
        """Return the members, which from now on do not outlive the tests."""
        members = self.cluster.members
        self._board.tell(members=[[one.pid, one.peer_port] for one in members if one.pid], cut=[])
        return members


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    board = Board(0)
    place = Place(tmp_path / "cluster", board)
    try:
        yield place
    finally:
        board.close()


def process(member: Member) -> Process:
    assert member.process is not None
    return member.process


def ended(member: Process) -> bool:
    return member.wait(Deadline(AMPLE_S))


def put(member: Member, key: str, value: str) -> None:
    words = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value.encode()).decode()}
    assert "header" in ask(member.client_port, "/v3/kv/put", words, AMPLE_S)


def got(member: Member, key: str) -> list[str]:
    found = ask(member.client_port, "/v3/kv/range", {"key": base64.b64encode(key.encode()).decode()}, AMPLE_S)
    return [base64.b64decode(pair["value"]).decode() for pair in found.get("kvs", [])]


def test_a_cluster_from_its_first_day_to_its_last(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_NAME", "a flag of somebody else's etcd")
    members = place.up()
    assert [member.name for member in members] == ["member1", "member2", "member3"]
    assert {"member1", "member1.log", "cluster.json"} <= {path.name for path in place.folder.iterdir()}
    put(members[0], "answer", "42")
    status = place.run("status")
    assert status.returncode == 0 and status.stdout.count("healthy") == 3 and str(members[2].pid) in status.stdout

    again = place.run("up")
    assert again.returncode == 0 and "runs already" in again.stderr
    assert [one.pid for one in place.cluster.members] == [one.pid for one in members]

    assert process(members[1]).signal(signal.SIGKILL) and ended(process(members[1]))
    status = place.run("status")
    assert status.returncode == 1 and f"127.0.0.1:{members[1].client_port}  does not run" in status.stdout
    mended = place.up()
    assert [old.pid == new.pid for old, new in zip(members, mended, strict=True)] == [True, False, True]
    assert got(mended[1], "answer") == ["42"]

    down = place.run("down")
    assert down.returncode == 0 and "ended member1, member2, member3" in down.stderr
    assert not any(process(one).running() for one in mended)
    status = place.run("status")
    assert status.returncode == 1 and status.stdout.count("does not run") == 3

    assert got(place.up()[0], "answer") == ["42"]
    down = place.run("down", "--purge")
    assert down.returncode == 0 and "the data is removed" in down.stderr and not place.folder.exists()


def test_what_is_not_there_is_said(place: Place) -> None:
    assert place.run("status").returncode == 1 and "there is no cluster" in place.run("status").stderr
    for words in ([], ["--purge"]):
        down = place.run("down", *words)
        assert down.returncode == 0 and "no member runs" in down.stderr
    assert not place.folder.exists()


def test_purge_leaves_alone_what_is_not_the_clusters(place: Place) -> None:
    place.up("--members", 1)
    (place.folder / "notes.txt").write_text("mine")
    assert place.run("down", "--purge").returncode == 0
    assert [path.name for path in place.folder.iterdir()] == ["notes.txt"]


def test_two_commands_at_once_make_one_cluster(place: Place) -> None:
    command = [sys.executable, "-m", "rallypoint", "etcd", "up", "--members=1", "--dir", str(place.folder)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    urls = {one.communicate(timeout=AMPLE_S)[0] for one in both}
    place.guarded()
    assert [one.returncode for one in both] == [0, 0] and len(urls) == 1


def test_a_member_that_does_not_hear_is_killed(place: Place) -> None:
    (member,) = place.up("--members", 1)
    assert process(member).signal(signal.SIGSTOP)
    assert place.run("down").returncode == 0
    assert ended(process(member))


def test_the_size_and_the_ports_of_a_cluster_stay(place: Place) -> None:
    (member,) = place.up("--members", 1)
    for words in (["--members", "3"], ["--port", "20000"]):
        refused = place.run("up", *words)
        assert refused.returncode == 2 and f"has 1 members from port {member.client_port} on" in refused.stderr
    for words in (["--members", "99"], ["--port", "65535"], ["--timeout", "-1"]):
        assert place.run("up", *words).returncode == 2
    assert process(member).running()


def test_without_the_program_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    done = CliRunner().invoke(main, ["etcd", "up", "--dir", str(tmp_path / "cluster")])
    assert done.exit_code == 1 and "apt-get install etcd-server" in done.output
    assert not (tmp_path / "cluster").exists()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_was_asked_for_and_is_taken_is_said(place: Place, taken: int) -> None:
    done = place.run("up", "--members", 1, "--port", taken)
    assert done.returncode == 1 and f"port {taken} or {taken + 1} is taken by another program" in done.stderr
    assert not place.file.exists() and place.run("up", "--members", 1).returncode == 0
    place.guarded()


def test_a_port_that_was_chosen_and_is_taken_meanwhile_gives_way(
    place: Place, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = iter([[taken, *local.free_ports(3)], local.free_ports(4)])
    monkeypatch.setattr(local, "free_ports", lambda count: next(chosen))
    assert place.cluster.up(2, timeout=AMPLE_S) == ["member1", "member2"]
    assert taken not in [member.client_port for member in place.guarded()]
    assert next(chosen, None) is None
    place.cluster.down(purge=True)


def test_a_port_that_was_taken_while_a_member_was_away_is_said(place: Place) -> None:
    (member,) = place.up("--members", 1)
    assert place.run("down").returncode == 0
    with socket.create_server(("127.0.0.1", member.client_port)):
        done = place.run("up")
        assert done.returncode == 1 and f"port {member.client_port} or" in done.stderr
    assert place.up() and (place.folder / "member1").is_dir()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_record_is_said_and_nothing_touched(place: Place, garbage: bytes) -> None:
    place.folder.mkdir()
    place.file.write_bytes(garbage)
    for name in ("up", "down", "status"):
        done = CliRunner().invoke(main, ["etcd", name, "--dir", str(place.folder)])
        assert done.exit_code == 1 and str(place.file) in done.output and "by hand" in done.output
    assert [path.name for path in place.folder.iterdir()] == ["cluster.json"]


def test_data_without_a_record_is_not_started_anew(place: Place) -> None:
    place.up("--members", 1)
    assert place.run("down").returncode == 0
    place.file.unlink()
    done = place.run("up")
    assert done.returncode == 1 and "there is data of members" in done.stderr
    assert (place.folder / "member1" / "member").is_dir()


def test_a_number_that_another_process_has_got_is_left_alone(place: Place) -> None:
    (member,) = place.up("--members", 1)
    assert process(member).signal(signal.SIGKILL) and ended(process(member))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        record = json.loads(place.file.read_text())
        record["members"][0]["pid"] = bystander.pid
        place.file.write_text(json.dumps(record))
        status = place.run("status")
        assert status.returncode == 1 and "does not run" in status.stdout
        down = place.run("down")
        assert down.returncode == 0 and "no member runs" in down.stderr
        assert bystander.poll() is None
        (again,) = place.up()
        assert again.pid != bystander.pid and bystander.poll() is None
        bystander.kill()


def test_a_process_is_known_by_its_birth() -> None:
    here = Process.of(os.getpid())
    assert here is not None and here.running() and here.signal(0)
    other = Process(here.pid, here.born + "0")
    assert not other.running() and not other.signal(signal.SIGKILL)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        born = Process.of(child.pid)
        assert born is not None
        assert not born.wait(Deadline(0))
        assert born.signal(signal.SIGKILL) and ended(born), "a zombie has ended"
        assert not born.signal(signal.SIGKILL) and Process.of(child.pid) is None


def fake(tmp_path: Path, *lines: str) -> str:
    """Make a program that is called instead of etcd."""
    path = tmp_path / "etcd"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["echo no disk >&2", "exit 1"], "member1 has ended, and said last: no disk"),
        (["exit 1"], "said last: nothing"),
        (["echo $$ > pid", "exec sleep 1000"], "member1 not healthy after 0.5 s"),
    ],
)
def test_a_member_that_does_not_come_up_is_said_and_nothing_stays(tmp_path: Path, lines: Any, says: str) -> None:
    cluster = LocalCluster(tmp_path / "cluster", binary=fake(tmp_path, *lines))
    with pytest.raises(LocalClusterError, match=says) as caught:
        cluster.up(1, timeout=0.5)
    assert caught.value.folder == str(tmp_path / "cluster")
    assert not cluster.members
    written = tmp_path / "cluster" / "pid"
    assert not written.exists() or Process.of(int(written.read_text())) is None
