"""A listener: which connections it admits, what it logs about its peers, and when it is idle."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest
from tests.event_loop import in_loop
from tests.raw_peer import AMPLE_S
from tests.server.echo_application import EchoApplication
from tests.server.peers import FakeTransport, settle

from rallypoint.protocol.c10d import hello
from rallypoint.server import listener as listener_module
from rallypoint.server.listener import LISTED_VANISHED, PeerLog


@in_loop
async def test_listeners_may_share_a_limit_on_connections() -> None:
    relay = EchoApplication(max_connections=3)
    limit = relay.listener.limit
    first, second = EchoApplication(limit), EchoApplication(limit)
    limit.round_sockets += 1
    peers = [FakeTransport(relay), FakeTransport(first)]
    refused = FakeTransport(second)
    assert [peer.closing for peer in (*peers, refused)] == [False, False, True]
    assert (relay.listener.refused, second.listener.refused, limit.connections) == (0, 1, 2)
    peers[0].hangs_up()
    await settle()
    assert not FakeTransport(second).closing and limit.connections == 2


@in_loop
async def test_a_refused_connection_is_dropped_and_its_input_ignored() -> None:
    full = EchoApplication(max_connections=0)
    peer = FakeTransport(full)
    peer.connection.data_received(hello(7))
    await settle()
    assert peer.lost and not peer.pending and not full.asked
    assert not full.listener.connections and not full.listener.limit.connections


@in_loop
async def test_a_round_with_clients_keeps_its_relay_from_being_idle() -> None:
    relay = EchoApplication(alone_s=0.0)
    ends: list[str] = []
    relay.listener.on_idle = lambda: ends.append("idle")
    client = FakeTransport(EchoApplication(relay.listener.limit))
    for _ in range(3):
        relay.listener.sweep()
    assert not ends
    client.hangs_up()
    await settle()
    relay.listener.sweep()
    relay.listener.sweep()
    assert ends == ["idle"]
    relay.listener.stop()


def test_it_listens_on_unix_sockets_too(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def run() -> None:
        served = EchoApplication()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            await served.listener.open([listening])
            reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(path), AMPLE_S)
            writer.write(hello(7))
            assert await asyncio.wait_for(reader.readexactly(len(hello(7))), AMPLE_S) == hello(7)
            (client,) = served.listener.clients(10)
            assert client["peer"] == "unix socket"
            writer.close()
            await served.listener.close()

    asyncio.run(run())


def test_vanished_peers_are_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    peer_log = PeerLog()
    for number in range(LISTED_VANISHED + 2):
        peer_log.vanished(f"10.0.0.{number}:1", 6.0)
    for _ in range(2):
        peer_log.report_vanished()
    assert len(caplog.records) == 1
    assert "10.0.0.9:1 and 2 more: nothing received for 6.0 s" in caplog.text


def test_refusals_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        full = EchoApplication(max_connections=1)
        peers = [FakeTransport(full) for _ in range(4)]
        full.listener.sweep()
        full.listener.sweep()
        full.listener.stop()
        assert [peer.closing for peer in peers] == [False, True, True, True]

    with caplog.at_level(logging.WARNING, listener_module.log.name):
        asyncio.run(run())
    assert [record.getMessage()[:45] for record in caplog.records] == ["refused 3 connections: the limit of 1 is reac"]
