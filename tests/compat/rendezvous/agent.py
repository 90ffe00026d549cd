"""One of torch's elastic agents, with our dynamic handler; prints what its worker returns, by rank.

agent.py ENDPOINT
"""

from __future__ import annotations

import json
import sys
from typing import Any


def add_up() -> list[int]:
    """Run as a worker: return the rank, the world size, and the sum over all ranks of rank + 1."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    answer = [dist.get_rank(), dist.get_world_size(), int(total)]
    dist.destroy_process_group()
    return answer


def create(params: Any) -> Any:
    """Create the handler as a package with its own backend would."""
    from rallypoint.compat.rendezvous import C10dRendezvousBackend, create_backend, create_handler

    class Named(C10dRendezvousBackend):
        name = "ours"

    _, store = create_backend(params)
    return create_handler(store, Named(store, params.run_id), params)


def main(endpoint: str) -> None:
    """Run one agent of two."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    rendezvous_handler_registry.register("ours", create)
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="run",
        rdzv_backend="ours",
        rdzv_endpoint=endpoint,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
        start_method="spawn",
    )
    print(json.dumps(launch_agent(config, add_up, [])))


if __name__ == "__main__":
    main(sys.argv[1])
