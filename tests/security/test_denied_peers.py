"""Failed attempts by host: counted, delayed, bounded, forgotten; by a clock and timers in the hands of the test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from tests.event_loop import in_loop_with

from rallypoint.server.denied_peers import (
    FIRST_DELAY_S,
    FORGET_S,
    MAX_DELAY_S,
    MAX_DELAYED,
    MAX_HOSTS,
    MAX_REPORTS,
    PROMPT,
    DeniedPeers,
)


class Attempts:
    """Failed attempts: when each was answered, and which were closed."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.peers = DeniedPeers(lambda: self.now)
        self.told: list[str] = []
        self.peers.on_new = self.told.append
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self.answered = self.closed = 0
        loop = asyncio.get_running_loop()
        loop.call_later = self._call_later  # type: ignore[method-assign, assignment]

    def _call_later(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        self.timers.append((delay_s, lambda: call(*arguments)))

    def fail(self, host: str = "10.0.0.1", why: str = "wrong token") -> float | None:
        """Fail once; return the delay of the answer, or None if the connection was closed instead."""
        answered, closed, timers = self.answered, self.closed, len(self.timers)
        self.peers.deny(host, why, self._answer, self._close)
        if self.closed > closed:
            return None
        if self.answered > answered:
            return 0.0
        assert len(self.timers) == timers + 1
        return self.timers[-1][0]

    def _answer(self) -> None:
        self.answered += 1

    def _close(self) -> None:
        self.closed += 1

    def elapse(self) -> None:
        """Give all delayed answers."""
        timers, self.timers = self.timers, []
        for _, call in timers:
            call()


in_loop = in_loop_with(Attempts)


@in_loop
async def test_the_first_failures_are_answered_at_once_and_then_later_and_later(attempts: Attempts) -> None:
    delays = [attempts.fail() for _ in range(PROMPT + 12)]
    assert delays[: PROMPT + 4] == [0.0] * PROMPT + [FIRST_DELAY_S * 2**n for n in range(4)]
    assert delays[-1] == delays[-2] == MAX_DELAY_S and delays == sorted(d for d in delays if d is not None)
    assert attempts.answered == PROMPT and attempts.peers.total == PROMPT + 12
    attempts.elapse()
    assert attempts.answered == PROMPT + 12 and not attempts.closed


@in_loop
async def test_a_host_that_fails_for_ever_has_the_longest_delay(attempts: Attempts) -> None:
    for _ in range(5000):
        last = attempts.fail()
        attempts.elapse()
    assert last == MAX_DELAY_S


@in_loop
async def test_other_hosts_are_answered_at_once(attempts: Attempts) -> None:
    for _ in range(20):
        attempts.fail("10.0.0.1")
    assert [attempts.fail("10.0.0.2") for _ in range(PROMPT)] == [0.0] * PROMPT
    assert attempts.fail("10.0.0.1") == MAX_DELAY_S


@in_loop
async def test_a_quiet_host_is_forgotten(attempts: Attempts) -> None:
    for _ in range(PROMPT + 1):
        attempts.fail()
    attempts.now += FORGET_S
    assert attempts.fail() == 2 * FIRST_DELAY_S, "not yet"
    attempts.now += FORGET_S + 0.001
    assert attempts.fail() == 0.0
    assert len(attempts.told) == 2


@in_loop
async def test_only_so_many_wait_for_their_answer(attempts: Attempts) -> None:
    for _ in range(PROMPT):
        attempts.fail()
    assert all(attempts.fail() for _ in range(MAX_DELAYED))
    assert attempts.fail() is None and attempts.fail("10.0.0.2") == 0.0, "the others are not delayed, and need no room"
    assert attempts.closed == 1 and attempts.peers.total == PROMPT + MAX_DELAYED + 2
    attempts.elapse()
    assert attempts.fail() == MAX_DELAY_S, "there is room again"


@in_loop
async def test_only_so_many_hosts_are_remembered(attempts: Attempts) -> None:
    for _ in range(PROMPT + 1):
        attempts.fail("the first")
        attempts.fail("the second")
    attempts.fail("the first")
    for number in range(MAX_HOSTS - 1):
        attempts.fail(f"10.1.{number >> 8}.{number & 255}")
    assert attempts.fail("the first") == 4 * FIRST_DELAY_S, "it is not the one that was silent for longest"
    assert attempts.fail("the second") == 0.0


def test_a_host_is_logged_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        attempts = Attempts()
        for _ in range(10):
            attempts.fail("10.0.0.1")
        attempts.fail("unix socket", "its user is \x1b[31mred\n")
        assert attempts.told == ["10.0.0.1 (wrong token)", r"unix socket (its user is \x1b[31mred\n)"]

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    words = "further failures of this host are counted, not logged"
    assert [record.getMessage() for record in caplog.records] == [
        f"denied 10.0.0.1 (wrong token); {words}",
        rf"denied unix socket (its user is \x1b[31mred\n); {words}",
    ]


def test_many_hosts_neither_fill_the_log_nor_occupy_the_clients(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        attempts = Attempts()
        for number in range(5000):
            attempts.fail(f"2001:db8::{number:x}")
        assert len(attempts.told) == MAX_REPORTS and attempts.peers.total == 5000
        attempts.now += FORGET_S + 1
        attempts.fail("2001:db8::1")
        assert len(attempts.told) == MAX_REPORTS + 1, "a minute later, again"

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert len(caplog.records) == MAX_REPORTS + 2
    assert caplog.records[MAX_REPORTS].getMessage().startswith(f"denied more than {MAX_REPORTS} hosts within ")
