"""The connection monitor while no call is in progress: a cut delays no other connection, and no number of cuts ends a
session."""

from __future__ import annotations

import socket
import threading

import pytest
from tests.client.sessions import connection_of
from tests.outage_log import DEADLINE_S, until

import rallypoint
from rallypoint.client.blocking import monitor
from rallypoint.client.routing import route
from rallypoint.core.ops import SessionHeartbeat
from rallypoint.protocol.native import frame
from rallypoint.testing import UP, CuttingProxy


def behind(cutter: CuttingProxy) -> rallypoint.Store:
    return rallypoint.connect(f"tcp://127.0.0.1:{cutter.port}", timeout=DEADLINE_S)


def cut_and_reconnect(cutter: CuttingProxy, idle: rallypoint.Store) -> None:
    """Cut the connection, and return when the monitor has reconnected."""
    sock = connection_of(idle).socket_reader.socket
    cutter.cut_all()
    until(lambda: connection_of(idle).socket_reader.socket is not sock, "the monitor reconnects")


def cut_off(cutter: CuttingProxy) -> None:
    """Refuse connections, and return when the client has tried to reconnect."""
    cutter.refusing = True
    cutter.cut_all()
    tried = cutter.connections
    until(lambda: cutter.connections > tried, "the client tries to reconnect")


def test_a_store_closed_while_it_reconnects_leaves_no_session() -> None:
    with rallypoint.Server(grace=1.5) as server, CuttingProxy(server.port) as cutter:
        store = behind(cutter)
        store.lease("mine", "v")
        cut_off(cutter)
        store.close()
        cutter.refusing = False
        until(lambda: server.statistics()["sessions"] == [], "the session ends with its grace period")
        assert server.statistics()["leased_keys"] == 0
        with pytest.raises(rallypoint.StoreClosed):
            store.get("mine")


def test_heartbeats_continue_while_another_connection_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "LOOK_S", 0.05)
    with (
        rallypoint.Server(grace=DEADLINE_S) as server,
        CuttingProxy(server.port) as lost,
        CuttingProxy(server.port) as fine,
        behind(lost) as cut,
        behind(fine) as store,
    ):
        cut.lease("cut", "v", heartbeat=1.0)
        store.lease("fine", "v", heartbeat=1.0)
        cut_off(lost)
        enough = fine.passed[UP] + 4 * len(frame(SessionHeartbeat(0)))  # one every third of a second
        until(
            lambda: fine.passed[UP] >= enough, "heartbeats continue for longer than the lease would last without them"
        )
        lost.refusing = False
        assert fine.connections == 1


def test_an_idle_client_keeps_its_lease_over_any_number_of_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut follows a reconnect, so they do not count as cuts in a row, although no reply came in between."""
    monkeypatch.setattr(monitor, "LOOK_S", 0.05)
    monkeypatch.setattr(route, "IN_A_ROW_S", 0.05)
    with (
        rallypoint.Server(grace=DEADLINE_S) as server,
        CuttingProxy(server.port) as cutter,
        behind(cutter) as idle,
        rallypoint.connect(server.url, timeout=DEADLINE_S) as store,
    ):
        idle.lease("mine", "v")
        for _ in range(route.MAX_CUTS + 3):
            cut_and_reconnect(cutter, idle)
        assert store.get("mine") == b"v"
        assert idle.add("n", 1) == 1


class ClosedMeanwhile(socket.socket):
    """A socket that another thread closes as soon as it was asked for its descriptor."""

    asked = 0

    def fileno(self) -> int:
        self.asked += 1
        return super().fileno() if self.asked == 1 else -1


class CutSession:
    """A session whose connection the peer has closed, as the monitor sees it."""

    heartbeat_s = float("inf")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reconnected = threading.Event()

    def monitor_state(self) -> tuple[socket.socket | None, bool] | None:
        return None if self.reconnected.is_set() else (self.sock, True)

    def reconnect(self, sock: socket.socket) -> None:
        assert sock is self.sock
        self.reconnected.set()

    def unresponsive_socket(self) -> socket.socket | None:
        return None

    def check_hang(self, sock: socket.socket) -> None: ...

    def read_idle(self) -> None: ...

    def send_heartbeat(self) -> bool:
        return True


def test_a_socket_closed_while_it_is_registered_does_not_end_the_monitor() -> None:
    ours, peer = socket.socketpair()
    peer.close()
    with ClosedMeanwhile(fileno=ours.detach()) as sock:
        session = CutSession(sock)
        monitor.ConnectionMonitor().watch(session)
        assert session.reconnected.wait(DEADLINE_S)
