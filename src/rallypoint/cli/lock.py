"""`rallypoint lock`: run a command on one node at a time.

The lock belongs to this process's session with the store. While the command runs, a thread checks the lock every second
and warns when it is lost. The command keeps running, because only it knows what its unfinished work is worth. The
resource that it writes to can reject a late holder by RALLYPOINT_FENCE, a number that increases with every holder.
Ctrl-C is left to the command; SIGTERM and SIGHUP are forwarded to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import click

from rallypoint import RallypointError, Store
from rallypoint.cli.completion import complete_files
from rallypoint.cli.store_command import (
    BY_SIGNAL,
    one_line,
    progress_printer,
    store_command,
    timeout_option,
    verbose_option,
)
from rallypoint.core.machines.machine import MAX_NAME
from rallypoint.recipes.lock import Lock

__all__ = ["command"]

POLL_S = 1.0
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""The exit codes of shells."""


@store_command("lock")
@click.argument("name")
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...", shell_complete=complete_files
)
@timeout_option
@verbose_option
def command(store: Store, name: str, command: tuple[str, ...], timeout: float | None, verbose: bool) -> None:
    """Wait for the lock NAME, run COMMAND while holding it, and exit with its exit code.

    RALLYPOINT_FENCE in COMMAND's environment is a number that increases with every holder. On timeout, print the holder
    and exit with 3 without running COMMAND. If the lock is lost while COMMAND runs, print a warning to standard error.
    """
    holder = one_line(os.fsencode(os.path.basename(command[0])))[:MAX_NAME] or "holder"
    lock = Lock(store, name, holder, progress_printer(verbose))
    lock.acquire(timeout)
    watch = _LockMonitor(lock, name)
    try:
        code = _run(command, {**os.environ, "RALLYPOINT_FENCE": str(lock.fence)}, watch)
    finally:
        watch.end()
    sys.exit(code)


class _LockMonitor:
    """Checks whether this process still holds a lock, and warns once if it does not."""

    def __init__(self, lock: Lock, name: str) -> None:
        self._lock = lock
        self._name = name
        self._over = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._poll, name="lock watch", daemon=True)

    def start(self) -> None:
        """Start to check."""
        self._thread.start()

    def end(self) -> None:
        """Release the lock, and warn if it was lost before that."""
        self._over.set()
        try:
            held = self._lock.release()
        except RallypointError:
            held = False
        if not held:
            self._warn("before the command ended")

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            if self._lock.lost:
                if not self._over.is_set():
                    self._warn("while the command runs")
                return

    def _warn(self, when: str) -> None:
        if not self._warned:
            self._warned = True
            fence = self._lock.fence
            click.echo(f"Warning: lock {self._name!r} (fence {fence}) was lost {when}; another may hold it", err=True)


def _run(command: tuple[str, ...], env: dict[str, str], watch: _LockMonitor) -> int:
    with _signals() as child_of:
        try:
            child = subprocess.Popen(command, env=env)
        except OSError as error:
            click.echo(f"Error: cannot run {command[0]}: {error.strerror}", err=True)
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        child_of.append(child)
        watch.start()
        code = child.wait()
    return code if code >= 0 else BY_SIGNAL - code


@contextlib.contextmanager
def _signals() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Leave signals to the command whose process the caller appends to the list."""
    child_of: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not child_of:
            sys.exit(BY_SIGNAL + number)
        child_of[0].send_signal(number)

    # An empty handler instead of SIG_IGN, which the command would inherit.
    handlers = {signal.SIGINT: lambda number, frame: None, signal.SIGTERM: forward, signal.SIGHUP: forward}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield child_of
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
