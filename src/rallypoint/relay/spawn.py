"""`Relay`: a relay as a child process, for a program that wants one of its own, as the launcher does on every node.

It shares with `Server` all but its settings (`spawn.py`): this process binds the sockets, and the child ends with it. A
relay that dies is followed by another on the same sockets: its URL stays, sessions of ours go on, and clients of
PyTorch, whose connections it took with it, fail as if their store had died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from rallypoint import net, unix_socket
from rallypoint.deadline import Deadline, Timeout
from rallypoint.relay.settings import upstream_store
from rallypoint.spawn import ChildServer
from rallypoint.store.relay_address import VARIABLE

__all__ = ["Relay"]


class Relay(ChildServer):
    """A relay in a child process that lives until `close`, or until this process ends, and is started again if it dies.

    `upstream` is the URL of the server, `tcp://host:port`, or of a store in etcd. It listens on `host` and `port`
    (0: a free one; see `url` and `port`) and, with `unix`, on that path, too; with `host` None there alone. It is up
    once it listens; `statistics` says whether it is connected. Processes with `environ` in their environment use it for
    their sessions.
    Raises AddressTaken where it cannot listen, ServerFailed where the child does not come up.
    """

    def __init__(
        self,
        upstream: str,
        host: str | Sequence[str] | None = "127.0.0.1",
        port: int = 0,
        *,
        unix: str | os.PathLike[str] | None = None,
        start_timeout: Timeout = 30.0,
    ) -> None:
        deadline = Deadline(start_timeout)
        self._store = upstream_store(upstream)
        self.upstream = self._store.label.removeprefix("tcp://")
        """The server's addresses, or the name of the store in etcd."""

        self.unix = None if unix is None else unix_socket.checked(os.fspath(unix))
        """The path of its Unix socket, or None."""

        if host is None and self.unix is None:
            raise ValueError("a relay listens on a host, on a unix path, or on both")
        sockets = [] if host is None else net.listen([host] if isinstance(host, str) else host, port)
        with contextlib.ExitStack() as undo:
            for sock in sockets:
                undo.enter_context(sock)
            if self.unix is not None:
                sockets.append(unix_socket.listen(self.unix))
            undo.pop_all()
        self._file = None if self.unix is None else unix_socket.where(self.unix)
        settings = {"upstream": upstream, "unix": self.unix, "parent_pid": os.getpid()}
        try:
            super().__init__("relay.process", settings, sockets, deadline, supervised=True)
        except BaseException:
            self._remove()
            raise

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs in its environment to use this relay for its sessions with the server."""
        place = self.url if self.unix is None else unix_socket.SCHEME + self.unix
        return {VARIABLE: self._store.relay_address(place).variable}

    def close(self) -> None:
        """End the relay, and free its port and its path; harmless when it is closed already."""
        super().close()
        self._remove()

    def _remove(self) -> None:
        """Remove the file of the Unix socket, which a relay that was killed has left."""
        if self.unix is not None and self._file is not None:
            unix_socket.remove(self.unix, self._file)
