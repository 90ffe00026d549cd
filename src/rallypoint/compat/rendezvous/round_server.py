"""The workers' store of a round: rank 0's node publishes its address in the round's store, and the others read it.

Rank 0's node runs a server for the workers of all nodes, a new one for each round: PyTorch's workers use their store
without a prefix, and would find the keys of the last round. It runs until the next round, or the end of the handler.
Rejected: one server, and a relay with a port for each round. That is one more process, to save a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.compat.rendezvous.api import RendezvousStoreInfo
from rallypoint.compat.rendezvous.backend_host import PollBackoff
from rallypoint.compat.rendezvous.errors import RendezvousTimeoutError
from rallypoint.deadline import Deadline
from rallypoint.launch.stores import run_server
from rallypoint.launch.stores.round_port import RoundOver
from rallypoint.process.spawn import Server

__all__ = ["RoundServer", "await_start"]

SLICE_S = 1.0
"""How often a node that waits for rank 0 checks whether the round is over."""


class RoundServer:
    """The server that rank 0's node runs for the workers of a round."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._scope = -1
        self._server: Server | None = None

    def open(self, scope: int) -> int:
        """Return the port of a round's server. Raises RoundOver if a later round already has one."""
        if scope < self._scope:
            raise RoundOver("a later round has the workers' store")
        if scope > self._scope or self._server is None or not self._server.running():
            self.close()
            self._server, self._scope = Server(run_server.to_bind(self._address, True)), scope
        return self._server.port

    def close(self) -> None:
        """Stop the server of the last round."""
        if self._server is not None:
            self._server.close()
        self._server = None


def await_start(store: Any, deadline: Deadline, is_over: Callable[[], bool]) -> None:
    """Wait until rank 0 has published the workers' store. Raises RoundOver if the round is over before that.

    The store may be PyTorch's: a blocking wait there would hold up the keep-alive, so this polls.
    """
    pace, look = PollBackoff(), Deadline(SLICE_S)
    while not store.check([RendezvousStoreInfo.MASTER_PORT_KEY]):
        if look.expired():
            if is_over():
                raise RoundOver("rank 0 has not published the workers' store")
            look = Deadline(SLICE_S)
        if deadline.expired():
            raise RendezvousTimeoutError(
                f"rank 0 has not published the workers' store within the timeout of {deadline.timeout_s:g} s"
            )
        pace.pause(1, min(deadline.remaining(), look.remaining()))
