"""The supervisor process of a server that outlives the process that started it; `Server` (`spawn.py`) starts both.

It holds the listening sockets, and none of the stored data. It exits when the server exits on request or after being
idle, and stops the server on SIGTERM. If it is killed, the server notices and exits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
from types import FrameType

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.process import standard_streams
from rallypoint.process.child import start
from rallypoint.process.supervisor import START_S, WHY_NOT, Supervisor, await_ready

__all__ = ["main"]


def main() -> None:
    """Start a server, report that it is ready, and restart it when it dies; read settings as the server does."""
    standard_streams.fill()
    logging.basicConfig(format="rallypoint server: %(message)s", level=logging.WARNING)
    settings = json.loads(standard_streams.read_settings())
    ready = settings.pop("ready_fd")
    sockets = [net.adopt(fd) for fd in settings["fds"]]
    start_server = functools.partial(start, {**settings, "parent_pid": os.getpid()}, quiet=False, what="server.process")
    first, pipe = start_server()
    url, why = await_ready(first, pipe, Deadline(START_S))
    with contextlib.suppress(BrokenPipeError):  # the process that started us was killed
        os.write(ready, f"{url or WHY_NOT + why}\n".encode())
    os.close(ready)
    if not url:
        sys.exit(1)
    _supervise(Supervisor(first, start_server, sockets))


def _supervise(supervisor: Supervisor) -> None:
    """Supervise in a thread, because a signal may arrive at any point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    thread = threading.Thread(target=supervisor.run, name="supervisor", daemon=True)
    try:
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        supervisor.close()
    sys.exit(1 if supervisor.wait(0.0) else 0)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
