"""Who is alive: leases fall with their process, outlast a cut and a pause, and end when a heart stops.

How long each takes is a figure of the benchmarks; here it only has to happen, or for a while not to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.cutter import Cutter

import rallypoint

DEADLINE_S = 60
GRACE_S = 0.5

HOLDER = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
store.lease("plain", "held")
store.lease("beating", "held", heartbeat=1.0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server(grace=GRACE_S) as server:
        yield server


@pytest.fixture
def store(server: rallypoint.Server) -> Iterator[rallypoint.Store]:
    with rallypoint.connect(server.url, timeout=DEADLINE_S) as store:
        yield store


def holder(url: str, *prefix: str) -> subprocess.Popen[str]:
    """Start a process that holds two leases, and return when it does."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_killed_process_loses_its_leases(server: rallypoint.Server, store: rallypoint.Store) -> None:
    process = holder(server.url)
    with store.watch() as changes:
        assert store.check(["plain", "beating"])
        end(process)
        assert {changes.next().key, changes.next().key} == {"plain", "beating"}
    assert store.num_keys() == 0


def test_a_stopped_process_keeps_its_lease_but_not_a_beating_one(
    server: rallypoint.Server, store: rallypoint.Store
) -> None:
    process = holder(server.url)
    try:
        with store.watch() as changes:
            os.kill(process.pid, signal.SIGSTOP)
            gone = changes.next()
            assert (gone.key, gone.value) == ("beating", None)
            with pytest.raises(rallypoint.StoreTimeout):
                changes.next(timeout=3 * GRACE_S)
        assert store.check(["plain"])
        assert [session["leases"] for session in server.statistics()["sessions"] if session["leases"]] == [["/plain"]]
    finally:
        end(process)


def test_a_clean_end_needs_no_grace() -> None:
    with (
        rallypoint.Server(grace=3600) as server,
        rallypoint.connect(server.url, timeout=DEADLINE_S) as store,
        store.watch() as changes,
    ):
        other = store.clone()
        other.lease("k", "v")
        other.close()
        assert [changes.next().value, changes.next().value] == [b"v", None]


def test_an_idle_client_keeps_its_session_over_a_cut(server: rallypoint.Server, store: rallypoint.Store) -> None:
    with Cutter(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as idle:
        idle.lease("k", "v")
        before = cutter.connections
        with store.watch() as changes:
            cutter.cut_all()
            with pytest.raises(rallypoint.StoreTimeout):
                changes.next(timeout=3 * GRACE_S)
        assert cutter.connections > before
        assert idle.get("k") == b"v"


def test_a_cut_longer_than_the_grace_ends_the_session(server: rallypoint.Server, store: rallypoint.Store) -> None:
    with Cutter(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as away:
        away.lease("k", "v")
        with store.watch() as changes:
            cutter.refusing = True
            cutter.cut_all()
            gone = changes.next()
            assert (gone.key, gone.value) == ("k", None)
        with pytest.raises(rallypoint.SessionLost, match="leases are gone"):
            away.add("n", 1)
        cutter.refusing = False
        with pytest.raises(rallypoint.SessionLost):
            away.get("k", timeout=0)
        assert store.num_keys() == 0


def test_a_restarted_server_is_told_apart() -> None:
    first = rallypoint.Server(grace=DEADLINE_S)
    with rallypoint.connect(first.url, timeout=DEADLINE_S) as store:
        store.set("k", "v")
        first.close()
        with rallypoint.Server(port=first.port), pytest.raises(rallypoint.ServerRestarted, match="not the one"):
            store.get("k", timeout=1)


def test_a_session_of_another_server_is_refused_even_by_an_equal_one() -> None:
    with (
        rallypoint.Server() as one,
        rallypoint.Server() as other,
        Cutter(one.port) as cutter,
        rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}", timeout=DEADLINE_S) as store,
    ):
        store.set("k", "v")
        cutter.redirect(other.port)
        with pytest.raises(rallypoint.ServerRestarted):
            store.get("k")
