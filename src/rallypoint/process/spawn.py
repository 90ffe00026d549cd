"""`Server`: a server as a child process of the program that uses it; `ChildServer`: the part it shares with `Relay`.

The parent binds the sockets and passes them on: a port in use is an error in the parent, the port is known at once, and
no race for a port number arises. The child runs in its own process session (Ctrl-C in the terminal does not reach it)
and exits when the parent does, even if the parent is killed. It is started by module name, so that stores can start a
server without importing it.

A supervised child (a relay, or a server with a data directory) is restarted when it dies, by a thread here, on the same
sockets (`supervisor.py` says why they stay open). If a server with a data directory outlives this process, the child is
a supervisor process (`process/supervised.py`), and the server is its child: if the supervisor is killed, the server
exits too, and the next process that needs one starts it again.

Rejected: a thread in this process; a rank busy in Python would stall every client.
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
from rallypoint.core.limits import LEAST_BYTES, MAX_GRACE_S
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import ServerFailed
from rallypoint.process.child import CREDENTIALS, start
from rallypoint.process.supervisor import Starter, Supervisor, await_ready, stop
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import Credentials
from rallypoint.security.http_client import open_http

__all__ = ["ChildServer", "Server"]

STATISTICS_S = 30.0
"""How long a server may take to return its statistics."""

_outliving: list[subprocess.Popen[bytes]] = []
"""Children that outlive this process. Kept, because Python warns when a running child is garbage-collected."""

_Self = TypeVar("_Self", bound="ChildServer")

_SERVER, _SUPERVISOR = "server.process", "process.supervised"


class ChildServer:
    """A child process that serves on the given sockets, until `close` or the end of this process.

    `what` is the module to run. A `supervised` child is restarted when it dies, until it is closed or told to exit.
    With `outlives`, it outlives this process. The sockets are closed here at the end. Without `credentials` it uses
    those of the environment. Raises ServerFailed if the child does not start, and ValueError for unusable credentials.
    """

    def __init__(
        self,
        what: str,
        settings: dict[str, Any],
        sockets: Sequence[socket.socket],
        deadline: Deadline,
        credentials: Credentials | None = None,
        *,
        supervised: bool = False,
        outlives: bool = False,
    ) -> None:
        self._supervisor: Supervisor | None = None
        try:
            self._security = ClientSecurity(credentials)
            secrets = self._security.credentials.environ()
            settings = {**settings, CREDENTIALS: secrets, "fds": [sock.fileno() for sock in sockets]}
            self.port: int = 0 if sockets[0].family == socket.AF_UNIX else sockets[0].getsockname()[1]
            self._first, ready = start(settings, quiet=outlives, what=what)
            self._stop = functools.partial(_stop, self._first, os.getpid())
            if outlives:
                _outliving.append(self._first)
            else:
                weakref.finalize(self, self._stop)
            hint = "" if outlives else "; it says more on this process's standard error"
            self.url, why = await_ready(self._first, ready, deadline, hint)
            if not self.url:
                raise ServerFailed(pid=self._first.pid, why=why)
            if supervised:
                self._supervise(functools.partial(start, settings, quiet=False, what=what), sockets)
        finally:
            for sock in sockets if self._supervisor is None else ():
                sock.close()

    def _supervise(self, starter: Starter, sockets: Sequence[socket.socket]) -> None:
        """Restart the child when it dies, from now on."""
        self._supervisor = Supervisor(self._first, starter, sockets)
        self._stop = functools.partial(_close, self._supervisor, os.getpid())
        weakref.finalize(self, self._stop)
        threading.Thread(target=self._supervisor.run, name=f"supervisor of {self.url}", daemon=True).start()

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        return self._first if self._supervisor is None else self._supervisor.child

    @property
    def pid(self) -> int:
        """The child's process id; during a restart, that of the last child."""
        return self._child.pid

    @property
    def restarts(self) -> int:
        """How many times the child was restarted."""
        return 0 if self._supervisor is None else self._supervisor.restarts

    def running(self) -> bool:
        """Return whether the child runs or is about to be restarted."""
        return self._child.poll() is None if self._supervisor is None else self._supervisor.running()

    def wait(self, timeout: Timeout | None = None) -> int | None:
        """Wait until the server has ended for good; return its exit code, negative for a signal.

        Returns None at the timeout. A child that will be restarted has not ended for good.
        """
        within_s = None if timeout is None else _finite(timeout, "timeout")
        if self._supervisor is not None:
            return self._supervisor.wait(within_s)
        try:
            return self._first.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def statistics(self) -> dict[str, Any]:
        """Return the server's statistics: counts, connections, sessions and pending waits."""
        deadline = Deadline(STATISTICS_S)
        with self._connect(deadline) as sock:
            connection = open_http(sock, self._security, deadline)
            connection.request("GET", "/statistics")
            facts: dict[str, Any] = json.load(connection.getresponse())
            return facts

    def _connect(self, deadline: Deadline) -> socket.socket:
        if self.url.startswith(unix_socket.SCHEME):
            return unix_socket.connect(self.url.removeprefix(unix_socket.SCHEME), deadline)
        return net.connect(*net.parse_endpoint(self.url.partition("//")[2], self.port), deadline, once=True)

    def kill(self, pid: int) -> None:
        """Kill a hung child, if `pid` is still its process id; a supervised child is then restarted."""
        child = self._child
        if child.pid == pid:
            child.kill()

    def close(self) -> None:
        """Stop the server and free its port; a second call does nothing."""
        self._stop()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url} pid {self.pid}{'' if self.running() else ' ended'}>"


class Server(ChildServer):
    """A store server in a child process that lives until `close`, or until this process ends.

    With `storage`, the URL of a store in etcd, it is one of the servers of that store: one is the leader, the others
    are standbys (docs/etcd.md). `engine` is the old name of `storage`.

    `port` 0 picks a free port; `host` may be a list. The attributes `url` and `port` give the address. `max_memory`
    limits the memory that clients can use (4 GiB), `max_connection_memory` the largest request and reply (256 MiB),
    both in bytes. `grace` is how long a client's session outlives its connection (2 s). Use it as a context manager.
    With `outlive` it outlives this process, and exits after that time without a connection.

    With `data_dir` it stores its data in that directory, and is restarted when it dies, until it is closed or a signal
    tells it to exit: clients continue where they were. `recovery` is how long sessions survive while the server is down
    (60 s). With `outlive` as well, `pid` is that of the supervisor process.

    `credentials` are its token and its certificate, which clients must know or accept (docs/security.md); by default
    those of the environment.

    Raises AddressTaken if it cannot listen, ServerFailed if the child does not start.
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
        credentials: Credentials | None = None,
        start_timeout: Timeout = 30.0,
    ) -> None:
        deadline = Deadline(start_timeout)
        limits = _limits(grace, max_memory=max_memory, max_connection_memory=max_connection_memory)
        storage = _storage(storage, engine)
        durable = _durable(data_dir, recovery, storage)
        supervised = data_dir is not None
        lifetime = {"parent_pid": os.getpid()} if outlive is None else {"alone_s": _finite(outlive, "outlive")}
        sockets = [net.adopt(fd)] if fd is not None else net.listen([host] if isinstance(host, str) else host, port)
        super().__init__(
            _SUPERVISOR if supervised and outlive is not None else _SERVER,
            {"storage": storage, **lifetime, **limits, **durable},
            sockets,
            deadline,
            credentials,
            supervised=supervised and outlive is None,
            outlives=outlive is not None,
        )


def _limits(grace: Timeout | None, **sizes: int | None) -> dict[str, Any]:
    """Validate the limits and return them as settings."""
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
        raise ValueError(f"{name} must be finite; for a permanent server use `rallypoint serve`")
    return found_s


def _storage(storage: str | None, engine: str | None) -> str | None:
    """Return the URL of the store in etcd, given as `storage` or by its old name `engine`."""
    if storage is not None and engine is not None:
        raise ValueError("engine is the old name of storage: give only one of them")
    return engine if storage is None else storage


def _durable(data_dir: str | os.PathLike[str] | None, recovery: Timeout | None, storage: str | None) -> dict[str, Any]:
    """Validate the options of a durable server and return them as settings."""
    if data_dir is None and storage is None and recovery is not None:
        raise ValueError("recovery needs data_dir or storage: without one a restarted server has no sessions")
    if data_dir is not None and not os.fspath(data_dir):
        raise ValueError("data_dir is empty: name a directory")
    if data_dir is not None and storage is not None:
        raise ValueError("give data_dir or storage, not both")
    durable: dict[str, Any] = {} if data_dir is None else {"data_dir": os.path.abspath(os.fspath(data_dir))}
    if recovery is not None:
        durable["recovery_s"] = seconds(recovery, "recovery")
        if durable["recovery_s"] > MAX_GRACE_S:
            raise ValueError(f"recovery must be at most {MAX_GRACE_S:g} s, got {durable['recovery_s']:g} s")
    return durable


def _stop(child: subprocess.Popen[bytes], owner_pid: int) -> None:
    """Stop the child, unless this process is a fork of its owner."""
    if os.getpid() == owner_pid:
        stop(child)


def _close(supervisor: Supervisor, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        supervisor.close()
