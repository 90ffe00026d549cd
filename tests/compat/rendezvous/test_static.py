"""A rendezvous of known ranks, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import rallypoint
from rallypoint import net
from rallypoint.compat.rendezvous import (
    RendezvousParameters,
    RendezvousStoreInfo,
    StaticTCPRendezvous,
    create_rdzv_handler,
)

HOST = "127.0.0.1"
AMPLE_S = 60


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    """Closes the stores of handlers, the last first."""
    with ExitStack() as stack:
        yield stack


def meet(nodes: ExitStack, handler: StaticTCPRendezvous):
    info = handler.next_rendezvous()
    nodes.callback(handler._store.close)
    return info


def static(endpoint: str, max_nodes: int = 2, **options: object) -> RendezvousParameters:
    return RendezvousParameters("static", endpoint, "run", 1, max_nodes, **options)


def test_rank_0_hosts_and_all_meet_under_the_run_id(nodes):
    port = net.free_port(HOST)
    host, guest = (StaticTCPRendezvous(HOST, port, rank, 2, "run", AMPLE_S) for rank in (0, 1))
    first, second = meet(nodes, host), meet(nodes, guest)
    assert [(info.rank, info.world_size) for info in (first, second)] == [(0, 2), (1, 2)]
    assert first.bootstrap_store_info == second.bootstrap_store_info == RendezvousStoreInfo(HOST, port)
    first.store.set("k", "v")
    assert second.store.get("k") == b"v"
    assert rallypoint.TCPStore(HOST, port).list_keys() == ["run/k"]


def test_a_further_round_is_on_the_same_store(nodes):
    handler = StaticTCPRendezvous(HOST, 0, 0, 1, "run", AMPLE_S)
    info = meet(nodes, handler)
    info.store.set("k", "v")
    assert handler.next_rendezvous().store.get("k") == b"v"
    assert info.bootstrap_store_info.master_port == handler._store.port > 0, "a free port is told by its number"


def test_a_server_of_ours_that_is_there_is_shared(nodes):
    with rallypoint.Server() as server:
        info = meet(nodes, StaticTCPRendezvous(HOST, server.port, 0, 1, "run", AMPLE_S))
        info.store.set("k", "v")
        assert rallypoint.TCPStore(HOST, server.port).get("run/k") == b"v"


def test_no_host_is_the_stores_error():
    with pytest.raises(rallypoint.ConnectFailed):
        StaticTCPRendezvous(HOST, net.free_port(HOST), 1, 2, "run", 1).next_rendezvous()


def test_it_has_nothing_to_agree_on():
    handler = create_rdzv_handler(static("node-a:4711", rank="1", timeout="17"))
    assert isinstance(handler, StaticTCPRendezvous)
    assert (handler.master_addr, handler.master_port, handler.rank, handler.world_size) == ("node-a", 4711, 1, 2)
    assert handler.timeout.total_seconds() == 17
    assert handler.get_backend() == "static" and handler.get_run_id() == "run" and handler.use_agent_store
    handler.set_closed()
    assert not handler.is_closed() and handler.num_nodes_waiting() == 0 and handler.shutdown()


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (static("h:1"), "'rank'"),
        (static("h:1", rank="first"), "'rank' .*'first'"),
        (static("h:1", rank=2), "'rank' must be 0 to 1 for 2 nodes, not 2"),
        (static("h:1", rank=-1), "'rank' must be 0 to 1"),
        (static("h", rank=0), "'h' .* needs a port"),
        (static(" ", rank=0), "needs an endpoint"),
        (static("h:x", rank=0), "'h:x'"),
    ],
)
def test_what_is_missing_is_named(params, says):
    with pytest.raises(ValueError, match=says):
        create_rdzv_handler(params)
