"""TLS handshakes in turn: by a clock and timers in the hands of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rallypoint.server.tls_queue import FORGET_S, MAX_HOSTS, MAX_WAITING, PACE_S, WINDOW, TlsQueue, TlsTurn


class Handshakes:
    """A queue, and which connections began or were refused, by number."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.queue = TlsQueue(lambda: self.now)
        self.begun: list[int] = []
        self.refused: list[int] = []
        self.turns: list[TlsTurn] = []
        self._soon: list[Callable[[], object]] = []
        self._timers: list[tuple[float, Callable[[], object]]] = []
        loop = asyncio.get_running_loop()
        loop.call_soon = self._call_soon  # type: ignore[method-assign, assignment]
        loop.call_later = self._call_later  # type: ignore[method-assign, assignment]

    def _call_soon(self, call: Callable[..., object], *arguments: object, context: object = None) -> None:
        self._soon.append(lambda: call(*arguments))

    def _call_later(self, delay_s: float, call: Callable[..., object], *arguments: object) -> object:
        self._timers.append((self.now + delay_s, lambda: call(*arguments)))
        return object()

    def enter(self, host: str = "10.0.0.1", count: int = 1) -> None:
        for _ in range(count):
            number = len(self.turns)
            begin, refuse = lambda number=number: self.begun.append(number), lambda number=number: self._refuse(number)
            self.turns.append(self.queue.enter(host, begin, refuse))

    def _refuse(self, number: int) -> None:
        self.refused.append(number)
        self.turns[number].ended()  # its connection is closed

    def turn(self) -> None:
        """Run one turn of the event loop."""
        soon, self._soon = self._soon, []
        for call in soon:
            call()

    def settle(self) -> None:
        while self._soon:
            self.turn()

    def elapse(self, for_s: float) -> None:
        """Let time pass, timer by timer."""
        end_at = self.now + for_s
        while due := [timer for timer in self._timers if timer[0] <= end_at + 1e-9]:
            first = min(due, key=lambda timer: timer[0])
            self._timers.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
            self.settle()
        self.now = end_at

    def fail(self, count: int, host: str = "10.0.0.1") -> None:
        """Let so many handshakes begin, and end without proof."""
        first = len(self.turns)
        self.enter(host, count)
        self.settle()
        for turn in self.turns[first:]:
            turn.ended()


def in_loop(test: Callable[[Handshakes], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        originals = loop.call_soon, loop.call_later
        try:
            await test(Handshakes())
        finally:
            loop.call_soon, loop.call_later = originals  # type: ignore[method-assign]

    def call() -> None:
        asyncio.run(run())

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


@in_loop
async def test_one_handshake_begins_in_each_turn_of_the_loop(shakes: Handshakes) -> None:
    shakes.enter(count=3)
    assert shakes.begun == []
    for turns in range(1, 4):
        shakes.turn()
        assert shakes.begun == list(range(turns))


@in_loop
async def test_a_host_that_proves_itself_never_waits_for_the_clock(shakes: Handshakes) -> None:
    shakes.enter(count=10 * WINDOW)
    shakes.settle()
    assert len(shakes.begun) == WINDOW
    proved = 0
    while proved < len(shakes.begun):
        shakes.turns[shakes.begun[proved]].proved()
        proved += 1
        shakes.settle()
    assert sorted(shakes.begun) == list(range(10 * WINDOW)) and not shakes.refused and not shakes.queue.waiting


@in_loop
async def test_a_host_that_fails_goes_on_at_the_pace_and_others_at_once(shakes: Handshakes) -> None:
    shakes.fail(WINDOW)
    shakes.enter(count=5)
    shakes.enter("10.0.0.2")
    shakes.settle()
    assert shakes.begun[WINDOW:] == [WINDOW + 5]
    shakes.elapse(0.0)
    assert shakes.begun[WINDOW + 1 :] == [WINDOW + 4], "the newest first"
    shakes.elapse(PACE_S * 0.9)
    assert len(shakes.begun) == WINDOW + 2
    shakes.elapse(PACE_S * 0.1)
    assert shakes.begun[WINDOW + 2 :] == [WINDOW + 3]


@in_loop
async def test_the_pace_is_that_of_all_hosts_together_and_they_take_turns(shakes: Handshakes) -> None:
    for host in ("a", "b"):
        shakes.fail(WINDOW, host)
    began = len(shakes.begun)
    shakes.enter("a", 20)
    shakes.enter("b", 2)
    shakes.elapse(3.5 * PACE_S)
    assert shakes.begun[began:] == [began + 19, began + 21, began + 18, began + 20]


@in_loop
async def test_open_handshakes_count_like_failed_ones(shakes: Handshakes) -> None:
    """A peer that sends the first message of TLS and no more."""
    shakes.enter(count=WINDOW + 3)
    shakes.settle()
    assert len(shakes.begun) == WINDOW and shakes.queue.waiting == 3


@in_loop
async def test_of_a_host_that_failed_often_only_so_many_wait_and_the_oldest_go(shakes: Handshakes) -> None:
    shakes.fail(WINDOW)
    shakes.enter(count=MAX_WAITING + 10)
    assert shakes.refused == list(range(WINDOW, WINDOW + 10)) and shakes.queue.waiting == MAX_WAITING
    assert shakes.queue.refused == 10


@in_loop
async def test_of_a_host_without_failures_all_wait(shakes: Handshakes) -> None:
    shakes.enter(count=WINDOW + 10 * MAX_WAITING)
    assert not shakes.refused and shakes.queue.waiting == 10 * MAX_WAITING


@in_loop
async def test_whoever_hangs_up_while_it_waits_has_not_failed(shakes: Handshakes) -> None:
    shakes.enter(count=WINDOW)
    shakes.settle()
    shakes.enter(count=5)
    for turn in shakes.turns[WINDOW:]:
        turn.ended()
    assert not shakes.queue.waiting
    for turn in shakes.turns[:WINDOW]:
        turn.proved()
    shakes.enter(count=WINDOW)
    shakes.settle()
    assert len(shakes.begun) == 2 * WINDOW


@in_loop
async def test_whoever_hangs_up_before_its_turn_costs_nothing(shakes: Handshakes) -> None:
    shakes.enter(count=2)
    for turn in shakes.turns:
        turn.ended()
    shakes.settle()
    assert not shakes.begun
    shakes.enter(count=WINDOW)
    shakes.settle()
    assert len(shakes.begun) == WINDOW


@in_loop
async def test_failures_are_forgotten_one_after_the_other(shakes: Handshakes) -> None:
    for _ in range(3):
        shakes.fail(WINDOW)
        shakes.elapse(1000 * WINDOW * FORGET_S)
    shakes.fail(WINDOW)
    shakes.elapse(2.5 * FORGET_S)
    began = len(shakes.begun)
    shakes.enter(count=10)
    shakes.settle()
    assert len(shakes.begun) == began + 2, "half of the third is not enough"
    assert shakes.queue.waiting == 8


@in_loop
async def test_a_flood_of_failures_begins_no_faster_than_the_pace(shakes: Handshakes) -> None:
    """Each one fails as soon as it has begun, and others always wait."""
    steps, step_s, ended = 2000, 0.01, 0
    for _ in range(steps):
        shakes.enter(count=2)
        shakes.settle()
        while ended < len(shakes.begun):
            shakes.turns[shakes.begun[ended]].ended()
            ended += 1
            shakes.settle()
        shakes.elapse(step_s)
    paced, forgotten = steps * step_s / PACE_S, steps * step_s / FORGET_S
    assert paced <= len(shakes.begun) <= WINDOW + paced + forgotten + 1


@in_loop
async def test_a_turn_ends_once(shakes: Handshakes) -> None:
    shakes.enter(count=WINDOW + 2)
    shakes.settle()
    for _ in range(3):
        shakes.turns[0].proved()
        shakes.turns[0].ended()
    shakes.settle()
    assert len(shakes.begun) == WINDOW + 1


@in_loop
async def test_only_so_many_hosts_are_remembered(shakes: Handshakes) -> None:
    shakes.fail(WINDOW, "first")
    for number in range(MAX_HOSTS):
        shakes.fail(1, f"host {number}")
    began = len(shakes.begun)
    shakes.enter("first")
    shakes.settle()
    assert len(shakes.begun) == began + 1


@in_loop
async def test_a_handshake_that_raises_does_not_stop_the_others(shakes: Handshakes) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    shakes.queue.enter("10.0.0.1", fail, fail)
    shakes.enter()
    try:
        shakes.settle()
    except RuntimeError:
        shakes.settle()
    assert shakes.begun == [0]
