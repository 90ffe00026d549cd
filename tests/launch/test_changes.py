"""Threads of the agent that listen to changes: they outlive quiet times and an etcd without a majority."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.served import server_fixture

import rallypoint
from rallypoint.errors import NoQuorum, SessionLost, StoreTimeout
from rallypoint.launch.changes import changes_of
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
