"""What a server of a replicated store tells its native clients unasked: which servers there are, and whether it has
a quorum.

The first is part of every welcome, too. Both are said again, together, whenever one of them changes, to whoever has
said hello, whether it was welcomed yet or not: a greeting is committed like everything else, so a client that comes
while etcd has no quorum waits for its welcome, and should know why.

Thousands are told a slice at a time. What each is told is what is so at that moment, so nothing old comes last.

Rejected: to answer every request with an error while there is no quorum. It may be back before the client's own time is
over, and then the request is carried out as if nothing had been.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

from rallypoint.core.records import Status
from rallypoint.protocol.native import MAX_WHY, Notice, frame
from rallypoint.server.multiplexed import MultiplexedConnection
from rallypoint.server.native_connection import NativeConnection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rallypoint.server.server import StoreServer

__all__ = ["Notices"]

SLICE = 256
"""How many clients are told in one turn of the event loop."""


class Notices:
    """What all clients of one server are to know."""

    def __init__(self, server: StoreServer) -> None:
        self.servers: list[str] = []
        """The addresses of all servers of the store; none where this one is alone by nature."""

        self.trouble = ""
        """Why nothing can be answered at the moment, if so."""

        self._server = server

    def set_servers(self, servers: list[str]) -> None:
        """Have clients told which servers there are, if that has changed."""
        if servers != self.servers:
            self.servers = servers
            self._tell_all()

    def set_trouble(self, trouble: str) -> None:
        """Have clients told that nothing can be answered, or ("") that all is well again, if that has changed."""
        changed, self.trouble = bool(trouble) != bool(self.trouble), trouble[:MAX_WHY]
        if changed:
            self._tell_all()

    def frame(self, one_port: bool = False) -> bytes:
        """Return the notice of what is so now; to clients of one port other servers are of no use."""
        return frame((0, Status.OK, Notice(None if one_port else self.servers, self.trouble)))

    def _tell_all(self) -> None:
        self._tell_some(iter(list(_native(self._server))))

    def _tell_some(self, left: Iterator[NativeConnection]) -> None:
        """Tell the next of those who are connected, and the others later."""
        notices, some = (self.frame(), self.frame(one_port=True)), list(islice(left, SLICE))
        for connection in some:
            connection.notify(notices[connection.one_port])
        if len(some) == SLICE:
            asyncio.get_running_loop().call_soon(self._tell_some, left)


def _native(server: StoreServer) -> Iterator[NativeConnection]:
    """Yield the handlers of all native clients, by connections of their own and by channels."""
    for handler in server.handlers():
        if isinstance(handler, NativeConnection):
            yield handler
        elif isinstance(handler, MultiplexedConnection):
            yield from handler.handlers
