"""A rendezvous whose nodes know their ranks from the start, as in PyTorch's `…rendezvous.static_tcp_rendezvous`.

The nodes negotiate nothing: rank 0 starts the server at the endpoint, or shares a rallypoint server that already runs
there, and all others connect to it. Their keys have the run id as a prefix.
"""

from __future__ import annotations

from datetime import timedelta

from rallypoint.compat.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rallypoint.compat.rendezvous.endpoint import parse_rendezvous_endpoint
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.tcp import TCPStore

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

TIMEOUT_S = 600


class StaticTCPRendezvous(RendezvousHandler):
    """The handler of one node of a static rendezvous; all rounds share one store."""

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timedelta(seconds=timeout)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name under which this kind of rendezvous is registered."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers can use the launchers' store: always True."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the configured rank and world size, with a connected store. Raises the store's error."""
        if self._store is None:
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                is_master=self.rank == 0,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        start = RendezvousStoreInfo(self.master_addr, self._store.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._store), self.rank, self.world_size, start)

    def is_closed(self) -> bool:
        """Return False: a static rendezvous cannot be closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: a static rendezvous cannot be closed."""

    def num_nodes_waiting(self) -> int:
        """Return 0: all nodes are known from the start."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self.run_id

    def shutdown(self) -> bool:
        """Return True. The server runs until this process ends, because workers may still use it."""
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of node `rank`, an option, of `max_nodes`; the option `timeout` is in seconds (600)."""
    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError("a static rendezvous needs the option 'rank' (torchrun: --node-rank)")
    if not 0 <= rank < params.max_nodes:
        raise ValueError(
            f"the option 'rank' must be 0 to {params.max_nodes - 1} for {params.max_nodes} nodes, not {rank}"
        )
    if not (params.endpoint or "").strip():
        raise ValueError("a static rendezvous needs an endpoint (torchrun: --master-addr and --master-port)")
    host, port = parse_rendezvous_endpoint(params.endpoint, -1)
    if port == -1:
        raise ValueError(
            f"the endpoint {params.endpoint!r} of a static rendezvous needs a port (torchrun: --master-port)"
        )
    timeout_s = params.get_as_int("timeout", TIMEOUT_S)
    return StaticTCPRendezvous(
        host, port, rank, params.max_nodes, params.run_id, TIMEOUT_S if timeout_s is None else timeout_s
    )
