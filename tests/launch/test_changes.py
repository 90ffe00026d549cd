"""Threads of the agent that listen to changes: they outlive quiet times and an etcd without a majority."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue

import pytest
from tests.raw_peer import AMPLE_S, until
from tests.served import server_fixture

import rallypoint
from rallypoint.errors import NoQuorum, SessionLost, StoreTimeout
from rallypoint.launch.changes import ChangeListener, changes_of
from rallypoint.store.base import Change, Watch

server = server_fixture()

SILENT = StoreTimeout(operation="watch", keys=["news"], missing=["news"], timeout_s=60.0, store="etcd://a")
WITHOUT_MAJORITY = NoQuorum(store="etcd://a", timeout_s=60.0, tried={"a": "refused"})
OVER = SessionLost(peer="a", why="expired")


class ScriptedWatch(Watch):
    """A watch whose next results are given."""

    def __init__(self, *results: Change | Exception) -> None:
        self._results: Iterator[Change | Exception] = iter(results)

    def next(self, timeout: object = None) -> Change:
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result


@pytest.mark.parametrize("pause", [SILENT, WITHOUT_MAJORITY])
def test_changes_go_on_after_a_pause_and_end_with_the_session(pause: Exception) -> None:
    first, second = Change("news", b"1", 1), Change("news", b"2", 2)
    assert list(changes_of(ScriptedWatch(first, pause, pause, second, OVER))) == [first, second]


def test_changes_end_when_the_watch_is_closed(server: rallypoint.Server) -> None:
    with rallypoint.connect(server.url) as store, store.watch("news") as watch:
        changes = changes_of(watch)
        store.set("news", "1")
        assert next(changes).value == b"1"
        watch.close()
        assert list(changes) == []


def test_a_listener_misses_no_change_that_follows_it(server: rallypoint.Server) -> None:
    """The agent does not wait for the reply: its next request causes a change, or has another client cause one."""
    found: Queue[Change] = Queue()
    with rallypoint.connect(server.url) as store, rallypoint.connect(server.url) as other:
        for turn in range(100):
            listener = ChangeListener(store, "news", found.put, "news")
            (store if turn % 2 else other).add("news", int(store.add("turn", 1) > 0))
            assert found.get(timeout=AMPLE_S).value == str(turn + 1).encode()
            listener.close()
            listener.confirm()
            until(lambda: server.statistics()["watches"], lambda watches: not watches)
