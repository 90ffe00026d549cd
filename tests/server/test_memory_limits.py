"""The memory limit holds: a server's resident memory, whatever its clients make it hold.

The promise is at most 1.5 times the limit plus 64 MiB. Each test makes a server hold something that costs it much more
than its bytes, or that many ask for and nobody reads; without the limit each of them would need several times as much.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.raw_peer import ServerProcess
from tests.server.hoarders import HOARDERS, MIB, SessionPeer

from rallypoint.core import ops
from rallypoint.core.costs import SESSION_BYTES

LIMIT = 32 * MIB
MOST = LIMIT * 3 // 2 + 64 * MIB

COUNTS = {
    "torch_queues": 200_000,
    "namespaces": 4_000,
    "leases": 200_000,
    "watches": 180_000,
    "waits": 150_000,
    "waits_for_items": 150_000,
    "waits_for_many_keys": 2_000_000,
    "locks": 150_000,
    "work_items": 400_000,
    "exchanges": 80_000,
    "kept_replies": 600_000,
    "pushes_of_sessions": 20_000,
    "unread_values": 24 * MIB,
    "unread_native_values": 24 * MIB,
    "unread_lists": 24 * MIB,
}
"""How many things each of them makes, or bytes. `python -m benchmarks memory` has them all, and their figures."""


@pytest.mark.parametrize("name", COUNTS)
def test_the_resident_memory_stays_within_the_limit(tmp_path: Path, name: str) -> None:
    with ServerProcess(tmp_path, max_memory=LIMIT, grace_s=30.0) as server:
        with HOARDERS[name](server, COUNTS[name]):
            assert server.statistics()["bytes"] < LIMIT * 3 // 2 + 32 * MIB
        assert server.memory(peak=True) < MOST
        with SessionPeer(server.address) as other, server.peer() as torch_peer:
            assert other.ask(ops.Ping(0))[1] == 0
            torch_peer.ping()


def test_all_namespaces_have_one_limit(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, max_memory=LIMIT) as server:
        with SessionPeer(server.address, run="one") as one, SessionPeer(server.address, run="other") as other:
            filled = one.ask_all(ops.Set(0, b"%d" % number, bytes(MIB)) for number in range(40))
            assert filled == 40 - 31
            (_, status, (error, fields)) = other.ask(ops.Set(0, b"more", bytes(MIB)))
            assert (status, error, fields["key"], fields["limit"]) == (2, "StoreFull", "more", LIMIT)
        with SessionPeer(server.address, run="one") as one:
            assert one.ask(ops.Delete(0, b"1"))[2] is True
        with SessionPeer(server.address, run="other") as other:
            assert other.ask(ops.Set(0, b"more", bytes(MIB)))[1] == 0, "there is room again"


def test_sessions_are_limited_by_memory(tmp_path: Path) -> None:
    """At this limit, half of the reserve of 32 MiB is for sessions."""
    count = 16 * MIB // SESSION_BYTES
    with ServerProcess(tmp_path, max_memory=LIMIT, grace_s=60.0) as server, HOARDERS["sessions"](server, count):
        with SessionPeer(server.address) as late:
            assert f"too many sessions: {count} is the limit (serve --max-sessions, --max-memory)" in str(late.welcome)
        with server.peer() as torch_peer:
            torch_peer.work(1)
