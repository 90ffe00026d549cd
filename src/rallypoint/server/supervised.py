"""The process that supervises a server which is to outlive whoever started it; started by `Server` (`spawn.py`).

It holds the listening sockets, and nothing of what is stored. It ends with the server, when that was told to end or has
had nobody for long, and ends the server when it is told to (SIGTERM). If it is killed, the server notices, and ends.
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
from rallypoint.child import start
from rallypoint.deadline import Deadline
from rallypoint.server import streams
from rallypoint.supervisor import START_S, WHY_NOT, Supervisor, await_ready

__all__ = ["main"]


def main() -> None:
    """Start a server, say that it is ready, and start it again when it dies; told what to do as the server is."""
    streams.fill()
    logging.basicConfig(format="rallypoint server: %(message)s", level=logging.WARNING)
    settings = json.loads(streams.read_settings())
    ready = settings.pop("ready_fd")
    sockets = [net.adopt(fd) for fd in settings["fds"]]
    again = functools.partial(start, {**settings, "parent_pid": os.getpid()}, quiet=False, what="server.process")
    first, pipe = again()
    url, why = await_ready(first, pipe, Deadline(START_S))
    with contextlib.suppress(BrokenPipeError):  # whoever waited for it has been killed
        os.write(ready, f"{url or WHY_NOT + why}\n".encode())
    os.close(ready)
    if not url:
        sys.exit(1)
    _supervise(Supervisor(first, again, sockets))


def _supervise(supervisor: Supervisor) -> None:
    """Supervise in a thread, for a signal may come at any moment of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    thread = threading.Thread(target=supervisor.run, name="supervisor", daemon=True)
    try:
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        supervisor.close()
    sys.exit(1 if supervisor.wait(0.0) else 0)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
