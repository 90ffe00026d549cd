"""Where the workers of a round start: the node of rank 0 says so in the store of the round, and the others read it.

Rank 0 keeps a server for the workers of all nodes, a new one for each round: PyTorch's workers use their store without
a prefix, and would find the keys of the round before. It stays until the next round, or the end of the handler.
Rejected: one server, and a relay with a port for each round. That is a process more, to save a tenth of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rallypoint.compat.rendezvous.api import RendezvousStoreInfo
from rallypoint.compat.rendezvous.errors import RendezvousTimeoutError
from rallypoint.compat.rendezvous.host import Pace
from rallypoint.deadline import Deadline
from rallypoint.elastic import home
from rallypoint.spawn import Server
from rallypoint.store.base import Store
from rallypoint.store.prefix import PrefixStore

__all__ = ["RoundServer", "await_start", "scoped"]

SLICE_S = 1.0
"""How often one who waits for rank 0 sees whether the round still stands."""


class RoundServer:
    """The server that a node of rank 0 keeps for the workers of a round."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._scope = -1
        self._server: Server | None = None

    def open(self, scope: int) -> int | None:
        """Return the port of a round's server; None where a later round has one already."""
        if scope < self._scope:
            return None
        if scope > self._scope or self._server is None or not self._server.running():
            self.close()
            self._server, self._scope = Server(home.to_bind(self._address, True)), scope
        return self._server.port

    def close(self) -> None:
        """End the server of the last round."""
        if self._server is not None:
            self._server.close()
        self._server = None


def await_start(store: Any, deadline: Deadline, is_over: Callable[[], bool]) -> bool:
    """Wait until rank 0 has said where workers start; return False where the round is over before that."""
    pace, look = Pace(), Deadline(SLICE_S)
    while not store.check([RendezvousStoreInfo.MASTER_PORT_KEY]):
        if look.expired():
            if is_over():
                return False
            look = Deadline(SLICE_S)
        if deadline.expired():
            raise RendezvousTimeoutError(
                f"the node of rank 0 has not said within the timeout of {deadline.timeout_s:g} s where workers start"
            )
        pace.pause(1, min(deadline.remaining(), look.remaining()))
    return True


def scoped(prefix: str, store: Any) -> Any:
    """Return a view of a store, ours or PyTorch's, in which all keys have a prefix."""
    if isinstance(store, Store):
        return PrefixStore(prefix, store)
    return sys.modules["torch"].distributed.PrefixStore(prefix, store)
