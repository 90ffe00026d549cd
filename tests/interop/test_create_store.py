"""Members of one store that use our `create_c10d_store` and PyTorch's: the last member releases all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.ports import reserve_port

import rallypoint
from rallypoint.compat.distributed import create_c10d_store

from .torch_processes import AMPLE_S, TorchProcesses

pytestmark = pytest.mark.needs("torch")


def join(whose: str, is_server: bool, port: int, world_size: int, rank: int) -> list[Any]:
    """Create the store with our function or torch's, write a name, and return the names of all members."""
    from torch.distributed.elastic.utils import distributed

    os.environ["RANK"] = str(rank)
    create: Any = create_c10d_store if whose == "ours" else distributed.create_c10d_store
    store = create(is_server, "127.0.0.1", port, world_size, timeout=AMPLE_S / 2)
    store.set(f"{rank}", whose)
    names: list[Any] = store.multi_get([str(n) for n in range(world_size)])
    store.barrier("seen", world_size)  # the server must not end while others still read
    return names


@pytest.mark.parametrize(
    "members", [("ours", "torch's", "torch's", "ours"), ("torch's", "ours", "ours", "torch's"), ("ours",) * 4]
)
def test_members_of_both_kinds_meet(torch_processes: TorchProcesses, members: tuple[str, ...]) -> None:
    port = reserve_port()
    calls = [(whose, rank == 0, port, len(members), rank) for rank, whose in enumerate(members)]
    first = torch_processes.start(join, *calls[0])
    others = [torch_processes.start(join, *call) for call in calls[1:]]
    names = [whose.encode() for whose in members]
    assert [member.result() for member in (first, *others)] == [names] * len(members)


@pytest.mark.parametrize("last", ["ours", "torch's"])
def test_the_last_member_releases_all(
    torch_processes: TorchProcesses, server: rallypoint.Server, until_waiting: Callable[[int], None], last: str
) -> None:
    early = [
        torch_processes.start(join, whose, False, server.port, 4, rank)
        for rank, whose in enumerate(["torch's", "ours", "ours"])
    ]
    until_waiting(3)
    late = torch_processes.start(join, last, False, server.port, 4, 3)
    assert [member.result() for member in (*early, late)] == [[b"torch's", b"ours", b"ours", last.encode()]] * 4
    keys = rallypoint.TCPStore("127.0.0.1", server.port).list_keys()
    assert {"_tcp_store/num_members/num_members", "_tcp_store/num_members/last_member"} <= set(keys)


def come_and_wait(port: int) -> str:
    from torch.distributed.elastic.utils import distributed

    try:
        distributed.create_c10d_store(False, "127.0.0.1", port, 3, timeout=AMPLE_S)
    except Exception as error:
        return type(error).__name__
    return "met"


def test_a_torch_member_is_counted_as_joined(
    torch_processes: TorchProcesses,
    server: rallypoint.Server,
    until_waiting: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    silent = torch_processes.start(come_and_wait, server.port)
    until_waiting(1)
    with pytest.raises(rallypoint.WorkersMissing) as caught:
        create_c10d_store(False, "127.0.0.1", server.port, 3, timeout=0.2)
    error = caught.value
    assert (error.joined, error.world_size, error.missing) == (2, 3, ())
    assert error.members[0].startswith("rank 1 (") and "1 unidentified" in error.members[1]
    server.close()
    assert silent.result() == "DistNetworkError"
