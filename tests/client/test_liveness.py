"""Liveness: leases end with their process, survive a cut or a pause, and end when their heartbeat stops.

The benchmarks measure how long each takes; these tests check only whether it happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.served import server_fixture

import rallypoint
from rallypoint.testing import CuttingProxy

DEADLINE_S = 60
GRACE_S = 0.5

HOLDER = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], timeout=60)
store.lease("plain", "held")
store.lease("with heartbeat", "held", heartbeat=1.0)
print("held", flush=True)
sys.stdin.read()
"""


server = server_fixture(grace=GRACE_S)


def holder(url: str, *prefix: str) -> subprocess.Popen[str]:
    """Start a process that holds two leases, and return when it has them."""
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
        assert store.check(["plain", "with heartbeat"])
        end(process)
        assert {changes.next().key, changes.next().key} == {"plain", "with heartbeat"}
    assert store.num_keys() == 0


def test_a_stopped_process_keeps_its_lease_unless_that_has_a_heartbeat(
    server: rallypoint.Server, store: rallypoint.Store
) -> None:
    process = holder(server.url)
    try:
        with store.watch() as changes:
            os.kill(process.pid, signal.SIGSTOP)
            gone = changes.next()
            assert (gone.key, gone.value) == ("with heartbeat", None)
            with pytest.raises(rallypoint.StoreTimeout):
                changes.next(timeout=3 * GRACE_S)
        assert store.check(["plain"])
        assert [session["leases"] for session in server.statistics()["sessions"] if session["leases"]] == [["/plain"]]
    finally:
        end(process)


def test_close_ends_leases_without_the_grace_period() -> None:
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
    with CuttingProxy(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as idle:
        idle.lease("k", "v")
        before = cutter.connections
        with store.watch() as changes:
            cutter.cut_all()
            with pytest.raises(rallypoint.StoreTimeout):
                changes.next(timeout=3 * GRACE_S)
        assert cutter.connections > before
        assert idle.get("k") == b"v"


def test_a_cut_longer_than_the_grace_period_ends_the_session(
    server: rallypoint.Server, store: rallypoint.Store
) -> None:
    with CuttingProxy(server.port) as cutter, rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}") as away:
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


def test_a_restarted_server_is_recognized() -> None:
    first = rallypoint.Server(grace=DEADLINE_S)
    with rallypoint.connect(first.url, timeout=DEADLINE_S) as store:
        store.set("k", "v")
        first.close()
        with rallypoint.Server(port=first.port), pytest.raises(rallypoint.ServerRestarted, match="not the one"):
            store.get("k", timeout=1)


def test_a_server_refuses_the_session_of_another_server() -> None:
    with (
        rallypoint.Server() as one,
        rallypoint.Server() as other,
        CuttingProxy(one.port) as cutter,
        rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}", timeout=DEADLINE_S) as store,
    ):
        store.set("k", "v")
        cutter.redirect(other.port)
        with pytest.raises(rallypoint.ServerRestarted):
            store.get("k")
