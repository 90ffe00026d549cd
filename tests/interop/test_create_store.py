"""`create_c10d_store` of ours and of PyTorch's, as members of one store: whoever comes last releases all."""

from __future__ import annotations

import os
from typing import Any

import pytest

import rallypoint
from rallypoint import net
from rallypoint.compat.distributed import create_c10d_store

from .crew import AMPLE_S

pytestmark = pytest.mark.needs("torch")


def join(whose: str, is_server: bool, port: int, world_size: int, rank: int) -> list[Any]:
    """Create the store as ours or as torch's do, write down a name, and return all of them."""
    from torch.distributed.elastic.utils import distributed

    os.environ["RANK"] = str(rank)
    create: Any = create_c10d_store if whose == "ours" else distributed.create_c10d_store
    store = create(is_server, "127.0.0.1", port, world_size, timeout=AMPLE_S / 2)
    store.set(f"{rank}", whose)
    names = store.multi_get([str(n) for n in range(world_size)])
    store.barrier("seen", world_size)  # nobody leaves with the server while others still look
    return names


@pytest.mark.parametrize(
    "members", [("ours", "torch's", "torch's", "ours"), ("torch's", "ours", "ours", "torch's"), ("ours",) * 4]
)
def test_members_of_both_kinds_meet(crew, members):
    port = net.free_port("127.0.0.1")
    calls = [(whose, rank == 0, port, len(members), rank) for rank, whose in enumerate(members)]
    first = crew.start(join, *calls[0])
    others = [crew.start(join, *call) for call in calls[1:]]
    names = [whose.encode() for whose in members]
    assert [member.result() for member in (first, *others)] == [names] * len(members)


@pytest.mark.parametrize("last", ["ours", "torch's"])
def test_the_last_one_in_releases_all(crew, server, until_waiting, last):
    early = [
        crew.start(join, whose, False, server.port, 4, rank) for rank, whose in enumerate(["torch's", "ours", "ours"])
    ]
    until_waiting(3)
    late = crew.start(join, last, False, server.port, 4, 3)
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


def test_a_torch_member_is_counted_among_those_who_came(crew, server, until_waiting, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    silent = crew.start(come_and_wait, server.port)
    until_waiting(1)
    with pytest.raises(rallypoint.WorkersMissing) as caught:
        create_c10d_store(False, "127.0.0.1", server.port, 3, timeout=0.2)
    error = caught.value
    assert (error.joined, error.world_size, error.missing) == (2, 3, ())
    assert error.members[0].startswith("rank 1 (") and "1 that did not say who" in error.members[1]
    server.close()
    assert silent.result() == "DistNetworkError"
