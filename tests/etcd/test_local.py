"""`rallypoint etcd` and its cluster, as real processes: start, status, stop, purge, and what they leave alone."""

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
from tests.etcd.cluster import PeerProxyProcess
from tests.raw_peer import AMPLE_S

from rallypoint.cli import main
from rallypoint.deadline import Deadline
from rallypoint.etcd.local import cluster as local_cluster
from rallypoint.etcd.local.cluster import LocalCluster, LocalClusterError
from rallypoint.etcd.local.member import EtcdMember, ask, free_ports
from rallypoint.etcd.local.process import Process

pytestmark = pytest.mark.needs("etcd")

GARBAGE = [b"", b"{", b"[]", b'{"token": "x", "members": []}', b'{"token": "x", "members": [{"name": 1}]}']


class Place:
    """A folder, and the commands on it. Members started in it end with the test."""

    def __init__(self, folder: Path, proxy: PeerProxyProcess) -> None:
        self.folder, self._proxy = folder, proxy
        self.cluster = LocalCluster(folder)
        self.file = folder / "cluster.json"

    def run(self, name: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rallypoint", "etcd", name, "--dir", str(self.folder), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def up(self, *words: object) -> list[EtcdMember]:
        done = self.run("up", *words)
        assert done.returncode == 0, done.stderr
        members = self.guarded()
        assert done.stdout == f"etcd://{','.join(f'127.0.0.1:{one.client_port}' for one in members)}\n"
        assert f"to stop it: rallypoint etcd down --dir {self.folder}" in done.stderr
        return members

    def guarded(self) -> list[EtcdMember]:
        """Return the members, and register them, so that they do not outlive the tests."""
        members = self.cluster.members
        self._proxy.tell(members=[[one.pid, one.peer_port] for one in members if one.pid], cut=[])
        return members


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    proxy = PeerProxyProcess(0)
    place = Place(tmp_path / "cluster", proxy)
    try:
        yield place
    finally:
        proxy.close()


def process(member: EtcdMember) -> Process:
    assert member.process is not None
    return member.process


def ended(member: Process) -> bool:
    return member.wait(Deadline(AMPLE_S))


def put(member: EtcdMember, key: str, value: str) -> None:
    words = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value.encode()).decode()}
    assert "header" in ask(member.client_port, "/v3/kv/put", words, AMPLE_S)


def got(member: EtcdMember, key: str) -> list[str]:
    found = ask(member.client_port, "/v3/kv/range", {"key": base64.b64encode(key.encode()).decode()}, AMPLE_S)
    return [base64.b64decode(pair["value"]).decode() for pair in found.get("kvs", [])]


def test_a_cluster_is_started_stopped_restarted_and_purged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_NAME", "a flag of somebody else's etcd")
    members = place.up()
    assert [member.name for member in members] == ["member1", "member2", "member3"]
    assert {"member1", "member1.log", "cluster.json"} <= {path.name for path in place.folder.iterdir()}
    put(members[0], "answer", "42")
    status = place.run("status")
    assert status.returncode == 0 and status.stdout.count("healthy") == 3 and str(members[2].pid) in status.stdout

    again = place.run("up")
    assert again.returncode == 0 and "is already running" in again.stderr
    assert [one.pid for one in place.cluster.members] == [one.pid for one in members]

    assert process(members[1]).signal(signal.SIGKILL) and ended(process(members[1]))
    status = place.run("status")
    assert status.returncode == 1 and f"127.0.0.1:{members[1].client_port}  not running" in status.stdout
    mended = place.up()
    assert [old.pid == new.pid for old, new in zip(members, mended, strict=True)] == [True, False, True]
    assert got(mended[1], "answer") == ["42"]

    down = place.run("down")
    assert down.returncode == 0 and "stopped member1, member2, member3" in down.stderr
    assert not any(process(one).running() for one in mended)
    status = place.run("status")
    assert status.returncode == 1 and status.stdout.count("not running") == 3

    assert got(place.up()[0], "answer") == ["42"]
    down = place.run("down", "--purge")
    assert down.returncode == 0 and "data removed" in down.stderr and not place.folder.exists()


def test_commands_without_a_cluster_say_so(place: Place) -> None:
    assert place.run("status").returncode == 1 and "no cluster in" in place.run("status").stderr
    for words in ([], ["--purge"]):
        down = place.run("down", *words)
        assert down.returncode == 0 and "no member is running" in down.stderr
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


def test_a_member_that_does_not_react_to_sigterm_is_killed(place: Place) -> None:
    (member,) = place.up("--members", 1)
    assert process(member).signal(signal.SIGSTOP)
    assert place.run("down").returncode == 0
    assert ended(process(member))


def test_the_size_and_the_ports_of_a_cluster_stay(place: Place) -> None:
    (member,) = place.up("--members", 1)
    for words in (["--members", "3"], ["--port", "20000"]):
        refused = place.run("up", *words)
        assert refused.returncode == 2 and f"has 1 members from port {member.client_port} on;" in refused.stderr
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
    """A port that another program uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_requested_port_that_is_taken_is_an_error(place: Place, taken: int) -> None:
    done = place.run("up", "--members", 1, "--port", taken)
    assert done.returncode == 1 and f"port {taken} or {taken + 1} is in use by another program" in done.stderr
    assert not place.file.exists() and place.run("up", "--members", 1).returncode == 0
    place.guarded()


def test_a_chosen_port_that_is_taken_meanwhile_is_replaced(
    place: Place, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = iter([[taken, *free_ports(3)], free_ports(4)])
    monkeypatch.setattr(local_cluster, "free_ports", lambda count: next(chosen))
    assert place.cluster.up(2, timeout=AMPLE_S) == ["member1", "member2"]
    assert taken not in [member.client_port for member in place.guarded()]
    assert next(chosen, None) is None
    place.cluster.down(purge=True)


def test_a_port_taken_while_a_member_was_down_is_an_error(place: Place) -> None:
    (member,) = place.up("--members", 1)
    assert place.run("down").returncode == 0
    with socket.create_server(("127.0.0.1", member.client_port)):
        done = place.run("up")
        assert done.returncode == 1 and f"port {member.client_port} or" in done.stderr
    assert place.up() and (place.folder / "member1").is_dir()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_record_is_an_error_and_nothing_is_touched(place: Place, garbage: bytes) -> None:
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
    assert done.returncode == 1 and "contains member data" in done.stderr
    assert (place.folder / "member1" / "member").is_dir()


def test_a_process_that_reuses_the_pid_of_a_member_is_left_alone(place: Place) -> None:
    (member,) = place.up("--members", 1)
    assert process(member).signal(signal.SIGKILL) and ended(process(member))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        record = json.loads(place.file.read_text())
        record["members"][0]["pid"] = bystander.pid
        place.file.write_text(json.dumps(record))
        status = place.run("status")
        assert status.returncode == 1 and "not running" in status.stdout
        down = place.run("down")
        assert down.returncode == 0 and "no member is running" in down.stderr
        assert bystander.poll() is None
        (again,) = place.up()
        assert again.pid != bystander.pid and bystander.poll() is None
        bystander.kill()


def test_a_process_is_identified_by_its_start_time() -> None:
    here = Process.of(os.getpid())
    assert here is not None and here.running() and here.signal(0)
    other = Process(here.pid, here.start_time + "0")
    assert not other.running() and not other.signal(signal.SIGKILL)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = Process.of(child.pid)
        assert process is not None
        assert not process.wait(Deadline(0))
        assert process.signal(signal.SIGKILL) and ended(process), "a zombie has ended"
        assert not process.signal(signal.SIGKILL) and Process.of(child.pid) is None


def fake(tmp_path: Path, *lines: str) -> str:
    """Create a program that runs instead of etcd."""
    path = tmp_path / "etcd"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["echo no disk >&2", "exit 1"], "member1 has exited; end of its log: no disk"),
        (["exit 1"], r"end of its log: \(empty\)"),
        (["echo $$ > pid", "exec sleep 1000"], "member1 not healthy after 0.5 s"),
    ],
)
def test_a_member_that_fails_to_start_is_reported_and_leaves_nothing(tmp_path: Path, lines: Any, says: str) -> None:
    cluster = LocalCluster(tmp_path / "cluster", binary=fake(tmp_path, *lines))
    with pytest.raises(LocalClusterError, match=says) as caught:
        cluster.up(1, timeout=0.5)
    assert caught.value.folder == str(tmp_path / "cluster")
    assert not cluster.members
    written = tmp_path / "cluster" / "pid"
    assert not written.exists() or Process.of(int(written.read_text())) is None
