"""A relay with several addresses leaves a server that hangs, and only such a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest
from tests.raw_peer import AMPLE_S
from tests.relay.fake_upstream import FakeServer, Owner, in_loop, is_connected
from tests.relay.relays import RelayThread

import rallypoint
from rallypoint import net
from rallypoint.protocol.native import Standby, standby
from rallypoint.relay.upstream import hang_detector
from rallypoint.relay.upstream.connection import Upstream


@contextlib.asynccontextmanager
async def two_servers(known: int = 2) -> AsyncIterator[tuple[FakeServer, FakeServer, Upstream]]:
    """Provide two servers, and an upstream that is given the first `known` of them."""
    servers = FakeServer(), FakeServer()
    for server in servers:
        await server.start()
    up = Upstream(net.Endpoints([endpoint for server in servers[:known] for endpoint in server.endpoints]))
    up.start()
    try:
        yield *servers, up
    finally:
        await up.close()
        for server in servers:
            server.stop()


@pytest.mark.parametrize(
    ("answer", "probe_s", "reason"),
    [
        (lambda _: b"", 0.05, "did not answer a second connection"),
        (lambda other: standby(Standby(f"tcp://127.0.0.1:{other.port}", [])), AMPLE_S, "is now a standby"),
    ],
    ids=["hangs", "no longer leads"],
)
@in_loop
async def test_a_server_that_hangs_or_no_longer_leads_is_replaced_by_the_next(
    answer: Callable[[FakeServer], bytes], probe_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deposed server may neither serve nor close the connections that it accepted while it led."""
    monkeypatch.setattr(hang_detector, "SILENCE_S", 0.05)
    monkeypatch.setattr(hang_detector, "PROBE_S", AMPLE_S)
    async with two_servers() as (first, other, up):
        await is_connected(up)
        owner = Owner(up)
        assert up.route.at.port == first.port
        first.answer = answer(other)
        monkeypatch.setattr(hang_detector, "PROBE_S", probe_s)
        await is_connected(up, times=2)
        assert up.route.at.port == other.port
        (why,) = owner.ends
        assert reason in why


@in_loop
async def test_a_hanging_server_is_replaced_by_one_learned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "SILENCE_S", 0.05)
    monkeypatch.setattr(hang_detector, "PROBE_S", 0.05)
    async with two_servers(known=1) as (hangs, server, up):
        await is_connected(up)
        hangs.answer = b""
        up.learn([f"tcp://127.0.0.1:{server.port}"])
        await is_connected(up, times=2)
        assert up.route.at.port == server.port


@in_loop
async def test_a_server_with_nothing_to_send_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "SILENCE_S", 0.01)
    monkeypatch.setattr(hang_detector, "PROBE_S", AMPLE_S)
    async with two_servers() as (quiet, other, up):
        await quiet.until(lambda: len(quiet.links) > 4)
        assert up.connections == 1 and up.connected and not other.links
        await up.close()
        probes = len(quiet.links)
        await asyncio.sleep(0)
        assert len(quiet.links) == probes, "a closed upstream sends no probes"


def test_a_torch_client_continues_when_its_relay_leaves_a_stopped_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "SILENCE_S", 0.2)
    monkeypatch.setattr(hang_detector, "PROBE_S", 0.5)
    with (
        rallypoint.Server() as stopped,
        rallypoint.Server() as next_one,
        RelayThread(stopped.port, next_one.port) as relay,
    ):
        assert relay.connected().server.upstream.route.at.port == stopped.port
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            relay.connected(times=2)
            assert relay.server.upstream.route.at.port == next_one.port
            with relay.peer() as peer:
                peer.set(b"k", b"v")
                assert peer.get(b"k") == b"v"
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
