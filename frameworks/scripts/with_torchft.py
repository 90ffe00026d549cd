"""Train replica groups with torchft: a group whose worker dies comes back, and takes its state from the others.

Each group is a job of its own under the launcher. The groups meet at the lighthouse that TORCHFT_LIGHTHOUSE names, and
each connects to the store of another. On one machine that is the store at MASTER_ADDR; groups on several machines start
one of their own with --own-store, for MASTER_ADDR of a job with one node is 127.0.0.1.
"""

import argparse
import hashlib
import os
import socket
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

TIMEOUT = timedelta(seconds=60)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--pause-alone", type=float, default=2.0, help="so that the other group is back before the end")
    parser.add_argument("--own-store", action="store_true")
    told = parser.parse_args()

    where = {}
    if told.own_store:  # for a group of one worker; several agree on a port with rallypoint.worker().free_port()
        store = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        where = {"store_addr": socket.gethostname(), "store_port": store.port}
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save():
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    group = ProcessGroupGloo(timeout=TIMEOUT)
    name = f"group{told.group}"
    manager = Manager(group, load, save, min_replica_size=1, replica_id=name, timeout=TIMEOUT, **where)
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    data = torch.Generator().manual_seed(told.group)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    begun = manager.current_step()
    while manager.current_step() < told.steps:
        time.sleep(told.pause if manager.num_participants() > 1 else told.pause_alone)
        x = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(parallel(x), x.sin().sum(dim=1, keepdim=True)).backward()
        optimizer.step()
        if restarts != "0" and not begun:
            begun = manager.current_step()
            print(f"group {told.group} resumes at {begun}", flush=True)
        print(f"group {told.group} of {manager.num_participants()}: step {manager.current_step()}", flush=True)

    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"result: step {manager.current_step()}, parameters {digest}", flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
