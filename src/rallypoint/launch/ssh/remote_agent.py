"""The end of `rallypoint run --hosts` on a host: `python -m rallypoint.launch.ssh.remote_agent`, started by ssh.

The first line of standard input holds the settings of the agent (`remote_hosts.py`), each later line the name of a
signal for it. When standard input ends, the launcher or the connection is gone: the agent gets SIGTERM, and after the
time for its workers SIGKILL, which its workers do not survive. The exit code is the agent's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

import msgspec

from rallypoint.launch.signal_names import signal_names
from rallypoint.launch.workers.worker_process import WorkerProcess, WorkerUnstartable, exit_code_of
from rallypoint.readiness import wait_readable

__all__ = ["MAX_LINE", "main"]

MAX_LINE = 1 << 20
"""The longest line that is read."""

READ_BYTES = 64 * 1024


class AgentSettings(msgspec.Struct, frozen=True):
    """The settings of an agent on this host."""

    words: list[str]
    directory: str
    environment: dict[str, str]
    kill_after_s: float


class _Lines:
    """Standard input, line by line, without waiting."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.ended = False
        self._descriptor = descriptor
        self._held = b""

    def read(self) -> list[bytes]:
        """Return the lines that have arrived."""
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.ended = not data
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE} bytes on standard input")
        return lines


def main() -> int:
    """Run the agent; return its exit code."""
    lines = _Lines(0)
    received: list[bytes] = []
    while not received and not lines.ended:
        wait_readable(0, timeout_s=None)  # ends with the connection
        received = lines.read()
    if not received:
        return _fail("no settings on standard input; this program is started by rallypoint run --hosts")
    try:
        settings = msgspec.convert(json.loads(received.pop(0)), AgentSettings)  # msgspec.json accepts no surrogates
        os.chdir(settings.directory)
    except (ValueError, msgspec.ValidationError) as error:
        return _fail(f"malformed settings: {error}. Is rallypoint the same version on all hosts?")
    except OSError as error:
        return _fail(f"cannot change to the directory of the launcher, {error.filename!r}: {error.strerror}")
    command = [sys.executable, "-m", "rallypoint", "run", *settings.words]
    agent = WorkerProcess(command, {**os.environ, **settings.environment}, "agent")
    try:
        agent.start()
    except WorkerUnstartable as error:
        return _fail(str(error))
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), lambda number, _: agent.signal(number))
    return exit_code_of(_follow(agent, lines, received, settings.kill_after_s))


def _follow(agent: WorkerProcess, lines: _Lines, received: list[bytes], kill_after_s: float) -> int:
    """Forward signals until the agent ends; end it when standard input ends. Return its exit code."""
    kill_at: float | None = None
    while (code := agent.poll()) is None:
        for line in received:
            with contextlib.suppress(ValueError):
                for name in signal_names(line.decode(errors="replace")):
                    agent.signal(signal.Signals[name])
        if lines.ended and kill_at is None:
            agent.signal(signal.SIGTERM)
            kill_at = time.monotonic() + kill_after_s
        sources: list[Any] = [agent] if lines.ended else [agent, 0]
        left_s = None if kill_at is None else kill_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            agent.kill()
            left_s = None
        wait_readable(*sources, timeout_s=left_s)
        received = [] if lines.ended else lines.read()
    agent.close()
    return code


def _fail(reason: str) -> int:
    print(f"rallypoint run: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
