"""`LocalCluster`: a small etcd cluster on this machine, for experiments and tests, in one directory D.

    D/cluster.json     the members: ports, pids and start times; replaced atomically
    D/memberN          the data of a member
    D/memberN.log      its log

Members are independent processes that outlive this one. The next `up` finds them by cluster.json and restarts the dead
ones; `down` stops them and no other process (process.py). A lock on the directory admits one call at a time.
Ports are chosen once, below the ephemeral range, so that they are still free when a member restarts. If another program
takes one before the first start, that start is repeated with other ports.
Rejected: `etcdctl`. etcd speaks HTTP, and Debian packages `etcdctl` separately.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import RallypointError, WithFields
from rallypoint.etcd.local.member import (
    HOST,
    ClusterRecord,
    EtcdMember,
    arguments,
    environment,
    find_binary,
    free_ports,
)
from rallypoint.etcd.local.process import Process

__all__ = ["LocalCluster", "LocalClusterError", "MemberStatus"]

START_S, STOP_S, REQUEST_S, POLL_S = 60.0, 3.0, 2.0, 0.02
"""Timeouts of a start, of each signal of a stop, and of a health check; the interval between checks."""

ATTEMPTS = 10
MAX_MEMBERS = 9
_BEGIN = "---- rallypoint starts"
_TAKEN = "address already in use"
_children: list[subprocess.Popen[bytes]] = []
"""Members that this process has started; Python warns when a running child's Popen is collected."""


class LocalClusterError(WithFields, RallypointError):
    """A local cluster, in `folder`, could not be started, found or stopped."""

    folder: str
    why: str

    def _sentence(self) -> str:
        return f"local etcd cluster in {self.folder}: {self.why}"


class _PortTaken(LocalClusterError):
    """A member could not listen on its port."""


class MemberStatus(msgspec.Struct, frozen=True):
    """The state of a member."""

    name: str
    endpoint: str
    pid: int | None
    running: bool
    healthy: bool


class LocalCluster:
    """The cluster in a folder. `flags` are appended to those of every member; tests advertise the ports of proxies."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        binary: str | None = None,
        flags: Sequence[str] = (),
        advertised_ports: Sequence[int] = (),
    ) -> None:
        self.folder = Path(folder).absolute()
        self._binary = binary
        self._flags = tuple(flags)
        self._advertised_ports = tuple(advertised_ports)
        self._file = self.folder / "cluster.json"

    @property
    def members(self) -> list[EtcdMember]:
        """The members now in cluster.json; empty if there is no cluster."""
        record = self._read()
        return record.members if record else []

    @property
    def endpoints(self) -> list[str]:
        """The members' client addresses, as host:port."""
        return [f"{HOST}:{member.client_port}" for member in self.members]

    @property
    def url(self) -> str:
        """The URL for `rallypoint.connect`."""
        return "etcd://" + ",".join(self.endpoints)

    def status(self) -> list[MemberStatus]:
        """Return the state of each member."""
        members = self.members
        return [
            MemberStatus(member.name, endpoint, member.pid, member.running(), member.running() and member.healthy())
            for member, endpoint in zip(members, self.endpoints, strict=True)
        ]

    def up(self, size: int | None = None, port: int | None = None, timeout: Timeout = START_S) -> list[str]:
        """Start the members that are not running, wait until all are healthy, and return the names of those started.

        A new cluster has `size` members (3). Each uses two consecutive ports, from `port` on, or free ports. Raises
        LocalClusterError, with the end of the log of a member that does not start, and ValueError if the existing
        cluster has another size or port.
        """
        deadline = Deadline(timeout)
        binary = self._binary or find_binary()
        self._check(size, port)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(deadline):
            if (record := self._read()) is None:
                return self._create(binary, size or 3, port, deadline)
            self._compare(record, size, port)
            dead = [member for member in record.members if not member.running()]
            for member in dead:
                self._start(record, member, binary)
            self._await(record.members, deadline)
            return [member.name for member in dead]

    def down(self, purge: bool = False, timeout: Timeout = START_S) -> list[str]:
        """Stop the running members and return their names; `purge` also removes their data, logs and cluster.json."""
        _reap()
        if not self.folder.is_dir():
            return []
        with self._locked(Deadline(timeout)):
            if (record := self._read()) is None:
                return []
            stopped = self._stop(record.members, at_once=purge)
            record.save(self._file)
            if purge:
                self._remove(record, logs=True)
        if purge:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # fails if it holds other files
        return stopped

    def start(self, index: int, timeout: Timeout | None = START_S) -> None:
        """Start one member that has exited, and wait until it is healthy; with timeout None, do not wait."""
        deadline = Deadline(START_S if timeout is None else timeout)
        with self._locked(deadline):
            if (record := self._read()) is None:
                raise self._error("no such cluster")
            member = record.members[index]
            if not member.running():
                self._start(record, member, self._binary or find_binary())
        if timeout is not None:
            self._await([member], deadline)

    def _start(self, record: ClusterRecord, member: EtcdMember, binary: str) -> None:
        """Start the process of a member, and record its pid and start time."""
        _reap()
        with self._log(member).open("ab") as log:
            log.write(f"{_BEGIN} {member.name}\n".encode())
            log.flush()
            child = subprocess.Popen(
                [binary, *arguments(member, record.members, self.folder, record.token), *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        _children.append(child)
        process = Process.of(child.pid)
        member.pid, member.start_time = child.pid, process.start_time if process else None
        record.save(self._file)

    def _create(self, binary: str, size: int, port: int | None, deadline: Deadline) -> list[str]:
        if list(self.folder.glob("member*/member")):
            raise self._error(f"it contains member data but no {self._file.name}; choose another folder, or remove it")
        for attempt in range(ATTEMPTS):
            record = ClusterRecord(secrets.token_hex(8), self._new_members(size, port))
            record.save(self._file)
            try:
                for member in record.members:
                    self._start(record, member, binary)
                self._await(record.members, deadline)
            except BaseException as error:
                self._stop(record.members, at_once=True)
                self._remove(record)
                if not isinstance(error, _PortTaken) or port is not None or attempt == ATTEMPTS - 1:
                    raise
            else:
                break
        return [member.name for member in record.members]

    def _new_members(self, size: int, port: int | None) -> list[EtcdMember]:
        ports = free_ports(2 * size) if port is None else range(port, port + 2 * size)
        members = [EtcdMember(f"member{i + 1}", ports[2 * i], ports[2 * i + 1], ports[2 * i + 1]) for i in range(size)]
        for member, advertised in zip(members, self._advertised_ports, strict=False):
            member.advertised_port = advertised
        return members

    def _check(self, size: int | None, port: int | None) -> None:
        if size is not None and not 1 <= size <= MAX_MEMBERS:
            raise ValueError(f"a local cluster has 1 to {MAX_MEMBERS} members, not {size}")
        if port is not None and not 1 <= port <= 65536 - 2 * (size or 3):
            raise ValueError(f"port {port} is too high: each member needs two consecutive ports up to 65535")

    def _compare(self, record: ClusterRecord, size: int | None, port: int | None) -> None:
        has, first = len(record.members), record.members[0].client_port
        if size not in (None, has) or port not in (None, first):
            raise ValueError(
                f"the cluster in {self.folder} has {has} members from port {first} on; "
                f"to replace it, remove it first: `rallypoint etcd down --purge`"
            )

    def _await(self, members: Sequence[EtcdMember], deadline: Deadline) -> None:
        """Wait until all members are healthy; raise if one exits, or at the deadline."""
        waiting = list(members)
        while waiting:
            member = waiting[0]
            healthy = member.healthy(max(POLL_S, min(REQUEST_S, deadline.remaining())))
            for one in members:
                if not one.running():
                    raise self._exited(one)
            if healthy:
                waiting.pop(0)
            elif deadline.expired():
                names = ", ".join(one.name for one in waiting)
                raise self._error(f"{names} not healthy after {deadline.timeout_s:g} s; see {self._log(member)}")
            else:
                time.sleep(POLL_S)

    def _exited(self, member: EtcdMember) -> LocalClusterError:
        text = self._log(member).read_text(errors="replace").rpartition(_BEGIN)[2]
        logged = text.partition("\n")[2].strip()
        if _TAKEN in logged:
            ports = f"{member.client_port} or {member.peer_port}"
            return _PortTaken(folder=str(self.folder), why=f"{member.name}: port {ports} is in use by another program")
        return self._error(
            f"{member.name} has exited; end of its log: {logged[-600:] or '(empty)'} ({self._log(member)})"
        )

    def _stop(self, members: Sequence[EtcdMember], at_once: bool = False) -> list[str]:
        """Stop the running members, with SIGTERM first unless `at_once`, and return their names."""
        running = [(member.name, process) for member in members if (process := member.process) and process.running()]
        for number in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
            for _, process in running:
                process.signal(number)
            deadline = Deadline(STOP_S)
            for _, process in running:
                process.wait(deadline)
        _reap()
        for member in members:
            if not member.running():
                member.pid = member.start_time = None
        return [name for name, _ in running]

    def _remove(self, record: ClusterRecord, logs: bool = False) -> None:
        for member in record.members:
            shutil.rmtree(self.folder / member.name, ignore_errors=True)
            if logs:
                self._log(member).unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)

    def _log(self, member: EtcdMember) -> Path:
        return self.folder / f"{member.name}.log"

    def _error(self, why: str) -> LocalClusterError:
        return LocalClusterError(folder=str(self.folder), why=why)

    @contextlib.contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.expired():
                        raise self._error("another command is using it") from None
                    time.sleep(POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> ClusterRecord | None:
        try:
            return ClusterRecord.load(self._file)
        except ValueError as error:
            raise self._error(f"{error}; stop its members by hand, and remove the folder") from None


def _reap() -> None:
    """Reap children that have exited, so that no zombies remain."""
    _children[:] = [child for child in _children if child.poll() is None]
