"""`LocalCluster`: a few members of etcd on this machine, for trying and for tests, kept in one folder.

    D/cluster.json     who the members are: ports, pids, when they were born; replaced as a whole, never rewritten
    D/memberN          the data of a member
    D/memberN.log      what it says

Members are processes of their own and outlive us. The next `up` finds them by the file, and starts those that have
died; `down` ends them and nobody else (process.py). One call at a time works on a folder: it holds a lock on it.
Ports are chosen once, below those that the system gives to outgoing connections, so that a member that was away finds
its own still free; where another program is faster to take one, the first start begins anew with others.
Rejected: asking `etcdctl`; etcd answers HTTP, and Debian packs the two apart.
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
from rallypoint.errors import RallypointError
from rallypoint.etcd.member import HOST, Member, Record, arguments, environment, find_binary, free_ports
from rallypoint.etcd.process import Process

__all__ = ["LocalCluster", "LocalClusterError", "Standing"]

START_S, STOP_S, ASK_S, LOOK_S = 60.0, 3.0, 2.0, 0.02
ATTEMPTS = 10
MOST_MEMBERS = 9
_BEGIN = "---- rallypoint starts"
_TAKEN = "address already in use"
_children: list[subprocess.Popen[bytes]] = []
"""Members that this process has started: kept, for one that is forgotten while it runs makes Python complain."""


class LocalClusterError(RallypointError):
    """A local cluster could not be started, found or ended; `folder` says which."""

    folder: str
    why: str

    def __init__(self, *, folder: str, why: str) -> None:
        super().__init__(f"local etcd cluster in {folder}: {why}", folder=folder, why=why)


class _PortTaken(LocalClusterError):
    """A member could not listen."""


class Standing(msgspec.Struct, frozen=True):
    """How a member stands."""

    name: str
    endpoint: str
    pid: int | None
    running: bool
    healthy: bool


class LocalCluster:
    """The cluster in a folder. `flags` go to every member, after our own; `dialled_ports` are for proxies in tests."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        binary: str | None = None,
        flags: Sequence[str] = (),
        dialled_ports: Sequence[int] = (),
    ) -> None:
        self.folder = Path(folder).absolute()
        self._binary = binary
        self._flags = tuple(flags)
        self._dialled_ports = tuple(dialled_ports)
        self._file = self.folder / "cluster.json"

    @property
    def members(self) -> list[Member]:
        """The members as the file has them now; none where there is no cluster."""
        record = self._read()
        return record.members if record else []

    @property
    def endpoints(self) -> list[str]:
        """Where clients find the members, as host:port."""
        return [f"{HOST}:{member.client_port}" for member in self.members]

    @property
    def url(self) -> str:
        """The URL for `rallypoint.connect`."""
        return "etcd://" + ",".join(self.endpoints)

    def status(self) -> list[Standing]:
        """Return how each member stands."""
        members = self.members
        return [
            Standing(member.name, endpoint, member.pid, member.running(), member.running() and member.healthy())
            for member, endpoint in zip(members, self.endpoints, strict=True)
        ]

    def up(self, size: int | None = None, port: int | None = None, timeout: Timeout = START_S) -> list[str]:
        """Start what does not run, wait until every member is healthy, and return who was started.

        A new cluster has `size` members (3), at `port` and the ports after it, two a member, or at free ones. Raises
        LocalClusterError, with the last words of a member that does not come up, and ValueError where the cluster that
        is there has another size or port.
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
        """End the members that run, and return who that was; `purge` removes their data, logs and cluster.json too."""
        _reap()
        if not self.folder.is_dir():
            return []
        with self._locked(Deadline(timeout)):
            if (record := self._read()) is None:
                return []
            ended = self._end(record.members, at_once=purge)
            record.save(self._file)
            if purge:
                self._remove(record, logs=True)
        if purge:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # only if nothing else is there
        return ended

    def start(self, index: int, timeout: Timeout | None = START_S) -> None:
        """Start one member that has ended, and wait until it is healthy; with None, do not wait."""
        deadline = Deadline(START_S if timeout is None else timeout)
        with self._locked(deadline):
            if (record := self._read()) is None:
                raise self._wrong("there is none")
            member = record.members[index]
            if not member.running():
                self._start(record, member, self._binary or find_binary())
        if timeout is not None:
            self._await([member], deadline)

    def _start(self, record: Record, member: Member, binary: str) -> None:
        """Start the process of a member, and write down who it is."""
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
        member.pid, member.born = child.pid, process.born if process else None
        record.save(self._file)

    def _create(self, binary: str, size: int, port: int | None, deadline: Deadline) -> list[str]:
        if list(self.folder.glob("member*/member")):
            raise self._wrong(
                f"there is data of members, but no {self._file.name}; choose another folder, or remove it"
            )
        for attempt in range(ATTEMPTS):
            record = Record(secrets.token_hex(8), self._new_members(size, port))
            record.save(self._file)
            try:
                for member in record.members:
                    self._start(record, member, binary)
                self._await(record.members, deadline)
            except BaseException as error:
                self._end(record.members, at_once=True)
                self._remove(record)
                if not isinstance(error, _PortTaken) or port is not None or attempt == ATTEMPTS - 1:
                    raise
            else:
                break
        return [member.name for member in record.members]

    def _new_members(self, size: int, port: int | None) -> list[Member]:
        ports = free_ports(2 * size) if port is None else range(port, port + 2 * size)
        members = [Member(f"member{i + 1}", ports[2 * i], ports[2 * i + 1], ports[2 * i + 1]) for i in range(size)]
        for member, dialled in zip(members, self._dialled_ports, strict=False):
            member.dialled_port = dialled
        return members

    def _check(self, size: int | None, port: int | None) -> None:
        if size is not None and not 1 <= size <= MOST_MEMBERS:
            raise ValueError(f"a local cluster has 1 to {MOST_MEMBERS} members, not {size}")
        if port is not None and not 1 <= port <= 65536 - 2 * (size or 3):
            raise ValueError(f"port {port} leaves no room for two ports a member")

    def _compare(self, record: Record, size: int | None, port: int | None) -> None:
        has, first = len(record.members), record.members[0].client_port
        if size not in (None, has) or port not in (None, first):
            raise ValueError(
                f"the cluster in {self.folder} has {has} members from port {first} on, and they stay; "
                f"`rallypoint etcd down --purge` removes it"
            )

    def _await(self, members: Sequence[Member], deadline: Deadline) -> None:
        """Wait until all are healthy; raise where one ends, or at the deadline."""
        waiting = list(members)
        while waiting:
            member = waiting[0]
            healthy = member.healthy(max(LOOK_S, min(ASK_S, deadline.remaining())))
            for one in members:
                if not one.running():
                    raise self._ended(one)
            if healthy:
                waiting.pop(0)
            elif deadline.expired():
                names = ", ".join(one.name for one in waiting)
                raise self._wrong(f"{names} not healthy after {deadline.timeout_s:g} s; see {self._log(member)}")
            else:
                time.sleep(LOOK_S)

    def _ended(self, member: Member) -> LocalClusterError:
        text = self._log(member).read_text(errors="replace").rpartition(_BEGIN)[2]
        said = text.partition("\n")[2].strip()
        if _TAKEN in said:
            ports = f"{member.client_port} or {member.peer_port}"
            return _PortTaken(folder=str(self.folder), why=f"{member.name}: port {ports} is taken by another program")
        return self._wrong(f"{member.name} has ended, and said last: {said[-600:] or 'nothing'} ({self._log(member)})")

    def _end(self, members: Sequence[Member], at_once: bool = False) -> list[str]:
        """End those that run, gently first; return their names."""
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
                member.pid = member.born = None
        return [name for name, _ in running]

    def _remove(self, record: Record, logs: bool = False) -> None:
        for member in record.members:
            shutil.rmtree(self.folder / member.name, ignore_errors=True)
            if logs:
                self._log(member).unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)

    def _log(self, member: Member) -> Path:
        return self.folder / f"{member.name}.log"

    def _wrong(self, why: str) -> LocalClusterError:
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
                        raise self._wrong("another command is still at work on it") from None
                    time.sleep(LOOK_S)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> Record | None:
        try:
            return Record.load(self._file)
        except ValueError as error:
            raise self._wrong(f"{error}; end its members by hand, and remove the folder") from None


def _reap() -> None:
    """Take note of the end of our children, so that nothing of them stays."""
    _children[:] = [child for child in _children if child.poll() is None]
