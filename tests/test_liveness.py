"""When a peer watch checks a connection, and when it reports a vanished host; loop and clock are fakes.

What TCP_INFO says of a host that is really gone is in `tests/client/test_vanished_host.py`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint import net
from rallypoint.liveness import LAST_PROBE_S, PAUSE_S, TICK_S, VANISHED_S, PeerWatch, silence_s

PROBED_S = VANISHED_S - LAST_PROBE_S


class Timer:
    def __init__(self, due_at: float, call: Callable[[], None]) -> None:
        self.due_at, self.call, self.cancelled = due_at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """A loop with one timer, on a clock that stands still until `run`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.timer: Timer | None = None
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        assert self.timer is None or self.timer.cancelled
        self.timer = Timer(self.now + delay_s, call)
        return self.timer

    def run(self, late_s: float = 0.0) -> float:
        """Fire the timer, `late_s` late; return in how many seconds it was due, less the tick."""
        timer, self.timer = self.timer, None
        assert timer is not None and not timer.cancelled
        delay_s, self.now = timer.due_at - self.now, timer.due_at + late_s
        timer.call()
        return delay_s - TICK_S


class Peer:
    """A socket that says when its host was last heard."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.data_at = self.acknowledged_at = loop.now
        self.answers = False
        self.probed_at: list[float] = []

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        since_ms = (round((self._loop.now - at) * 1000) for at in (self.data_at, self.acknowledged_at))
        return struct.pack("=52xII", *since_ms)[:size]

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option, value) == (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        self.probed_at.append(self._loop.now)
        if self.answers:
            self.acknowledged_at = self._loop.now


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


def watch(loop: Loop, sock: Any) -> tuple[PeerWatch, list[float]]:
    gone: list[float] = []
    return PeerWatch(loop, sock, gone.append), gone  # type: ignore[arg-type]


def test_a_silent_host_gets_a_last_probe_and_is_gone_exactly_in_time(loop: Loop) -> None:
    peer = Peer(loop)
    _, gone = watch(loop, peer)
    peer.acknowledged_at += 2.0  # the last sign
    for delay_s in (PROBED_S, 2.0 - TICK_S, LAST_PROBE_S):
        assert loop.run() == pytest.approx(delay_s)
    assert gone == [pytest.approx(VANISHED_S + 2 * TICK_S)] and loop.timer is None
    assert peer.probed_at == [pytest.approx(peer.acknowledged_at + PROBED_S + TICK_S)]


def test_a_host_that_answers_the_last_probe_is_not_gone(loop: Loop) -> None:
    peer = Peer(loop)
    _, gone = watch(loop, peer)
    peer.answers = True
    for delay_s in (PROBED_S, LAST_PROBE_S, PROBED_S - LAST_PROBE_S - TICK_S):
        assert loop.run() == pytest.approx(delay_s)
    assert not gone and loop.timer is not None


def test_data_and_acknowledgements_are_signs_of_life(loop: Loop) -> None:
    peer = Peer(loop)
    _, gone = watch(loop, peer)
    for turn in range(20):
        setattr(peer, "data_at" if turn % 2 else "acknowledged_at", loop.now + 5.0)
        loop.run()
    assert not gone and loop.now > 1000.0 + 20 * 2


def test_after_a_pause_acknowledgements_get_time_to_arrive(loop: Loop) -> None:
    peer = Peer(loop)
    _, gone = watch(loop, peer)
    loop.run(late_s=20.0)
    assert not gone
    peer.acknowledged_at = loop.now + 0.1
    assert loop.run() == pytest.approx(PAUSE_S)
    assert not gone and loop.timer is not None


def test_a_loop_that_is_always_late_still_detects_a_vanished_host(loop: Loop) -> None:
    _, gone = watch(loop, Peer(loop))
    loop.run(late_s=20.0)
    loop.run(late_s=20.0)
    assert gone == [pytest.approx(PROBED_S + PAUSE_S + 40.0 + 2 * TICK_S)]


def test_a_stopped_watch_checks_no_more(loop: Loop) -> None:
    watching, _ = watch(loop, Peer(loop))
    watching.stop()
    assert loop.timer is not None and loop.timer.cancelled


def test_what_is_not_tcp_is_not_watched(loop: Loop) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert silence_s(ours) is None
        watch(loop, ours)
    assert silence_s(ours) is None  # closed
    assert net.watch(loop, asyncio.Transport(), print) is None  # type: ignore[arg-type]
    assert loop.timer is None


def test_a_connection_that_was_just_made_is_not_silent() -> None:
    with net.bound_socket() as server, socket.create_connection(server.getsockname()[:2]) as sock:
        silent_s = silence_s(sock)
        assert silent_s is not None and silent_s < VANISHED_S
