"""How much an object takes on a store that only has bytes, where all its state is one value; more is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kinds import AMPLE_S, together

from rallypoint import Exchange, Group, HashStore, LimitExceeded, Server, connect

MOST = 1_569_672
"""What each of two ranks may give."""


class Silent:
    """A store that has no operation, so that whatever is sent to it fails."""


def test_every_rank_may_give_its_share_again_and_again() -> None:
    store = HashStore()

    def run(rank: int) -> list[bytes]:
        exchange = Exchange(store.clone(), "data", 2)
        for byte in b"abc":
            got = exchange.all_gather(rank, bytes([byte]) * MOST, AMPLE_S)
            assert [one == bytes([byte]) * MOST for one in got] == [True, True]
            exchange.broadcast(rank, bytes(2 * MOST), 0, AMPLE_S)
        return got

    together([lambda rank=rank: run(rank) for rank in range(2)])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["all_gather", "gather"])
def test_more_than_a_share_is_refused_to_all_ranks(rank: int, how: str) -> None:
    exchange: Any = Exchange(Silent(), "data", 2)
    with pytest.raises(LimitExceeded, match=f"what rank {rank} of 2 gives to exchange 'data' has .* limit is {MOST:,}"):
        getattr(exchange, how)(rank, bytes(MOST + 1))


def test_more_than_all_shares_is_refused_to_the_root_of_a_broadcast() -> None:
    with pytest.raises(LimitExceeded, match="what rank 1 of 2 gives"):
        Exchange(Silent(), "data", 2).broadcast(1, bytes(3 * MOST), root=1)


def test_our_server_takes_more() -> None:
    with Server() as server:
        assert Exchange(connect(server.url), "data", 1).all_gather(0, bytes(4 * MOST)) == [bytes(4 * MOST)]


def test_a_state_that_would_not_fit_is_not_written() -> None:
    group = Group(HashStore(), "workers")
    with pytest.raises(LimitExceeded, match="the state of 'roster:workers' has"):
        group.join("ann", bytes(7 * 1024**2))
    with group.join("bob", b"little") as bob:
        assert list(bob.view.members) == ["bob"]
