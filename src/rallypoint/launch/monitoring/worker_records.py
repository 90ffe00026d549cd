"""The records of an agent's workers: a small file in shared memory that workers write to and the agent reads.

    DIR/records            128 bytes for each local rank (below)
    DIR/stacks.LOCAL_RANK  where the worker's faulthandler writes its stacks
    DIR/agent.json         the run, its store, the node, and the workers, for commands on this machine (local_agents.py)
    DIR/token              the token of the store, if the agent made it for a private server

DIR belongs to the agent, which removes it; its parent belongs to the user (mode 0700). A worker gets the path
`DIR/LOCAL_RANK` in RALLYPOINT_MONITOR. Its record has integers of eight bytes, each of which is written as a whole: the
last step; when that was, in nanoseconds of the monotonic clock, which all processes of a machine share (0: never); the
process that answers the dump signal, and its descriptor of the stack file; the dump signal; three that are unused; five
for the agreement on a step to stop at (preemption/stop_record.py).

Rejected: a pipe or a socket to the agent. A call of `progress` would be a system call, and could block.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import signal
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from rallypoint.core.policy.stop_policy import NONE
from rallypoint.launch.monitoring.progress_record import MONITOR_VARIABLE, RECORD_BYTES, STOP_NUMBERS

__all__ = [
    "ANSWER_SIGNAL",
    "DUMP_SIGNAL",
    "TOKEN_FILE",
    "AgentEntry",
    "RecordReader",
    "WorkerEntry",
    "WorkerRecords",
    "directory_name",
    "nonblocking",
    "with_hook",
]

TOKEN_FILE = "token"
"""The file with the token of a private server."""

HOOK = str(Path(__file__).parent / "hook")
"""The directory of the hook that Python workers import at start-up."""

_RECORD = struct.Struct("@5q24x5q24x")  # native: numbers are read whole, not byte by byte while they change
_NO_STEPS = [NONE] * len(range(*STOP_NUMBERS))

DUMP_SIGNAL: int = getattr(signal, "SIGRTMIN", -7) + 7
"""The signal at which workers dump their stacks: a real-time signal that nothing else uses; 0 without such signals."""


ANSWER_SIGNAL = DUMP_SIGNAL - 1
"""The signal at which workers write their stacks by Python code."""


class WorkerEntry(msgspec.Struct, frozen=True):
    """A running worker, and the directory and number of its record."""

    rank: int
    local_rank: int
    pid: int
    directory: str


class AgentEntry(msgspec.Struct, frozen=True):
    """The content of agent.json."""

    run: str
    node: str
    pid: int
    workers: tuple[WorkerEntry, ...] = ()
    url: str = ""
    """The address of the run's store for clients, without secrets."""

    directory: str = ""
    """The directory that it was read from."""


class LastProgress(NamedTuple):
    """The last progress of a worker, and the time since then."""

    step: int
    age_s: float


class DumpPoint(NamedTuple):
    """The process that dumps its stacks for a worker, and its descriptor of the stack file."""

    pid: int
    descriptor: int


def with_hook(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which Python imports the hook for stack dumps at start-up, if there is a record."""
    if MONITOR_VARIABLE not in environment or not DUMP_SIGNAL:
        return environment
    before = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": f"{HOOK}{os.pathsep}{before}" if before else HOOK}


class WorkerRecords:
    """The records of one agent's workers; does nothing if their directory cannot be created."""

    def __init__(self, workers: int) -> None:
        self.directory: Path | None = None
        """The directory of this agent; it may not exist yet."""

        self._size = workers
        self._map: mmap.mmap | None = None
        with contextlib.suppress(OSError):
            self.directory = _user_directory() / f"{os.getpid()}-{secrets.token_hex(4)}"

    def prepare(self, local_rank: int) -> dict[str, str]:
        """Clear the record of a worker that is about to start; return the variables for its environment."""
        if self.directory is None:
            return {}
        try:
            if self._map is None:
                self._map = self._create(self.directory)
            _RECORD.pack_into(self._map, local_rank * RECORD_BYTES, 0, 0, 0, 0, DUMP_SIGNAL, *_NO_STEPS)
            stacks = self.directory / f"stacks.{local_rank}"
            stacks.unlink(missing_ok=True)  # a process of an earlier attempt may still have it open
            stacks.touch(0o600)
        except OSError:
            self.directory = None
            return {}
        return {MONITOR_VARIABLE: f"{self.directory}/{local_rank}"}

    def _create(self, directory: Path) -> mmap.mmap:
        directory.mkdir(mode=0o700)
        with open(directory / "records", "xb+") as file:
            file.truncate(RECORD_BYTES * self._size)
            return mmap.mmap(file.fileno(), RECORD_BYTES * self._size)

    def publish(self, entry: AgentEntry, token: str) -> None:
        """Write agent.json, and the token of a private server, if there is one."""
        if self.directory is None or self._map is None:
            return
        with contextlib.suppress(OSError):
            if token:
                _replace(self.directory / TOKEN_FILE, token.encode("ascii"))
            _replace(self.directory / "agent.json", msgspec.json.encode(entry))

    def entry(self, rank: int, local_rank: int, pid: int) -> WorkerEntry:
        """Return the entry of a worker that was started."""
        return WorkerEntry(rank, local_rank, pid, "" if self.directory is None else str(self.directory))

    def progress(self, local_rank: int) -> LastProgress | None:
        """Return the last progress of a worker, or None if it never called `progress`."""
        if self._map is None:
            return None
        step, at_ns, *_ = _RECORD.unpack_from(self._map, local_rank * RECORD_BYTES)
        return _progress(step, at_ns)

    def numbers(self, local_rank: int) -> memoryview | None:
        """Return the numbers of a record, each read and written as a whole; None if no worker was started.

        Keep no reference to it: the file cannot be closed meanwhile.
        """
        if self._map is None:
            return None
        start = local_rank * RECORD_BYTES
        return memoryview(self._map)[start : start + RECORD_BYTES].cast("q")

    def close(self) -> None:
        """Remove the files."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


class RecordReader:
    """Reads the record of one worker, in the agent or in another process of the same user."""

    def __init__(self, entry: WorkerEntry) -> None:
        self._entry = entry

    @property
    def stack_file(self) -> str:
        """The path of the worker's stack file."""
        return f"{self._entry.directory}/stacks.{self._entry.local_rank}"

    def read(self) -> tuple[LastProgress | None, DumpPoint | None]:
        """Return the worker's last progress, and the process that dumps its stacks; None for each that is unknown."""
        try:
            with open(f"{self._entry.directory}/records", "rb", opener=nonblocking) as file:
                file.seek(self._entry.local_rank * RECORD_BYTES)
                step, at_ns, pid, descriptor, number, *_ = _RECORD.unpack(file.read(RECORD_BYTES))
        except (OSError, struct.error):
            return None, None
        point = DumpPoint(pid, descriptor) if pid > 0 and number == DUMP_SIGNAL else None
        return _progress(step, at_ns), point


def nonblocking(path: str, flags: int) -> int:
    """Open a file for `open`: another user may have put a pipe in its place, which must not block root."""
    return os.open(path, flags | os.O_NONBLOCK)


def _progress(step: int, at_ns: int) -> LastProgress | None:
    return LastProgress(step, max(0.0, (time.monotonic_ns() - at_ns) / 1e9)) if at_ns else None


def _replace(path: Path, data: bytes) -> None:
    """Write a file that only this user can read; readers see the old content or the new."""
    made = path.with_name(f"{path.name}.new")
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    made.replace(path)


def directory_name(user: object) -> str:
    """Return the name of a user's directory for agents, by the id of the user."""
    return f"rallypoint-{user}"


def _user_directory() -> Path:
    """Create and return the directory of this user for its agents; raise OSError if it is not private."""
    made = Path(tempfile.gettempdir(), directory_name(os.geteuid()))
    with contextlib.suppress(FileExistsError):
        made.mkdir(mode=0o700)
    facts = made.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{made} is not a private directory")
    return made
