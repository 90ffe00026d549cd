"""Size limits on stores of bytes, where the whole state of an object is one value."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.store_kinds import AMPLE_S, together

from rallypoint import Exchange, Group, HashStore, LimitExceeded, Server, connect

MOST = 1_569_672
"""The largest contribution of each of two ranks."""


class Silent:
    """A store without operations, so that every call on it fails."""


def test_every_rank_may_contribute_its_share_repeatedly() -> None:
    store = HashStore()

    def run(rank: int) -> list[bytes]:
        exchange = Exchange(store.clone(), "data", 2)
        for byte in b"abc":
            got = exchange.all_gather(rank, bytes([byte]) * MOST, AMPLE_S)
            assert [one == bytes([byte]) * MOST for one in got] == [True, True]
            exchange.broadcast(rank, bytes(2 * MOST), 0, AMPLE_S)
        return got

    together([partial(run, rank) for rank in range(2)])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["all_gather", "gather"])
def test_a_contribution_over_the_share_is_refused(rank: int, how: str) -> None:
    exchange: Any = Exchange(Silent(), "data", 2)
    with pytest.raises(LimitExceeded, match=f"data of rank {rank} of 2 for exchange 'data' has .* limit is {MOST:,}"):
        getattr(exchange, how)(rank, bytes(MOST + 1))


def test_a_broadcast_over_all_shares_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="data of rank 1 of 2 for exchange"):
        Exchange(Silent(), "data", 2).broadcast(1, bytes(3 * MOST), root=1)


def test_a_server_accepts_larger_contributions() -> None:
    with Server() as server:
        assert Exchange(connect(server.url), "data", 1).all_gather(0, bytes(4 * MOST)) == [bytes(4 * MOST)]


def test_a_state_over_the_limit_is_not_written() -> None:
    group = Group(HashStore(), "workers")
    with pytest.raises(LimitExceeded, match="the state of 'roster:workers' has"):
        group.join("ann", bytes(7 * 1024**2))
    with group.join("bob", b"little") as bob:
        assert list(bob.view.members) == ["bob"]
