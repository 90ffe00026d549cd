"""`Relay`: a relay as a child process, for programs that run their own, as the launcher does on every node.

It shares everything but its settings with `Server` (`process/spawn.py`): this process binds the sockets, and the child
exits with it. A relay that dies is restarted on the same sockets. Its URL stays the same and native sessions resume;
PyTorch clients lose their connections and fail as if their store had died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from rallypoint import net, unix_socket
from rallypoint.client.routing.relay_address import VARIABLE
from rallypoint.deadline import Deadline, Timeout
from rallypoint.process.spawn import ChildServer
from rallypoint.relay.settings import upstream_store
from rallypoint.security.credentials import Credentials

__all__ = ["Relay"]


class Relay(ChildServer):
    """A relay in a child process that runs until `close` or the end of this process, and is restarted if it dies.

    `upstream` is the URL of the server, `tcp://host:port`, or of a store in etcd. The relay listens on `host` and
    `port` (0: a free port; see `url` and `port`), and with `unix` also on that path; with `host` None only there. It is
    ready once it listens; `statistics` says whether it is connected. Processes with `environ` in their environment use
    it for their sessions. It has the `credentials` of the server and demands them of its clients, as a server does; by
    default they are those of the environment.
    Raises AddressTaken if it cannot listen, ServerFailed if the child does not start.
    """

    def __init__(
        self,
        upstream: str,
        host: str | Sequence[str] | None = "127.0.0.1",
        port: int = 0,
        *,
        unix: str | os.PathLike[str] | None = None,
        credentials: Credentials | None = None,
        start_timeout: Timeout = 30.0,
    ) -> None:
        deadline = Deadline(start_timeout)
        self._store = upstream_store(upstream)
        self.upstream = self._store.label.removeprefix("tcps://").removeprefix("tcp://")
        """The server's addresses, or the name of the store in etcd."""

        self.unix = None if unix is None else unix_socket.checked(os.fspath(unix))
        """The path of its Unix socket, or None."""

        if host is None and self.unix is None:
            raise ValueError("a relay needs a host, a unix path, or both to listen on")
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
            super().__init__("relay.process", settings, sockets, deadline, credentials, supervised=True)
        except BaseException:
            self._remove()
            raise

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables with which a process uses this relay for its sessions."""
        place = self.url if self.unix is None else unix_socket.SCHEME + self.unix
        return {VARIABLE: self._store.relay_address(place).variable}

    def close(self) -> None:
        """Stop the relay, and free its port and its path; safe to call twice."""
        super().close()
        self._remove()

    def _remove(self) -> None:
        """Remove the file of the Unix socket, which a killed relay leaves behind."""
        if self.unix is not None and self._file is not None:
            unix_socket.remove(self.unix, self._file)
