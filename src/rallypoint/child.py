"""Start a child process that serves: a module of ours, on sockets that it inherits, told what to do by a pipe.

Its settings are its standard input, not its arguments: the URL of a store in etcd may have a password in it, and
everybody on the machine can read the arguments of a process. It writes its URL, or why it has none, to another pipe
(`supervisor.await_ready`).

Rejected: settings in its environment. Its own children would inherit them, and so would whatever those start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rallypoint.errors import ServerFailed

__all__ = ["start"]

PIPE_BYTES = 32 * 1024
"""How long a child's settings may be: every system's pipes hold as much."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rallypoint.{} import main; main()"


def start(settings: dict[str, Any], quiet: bool, what: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the child; return it, and where it will write its URL. One that outlives us must not hold our output.

    Its settings are in the pipe that is its standard input before it runs, so they are whole whatever becomes of us.
    """
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
    """Have a pipe with some bytes in it, to read from."""
    if len(data) > PIPE_BYTES:
        raise ValueError(f"the settings of a server have {len(data)} bytes, and {PIPE_BYTES} is the limit")
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(data)
        yield reader
    finally:
        os.close(reader)


def _module_path() -> list[str]:
    """Return where the child finds modules: as here, but the library's own come first and the working directory last.

    With `-I` neither that directory nor the environment can then shadow what the server is made of.
    """
    library = os.path.dirname(os.__file__)
    first = (library, os.path.join(library, "lib-dynload"))
    return sorted(sys.path, key=lambda entry: (entry not in first) + (entry == ""))
