"""Calls that complete at the moment of their timeout, on real machines, and reports of progress."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from tests.store_kinds import AMPLE_S, Open

from rallypoint import Barrier, Exchange, HashStore, Lock, MembersMissing, Server, connect
from rallypoint.core.machines.lock import LockQuery
from rallypoint.core.machines.machine import Command, Done, Undo, Waiting
from rallypoint.recipes.hosting import shared_object


class Late:
    """A host in which others act right before a call is withdrawn."""

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
    """A host in which a call waits once and then completes."""

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
    (line,) = caplog.messages
    assert re.fullmatch(r"barrier 'b', member 0 has waited \d+ s: 1 of 2 members are here", line)


def test_an_error_in_a_progress_callback_withdraws_the_call(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)

    def progress(_: Waiting) -> None:
        Barrier(open_store(), "other", 2).wait(0, 0)

    with pytest.raises(MembersMissing, match="barrier 'other'"):
        Barrier(open_store(), "b", 2, progress).wait(0, AMPLE_S)
    with pytest.raises(MembersMissing) as caught:
        Barrier(open_store(), "b", 2).wait(1, 0)
    assert caught.value.missing == ("0",), "its arrival was withdrawn"


def test_a_barrier_that_opens_at_the_timeout_passes() -> None:
    store = HashStore()
    barrier = Barrier(store, "b", 2)
    late(barrier, lambda: Barrier(store, "b", 2).wait(1, 0))
    barrier.wait(0, 0)


def test_an_exchange_that_completes_at_the_timeout_returns_its_result() -> None:
    store = HashStore()
    exchange = Exchange(store, "x", 2)
    late(exchange, lambda: Exchange(store, "x", 2).all_gather(1, b"one", 0))
    assert exchange.all_gather(0, b"zero", 0) == [b"zero", b"one"]


def test_a_lock_acquired_at_the_timeout_is_released() -> None:
    store = HashStore()
    first, second = Lock(store, "l"), Lock(store, "l")
    first.acquire()
    late(second, first.release)
    with pytest.raises(MembersMissing):
        second.acquire(0)
    assert second.fence == 0 and not second.lost
    assert Lock(store, "l").acquire(0) > first.fence, "the lock acquired too late was released"


def test_statistics_of_the_server_count_hosted_objects() -> None:
    with Server() as server:
        store = connect(server.url)
        assert server.statistics()["objects"] == {}
        with Lock(store, "l"):
            assert server.statistics()["objects"] == {"lock": 1}
        assert server.statistics()["objects"] == {}
    assert isinstance(shared_object.host_of(HashStore()).act("l", "m", 1, LockQuery(), 0.0), Done)
