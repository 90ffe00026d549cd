"""`Cluster`: a real cluster of etcd for tests, whose members can be killed, stopped, cut off and restarted.

It is a `LocalCluster` in its own folder, in memory if possible. Its members end with it, and with the process that runs
the tests, even if that is killed (peer_proxy.py).
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from tests.raw_peer import AMPLE_S

from rallypoint.deadline import Deadline
from rallypoint.etcd.local.cluster import LocalCluster
from rallypoint.etcd.local.member import ClusterRecord, EtcdMember, ask, find_binary
from rallypoint.etcd.local.process import Process
from rallypoint.readiness import wait_readable

MEMORY = Path("/dev/shm")
Seen = TypeVar("Seen")


@functools.cache
def fast_flags() -> tuple[str, ...]:
    """Return the flags that make this version of etcd fast, at the cost of durability."""
    asked = subprocess.run([find_binary(), "--help"], capture_output=True, text=True)
    return ("--unsafe-no-fsync",) if "--unsafe-no-fsync" in asked.stdout + asked.stderr else ()


class Cluster:
    """A running cluster; a context manager. Members are counted from 0.

    `cuttable` sends the traffic between members through a proxy, which `partition` needs; `flags` are for etcd.
    Without a folder it creates one, and removes it at the end.
    """

    def __init__(
        self, folder: Path | None = None, members: int = 3, cuttable: bool = False, flags: Sequence[str] = ()
    ) -> None:
        made = []
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="rally-etcd-", dir=MEMORY if MEMORY.is_dir() else None))
            made = [folder]
        self._proxy = PeerProxyProcess(members if cuttable else 0, *made)
        self.cuttable = cuttable
        try:
            self.local = _RegisteredCluster(
                self._tell, folder, flags=(*fast_flags(), *flags), advertised_ports=self._proxy.ports
            )
            self._cut: set[int] = set()
            self.local.up(members, timeout=AMPLE_S)
            self.url, self.endpoints = self.local.url, self.local.endpoints
            self._ids = [ask(one.client_port, "/v3/maintenance/status", {})["header"]["member_id"] for one in self]
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[EtcdMember]:
        return iter(self.local.members)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every member, and delete its data."""
        self._proxy.close()
        self.local.down(purge=True)

    def kill(self, index: int) -> None:
        """Kill a member, and wait until it has ended."""
        self._signal(index, signal.SIGKILL)
        assert self._process(index).wait(Deadline(AMPLE_S))

    def stop(self, index: int) -> None:
        """Stop a member by SIGSTOP: its connections stay, and nothing answers."""
        self._signal(index, signal.SIGSTOP)
        threads, deadline = Path(f"/proc/{self._process(index).pid}/task"), Deadline(AMPLE_S)
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
            assert not deadline.expired(), f"member {index} does not stop"

    def cont(self, index: int) -> None:
        """Continue a stopped member."""
        self._signal(index, signal.SIGCONT)

    def restart(self, index: int, wait: bool = True) -> None:
        """Restart a killed member; with `wait`, return when it is healthy, which needs a quorum."""
        self.local.start(index, AMPLE_S if wait else None)

    def partition(self, *indices: int) -> None:
        """Cut these members off from every other; clients still reach them."""
        assert self.cuttable, "partition needs Cluster(cuttable=True)"
        self._cut |= set(indices)
        self._tell(self.local.members)

    def heal(self) -> None:
        """Reconnect all members."""
        self._cut.clear()
        self._tell(self.local.members)

    def leader(self, other_than: int | None = None) -> int:
        """Return the member that leads in the latest term, once there is one (other than the given member)."""

        def look() -> int | None:
            known = [view for one in self if one.running() and (view := _view(one))]
            term = max((term for term, _ in known), default=0)
            leaders = {leader for at, leader in known if at == term}
            return self._ids.index(leaders.pop()) if len(leaders) == 1 else None

        index = _until(look, lambda index: index not in (None, other_than))
        assert index is not None
        return index

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

    def _tell(self, members: list[EtcdMember]) -> None:
        running = [[one.pid, one.peer_port] if one.pid else None for one in members]
        self._proxy.tell(members=running, cut=sorted(self._cut))


class _RegisteredCluster(LocalCluster):
    """A local cluster that reports every member it starts."""

    def __init__(self, tell: Callable[[list[EtcdMember]], None], folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._tell = tell

    def _start(self, record: ClusterRecord, member: EtcdMember, binary: str) -> None:
        super()._start(record, member, binary)
        self._tell(record.members)


class PeerProxyProcess:
    """The peer proxy of one cluster."""

    def __init__(self, ports: int, *removed: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", Path(__file__).with_name("peer_proxy.py"), str(ports), *removed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach the tests only
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._input, self._output = self._child.stdin, self._child.stdout
        self._lock = threading.Lock()  # threads of a test may kill and start members
        self.ports: list[int] = json.loads(self._read_line())

    def tell(self, **state: object) -> None:
        with self._lock:
            self._input.write(json.dumps(state).encode() + b"\n")
            self._input.flush()
            assert self._read_line() == b"ok\n", "the peer proxy has ended"

    def close(self) -> None:
        self._input.close()
        self._child.wait(AMPLE_S)
        self._output.close()

    def _read_line(self) -> bytes:
        assert wait_readable(self._output, timeout_s=AMPLE_S), "no reply from the peer proxy"
        return self._output.readline()


def _until(look: Callable[[], Seen], true: Callable[[Seen], bool]) -> Seen:
    """Poll until a condition is true, with pauses: each look is a connection, which lingers in the kernel."""
    deadline, pause = Deadline(AMPLE_S), threading.Event()
    while not true(seen := look()):
        assert not deadline.expired(), f"not true within {AMPLE_S:g} s; last seen: {seen}"
        pause.wait(0.05)
    return seen


def _view(member: EtcdMember) -> tuple[int, str] | None:
    """Return the term and the leader according to a member; None if it does not answer, or knows no leader."""
    try:
        status = ask(member.client_port, "/v3/maintenance/status", {}, timeout_s=1.0)
    except (OSError, HTTPException, ValueError):
        return None
    return (int(status["raftTerm"]), status["leader"]) if status.get("leader", "0") != "0" else None
