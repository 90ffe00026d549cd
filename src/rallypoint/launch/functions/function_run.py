"""One run of a function, from its files to the end of its agent, in a thread that owns all of them.

KeyboardInterrupt, and whatever else a signal handler raises, reaches the main thread between any two instructions: also
between the start of a process and the assignment that remembers it. Another thread is never interrupted, so nothing is
forgotten. The caller waits, and stops the run when it is interrupted itself.

Rejected: to block signals meanwhile. The kernel delivers them to another thread, and Python raises in the main thread.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rallypoint.launch.functions import agent_process
from rallypoint.process import child

__all__ = ["FunctionRun"]

READ_BYTES = 65536


class FunctionRun:
    """The directory and the agent of one run; `ended` is set when the agent, and all of its workers, have ended.

    `files` are written to the directory first. It exists until `close`, which ends the thread.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self.directory: Path | None = None
        self.events: list[dict[str, Any]] = []
        self.error: Exception | None = None
        """Why the agent could not be started, if it could not."""

        self.killed: int | None = None
        """The exit code of an agent that ended unexpectedly."""

        self.ended = threading.Event()
        self._closed, self._finished = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._begun = False
        self._signal: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="rallypoint.launch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def code(self) -> int | None:
        """The exit code of the job, None if its agent has not reported one."""
        last = self.events[-1] if self.events else {}
        return int(last["code"]) if last.get("event") == agent_process.EXIT else None

    def stop(self, signum: int) -> None:
        """Send a signal to the agent, which then ends its workers; if it has just been started, end it by SIGTERM."""
        with self._lock:
            self._signal = signum if self.events or signum == signal.SIGKILL else signal.SIGTERM
            self._send()
            if not self._begun:  # and the thread will not begin any more
                self.ended.set()

    def close(self) -> None:
        """Remove the directory and end the thread, after `ended`. If this is interrupted, call it again."""
        self._closed.set()
        if self._begun:
            self._finished.wait()
            self._thread.join()

    def _send(self) -> None:
        if self._process is not None and self._signal is not None:
            self._process.send_signal(self._signal)

    # In the thread

    def _run(self) -> None:
        with self._lock:
            self._begun = self._signal is None
        if self._begun:
            try:
                self._run_in(Path(tempfile.mkdtemp(prefix="rallypoint-launch-")))
            except OSError as error:
                self._end(error)
            self._finished.set()

    def _run_in(self, directory: Path) -> None:
        """Run the agent, and remove the directory when the caller has read the results."""
        self.directory = directory
        error: Exception | None = None
        try:
            for name, data in self._files.items():
                (directory / name).write_bytes(data)
            self._files = {}
            self._run_agent(directory)
        except Exception as caught:
            error = caught
        self._end(error)
        shutil.rmtree(directory, ignore_errors=True)

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self.ended.set()
        self._closed.wait()

    def _run_agent(self, directory: Path) -> None:
        settings = {"parent_pid": os.getpid(), "directory": str(directory), "fds": []}
        process, pipe = child.start(settings, quiet=False, what=agent_process.MODULE)
        with self._lock:
            self._process = process
            self._send()
        with os.fdopen(pipe, "rb") as events:
            for line in events:  # ends when the agent does
                if line.endswith(b"\n"):  # else it was killed while it wrote
                    event = json.loads(line)
                    with self._lock:
                        self.events.append(event)
        code = process.wait()
        with self._lock:
            self._process = None  # its number may be reused
        if self.code is None:
            self.killed = code
