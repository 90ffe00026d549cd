"""Where a worker stands in a round, and what it is told of that: torchrun's environment variables, and ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.elastic.rendezvous import Round
from rallypoint.errors import MembersMissing
from rallypoint.recipes.exchange import Exchange
from rallypoint.store.relay_address import VARIABLE as RELAY

__all__ = ["Told", "World", "environment", "gather"]

LOOK_S = 2.0
"""How often a node that waits to hear of the others looks whether the round is over."""


class World(NamedTuple):
    """One round as the workers of one node need to know it."""

    run_id: str
    url: str
    scope: int
    number: int
    reason: str
    """Why the round was formed."""

    members: Sequence[str]
    """The nodes, by rank."""

    node_rank: int
    workers: Sequence[int]
    """How many workers each node has, by its rank."""

    master: net.Endpoint
    """A store of this round alone that PyTorch's workers can use."""

    rank0: str
    """Where the node of rank 0 is reached."""

    relay: str
    """What RALLYPOINT_RELAY is for the workers of this node; empty where there is no relay."""

    role: str
    restarts: int
    max_restarts: int

    @property
    def node(self) -> str:
        """The name of this node."""
        return self.members[self.node_rank]

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.members)

    @property
    def size(self) -> int:
        """How many workers there are."""
        return sum(self.workers)

    @property
    def first(self) -> int:
        """The global rank of this node's first worker."""
        return sum(self.workers[: self.node_rank])

    @property
    def ranks(self) -> range:
        """The global ranks of this node's workers."""
        return range(self.first, self.first + self.workers[self.node_rank])

    def words(self) -> str:
        """Say where this node stands."""
        ranks = self.ranks
        own = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"node {self.node_rank} of {self.nodes}, {own} of {self.size}"


class Told(NamedTuple):
    """What a node tells the others of its round: its name, how many workers it has, and where the round's store is."""

    node: str
    workers: int
    port: int
    """The port that this node has opened for all, as rank 0; 0 where it has none."""

    def encode(self) -> bytes:
        """Return it as bytes."""
        return f"{self.workers} {self.port} {self.node}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Told:
        """Read what `encode` returned."""
        workers, port, node = data.decode().split(" ", 2)
        return cls(node, int(workers), int(port))


def gather(now: Round, own: Told, is_over: Callable[[float, Sequence[str]], bool], timeout_s: float) -> Sequence[Told]:
    """Return what every node of a round tells, by rank.

    `is_over` is asked every 2 s, with the time that this took so far and the ranks that are missing. Raises
    MembersMissing when one does not say so in time, or the round is over before it has.
    """
    if now.world_size == 1:
        return [own]
    deadline, exchange = Deadline(timeout_s), Exchange(now.store, "nodes", now.world_size)
    while True:
        try:
            told = exchange.all_gather(now.rank, own.encode(), min(deadline.remaining(), LOOK_S))
        except MembersMissing as error:
            if is_over(deadline.timeout_s - deadline.remaining(), error.missing) or deadline.expired():
                raise
            continue
        return [Told.decode(data) for data in told]


def environment(world: World, rank: int, extra: Mapping[str, str], error_file: str) -> dict[str, str]:
    """Return the whole environment of a worker."""
    here = world.workers[world.node_rank]
    told: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank - world.first,
        "WORLD_SIZE": world.size,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": world.node_rank,
        "GROUP_WORLD_SIZE": world.nodes,
        "ROLE_NAME": world.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world.size,
        "MASTER_ADDR": world.master.host,
        "MASTER_PORT": world.master.port,
        "TORCHELASTIC_RESTART_COUNT": world.restarts,
        "TORCHELASTIC_MAX_RESTARTS": world.max_restarts,
        "TORCHELASTIC_RUN_ID": world.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "RALLYPOINT_RANK0_ADDR": world.rank0,
        "RALLYPOINT_URL": world.url,
        "RALLYPOINT_RUN": world.run_id,
        "RALLYPOINT_SCOPE": world.scope,
        "RALLYPOINT_ROUND": world.number,
        "RALLYPOINT_NODE": world.node,
    }
    if world.relay:
        told[RELAY] = world.relay
    base = {**os.environ, **extra}
    base.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    base.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    if here > 1:
        base.setdefault("OMP_NUM_THREADS", "1")  # else every worker would take all cores
    return base | {name: str(value) for name, value in told.items()}
