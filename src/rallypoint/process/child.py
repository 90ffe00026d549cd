"""Start a server as a child process: a module of this package, with inherited sockets and settings from a pipe.

The settings go to its standard input, not its arguments: the URL of a store in etcd may contain a password, and any
user of the machine can read a process's arguments. The child writes its URL, or the reason that it has none, to another
pipe (`supervisor.await_ready`).

Rejected: settings in the environment. All descendants of the child would inherit them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from rallypoint.errors import ServerFailed

__all__ = ["CREDENTIALS", "start"]

CREDENTIALS = "credentials"
"""The name of the credentials among the settings of a child."""

PIPE_BYTES = 32 * 1024
"""Limit on a child's settings: a pipe holds at least this much on every system."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rallypoint.{} import main; main()"


def start(settings: dict[str, Any], quiet: bool, what: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the child; return it and the descriptor on which it reports its URL.

    A child that outlives this process must not hold its output: start it `quiet`. The settings are in the child's
    standard input before it runs, so it reads them in full even if this process dies.
    """
    if find_spec("h11") is None:
        raise ServerFailed(pid=0, why="servers need h11: pip install 'rallypoint[server]'")
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-c", _BOOT.format(what), json.dumps(_module_path())]
    try:
        with _pipe_with(json.dumps({**settings, "ready_fd": writer}).encode() + b"\n") as told:
            child = subprocess.Popen(
                command,
                stdin=told,
                stdout=subprocess.DEVNULL if quiet else None,
                stderr=subprocess.DEVNULL if quiet else None,
                pass_fds=[*settings["fds"], writer],
                start_new_session=True,
            )
    except BaseException as error:
        os.close(reader)
        if isinstance(error, OSError):
            raise ServerFailed(pid=0, why=f"{sys.executable!r} cannot be run: {error.strerror}") from error
        raise
    finally:
        os.close(writer)
    return child, reader


@contextlib.contextmanager
def _pipe_with(data: bytes) -> Iterator[int]:
    """Yield the read end of a pipe that contains `data`."""
    if len(data) > PIPE_BYTES:
        raise ValueError(f"server settings are too long: {len(data)} bytes, limit {PIPE_BYTES}")
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(data)
        yield reader
    finally:
        os.close(reader)


def _module_path() -> list[str]:
    """Return the child's module path: ours, with the standard library first and the working directory last.

    Together with `-I`, neither that directory nor the environment can then shadow a module of the server.
    """
    library = os.path.dirname(os.__file__)
    first = (library, os.path.join(library, "lib-dynload"))
    return sorted(sys.path, key=lambda entry: (entry not in first) + (entry == ""))
