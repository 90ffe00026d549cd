"""Batches: requests sent together and collected later, in order, executed exactly once despite cuts; on every store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.served import server_fixture

import rallypoint
from rallypoint.core import ops
from rallypoint.store.base import Watch
from rallypoint.store.batch import Answer, Batch
from rallypoint.testing import DOWN, UP, CuttingProxy

DEADLINE_S = 60


server = server_fixture("module")


def connect(port: int) -> rallypoint.Store:
    return rallypoint.connect(f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S)


@pytest.fixture(params=["tcp", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[rallypoint.Store]:
    if request.param == "tcp":
        with rallypoint.Server() as server, connect(server.port) as store:
            yield store
    elif request.param == "hash":
        yield rallypoint.HashStore()
    else:
        yield rallypoint.FileStore(str(tmp_path / "store"), 1)


def test_answers_are_those_of_the_single_calls(store: rallypoint.Store) -> None:
    view = rallypoint.PrefixStore("job", store)
    with Batch(store) as batch:
        batch.set(view, "k", "v")
        counts = [batch.add(view, "n", 5), batch.add(view, "n", -2)]
        lease = batch.lease(view, "mine", b"here")
        found = [batch.check(view, keys) for keys in (["k", "mine"], ["k", "missing"])]
        keys, marks = batch.list_keys(view), batch.list_keys(view, "mi")
        values = [batch.get(view, key) for key in ("k", "missing")]
        swapped = batch.compare_set(view, "once", "", "first"), batch.compare_set(view, "once", "", "second")
        assert store.num_keys() == 0, "nothing is sent before the block ends"
    assert [count.value for count in counts] == [5, 3] and [one.value for one in found] == [True, False]
    assert (keys.value, marks.value) == (["k", "mine", "n"], ["ne"])
    assert [one.value for one in values] == [b"v", None] and [one.value for one in swapped] == [b"first", b"first"]
    with Batch(store) as batch:
        released, deleted = batch.release(lease.value), batch.delete_prefix(view, "")
    assert (released.value, deleted.value, store.num_keys()) == (True, 3, 0)


def test_a_watch_begins_with_its_request(store: rallypoint.Store) -> None:
    seen: list[Watch] = []
    with Batch(store) as batch:
        batch.set(store, "k", "early")
        watching = batch.watch(store, "k")
        watching.then(seen.append)
        batch.set(store, "k", "late")
    assert seen == [watching.value]
    with watching.value as watch:
        assert watch.next(DEADLINE_S).value == b"late"
        store.delete_key("k")
        assert watch.next(DEADLINE_S).value is None


def test_what_is_asked_after_a_batch_was_sent_takes_effect_after_it(store: rallypoint.Store) -> None:
    batch = Batch(store)
    first = batch.add(store, "n", 1)
    batch.send()
    assert store.add("n", 1) == 2
    batch.wait()
    assert first.value == 1
    batch.wait()  # again: there is nothing more to wait for
    assert store.add("n", 1) == 3


def test_the_first_error_is_raised_and_the_other_answers_are_there(store: rallypoint.Store) -> None:
    store.set("word", "no number")
    batch = Batch(store)
    before, _, after = (batch.add(store, key, 1) for key in ("n", "word", "m"))
    with pytest.raises(rallypoint.NotAnInteger, match="no number"):
        batch.wait()
    assert (before.value, after.value) == (1, 1)


def test_the_error_of_an_optional_request_is_dropped(store: rallypoint.Store) -> None:
    store.set("word", "no number")
    used: list[int] = []
    with Batch(store) as batch:
        bad: Answer[int] = batch.request(ops.Add(0, store._name("word"), 1), int, optional=True)
        bad.then(used.append)
        good = batch.add(store, "n", 1)
    assert (used, good.value) == ([], 1)


def test_an_error_in_the_block_sends_nothing(store: rallypoint.Store) -> None:
    def use() -> None:
        with Batch(store) as batch:
            batch.set(store, "k", "v")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        use()
    assert store.num_keys() == 0


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("after", [0, 1, 5, 30, 60, 90, 150])
def test_a_cut_repeats_and_loses_no_request(way: str, after: int, server: rallypoint.Server) -> None:
    with CuttingProxy(server.port) as cutter, connect(cutter.port) as store, connect(server.port) as plain:
        plain.delete_prefix("")
        cutter.cut_after(way, after)
        batch = Batch(store)
        first = batch.add(store, "n", 1)
        watching = batch.watch(store, "n")
        batch.lease(store, "mine", "v")
        second = batch.add(store, "n", 1)
        batch.send()
        assert store.add("n", 1) == 3
        cutter.cut_all()
        batch.wait()
        assert (first.value, second.value) == (1, 2)
        assert plain.get("mine") == b"v" and plain.get("n") == b"3"
        with watching.value as watch:
            assert [watch.next(DEADLINE_S).value for _ in range(2)] == [b"2", b"3"]


def test_replies_that_nobody_waits_for_are_kept(server: rallypoint.Server) -> None:
    """The connection monitor receives them; other calls find the connection as usual."""
    with connect(server.port) as store:
        store.delete_prefix("")
        batches = [Batch(store) for _ in range(100)]
        counts = [batch.add(store, "n", 1) for batch in batches]
        for batch in batches:
            batch.send()
        assert store.add("n", 0) == 100
        for batch in reversed(batches):
            batch.wait()
        assert [count.value for count in counts] == list(range(1, 101))


def test_a_fork_leaves_the_replies_to_its_parent(server: rallypoint.Server) -> None:
    with connect(server.port) as store:
        store.delete_prefix("")
        batch = Batch(store)
        count = batch.add(store, "n", 1)
        batch.send()
        child = os.fork()
        if not child:
            try:
                batch.wait()
            except rallypoint.SessionLost:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        batch.wait()
        assert count.value == 1
