"""The agent of `rallypoint.launch`: a child process of the caller, with a job of one node.

It writes its events to a pipe, one JSON object per line, the exit code last. If the caller dies, it ends its workers
and removes the caller's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.launch.agent import NodeAgent
from rallypoint.launch.functions.launch_options import LaunchOptions
from rallypoint.launch.functions.worker_main import BOOT, SETUP
from rallypoint.launch.job import WorkerCommand
from rallypoint.process import standard_streams
from rallypoint.readiness import wait_readable

__all__ = ["EXIT", "MODULE", "OPTIONS", "main"]

MODULE = "launch.functions.agent_process"
"""The name of this module for `process.child`."""

OPTIONS = "options.json"
"""The file with the LaunchOptions, in the caller's directory."""

EXIT = "exit"
"""The last event: its `code` is the exit code of the job."""

PARENT_POLL_S = 0.5


class CallSettings(msgspec.Struct):
    """The settings of this process: the caller, its directory, and the pipe for events."""

    parent_pid: int
    directory: str
    ready_fd: int


def main() -> None:
    """Run the job; the exit code is that of `rallypoint run`."""
    settings = msgspec.json.decode(standard_streams.read_settings(), type=CallSettings)
    standard_streams.fill()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # that of the caller's thread
    directory, pipe = Path(settings.directory), settings.ready_fd
    os.set_inheritable(pipe, False)
    options = msgspec.json.decode((directory / OPTIONS).read_bytes(), type=LaunchOptions)
    command = WorkerCommand("command", sys.executable, ("-u", "-c", BOOT, str(directory / SETUP)))
    threading.Thread(target=_end_with, args=(settings.parent_pid,), name="end of the caller", daemon=True).start()
    code = NodeAgent(options.job(command), lambda event: _write(pipe, event)).run()
    _write(pipe, {"event": EXIT, "code": code})
    if os.getppid() != settings.parent_pid:
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(code)


def _write(pipe: int, event: Mapping[str, Any]) -> None:
    data = json.dumps(event).encode() + b"\n"
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except OSError:
        pass  # the caller is gone


def _end_with(parent_pid: int) -> None:
    """Wait until the caller is gone, and tell this process to end."""
    with contextlib.suppress(OSError):  # no pidfd on this system, or the caller is gone
        descriptor = os.pidfd_open(parent_pid)
        if os.getppid() == parent_pid:  # else its number may be another process's
            wait_readable(descriptor, timeout_s=None)
    while os.getppid() == parent_pid:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
