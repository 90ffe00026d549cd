"""Pipelines: writes sent together, answered in order, and executed exactly once despite cuts; on every store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.served import server_fixture

import rallypoint
from rallypoint.store.native_backend import WINDOW
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


def test_results_are_in_order(store: rallypoint.Store) -> None:
    with store.pipeline() as pipe:
        pipe.set("k", "a")
        pipe.append("k", b"b")
        pipe.add("n", 5)
        pipe.add("n", -2)
        pipe.delete_key("k")
        pipe.delete_key("k")
        pipe.queue_push("q", "first")
        pipe.queue_push("q", "second")
        pipe.append("k", "again")
        assert pipe.results == [] and not store.check(["n"]), "nothing is sent before the block ends"
    assert pipe.results == [None, None, 5, 3, True, False, None, None, None]
    assert store.get("k") == b"again"
    assert [store.queue_pop("q"), store.queue_pop("q")] == [b"first", b"second"]


def test_an_empty_pipeline_does_nothing(store: rallypoint.Store) -> None:
    with store.pipeline() as pipe:
        pass
    assert pipe.results == [] and store.num_keys() == 0


def test_a_pipeline_of_a_prefix_store_uses_the_prefix(store: rallypoint.Store) -> None:
    with rallypoint.PrefixStore("job", store).pipeline() as pipe:
        pipe.set("k", "v")
    assert store.get("job/k") == b"v"


def test_an_error_in_the_block_sends_nothing(store: rallypoint.Store) -> None:
    def use() -> None:
        with store.pipeline() as pipe:
            pipe.set("k", "v")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        use()
    assert store.num_keys() == 0


def test_misuse_raises_at_once(store: rallypoint.Store) -> None:
    pipe = store.pipeline()
    with pytest.raises(TypeError):
        pipe.add("n", 1.5)  # type: ignore[arg-type]
    with pytest.raises(rallypoint.LimitExceeded):
        pipe.set("k" * 10_000, "v")


def test_a_failed_operation_raises_and_those_before_it_are_executed(store: rallypoint.Store) -> None:
    store.set("word", "no number")

    def use() -> None:
        with store.pipeline() as pipe:
            pipe.set("before", "1")
            pipe.add("word", 1)
            pipe.add("n", 1)

    with pytest.raises(rallypoint.NotAnInteger, match="no number"):
        use()
    assert store.get("before") == b"1"
    assert store.get("word") == b"no number"
    assert store.add("n", 1) in (1, 2), "the store still works"


def test_a_pipeline_longer_than_the_window(store: rallypoint.Store) -> None:
    count = 2 * WINDOW + 7
    with store.pipeline() as pipe:
        for _ in range(count):
            pipe.add("n", 1)
    assert pipe.results == list(range(1, count + 1))


def test_a_pipeline_of_large_values_does_not_deadlock(server: rallypoint.Server) -> None:
    value = b"x" * 200_000
    with connect(server.port) as store:
        with store.pipeline() as pipe:
            for number in range(100):
                pipe.set(f"large {number}", value)
        assert pipe.results == [None] * 100
        assert store.multi_get([f"large {number}" for number in range(100)]) == [value] * 100
        store.delete_prefix("large")


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("after", [1, 3, 50, 777, 2000, 5001])
def test_a_cut_repeats_and_loses_no_operation(way: str, after: int, server: rallypoint.Server) -> None:
    count = WINDOW + 100
    with CuttingProxy(server.port) as cutter, connect(cutter.port) as store, connect(server.port) as plain:
        plain.delete_prefix("")
        cutter.cut_after(way, after)
        with store.pipeline() as pipe:
            for number in range(count):
                pipe.add("n", 1)
                pipe.queue_push("q", str(number))
        assert cutter.connections > 1, "the connection was cut"
        assert pipe.results[::2] == list(range(1, count + 1))
        assert plain.get("n") == str(count).encode()
        assert [plain.queue_pop("q") for _ in range(count)] == [str(number).encode() for number in range(count)]
        assert plain.queue_len("q") == 0


def test_pipelines_survive_many_cuts(server: rallypoint.Server) -> None:
    with CuttingProxy(server.port) as cutter, connect(cutter.port) as store:
        store.delete_prefix("")
        for turn in range(1, 21):
            cutter.cut_after(DOWN, 100 * turn % 700 + 1)
            with store.pipeline() as pipe:
                for _ in range(100):
                    pipe.add("n", 1)
            assert pipe.results[-1] == 100 * turn
        assert cutter.connections > 20
