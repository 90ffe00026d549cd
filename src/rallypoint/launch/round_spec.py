"""One round as the workers of a node see it, and their environment variables: torchrun's and ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rallypoint import net
from rallypoint.client.routing.relay_address import VARIABLE as RELAY
from rallypoint.deadline import Deadline
from rallypoint.errors import MembersMissing
from rallypoint.launch.signal_names import ENDING_SIGNALS
from rallypoint.recipes.exchange import Exchange
from rallypoint.recipes.rendezvous import Round
from rallypoint.security.credentials import RUN_TOKEN, Credentials

__all__ = ["SIGNALS", "NodeInfo", "RoundSpec", "environment", "exchange_node_info", "virtual_local_rank"]

SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""The variable with the signals that PyTorch handles, in workers that start further processes."""

LOOK_S = 2.0
"""How often a node that waits for the data of the others checks whether the round is over."""


class RoundSpec(NamedTuple):
    """One round, as seen from one node."""

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
    """Number of workers of each node, by node rank."""

    master: net.Endpoint
    """Address of the round's own store, which speaks PyTorch's protocol."""

    address: str
    """Address at which other nodes reach this one."""

    rank0: str
    """Address of the node of rank 0."""

    relay: str
    """Value of RALLYPOINT_RELAY for the workers of this node; empty without a relay."""

    credentials: Credentials
    """What workers need to use the store of the run."""

    role: str
    restarts: int
    max_restarts: int

    @property
    def node(self) -> str:
        """The name of this node."""
        return self.members[self.node_rank]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @property
    def size(self) -> int:
        """Number of workers on all nodes."""
        return sum(self.workers)

    @property
    def first(self) -> int:
        """The global rank of this node's first worker."""
        return sum(self.workers[: self.node_rank])

    @property
    def ranks(self) -> range:
        """The global ranks of this node's workers."""
        return range(self.first, self.first + self.workers[self.node_rank])

    def describe(self) -> str:
        """Return the ranks of this node and its workers as text."""
        ranks = self.ranks
        own = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"node {self.node_rank} of {self.nodes}, {own} of {self.size}"


class NodeInfo(NamedTuple):
    """What a node announces to the others of its round."""

    node: str
    workers: int
    port: int
    """The port of the round's store, opened by rank 0; 0 on other nodes."""

    def encode(self) -> bytes:
        """Return the wire format."""
        return f"{self.workers} {self.port} {self.node}".encode()

    @classmethod
    def decode(cls, data: bytes) -> NodeInfo:
        """Parse the wire format."""
        workers, port, node = data.decode().split(" ", 2)
        return cls(node, int(workers), int(port))


def exchange_node_info(
    joined: Round, own: NodeInfo, is_over: Callable[[float, Sequence[str]], bool], timeout_s: float
) -> Sequence[NodeInfo]:
    """Announce `own`, and return the announcements of all nodes of a round, by rank.

    `is_over` is called every 2 s with the time elapsed and the missing ranks. Raises MembersMissing if a node is
    missing at the timeout, or when the round is over.
    """
    if joined.world_size == 1:
        return [own]
    deadline, exchange = Deadline(timeout_s), Exchange(joined.store, "nodes", joined.world_size)
    while True:
        try:
            replies = exchange.all_gather(joined.rank, own.encode(), min(deadline.remaining(), LOOK_S))
        except MembersMissing as error:
            if is_over(deadline.timeout_s - deadline.remaining(), error.missing) or deadline.expired():
                raise
            continue
        return [NodeInfo.decode(data) for data in replies]


def environment(spec: RoundSpec, rank: int, extra: Mapping[str, str], error_file: str) -> dict[str, str]:
    """Return the complete environment of a worker."""
    here = spec.workers[spec.node_rank]
    variables: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank - spec.first,
        "WORLD_SIZE": spec.size,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": spec.node_rank,
        "GROUP_WORLD_SIZE": spec.nodes,
        "ROLE_NAME": spec.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": spec.size,
        "MASTER_ADDR": spec.master.host,
        "MASTER_PORT": spec.master.port,
        "TORCHELASTIC_RESTART_COUNT": spec.restarts,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "RALLYPOINT_NODE_ADDR": spec.address,
        "RALLYPOINT_RANK0_ADDR": spec.rank0,
        "RALLYPOINT_URL": spec.url,
        "RALLYPOINT_RUN": spec.run_id,
        "RALLYPOINT_SCOPE": spec.scope,
        "RALLYPOINT_ROUND": spec.number,
        "RALLYPOINT_NODE": spec.node,
    }
    if spec.relay:
        variables[RELAY] = spec.relay
    base = {**os.environ, **extra, RUN_TOKEN: spec.credentials.run_token}
    base.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    base.setdefault(SIGNALS, ",".join(ENDING_SIGNALS))
    if here > 1:
        base.setdefault("OMP_NUM_THREADS", "1")  # by default every worker would use all cores
    return base | {name: str(value) for name, value in variables.items()}


def virtual_local_rank(local_rank: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that sees its own GPU only, as device 0; raise ValueError if there is none."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    devices = None if visible is None else visible.split(",")
    if devices is not None and local_rank >= len(devices):
        raise ValueError(f"there is no device for local rank {local_rank} in CUDA_VISIBLE_DEVICES={visible}")
    device = str(local_rank) if devices is None else devices[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}
