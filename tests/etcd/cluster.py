"""`Cluster`: a real cluster of etcd for tests, whose members can be killed, held, cut off and started again.

It is a `LocalCluster` in a folder of its own, in memory where the system has such a place. Its members end with it,
and with the process that runs the tests, however that ends (switchboard.py).
"""

from __future__ import annotations

import functools
import json
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.wire import AMPLE_S

from rallypoint.deadline import Deadline
from rallypoint.etcd.local import LocalCluster
from rallypoint.etcd.member import Member, Record, ask, find_binary
from rallypoint.etcd.process import Process

MEMORY = Path("/dev/shm")


@functools.cache
def fast_flags() -> tuple[str, ...]:
    """Return the flags that make this version of etcd fast where nothing need survive the machine."""
    asked = subprocess.run([find_binary(), "--help"], capture_output=True, text=True)
    return ("--unsafe-no-fsync",) if "--unsafe-no-fsync" in asked.stdout + asked.stderr else ()


class Cluster:
    """A running cluster; a context manager. Members are counted from 0.

    `cuttable` sends what members say to each other through a proxy, which `partition` needs; `flags` are for etcd.
    Without a folder it makes one, and removes it.
    """

    def __init__(
        self, folder: Path | None = None, members: int = 3, cuttable: bool = False, flags: Sequence[str] = ()
    ) -> None:
        made = []
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="rally-etcd-", dir=MEMORY if MEMORY.is_dir() else None))
            made = [folder]
        self._board = Board(members if cuttable else 0, *made)
        self.cuttable = cuttable
        try:
            self.local = _Watched(self._tell, folder, flags=(*fast_flags(), *flags), dialled_ports=self._board.ports)
            self._cut: set[int] = set()
            self.local.up(members, timeout=AMPLE_S)
            self.url, self.endpoints = self.local.url, self.local.endpoints
            self._ids = [ask(one.client_port, "/v3/maintenance/status", {})["header"]["member_id"] for one in self]
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Member]:
        return iter(self.local.members)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every member, and forget its data."""
        self._board.close()
        self.local.down(purge=True)

    def kill(self, index: int) -> None:
        """Kill a member, and wait until it has ended."""
        self._signal(index, signal.SIGKILL)
        assert self._process(index).wait(Deadline(AMPLE_S))

    def stop(self, index: int) -> None:
        """Hold a member: its connections stay, and nothing answers."""
        self._signal(index, signal.SIGSTOP)
        threads, deadline = Path(f"/proc/{self._process(index).pid}/task"), Deadline(AMPLE_S)
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
            assert not deadline.expired(), f"member {index} does not stop"

    def cont(self, index: int) -> None:
        """Let a member that was held go on."""
        self._signal(index, signal.SIGCONT)

    def restart(self, index: int, wait: bool = True) -> None:
        """Start a member that was killed, and wait until it is healthy, for which it needs a quorum."""
        self.local.start(index, AMPLE_S if wait else None)

    def partition(self, *indices: int) -> None:
        """Cut these members off from every other; clients still reach them."""
        assert self.cuttable, "a cluster is cut only if it is made so: Cluster(cuttable=True)"
        self._cut |= set(indices)
        self._tell(self.local.members)

    def heal(self) -> None:
        """Let all members speak to each other again."""
        self._cut.clear()
        self._tell(self.local.members)

    def leader(self, other_than: int | None = None) -> int:
        """Return who leads, by the latest term that anybody knows, once that is somebody (else)."""

        def look() -> int | None:
            known = [view for one in self if one.running() and (view := _view(one))]
            term = max((term for term, _ in known), default=0)
            leaders = {leader for at, leader in known if at == term}
            return self._ids.index(leaders.pop()) if len(leaders) == 1 else None

        return _until(look, lambda index: index not in (None, other_than))

    def settle(self) -> None:
        """Wait until every member is healthy."""
        for one in self:
            _until(one.healthy, bool)

    def _process(self, index: int) -> Process:
        process = self.local.members[index].process
        assert process is not None, f"member {index} was never started"
        return process

    def _signal(self, index: int, number: int) -> None:
        assert self._process(index).signal(number), f"member {index} does not run"

    def _tell(self, members: list[Member]) -> None:
        running = [[one.pid, one.peer_port] if one.pid else None for one in members]
        self._board.tell(members=running, cut=sorted(self._cut))


class _Watched(LocalCluster):
    """A local cluster that tells of every member it starts."""

    def __init__(self, tell: Callable[[list[Member]], None], *args, **options) -> None:
        super().__init__(*args, **options)
        self._tell = tell

    def _start(self, record: Record, member: Member, binary: str) -> None:
        super()._start(record, member, binary)
        self._tell(record.members)


class Board:
    """The switchboard of one cluster."""

    def __init__(self, ports: int, *removed: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", Path(__file__).with_name("switchboard.py"), str(ports), *removed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests
        )
        self._lock = threading.Lock()  # threads of a test may kill and start members
        self.ports: list[int] = json.loads(self._hear())

    def tell(self, **state: object) -> None:
        assert self._child.stdin is not None
        with self._lock:
            self._child.stdin.write(json.dumps(state).encode() + b"\n")
            self._child.stdin.flush()
            assert self._hear() == b"ok\n", "the switchboard has ended"

    def close(self) -> None:
        self._child.stdin.close()
        self._child.wait(AMPLE_S)
        self._child.stdout.close()

    def _hear(self) -> bytes:
        assert select.select([self._child.stdout], [], [], AMPLE_S)[0], "the switchboard says nothing"
        return self._child.stdout.readline()


def _until(look: Callable[[], Any], true: Callable[[Any], bool]) -> Any:
    """Look until what is seen is so, a few times a second: each look is a connection, which the kernel remembers."""
    deadline, pause = Deadline(AMPLE_S), threading.Event()
    while not true(seen := look()):
        assert not deadline.expired(), f"it never came to be; at last there was {seen}"
        pause.wait(0.05)
    return seen


def _view(member: Member) -> tuple[int, str] | None:
    """Return the term and the leader that a member knows of; None if it does not answer, or knows of none."""
    try:
        status = ask(member.client_port, "/v3/maintenance/status", {}, timeout_s=1.0)
    except (OSError, HTTPException, ValueError):
        return None
    return (int(status["raftTerm"]), status["leader"]) if status.get("leader", "0") != "0" else None
