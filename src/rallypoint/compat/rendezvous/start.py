"""Where the workers of a round start: the node of rank 0 says so in the store of the round, and the others read it.

Rank 0 keeps a server for the workers of all nodes, as long as its handler is there, and each round is behind a door of
its own (`server/doors.py`): PyTorch's workers use their store without a prefix, and would find the keys of the round
before. Rejected: a server for each round, which takes a tenth of a second more every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rallypoint import net
from rallypoint.compat.rendezvous.api import RendezvousStoreInfo
from rallypoint.compat.rendezvous.errors import RendezvousTimeoutError
from rallypoint.compat.rendezvous.host import Pace
from rallypoint.deadline import Deadline
from rallypoint.elastic import home
from rallypoint.spawn import Server
from rallypoint.store.base import Store
from rallypoint.store.prefix import PrefixStore

__all__ = ["Doorkeeper", "await_start", "scoped"]

DOOR_S = 60.0
"""How long this node's own server may take to open a door."""

SLICE_S = 1.0
"""How often one who waits for rank 0 sees whether the round still stands."""


class Doorkeeper:
    """The server that a node of rank 0 keeps for workers."""

    def __init__(self, address: str, run_id: str) -> None:
        self._address = address
        self._run_id = run_id
        self._server: Server | None = None

    def open(self, scope: int) -> int | None:
        """Return the port where the workers of a round find a store of their own; None where a later one has one."""
        if self._server is None or not self._server.running():
            self._server = Server(home.to_bind(self._address, True))
        host, port = net.parse_endpoint(self._server.url.partition("//")[2], self._server.port)
        return home.open_door(host, port, self._run_id, scope, DOOR_S)


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
