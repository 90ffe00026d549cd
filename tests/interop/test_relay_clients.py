"""PyTorch's clients on two relays of one server: every operation, many processes, no difference to PyTorch's server.

Nor is there one to a client of the server itself: random histories and the odd corners of the wire have the same
answers (`tests/conformance/test_differential.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.conformance.calls import LONG_ENOUGH_S
from tests.conformance.differences import WIRE_ROWS, Wire, WireRow, prefixed
from tests.conformance.model import Model, View
from tests.conformance.test_differential import HISTORIES, empty, step, torch_stores
from tests.wire import until

import rallypoint

from .operations import keys_of
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

pytestmark = pytest.mark.needs("torch")


@pytest.fixture
def relays(server: rallypoint.Server) -> Iterator[tuple[int, int]]:
    """The ports of two relays of the server."""
    with rallypoint.Relay(server.url) as one, rallypoint.Relay(server.url) as other:
        yield one.port, other.port


def waiting(server: rallypoint.Server, count: int) -> None:
    """Return when so many requests wait at the server; equal ones of a relay's clients are one."""
    until(lambda: server.statistics()["waiting"], lambda seen: seen == count)


def test_every_operation_from_four_processes_at_once(crew, server, relays, truth):
    lines, keys = truth
    marks = [f"{n}:" for n in range(4)]
    assert crew.run(on_our_server, [(relays[n % 2], mark) for n, mark in enumerate(marks)]) == [(lines, keys)] * 4
    with rallypoint.TCPStore("127.0.0.1", server.port) as ours:
        assert {(mark, key) for mark in marks for key in keys_of(ours, mark)} == {(m, k) for m in marks for k in keys}


def test_every_operation_through_torchs_prefix_store(crew, relays, truth):
    lines, keys = truth
    (seen, left), (seen_too, left_too) = crew.run(through_prefixes, [(relays[0], "a"), (relays[1], "b")])
    assert seen == seen_too == lines
    barrier_keys = {"full/num_members", "full/last_member"}
    assert set(left) == set(left_too) == {key for key in keys if key != "full"} | barrier_keys


def test_a_clone_is_a_client_of_its_own(crew, relays):
    late = [("wait", "DistStoreError")] * 2
    assert crew.start(use_a_clone, relays[0]).result() == (b"the clone", b"the clone", 1, late)


def test_a_wait_is_woken_by_a_client_of_the_other_relay(crew, server, relays):
    members = [crew.start(wait_for, relays[n % 2], ["x", "y"]) for n in range(4)]
    waiting(server, 2)
    crew.start(write, relays[0], "x", "1").result()
    crew.start(write, relays[1], "y", "2").result()
    assert [member.result() for member in members] == [[b"1", b"2"]] * 4
    waiting(server, 0)


def test_a_client_that_timed_out_stays_usable(crew, server, relays):
    late = "DistStoreError"
    expected = [line for n in range(1, 6) for line in (("wait", late), ("barrier", late), ("add", n))]
    assert crew.start(time_out_and_go_on, relays[0]).result() == [*expected, ("has_extended_api", True)]
    waiting(server, 0)


@pytest.mark.parametrize("through_prefix", [False, True])
def test_a_barrier_of_eight_processes(crew, relays, through_prefix):
    assert crew.run(meet, [(relays[n % 2], 5, through_prefix) for n in range(8)]) == [[8] * 5] * 8


def test_four_consumers_get_every_item_once(crew, server, relays):
    consumers = [crew.start(consume, relays[n % 2]) for n in range(4)]
    crew.run(produce, [(relays[0], 0, 500), (relays[1], 500, 500)])
    with rallypoint.TCPStore("127.0.0.1", server.port) as ours:
        for _ in consumers:
            ours.queue_push("jobs", "stop")
        taken = [consumer.result() for consumer in consumers]
        assert sorted(item for items in taken for item in items) == list(range(1000))
        assert ours.queue_len("jobs") == 0


def test_histories_give_the_same_answers(relays, tmp_path):
    from torch.distributed import TCPStore

    patient = timedelta(seconds=LONG_ENOUGH_S)
    with torch_stores("tcp", tmp_path) as fresh:
        theirs, ours = fresh(), TCPStore("127.0.0.1", relays[0], timeout=patient)
        views = {False: (theirs, ours), True: (prefixed(theirs), prefixed(ours))}

        @settings(max_examples=60)
        @given(HISTORIES)
        def compare(history: list[tuple[bool, tuple[Any, ...]]]) -> None:
            model = Model()
            try:
                for through, call in history:
                    step("tcp", views[through], View(model, "p/" if through else "", ""), through, call)
            finally:
                empty(theirs, model)
                empty(ours, model)

        compare()


@pytest.mark.parametrize("row", WIRE_ROWS, ids=lambda row: row.name)
def test_a_row_of_the_wire_is_true(row: WireRow, tmp_path: Path) -> None:
    with rallypoint.Server() as server, rallypoint.Relay(server.url) as relay:
        wires = Wire(relay.port), Wire(relay.port), Wire(relay.port)
        assert row.probe(*wires) == row.ours
        for wire in wires:
            wire.close()
