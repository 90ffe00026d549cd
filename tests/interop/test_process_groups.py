"""PyTorch's process groups, DDP, RPC and torchrun on our store, in programs that do not use rallypoint themselves.

By default, rank 0 of a job starts the store's server, at the address that all ranks were given. With
TORCHELASTIC_USE_AGENT_STORE=True (exactly so) in its environment it connects to an existing server, as all other ranks
do, for the init methods env:// and tcp://. torchrun sets it for its workers; here it selects a rallypoint server.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rallypoint

from .operations import AMPLE
from .torch_processes import AMPLE_S, TorchProcesses

pytestmark = pytest.mark.needs("torch")

PROGRAM = Path(__file__).with_name("program.py")
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def keys_on(server: rallypoint.Server) -> set[str]:
    return set(rallypoint.TCPStore("127.0.0.1", server.port).list_keys())


def gloo_keys(prefix: str, group: str = "0") -> set[str]:
    """The keys of the addresses of the two ranks of a group."""
    return {f"{prefix}{group}//cpu//0/{rank}" for rank in range(2)}


# Unchanged programs


def train_alone() -> list[float]:
    from .program import train

    return train(0, 1)


def outputs(processes: list[subprocess.Popen[str]]) -> list[Any]:
    """Wait for the processes, and return what each printed."""
    try:
        printed = [process.communicate(timeout=AMPLE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, complaint) in zip(processes, printed, strict=True):
        assert process.returncode == 0, complaint
    return [ast.literal_eval(line) for out, _ in printed for line in out.splitlines()]


def surroundings(server_port: int, rank: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server_port)}
    return {**AGENT_STORE, **place, "RANK": str(rank), "WORLD_SIZE": "2"}


def test_an_unchanged_program_trains_over_our_server(
    torch_processes: TorchProcesses, server: rallypoint.Server
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**os.environ, **surroundings(server.port, rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    expected = torch_processes.start(train_alone).result()
    assert sorted(outputs(ranks)) == [(rank, 3.0, expected) for rank in range(2)]
    assert gloo_keys("default_pg/") <= keys_on(server)


def run_the_program(port: int, rank: int) -> tuple[int, float, list[float]]:
    from .program import run

    os.environ.update(surroundings(port, rank))
    return run(f"tcp://127.0.0.1:{port}")


def test_the_same_with_an_address_in_the_program(torch_processes: TorchProcesses, server: rallypoint.Server) -> None:
    expected = torch_processes.start(train_alone).result()
    ranks = torch_processes.run(run_the_program, [(server.port, rank) for rank in range(2)])
    assert ranks == [(rank, 3.0, expected) for rank in range(2)]
    assert gloo_keys("default_pg/") <= keys_on(server)


def test_torchrun_meets_on_our_server(torch_processes: TorchProcesses, server: rallypoint.Server) -> None:
    options = f"--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{server.port} --rdzv-id=j7"
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options.split(), str(PROGRAM)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    expected = torch_processes.start(train_alone).result()
    assert sorted(outputs([torchrun])) == [(rank, 3.0, expected) for rank in range(2)]
    assert {"torch.rendezvous.j7", "torch.rendezvous.j7.0/MASTER_PORT"} <= keys_on(server)


# Ways to open a process group


def open_group(port: int, how: str, rank: int) -> None:
    """Open the default group of two ranks."""
    dist = importlib.import_module("torch.distributed")

    if how in ("env", "tcp"):
        os.environ.update(surroundings(port, rank))
        method = "env://" if how == "env" else f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=AMPLE)
        return
    if how == "client":
        store = dist.TCPStore("127.0.0.1", port, timeout=AMPLE)
    else:
        from rallypoint.torch import TorchStore

        store = TorchStore(rallypoint.connect(how, timeout=AMPLE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def use_groups(port: int, how: str, rank: int) -> list[Any]:
    import torch

    dist = importlib.import_module("torch.distributed")

    open_group(port, how, rank)
    values = torch.tensor([rank + 1.0, 10.0])
    dist.all_reduce(values)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    other = dist.new_group([0, 1])
    dist.broadcast(values, src=1, group=other)
    dist.destroy_process_group(other)
    dist.barrier()
    dist.destroy_process_group()
    return [values.tolist(), gathered]


USED = [[3.0, 20.0], [{"rank": 0}, {"rank": 1}]]


@pytest.mark.parametrize(("how", "prefix"), [("env", "default_pg/"), ("tcp", "default_pg/"), ("client", "")])
def test_a_process_group_works_on_our_server(
    torch_processes: TorchProcesses, server: rallypoint.Server, how: str, prefix: str
) -> None:
    assert torch_processes.run(use_groups, [(server.port, how, rank) for rank in range(2)]) == [USED] * 2
    assert gloo_keys(prefix) | gloo_keys(f"{prefix}0//", "1") <= keys_on(server)


def test_a_process_group_works_over_the_adapter(torch_processes: TorchProcesses, server: rallypoint.Server) -> None:
    url = f"{server.url}/job-7"
    assert torch_processes.run(use_groups, [(0, url, rank) for rank in range(2)]) == [USED] * 2
    assert gloo_keys("job-7/") | gloo_keys("job-7/0//", "1") == keys_on(server)


def test_a_process_group_works_over_the_adapter_and_a_file(torch_processes: TorchProcesses, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run-7"
    watcher = rallypoint.FileStore(tmp_path / "run-7")
    assert torch_processes.run(use_groups, [(0, url, rank) for rank in range(2)]) == [USED] * 2
    assert gloo_keys("") | gloo_keys("0//", "1") == set(watcher.list_keys())


def lose_the_race_for_the_port(port: int) -> str:
    """Run rank 0 without the variable."""
    dist = importlib.import_module("torch.distributed")

    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=AMPLE)
    except dist.DistNetworkError as error:
        return str(error)
    return "it connected"


def test_without_the_variable_rank_0_wants_a_server_of_its_own(
    torch_processes: TorchProcesses, server: rallypoint.Server
) -> None:
    assert "EADDRINUSE" in torch_processes.start(lose_the_race_for_the_port, server.port).result()
    assert keys_on(server) == set()


def wait_for_a_rank_that_never_comes(url: str) -> list[bool]:
    dist = importlib.import_module("torch.distributed")

    from rallypoint.torch import TorchStore

    try:
        store = TorchStore(rallypoint.connect(url, timeout=1))
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=AMPLE / 60)
    except Exception as error:
        return [isinstance(error, kind) for kind in (dist.DistStoreError, rallypoint.StoreTimeout, TimeoutError)]
    return []


def test_a_missing_rank_is_a_timeout_of_torch_and_of_ours(
    torch_processes: TorchProcesses, server: rallypoint.Server
) -> None:
    assert torch_processes.start(wait_for_a_rank_that_never_comes, server.url).result() == [True, True, True]
    assert keys_on(server) == {"0//cpu//0/0"}


def be_interrupted(url: str) -> str:
    dist = importlib.import_module("torch.distributed")

    from rallypoint.torch import TorchStore

    try:
        dist.init_process_group("gloo", store=TorchStore(rallypoint.connect(url)), rank=0, world_size=2, timeout=AMPLE)
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def test_ctrl_c_ends_a_group_that_waits(server: rallypoint.Server, interrupted: Callable[..., Any]) -> None:
    assert interrupted(be_interrupted, server.url) == "interrupted"


# RPC


def call_each_other(port: int, how: str, rank: int) -> float:
    import torch

    dist = importlib.import_module("torch.distributed")
    rpc = importlib.import_module("torch.distributed.rpc")

    from rallypoint.torch import TorchStore

    def adapted(url: str, **_: Any) -> Iterator[tuple[TorchStore, int, int]]:
        yield TorchStore(rallypoint.TCPStore("127.0.0.1", port, timeout=AMPLE)), rank, 2

    os.environ.update(surroundings(port, rank))
    dist.register_rendezvous_handler("adapter", adapted)
    method = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "adapter": "adapter://"}[how]
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, rpc_timeout=AMPLE_S, num_worker_threads=2)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    answer = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank))
    rpc.shutdown()
    return float(answer.sum())


@pytest.mark.parametrize("how", ["env", "tcp", "adapter"])
def test_rpc_works_on_our_server(torch_processes: TorchProcesses, server: rallypoint.Server, how: str) -> None:
    assert torch_processes.run(call_each_other, [(server.port, how, rank) for rank in range(2)]) == [2.0, 4.0]
    assert {"rpc_prefix_0/names/0", "rpc_prefix_0/addrs/worker1"} <= keys_on(server)
