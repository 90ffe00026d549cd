"""The static rendezvous: ranks are given, the store is on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.ports import reserve_port

import rallypoint
from rallypoint.compat.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    StaticTCPRendezvous,
    create_rdzv_handler,
)

HOST = "127.0.0.1"
AMPLE_S = 60


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    """Closes the handlers' stores at the end, the last one first."""
    with ExitStack() as stack:
        yield stack


def meet(nodes: ExitStack, handler: StaticTCPRendezvous) -> RendezvousInfo:
    info = handler.next_rendezvous()
    nodes.callback(store_of(handler).close)
    return info


def store_of(handler: StaticTCPRendezvous) -> rallypoint.TCPStore:
    assert handler._store is not None
    return handler._store


def static(endpoint: str, max_nodes: int = 2, **options: Any) -> RendezvousParameters:
    return RendezvousParameters("static", endpoint, "run", 1, max_nodes, **options)


def test_rank_0_hosts_and_all_meet_under_the_run_id(nodes: ExitStack) -> None:
    port = reserve_port()
    host, joiner = (StaticTCPRendezvous(HOST, port, rank, 2, "run", AMPLE_S) for rank in (0, 1))
    first, second = meet(nodes, host), meet(nodes, joiner)
    assert [(info.rank, info.world_size) for info in (first, second)] == [(0, 2), (1, 2)]
    assert first.bootstrap_store_info == second.bootstrap_store_info == RendezvousStoreInfo(HOST, port)
    first.store.set("k", "v")
    assert second.store.get("k") == b"v"
    assert rallypoint.TCPStore(HOST, port).list_keys() == ["run/k"]


def test_the_next_round_uses_the_same_store(nodes: ExitStack) -> None:
    handler = StaticTCPRendezvous(HOST, 0, 0, 1, "run", AMPLE_S)
    info = meet(nodes, handler)
    info.store.set("k", "v")
    assert handler.next_rendezvous().store.get("k") == b"v"
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_port == store_of(handler).port > 0, "port 0 is reported as the bound port"


def test_an_existing_server_of_ours_is_shared(nodes: ExitStack) -> None:
    with rallypoint.Server() as server:
        info = meet(nodes, StaticTCPRendezvous(HOST, server.port, 0, 1, "run", AMPLE_S))
        info.store.set("k", "v")
        assert rallypoint.TCPStore(HOST, server.port).get("run/k") == b"v"


def test_a_missing_host_raises_the_store_s_error() -> None:
    with pytest.raises(rallypoint.ConnectFailed):
        StaticTCPRendezvous(HOST, reserve_port(), 1, 2, "run", 1).next_rendezvous()


def test_a_static_handler_is_configured_by_its_parameters() -> None:
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
def test_invalid_static_parameters_are_named(params: RendezvousParameters, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_rdzv_handler(params)
