"""How a call is carried through when it comes true at the very moment of its time-out, on machines that are real."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from tests.kinds import AMPLE_S, Open

from rallypoint import Barrier, Exchange, HashStore, Lock, MembersMissing, Server, connect
from rallypoint.core.machine import Command, Done, Undo, Waiting
from rallypoint.recipes import hosting


class Late:
    """A host in which others act right before a call is taken back."""

    label = "a host"

    def __init__(self, host: Any, meanwhile: Any) -> None:
        self._host, self._meanwhile = host, meanwhile

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Any:
        if isinstance(command, Undo) and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        return self._host.act(name, member, call, command, wait_s)


def late(shared: Any, meanwhile: Any) -> None:
    shared._object._host = Late(shared._object._host, meanwhile)


class Slow:
    """A host in which a call waits once, and then is done."""

    label = "a host"

    def __init__(self) -> None:
        self._outcomes = iter([Waiting("1 of 2 members are here"), Done()])

    def act(self, *_: Any) -> Any:
        return next(self._outcomes)


def test_without_a_callback_a_wait_is_logged_with_its_age(caplog: pytest.LogCaptureFixture) -> None:
    barrier: Any = Barrier(HashStore(), "b", 2)
    barrier._object._host = Slow()
    with caplog.at_level("INFO", "rallypoint"):
        barrier.wait(0, math.inf)
    (said,) = caplog.messages
    assert re.fullmatch(r"barrier 'b', member 0 has waited \d+ s: 1 of 2 members are here", said)


def test_what_a_progress_callback_raises_takes_the_call_back(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "PROGRESS_S", 0.05)

    def progress(_: Waiting) -> None:
        Barrier(open_store(), "other", 2).wait(0, 0)

    with pytest.raises(MembersMissing, match="barrier 'other'"):
        Barrier(open_store(), "b", 2, progress).wait(0, AMPLE_S)
    with pytest.raises(MembersMissing) as caught:
        Barrier(open_store(), "b", 2).wait(1, 0)
    assert caught.value.missing == ("0",), "it has not arrived"


def test_a_barrier_that_opened_in_time_has_opened() -> None:
    store = HashStore()
    barrier = Barrier(store, "b", 2)
    late(barrier, lambda: Barrier(store, "b", 2).wait(1, 0))
    barrier.wait(0, 0)


def test_an_exchange_that_ended_in_time_gives_what_it_came_to() -> None:
    store = HashStore()
    exchange = Exchange(store, "x", 2)
    late(exchange, lambda: Exchange(store, "x", 2).all_gather(1, b"one", 0))
    assert exchange.all_gather(0, b"zero", 0) == [b"zero", b"one"]


def test_a_lock_that_came_too_late_is_not_held() -> None:
    store = HashStore()
    first, second = Lock(store, "l"), Lock(store, "l")
    first.acquire()
    late(second, first.release)
    with pytest.raises(MembersMissing):
        second.acquire(0)
    assert second.fence == 0 and not second.lost
    assert Lock(store, "l").acquire(0) > first.fence, "what came too late was given back"


def test_the_server_says_what_it_hosts() -> None:
    with Server() as server:
        store = connect(server.url)
        assert server.statistics()["objects"] == {}
        with Lock(store, "l"):
            assert server.statistics()["objects"] == {"lock": 1}
        assert server.statistics()["objects"] == {}
    assert isinstance(hosting.host_of(HashStore()).act("l", "m", 1, _look(), 0.0), Done)


def _look() -> Command:
    from rallypoint.core.lock import Look

    return Look()
