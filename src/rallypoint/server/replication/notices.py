"""Notices from a server of a replicated store to its native clients: the list of servers, and the loss of the quorum.

The list is also part of every welcome. A notice contains both facts, and is sent whenever one of them changes, to every
client that has said hello, welcomed or not: a greeting is committed like every change, so a client that connects while
etcd has no quorum waits for its welcome, and should know why.

Notices to thousands of clients are sent in slices. Each contains the facts at that moment, so the last one is current.

Rejected: answering every request with an error while there is no quorum. The quorum may be back before the client's
timeout, and the request is then executed as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

from rallypoint.core.records import ReplyStatus
from rallypoint.protocol.native import MAX_WHY, Notice, frame
from rallypoint.server.connections.multiplexed import MultiplexedConnection
from rallypoint.server.connections.native_connection import NativeConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rallypoint.server.connections.connection import ProtocolHandler

__all__ = ["Notices"]

SLICE = 256
"""Clients notified in one turn of the event loop."""


class Notices:
    """The facts that all clients of one server should know."""

    def __init__(self, handlers: Callable[[], list[ProtocolHandler]]) -> None:
        self.servers: list[str] = []
        """The addresses of all servers of a replicated store; otherwise empty."""

        self.trouble = ""
        """Why the server cannot answer at the moment; otherwise empty."""

        self._handlers = handlers  # returns those of all connections

    def set_servers(self, servers: list[str]) -> None:
        """Set the list of servers; notify clients if it changed."""
        if servers != self.servers:
            self.servers = servers
            self._tell_all()

    def set_trouble(self, trouble: str) -> None:
        """Set why the server cannot answer ("": it can); notify clients if that changed."""
        changed, self.trouble = bool(trouble) != bool(self.trouble), trouble[:MAX_WHY]
        if changed:
            self._tell_all()

    def tell_denied(self, who: str) -> None:
        """Notify clients of a host that failed to authenticate: a job may be waiting for it."""
        self._tell_all(who[:MAX_WHY])

    def frame(self, one_port: bool = False, denied: str = "") -> bytes:
        """Return the current notice; clients whose namespace is that of the port get no list of servers."""
        return frame((0, ReplyStatus.OK, Notice(None if one_port else self.servers, self.trouble, denied)))

    def _tell_all(self, denied: str = "") -> None:
        self._tell_some(iter(list(_native(self._handlers()))), denied)

    def _tell_some(self, left: Iterator[NativeConnection], denied: str) -> None:
        """Notify the next slice of clients, and the rest in later turns of the event loop."""
        notices, some = (self.frame(False, denied), self.frame(True, denied)), list(islice(left, SLICE))
        for connection in some:
            connection.notify(notices[connection.one_port])
        if len(some) == SLICE:
            asyncio.get_running_loop().call_soon(self._tell_some, left, denied)


def _native(handlers: list[ProtocolHandler]) -> Iterator[NativeConnection]:
    """Yield the handlers of all native clients, on connections of their own and on channels."""
    for handler in handlers:
        if isinstance(handler, NativeConnection):
            yield handler
        elif isinstance(handler, MultiplexedConnection):
            yield from handler.handlers
