"""A relay with several addresses leaves a server that hangs, and no other."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.relay.fake_upstream import FakeServer, Owner, in_loop, is_connected
from tests.relay.relays import RelayThread
from tests.wire import AMPLE_S

import rallypoint
from rallypoint import net
from rallypoint.relay import hang_watch
from rallypoint.relay.upstream import Upstream


@in_loop
async def test_a_server_that_hangs_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "SILENCE_S", 0.05)
    monkeypatch.setattr(hang_watch, "PROBE_S", AMPLE_S)
    hangs, server = FakeServer(), FakeServer()
    await hangs.start()
    await server.start()
    up = Upstream(net.Endpoints([*hangs.endpoints, *server.endpoints]))
    up.start()
    await is_connected(up)
    owner = Owner(up)
    assert up.endpoint.port == hangs.port
    hangs.answer = b""
    monkeypatch.setattr(hang_watch, "PROBE_S", 0.05)
    await is_connected(up, times=2)
    assert up.endpoint.port == server.port
    (why,) = owner.ends
    assert "answers nobody" in why
    await up.close()
    hangs.stop()
    server.stop()


@in_loop
async def test_a_server_that_has_nothing_to_say_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "SILENCE_S", 0.01)
    monkeypatch.setattr(hang_watch, "PROBE_S", AMPLE_S)
    quiet, other = FakeServer(), FakeServer()
    await quiet.start()
    await other.start()
    up = Upstream(net.Endpoints([*quiet.endpoints, *other.endpoints]))
    up.start()
    await quiet.until(lambda: len(quiet.links) > 4)
    assert up.connections == 1 and up.connected and not other.links
    await up.close()
    asked = len(quiet.links)
    await asyncio.sleep(0)
    assert len(quiet.links) == asked, "nobody asks when the relay has ended"
    quiet.stop()
    other.stop()


def test_a_stopped_server_is_left_and_a_torch_client_goes_on_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "SILENCE_S", 0.2)
    monkeypatch.setattr(hang_watch, "PROBE_S", 0.5)
    with (
        rallypoint.Server() as stopped,
        rallypoint.Server() as next_one,
        RelayThread(stopped.port, next_one.port) as relay,
    ):
        assert relay.connected().server.upstream.endpoint.port == stopped.port
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            relay.connected(times=2)
            assert relay.server.upstream.endpoint.port == next_one.port
            with relay.peer() as peer:
                peer.set(b"k", b"v")
                assert peer.get(b"k") == b"v"
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
