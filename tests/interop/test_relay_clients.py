"""PyTorch's clients on two relays of one server: every operation, many processes, same results as PyTorch's server.

Random histories and corner cases of the protocol also have the same results as without a relay
(`tests/conformance/test_differential.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.conformance.calls import LONG_ENOUGH_S
from tests.conformance.differences import SOCKET_ROWS, C10dSocket, SocketRow, prefixed
from tests.conformance.test_differential import compare, torch_stores
from tests.raw_peer import until

import rallypoint

from .operations import Truth, keys_of
from .test_torch_clients import (
    consume,
    meet,
    on_our_server,
    produce,
    through_prefixes,
    time_out_and_go_on,
    use_a_clone,
    wait_for,
    write,
)
from .torch_processes import TorchProcesses

pytestmark = pytest.mark.needs("torch")


@pytest.fixture
def relays(server: rallypoint.Server) -> Iterator[tuple[int, int]]:
    """The ports of two relays of the server."""
    with rallypoint.Relay(server.url) as one, rallypoint.Relay(server.url) as other:
        yield one.port, other.port


def waiting(server: rallypoint.Server, count: int) -> None:
    """Return when `count` requests wait at the server; a relay merges equal ones."""
    until(lambda: server.statistics()["waiting"], lambda seen: seen == count)


def test_every_operation_from_four_processes_at_once(
    torch_processes: TorchProcesses, server: rallypoint.Server, relays: tuple[int, int], truth: Truth
) -> None:
    lines, keys = truth
    marks = [f"{n}:" for n in range(4)]
    assert (
        torch_processes.run(on_our_server, [(relays[n % 2], mark) for n, mark in enumerate(marks)])
        == [(lines, keys)] * 4
    )
    with rallypoint.TCPStore("127.0.0.1", server.port) as ours:
        assert {(mark, key) for mark in marks for key in keys_of(ours, mark)} == {(m, k) for m in marks for k in keys}


def test_every_operation_through_torchs_prefix_store(
    torch_processes: TorchProcesses, relays: tuple[int, int], truth: Truth
) -> None:
    lines, keys = truth
    (seen, left), (seen_too, left_too) = torch_processes.run(through_prefixes, [(relays[0], "a"), (relays[1], "b")])
    assert seen == seen_too == lines
    barrier_keys = {"full/num_members", "full/last_member"}
    assert set(left) == set(left_too) == {key for key in keys if key != "full"} | barrier_keys


def test_a_clone_is_a_client_of_its_own(torch_processes: TorchProcesses, relays: tuple[int, int]) -> None:
    late = [("wait", "DistStoreError")] * 2
    assert torch_processes.start(use_a_clone, relays[0]).result() == (b"the clone", b"the clone", 1, late)


def test_a_wait_is_woken_by_a_client_of_the_other_relay(
    torch_processes: TorchProcesses, server: rallypoint.Server, relays: tuple[int, int]
) -> None:
    members = [torch_processes.start(wait_for, relays[n % 2], ["x", "y"]) for n in range(4)]
    waiting(server, 2)
    torch_processes.start(write, relays[0], "x", "1").result()
    torch_processes.start(write, relays[1], "y", "2").result()
    assert [member.result() for member in members] == [[b"1", b"2"]] * 4
    waiting(server, 0)


def test_a_client_that_timed_out_stays_usable(
    torch_processes: TorchProcesses, server: rallypoint.Server, relays: tuple[int, int]
) -> None:
    late = "DistStoreError"
    expected = [line for n in range(1, 6) for line in (("wait", late), ("barrier", late), ("add", n))]
    assert torch_processes.start(time_out_and_go_on, relays[0]).result() == [*expected, ("has_extended_api", True)]
    waiting(server, 0)


@pytest.mark.parametrize("through_prefix", [False, True])
def test_a_barrier_of_eight_processes(
    torch_processes: TorchProcesses, relays: tuple[int, int], through_prefix: bool
) -> None:
    assert torch_processes.run(meet, [(relays[n % 2], 5, through_prefix) for n in range(8)]) == [[8] * 5] * 8


def test_four_consumers_get_every_item_once(
    torch_processes: TorchProcesses, server: rallypoint.Server, relays: tuple[int, int]
) -> None:
    consumers = [torch_processes.start(consume, relays[n % 2]) for n in range(4)]
    torch_processes.run(produce, [(relays[0], 0, 500), (relays[1], 500, 500)])
    with rallypoint.TCPStore("127.0.0.1", server.port) as ours:
        for _ in consumers:
            ours.queue_push("jobs", "stop")
        taken = [consumer.result() for consumer in consumers]
        assert sorted(item for items in taken for item in items) == list(range(1000))
        assert ours.queue_len("jobs") == 0


def test_random_histories_give_the_same_answers_as_torchs_server(relays: tuple[int, int], tmp_path: Path) -> None:
    dist = importlib.import_module("torch.distributed")
    patient = timedelta(seconds=LONG_ENOUGH_S)
    with torch_stores("tcp", tmp_path) as fresh:
        theirs, ours = fresh(), dist.TCPStore("127.0.0.1", relays[0], timeout=patient)
        compare("tcp", (theirs, ours), (prefixed(theirs), prefixed(ours)), examples=60)


@pytest.mark.parametrize("row", SOCKET_ROWS, ids=lambda row: row.name)
def test_a_row_of_the_table_of_socket_differences_holds(row: SocketRow, tmp_path: Path) -> None:
    with rallypoint.Server() as server, rallypoint.Relay(server.url) as relay:
        sockets = C10dSocket(relay.port), C10dSocket(relay.port), C10dSocket(relay.port)
        assert row.probe(*sockets) == row.ours
        for one in sockets:
            one.close()
