"""Where a worker stands in a round, and what it is told of that: torchrun's environment variables, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rallypoint import net

__all__ = ["World", "environment"]


class World(NamedTuple):
    """One round as the workers of one node need to know it."""

    run_id: str
    url: str
    scope: int
    number: int
    node: str
    node_rank: int
    nodes: int
    workers: Sequence[int]
    """How many workers each node has, by its rank."""

    master: net.Endpoint
    """A store of this round alone that PyTorch's workers can use."""

    role: str
    restarts: int
    max_restarts: int

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


def environment(world: World, rank: int, extra: Mapping[str, str], error_file: str) -> dict[str, str]:
    """Return the whole environment of a worker."""
    here = world.workers[world.node_rank]
    told = {
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
        "RALLYPOINT_URL": world.url,
        "RALLYPOINT_RUN": world.run_id,
        "RALLYPOINT_SCOPE": world.scope,
        "RALLYPOINT_ROUND": world.number,
        "RALLYPOINT_NODE": world.node,
    }
    base = {**os.environ, **extra}
    base.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if here > 1:
        base.setdefault("OMP_NUM_THREADS", "1")  # else every worker would take all cores
    return base | {name: str(value) for name, value in told.items()}
