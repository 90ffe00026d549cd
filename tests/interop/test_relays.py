"""PyTorch through a relay on each of two nodes, while links to the server are cut and the server is killed.

The nodes are network namespaces. Workers use the store in every step: they count, hand each other keys, meet at
barriers, and open new groups, with PyTorch's client and ours. They are the same processes all the time, none of their
calls fails, and at the end every count is exact and the weights are those of an undisturbed run.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rallypoint

from .relayed_nodes import RELAY_PORT, RelayedNodes, become_worker, relayed_nodes, stop_asked, tell_progress
from .relayed_program import AMPLE, WORLD, check_stores, train, use_stores
from .torch_processes import TorchProcesses

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("netns")]

KILLS, CUTS = 3, 4


def open_stores(upstream: str) -> tuple[Any, rallypoint.Store]:
    dist = importlib.import_module("torch.distributed")

    return dist.TCPStore("127.0.0.1", RELAY_PORT, timeout=AMPLE), rallypoint.connect(upstream, timeout=AMPLE)


def train_here(namespace: str, upstream: str, place: str, rank: int) -> tuple[int, bool, int]:
    """Train by DDP until asked to stop; return the steps, whether the result is right, and the pid."""
    dist = importlib.import_module("torch.distributed")

    become_worker(namespace, upstream)
    torchs, ours = open_stores(upstream)
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=WORLD, timeout=AMPLE)
    return *train(place, rank, torchs, ours), os.getpid()


def call_here(namespace: str, upstream: str, place: str, rank: int) -> tuple[int, bool, int]:
    """Call each other until asked to stop; every step opens RPC again, whose workers find each other in the store."""
    import torch

    rpc = importlib.import_module("torch.distributed.rpc")

    become_worker(namespace, upstream)
    torchs, ours = open_stores(upstream)
    step, stop, right = 0, False, True
    while not stop:
        step += 1
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=AMPLE.total_seconds(), num_worker_threads=2)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD, rpc_backend_options=options)
        answer = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), step))
        right = right and answer.tolist() == [step + 1.0] * 2
        use_stores(torchs, ours, step, rank)
        rpc.shutdown()
        if rank == 0:
            torchs.set(f"stop/{step}", "yes" if stop_asked(place) else "no")
            tell_progress(place, step)
        stop = torchs.get(f"stop/{step}") == b"yes"
    check_stores(torchs, ours, step)
    torchs.barrier("over", WORLD)
    return step, right, os.getpid()


# Faults


def kill_the_server(nodes: RelayedNodes, go_on: Callable[[], None]) -> None:
    for _ in range(KILLS):
        nodes.restart_server()
        go_on()


def cut_the_links(nodes: RelayedNodes, go_on: Callable[[], None]) -> None:
    for number in range(CUTS):
        nodes.cut(nodes.nodes[number % 2])
        go_on()
    for node in nodes.nodes:
        assert nodes.statistics(node)["upstream_connections"] > CUTS // 2, "the relay never noticed a cut"


@pytest.mark.parametrize("fault", [kill_the_server, cut_the_links])
@pytest.mark.parametrize("program", [train_here, call_here])
def test_workers_continue_in_the_same_processes(
    torch_processes: TorchProcesses, tmp_path: Path, program: Any, fault: Any
) -> None:
    with relayed_nodes(tmp_path) as nodes:
        members = [torch_processes.start(program, *nodes.arguments(rank)) for rank in range(WORLD)]
        nodes.work_on(members)
        fault(nodes, lambda: nodes.work_on(members))
        nodes.stop()
        (steps, *ended), (steps_too, *ended_too) = [member.result() for member in members]
        assert steps == steps_too
        assert [ended, ended_too] == [[True, member.pid] for member in members], "the same processes, and right results"
