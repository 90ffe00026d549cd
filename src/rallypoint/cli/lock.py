"""`rallypoint lock`: a command that runs on one node at a time.

The lock hangs on this process's session with the store. While the command runs, a thread looks every second whether the
lock is still ours, and says so when it is not: the command goes on, for only it knows what half of its work is worth.
That is what RALLYPOINT_FENCE is for: it grows with every holder, so that whatever the command writes to can refuse one
that is late. A Ctrl-C is the command's to act on; SIGTERM and SIGHUP are passed on to it.
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
from rallypoint.cli.opening import BY_SIGNAL, line, store_command, teller, timeout_option, verbose_option
from rallypoint.core.machine import MAX_NAME
from rallypoint.recipes.lock import Lock

__all__ = ["command"]

LOOK_S = 1.0
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""The exit codes that shells use."""


@store_command("lock")
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@timeout_option
@verbose_option
def command(store: Store, name: str, command: tuple[str, ...], timeout: float | None, verbose: bool) -> None:
    """Wait for the lock NAME, run COMMAND while holding it, and exit with its exit code.

    COMMAND finds a number that grows with every holder in RALLYPOINT_FENCE. On time-out, name the holder, and exit with
    3; COMMAND has not run. If the lock is lost while it runs, that is said on standard error.
    """
    holder = line(os.fsencode(os.path.basename(command[0])))[:MAX_NAME] or "holder"
    lock = Lock(store, name, holder, teller(verbose))
    lock.acquire(timeout)
    watch = _Watch(lock, name)
    try:
        code = _run(command, {**os.environ, "RALLYPOINT_FENCE": str(lock.fence)}, watch)
    finally:
        watch.end()
    sys.exit(code)


class _Watch:
    """Looks whether a lock is still ours, and says once if not."""

    def __init__(self, lock: Lock, name: str) -> None:
        self._lock = lock
        self._name = name
        self._over = threading.Event()
        self._said = False
        self._thread = threading.Thread(target=self._look, name="lock watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def end(self) -> None:
        """Release the lock, and say if it was lost before that."""
        self._over.set()
        try:
            held = self._lock.release()
        except RallypointError:
            held = False
        if not held:
            self._say("before the command ended")

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            if self._lock.lost:
                if not self._over.is_set():
                    self._say("while the command runs")
                return

    def _say(self, when: str) -> None:
        if not self._said:
            self._said = True
            fence = self._lock.fence
            click.echo(f"Warning: lock {self._name!r} (fence {fence}) was lost {when}; another may hold it", err=True)


def _run(command: tuple[str, ...], env: dict[str, str], watch: _Watch) -> int:
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
    """Leave signals to the command that is put into the list."""
    child_of: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not child_of:
            sys.exit(BY_SIGNAL + number)
        child_of[0].send_signal(number)

    # A handler that does nothing, and not SIG_IGN: that one the command would inherit.
    handlers = {signal.SIGINT: lambda number, frame: None, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield child_of
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
