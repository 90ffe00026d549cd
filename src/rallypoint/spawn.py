"""`Server`: a server as a child process, for a program that wants one of its own.

The parent binds the sockets and hands them over, so a taken port is the parent's error, the port is known at once, and
nobody races for a number. The child runs in a session of its own (a Ctrl-C in the terminal does not reach it) and ends
when the parent does, however that ends. It is started by name, so that stores may start one and servers need no store.
Rejected: a thread in this process; a rank busy in Python would stall everyone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from rallypoint import net
from rallypoint.core.limits import LEAST_BYTES, MAX_GRACE_S
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ServerFailed

__all__ = ["WHY_NOT", "Server"]

STOP_S = 5.0
"""How long a child may take to end before it is killed."""

STATISTICS_S = 30.0
"""How long a server may take to say what it holds."""

WHY_NOT = "! "
"""What a child writes, and then why it does not come up, instead of its URL."""

_left_alone: list[subprocess.Popen[bytes]] = []
"""Children that outlive us: kept, for one that is forgotten while it runs makes Python complain."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rallypoint.server.process import main; main()"


class Server:
    """A store server in a child process that lives until `close`, or until this process ends.

    With `engine`, the URL of a store in etcd, it is a gateway to that: any number of them are one store.
    `port` 0 means a free one; `host` may be several. `url` and `port` say where it is. `max_memory` bounds all that
    clients may make it hold (default 4 GiB), `max_connection_memory` the largest request and answer (256 MiB), both in
    bytes; `grace` is how long a client's session outlives its connection (2 s). Use it as a context manager. With
    `outlive` it does not end with this process, but when nobody has been connected for so long.
    Raises AddressTaken where it cannot listen, ServerFailed where the child does not come up.
    """

    def __init__(
        self,
        host: str | Sequence[str] = "127.0.0.1",
        port: int = 0,
        *,
        fd: int | None = None,
        engine: str | None = None,
        max_memory: int | None = None,
        max_connection_memory: int | None = None,
        grace: Timeout | None = None,
        outlive: Timeout | None = None,
        start_timeout: Timeout = 30.0,
    ) -> None:
        deadline = Deadline(start_timeout)
        limits = _limits(grace, max_memory=max_memory, max_connection_memory=max_connection_memory)
        life = {"parent_pid": os.getpid()} if outlive is None else {"alone_s": _finite(outlive, "outlive")}
        sockets = [net.adopt(fd)] if fd is not None else net.listen([host] if isinstance(host, str) else host, port)
        settings = {"fds": [sock.fileno() for sock in sockets], "engine": engine, **life, **limits}
        try:
            self.port: int = sockets[0].getsockname()[1]
            self._child, ready = _start(settings, quiet=outlive is not None)
            self._stop = functools.partial(_stop, self._child, os.getpid())
            if outlive is None:
                weakref.finalize(self, self._stop)
            else:
                _left_alone.append(self._child)
            self.url = self._await_url(ready, deadline)
        finally:
            for sock in sockets:
                sock.close()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def running(self) -> bool:
        """Say whether the child is still there."""
        return self._child.poll() is None

    def wait(self, timeout: Timeout | None = None) -> int | None:
        """Wait until the child has ended; return its exit code, a signal as a negative number, None if it runs on."""
        try:
            return self._child.wait(None if timeout is None else _finite(timeout, "timeout"))
        except subprocess.TimeoutExpired:
            return None

    def statistics(self) -> dict[str, Any]:
        """Return what the server holds now: counts, and who is connected, has a session, and waits for what."""
        from http.client import HTTPConnection

        host, port = net.parse_endpoint(self.url.partition("//")[2], self.port)
        connection = HTTPConnection(host, port, timeout=STATISTICS_S)
        try:
            connection.request("GET", "/statistics")
            facts: dict[str, Any] = json.load(connection.getresponse())
            return facts
        finally:
            connection.close()

    def close(self) -> None:
        """End the server and free its port; harmless when it is closed already."""
        self._stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {self.url} pid {self.pid}{'' if self.running() else ' ended'}>"

    def _await_url(self, ready: int, deadline: Deadline) -> str:
        why = ""
        with os.fdopen(ready, "rb") as pipe:
            if select.select([pipe], [], [], deadline.remaining())[0]:
                line = pipe.readline().decode().strip()
                if line and not line.startswith(WHY_NOT):
                    return line
                why = line.removeprefix(WHY_NOT)
        expired = deadline.expired()
        if not expired:  # it is on its way out, and its own exit code says more than our signal would
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(STOP_S)
        self.close()
        code = self._child.returncode
        raise ServerFailed(
            pid=self.pid,
            why=why or (f"not ready after {deadline.timeout_s:g} s" if expired else f"ended with {code}"),
        )


def _limits(grace: Timeout | None, **sizes: int | None) -> dict[str, Any]:
    """Check the limits that were given, and return them as settings."""
    given = {name: size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be a number of bytes, not {size!r}")
        if not LEAST_BYTES[name] <= size < 2**63:
            raise ValueError(f"{name} must be at least {LEAST_BYTES[name]} bytes, and fit in 64 bits, got {size}")
    if grace is None:
        return given
    grace_s = seconds(grace, "grace")
    if grace_s > MAX_GRACE_S:
        raise ValueError(f"grace must be at most {MAX_GRACE_S:g} s, got {grace_s:g} s")
    return {**given, "grace_s": grace_s}


def _finite(timeout: Timeout, name: str) -> float:
    found_s = seconds(timeout, name)
    if found_s == float("inf"):
        raise ValueError(f"{name} must not be without end: a server that nobody ends is started by `rallypoint serve`")
    return found_s


def _start(settings: dict[str, Any], quiet: bool) -> tuple[subprocess.Popen[bytes], int]:
    """Start the child; return it, and where it will write its URL. One that outlives us must not hold our output."""
    reader, writer = os.pipe()
    settings = {**settings, "ready_fd": writer}
    command = [sys.executable, "-I", "-c", _BOOT, json.dumps(_module_path()), json.dumps(settings)]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
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


def _module_path() -> list[str]:
    """Return where the child finds modules: as here, but the library's own come first and the working directory last.

    With `-I` neither that directory nor the environment can then shadow what the server is made of.
    """
    library = os.path.dirname(os.__file__)
    first = (library, os.path.join(library, "lib-dynload"))
    return sorted(sys.path, key=lambda entry: (entry not in first) + (entry == ""))


def _stop(child: subprocess.Popen[bytes], owner_pid: int) -> None:
    """End the child, gently first; a fork of its owner must leave it alone."""
    if os.getpid() != owner_pid:
        return
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
