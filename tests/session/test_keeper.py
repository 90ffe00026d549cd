"""The keeper, while no call is under way: one cut delays no other connection, and no number of them ends a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cutter import UP, Cutter

import rallypoint
from rallypoint.core.ops import Beat
from rallypoint.deadline import Deadline
from rallypoint.protocol.native import frame
from rallypoint.store import keeper, route

DEADLINE_S = 60


def until(true: Callable[[], bool], what: str) -> None:
    """Look until something is so."""
    deadline = Deadline(DEADLINE_S)
    while not true():
        assert not deadline.expired(), f"not within {DEADLINE_S} s: {what}"


def behind(cutter: Cutter) -> rallypoint.Store:
    return rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}", timeout=DEADLINE_S)


def cut_and_mended(cutter: Cutter, idle: rallypoint.Store) -> None:
    """Cut, and return when the keeper has mended that."""
    sock = idle._backend._wire._ear.socket
    cutter.cut_all()
    until(lambda: idle._backend._wire._ear.socket is not sock, "a cut is mended")


def cut_off(cutter: Cutter) -> None:
    """Hide the server, and return when somebody tries in vain to mend that."""
    cutter.refusing = True
    cutter.cut_all()
    tried = cutter.connections
    until(lambda: cutter.connections > tried, "a cut is being mended")


def test_a_store_that_is_closed_while_a_cut_is_mended_leaves_no_session() -> None:
    with rallypoint.Server(grace=1.5) as server, Cutter(server.port) as cutter:
        store = behind(cutter)
        store.lease("mine", "v")
        cut_off(cutter)
        store.close()
        cutter.refusing = False
        until(lambda: server.statistics()["sessions"] == [], "the session ends with its grace")
        assert server.statistics()["leased_keys"] == 0
        with pytest.raises(rallypoint.StoreClosed):
            store.get("mine")


def test_a_heart_beats_while_another_connection_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "KEEP_S", 0.05)
    with (
        rallypoint.Server(grace=DEADLINE_S) as server,
        Cutter(server.port) as lost,
        Cutter(server.port) as fine,
        behind(lost) as cut,
        behind(fine) as store,
    ):
        cut.lease("cut", "v", heartbeat=1.0)
        store.lease("fine", "v", heartbeat=1.0)
        cut_off(lost)
        enough = fine.passed[UP] + 4 * len(frame(Beat(0)))  # one every third of a second
        until(lambda: fine.passed[UP] >= enough, "it beats for longer than the lease would last without")
        lost.refusing = False
        assert fine.connections == 1


def test_an_idle_holder_keeps_its_lease_over_any_number_of_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut comes after the last was mended, so they are not in a row, though no answer came in between."""
    monkeypatch.setattr(keeper, "KEEP_S", 0.05)
    monkeypatch.setattr(route, "IN_A_ROW_S", 0.05)
    with (
        rallypoint.Server(grace=DEADLINE_S) as server,
        Cutter(server.port) as cutter,
        behind(cutter) as idle,
        rallypoint.connect(server.url, timeout=DEADLINE_S) as store,
    ):
        idle.lease("mine", "v")
        for _ in range(route.MENDS + 3):
            cut_and_mended(cutter, idle)
        assert store.get("mine") == b"v"
        assert idle.add("n", 1) == 1
