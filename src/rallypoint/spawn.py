"""`Server`: a server as a child process, for a program that wants one of its own; and what a `Relay` shares with it.

The parent binds the sockets and hands them over, so a taken port is the parent's error, the port is known at once, and
nobody races for a number. The child runs in a session of its own (a Ctrl-C in the terminal does not reach it) and ends
when the parent does, however that ends. It is started by name, so that stores may start one and servers need no store.

A supervised child (a relay, or a server with a data directory) is followed by another when it dies: a thread here waits
for it, and starts the next on the same sockets (`supervisor.py`, which says why the sockets stay open). Where a server
with a data directory is to outlive this process, the child is a process that does the same (`server/supervised.py`),
and the server is its child: if that is killed, the server ends with it, and whoever needs one starts it again.

Rejected: a thread in this process; a rank busy in Python would stall everyone.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

from rallypoint import net, unix_socket
from rallypoint.child import start
from rallypoint.core.limits import LEAST_BYTES, MAX_GRACE_S
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ServerFailed
from rallypoint.supervisor import Starter, Supervisor, await_ready, stop

__all__ = ["ChildServer", "Server"]

STATISTICS_S = 30.0
"""How long a server may take to say what it holds."""

_left_alone: list[subprocess.Popen[bytes]] = []
"""Children that outlive us: kept, for one that is forgotten while it runs makes Python complain."""

_Self = TypeVar("_Self", bound="ChildServer")

_SERVER, _SUPERVISOR = "server.process", "server.supervised"


class ChildServer:
    """A child process that serves on sockets which it was handed, until `close` or the end of this process.

    `what` is the module to run. One that is `supervised` is followed by another when it dies, until it is closed or was
    told to end; one that is `left_alone` does not end with this process. The sockets are closed here, in the end.
    Raises ServerFailed where the child does not come up.
    """

    def __init__(
        self,
        what: str,
        settings: dict[str, Any],
        sockets: Sequence[socket.socket],
        deadline: Deadline,
        *,
        supervised: bool = False,
        left_alone: bool = False,
    ) -> None:
        settings = {**settings, "fds": [sock.fileno() for sock in sockets]}
        self._supervisor: Supervisor | None = None
        try:
            self.port: int = 0 if sockets[0].family == socket.AF_UNIX else sockets[0].getsockname()[1]
            self._first, ready = start(settings, quiet=left_alone, what=what)
            self._stop = functools.partial(_stop, self._first, os.getpid())
            if left_alone:
                _left_alone.append(self._first)
            else:
                weakref.finalize(self, self._stop)
            hint = "" if left_alone else "; it says more on this process's standard error"
            self.url, why = await_ready(self._first, ready, deadline, hint)
            if not self.url:
                raise ServerFailed(pid=self._first.pid, why=why)
            if supervised:
                self._supervise(functools.partial(start, settings, quiet=False, what=what), sockets)
        finally:
            for sock in sockets if self._supervisor is None else ():
                sock.close()

    def _supervise(self, again: Starter, sockets: Sequence[socket.socket]) -> None:
        """Have a child that dies followed by another, from now on."""
        self._supervisor = Supervisor(self._first, again, sockets)
        self._stop = functools.partial(_close, self._supervisor, os.getpid())
        weakref.finalize(self, self._stop)
        threading.Thread(target=self._supervisor.run, name=f"supervisor of {self.url}", daemon=True).start()

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        return self._first if self._supervisor is None else self._supervisor.child

    @property
    def pid(self) -> int:
        """The child's process id; between two children, that of the last."""
        return self._child.pid

    @property
    def restarts(self) -> int:
        """How often a child that died has been followed by another."""
        return 0 if self._supervisor is None else self._supervisor.restarts

    def running(self) -> bool:
        """Say whether the child is still there, or is about to be followed by another."""
        return self._child.poll() is None if self._supervisor is None else self._supervisor.running()

    def wait(self, timeout: Timeout | None = None) -> int | None:
        """Wait until the server has ended for good; return its exit code, a signal as a negative number.

        None means that it runs on. A child that is followed by another is not the end.
        """
        within_s = None if timeout is None else _finite(timeout, "timeout")
        if self._supervisor is not None:
            return self._supervisor.wait(within_s)
        try:
            return self._first.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def statistics(self) -> dict[str, Any]:
        """Return what the server holds now: counts, and who is connected, has a session, and waits for what."""
        from http.client import HTTPConnection

        if self.url.startswith(unix_socket.SCHEME):
            connection = HTTPConnection("localhost")
            path = self.url.removeprefix(unix_socket.SCHEME)
            connection.sock = unix_socket.connect(path, Deadline(STATISTICS_S))
            connection.sock.settimeout(STATISTICS_S)
        else:
            host, port = net.parse_endpoint(self.url.partition("//")[2], self.port)
            connection = HTTPConnection(host, port, timeout=STATISTICS_S)
        try:
            connection.request("GET", "/statistics")
            facts: dict[str, Any] = json.load(connection.getresponse())
            return facts
        finally:
            connection.close()

    def kill(self, pid: int) -> None:
        """Kill the child, which hangs, if that is still its process id; one that is supervised has a successor."""
        child = self._child
        if child.pid == pid:
            child.kill()

    def close(self) -> None:
        """End the server and free its port; harmless when it is closed already."""
        self._stop()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url} pid {self.pid}{'' if self.running() else ' ended'}>"


class Server(ChildServer):
    """A store server in a child process that lives until `close`, or until this process ends.

    With `storage`, the URL of a store in etcd, it is one of the servers of that: one leads, the others stand by
    (docs/etcd.md); `engine` is the old name of it.
    `port` 0 means a free one; `host` may be several. `url` and `port` say where it is. `max_memory` bounds all that
    clients may make it hold (default 4 GiB), `max_connection_memory` the largest request and answer (256 MiB), both in
    bytes; `grace` is how long a client's session outlives its connection (2 s). Use it as a context manager. With
    `outlive` it does not end with this process, but when nobody has been connected for so long.

    With `data_dir` it keeps all that is stored in that directory, and is started again when it dies, until it is closed
    or a signal has told it to end: clients go on where they were. `recovery` is how long their sessions may outlive its
    absence (60 s). With `outlive` as well, `pid` is that of the process which does so.
    Raises AddressTaken where it cannot listen, ServerFailed where the child does not come up.
    """

    def __init__(
        self,
        host: str | Sequence[str] = "127.0.0.1",
        port: int = 0,
        *,
        fd: int | None = None,
        storage: str | None = None,
        engine: str | None = None,
        max_memory: int | None = None,
        max_connection_memory: int | None = None,
        grace: Timeout | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        recovery: Timeout | None = None,
        outlive: Timeout | None = None,
        start_timeout: Timeout = 30.0,
    ) -> None:
        deadline = Deadline(start_timeout)
        limits = _limits(grace, max_memory=max_memory, max_connection_memory=max_connection_memory)
        storage = _storage(storage, engine)
        durable = _durable(data_dir, recovery, storage)
        supervised = data_dir is not None
        life = {"parent_pid": os.getpid()} if outlive is None else {"alone_s": _finite(outlive, "outlive")}
        sockets = [net.adopt(fd)] if fd is not None else net.listen([host] if isinstance(host, str) else host, port)
        super().__init__(
            _SUPERVISOR if supervised and outlive is not None else _SERVER,
            {"storage": storage, **life, **limits, **durable},
            sockets,
            deadline,
            supervised=supervised and outlive is None,
            left_alone=outlive is not None,
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


def _storage(storage: str | None, engine: str | None) -> str | None:
    """Return the URL of the store in etcd, by its new name or its old one."""
    if storage is not None and engine is not None:
        raise ValueError("engine is the old name of storage: give one of them")
    return engine if storage is None else storage


def _durable(data_dir: str | os.PathLike[str] | None, recovery: Timeout | None, storage: str | None) -> dict[str, Any]:
    """Check what makes a server durable, and return it as settings."""
    if data_dir is None and storage is None and recovery is not None:
        raise ValueError("recovery is for a server with data_dir or storage: without one it forgets all sessions")
    if data_dir is not None and not os.fspath(data_dir):
        raise ValueError("data_dir is empty: name a directory")
    if data_dir is not None and storage is not None:
        raise ValueError("a server has its state in data_dir or in storage, not in both")
    durable: dict[str, Any] = {} if data_dir is None else {"data_dir": os.path.abspath(os.fspath(data_dir))}
    if recovery is not None:
        durable["recovery_s"] = seconds(recovery, "recovery")
        if durable["recovery_s"] > MAX_GRACE_S:
            raise ValueError(f"recovery must be at most {MAX_GRACE_S:g} s, got {durable['recovery_s']:g} s")
    return durable


def _stop(child: subprocess.Popen[bytes], owner_pid: int) -> None:
    """End the child; a fork of its owner must leave it alone."""
    if os.getpid() == owner_pid:
        stop(child)


def _close(supervisor: Supervisor, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        supervisor.close()
