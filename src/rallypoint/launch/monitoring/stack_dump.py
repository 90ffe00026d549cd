"""Requests stack dumps from running workers, and reports which workers are stopped.

A worker is sent the dump signal only if its hook has registered it, the process still catches the signal, and the
descriptor that it would write to is still its stack file: a process that has executed another program, or has closed
all of its descriptors, is left alone. The kernel blocks the signal while the handler runs, which shows when a dump is
complete. The signal goes to the main thread, which writes its own stack: another thread would write its own. A stopped
process cannot answer, and is reported as stopped.

A worker that runs Python code must not get this signal: its frames change, and reading them may crash it. So it is
first asked by another signal, which it answers by Python code (`hook/sitecustomize.py`). The dump signal follows only
if it does not: soon if its main thread sleeps in the kernel, and after RUNNING_S if it runs C code.

Rejected: waiting until the stack file stops growing. On a busy machine that cuts dumps short.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

from rallypoint.core.stacks import MAX_STACK_BYTES, RankStack
from rallypoint.deadline import Deadline
from rallypoint.launch.monitoring.worker_records import (
    ANSWER_SIGNAL,
    DUMP_SIGNAL,
    RecordReader,
    WorkerEntry,
    nonblocking,
)

__all__ = ["DUMP_S", "STOPPED", "dump_stacks", "process_state", "state_word"]

DUMP_S = 2.0
"""How long workers may take to write their stacks."""

LOOK_S = 0.005
"""Interval between two checks of an unfinished dump."""

STOPPED = ("T", "t")
"""The kernel's states of processes stopped by a signal, and by a debugger."""

ENDED = ("", "Z", "X")
SLEEPING = ("S", "D", "I")
SLEEPING_S, RUNNING_S = 0.1, 1.0
"""How long a worker may take to answer by Python code before it gets the dump signal, by the state of its thread."""

NOT_REGISTERED = "no stack: not a Python process, or one that has not started yet"


def process_state(pid: int) -> str:
    """Return the state of a process as the kernel names it (R, S, D, T, Z, ...); empty if it is gone."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0].decode()
    return ""


def state_word(state: str) -> str:
    """Return running, stopped or ended for a state as the kernel names it."""
    return "stopped" if state in STOPPED else "ended" if state in ENDED else "running"


def dump_stacks(
    workers: Sequence[WorkerEntry], node: str, timeout_s: float = DUMP_S, cancelled: Callable[[], bool] = lambda: False
) -> list[RankStack]:
    """Return the stacks of workers of this machine; a worker that does not answer in time gets a note instead."""
    deadline = Deadline(timeout_s)
    dumps = [_Dump(worker) for worker in workers]
    while not deadline.expired() and not cancelled():
        if all(dump.is_over() for dump in dumps):
            break
        time.sleep(LOOK_S)
    return [dump.result(node) for dump in dumps]


class _Dump:
    """The dump of one worker, in progress."""

    def __init__(self, worker: WorkerEntry) -> None:
        self._worker, self._reader = worker, RecordReader(worker)
        self._progress, point = self._reader.read()
        self._pid = worker.pid if point is None or not _is_in_session(point.pid, worker.pid) else point.pid
        self._note, self._state = "", process_state(self._pid)
        self._blocking: set[str] = set()
        self._asked_at: float | None = None  # by the first signal, while its answer is awaited
        self._start = self._size()
        if self._state in STOPPED:
            self._note = "stopped (SIGSTOP)" if self._state == "T" else "stopped (by a debugger)"
        elif self._state in ENDED:
            self._note = "no stack: it has ended"
        elif point is None or not self._may_signal(point.descriptor):
            self._note = NOT_REGISTERED
        else:
            self._blocking = self._threads_with("SigBlk")
            if _has(f"/proc/{self._pid}/status", "SigCgt", ANSWER_SIGNAL):
                self._asked_at = time.monotonic()
            self._signal(DUMP_SIGNAL if self._asked_at is None else ANSWER_SIGNAL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _signal_main_thread(self._pid, number)

    def _may_signal(self, descriptor: int) -> bool:
        try:
            file = os.path.realpath(self._reader.stack_file)
            return (
                _is_in_session(self._pid, self._worker.pid)
                and os.readlink(f"/proc/{self._pid}/fd/{descriptor}") == file
                and _has(f"/proc/{self._pid}/status", "SigCgt")
            )
        except OSError:
            return False

    def is_over(self) -> bool:
        """Return whether the dump is complete, or there will be none."""
        if self._note:
            return True
        state = process_state(self._pid)
        if state in (*ENDED, *STOPPED):
            return True
        if self._asked_at is not None:
            if self._size() > self._start:
                return self._read().endswith("\n\n")
            if time.monotonic() - self._asked_at < (SLEEPING_S if state in SLEEPING else RUNNING_S):
                return False
            self._asked_at = None
            self._signal(DUMP_SIGNAL)
        return self._size() > self._start and not (self._threads_with("SigBlk") - self._blocking)

    def result(self, node: str) -> RankStack:
        """Return the stacks written so far."""
        text = "" if self._note else self._read()
        step, age_s = (None, None) if self._progress is None else self._progress
        return RankStack(
            rank=self._worker.rank,
            node=node,
            pid=self._pid,
            text=text,
            note=self._note or ("" if text else f"no answer within {DUMP_S:g} s (process state {self._state})"),
            state=state_word(self._state),
            step=step,
            age_s=age_s,
        )

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self._reader.stack_file).st_size
        return 0

    def _read(self) -> str:
        with contextlib.suppress(OSError), open(self._reader.stack_file, "rb", opener=nonblocking) as file:
            file.seek(self._start)
            data = file.read(1 << 20)
            text = data.decode(errors="replace")
            return text if len(text) <= MAX_STACK_BYTES else text[-MAX_STACK_BYTES:]  # the main thread is the last
        return ""

    def _threads_with(self, mask: str) -> set[str]:
        """Return the threads of the process whose signal mask of that name includes the dump signal."""
        with contextlib.suppress(OSError):
            tasks = os.listdir(f"/proc/{self._pid}/task")
            return {task for task in tasks if _has(f"/proc/{self._pid}/task/{task}/status", mask)}
        return set()


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process; to the process, if the C library has no `tgkill`."""
    import ctypes  # for dumps only

    try:
        tgkill = ctypes.CDLL(None, use_errno=True).tgkill
    except AttributeError:
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _is_in_session(pid: int, leader: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == leader
    return False


def _has(status: str, mask: str, number: int = DUMP_SIGNAL) -> bool:
    """Return whether a signal mask in a /proc status file includes a signal."""
    with contextlib.suppress(OSError), open(status, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(mask):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
