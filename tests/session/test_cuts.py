"""Cut the connection at every byte of every request and of every answer: each operation still happens exactly once.

For each operation, a first run through the proxy measures how many bytes its request and its answer have. Then it is
run once for every byte of both, with the connection cut right there; the client has to come back, resume and get its
answer, and the store has to look as if nothing had happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from tests.cutter import DOWN, UP, Cutter

import rallypoint
from rallypoint import Store, Swap

DEADLINE_S = 60


class Case(NamedTuple):
    """An operation on a prepared store: what it does, what it must return, and what must then be true."""

    prepare: Callable[[Store], Any]
    act: Callable[[Store], Any]
    returns: Any
    then: Callable[[Store], bool]


def nothing(store: Store) -> None:
    pass


CASES = {
    "set": Case(nothing, lambda s: s.set("k", "v"), None, lambda s: s.get("k") == b"v"),
    "get": Case(lambda s: s.set("k", "v"), lambda s: s.get("k"), b"v", lambda s: s.get("k") == b"v"),
    "add": Case(lambda s: s.set("k", "5"), lambda s: s.add("k", 2), 7, lambda s: s.get("k") == b"7"),
    "append": Case(lambda s: s.set("k", "a"), lambda s: s.append("k", "b"), None, lambda s: s.get("k") == b"ab"),
    "compare_set": Case(
        lambda s: s.set("k", "a"), lambda s: s.compare_set("k", "a", "b"), b"b", lambda s: s.get("k") == b"b"
    ),
    "swap": Case(
        lambda s: s.set("k", "a"), lambda s: s.swap("k", "a", "b"), Swap(True, b"b"), lambda s: s.get("k") == b"b"
    ),
    "check": Case(lambda s: s.set("k", "a"), lambda s: s.check(["k"]), True, lambda s: True),
    "wait": Case(lambda s: s.set("k", "a"), lambda s: s.wait(["k"]), None, lambda s: True),
    "multi_get": Case(
        lambda s: s.multi_set(["a", "b"], ["1", "2"]), lambda s: s.multi_get(["a", "b"]), [b"1", b"2"], lambda s: True
    ),
    "multi_set": Case(
        nothing, lambda s: s.multi_set(["a", "b"], ["1", "2"]), None, lambda s: s.multi_get(["a", "b"]) == [b"1", b"2"]
    ),
    "delete_key": Case(lambda s: s.set("k", "a"), lambda s: s.delete_key("k"), True, lambda s: not s.check(["k"])),
    "delete_prefix": Case(
        lambda s: s.multi_set(["pa", "pb"], ["1", "2"]), lambda s: s.delete_prefix("p"), 2, lambda s: s.num_keys() == 0
    ),
    "num_keys": Case(lambda s: s.set("k", "a"), lambda s: s.num_keys(), 1, lambda s: True),
    "list_keys": Case(lambda s: s.set("k", "a"), lambda s: s.list_keys(), ["k"], lambda s: True),
    "queue_push": Case(nothing, lambda s: s.queue_push("q", "i"), None, lambda s: s.queue_len("q") == 1),
    "queue_pop": Case(
        lambda s: [s.queue_push("q", i) for i in "ab"],
        lambda s: s.queue_pop("q"),
        b"a",
        lambda s: (s.queue_len("q"), s.queue_pop("q")) == (1, b"b"),
    ),
    "queue_pop without waiting": Case(
        lambda s: [s.queue_push("q", i) for i in "ab"],
        lambda s: s.queue_pop("q", block=False),
        b"a",
        lambda s: (s.queue_len("q"), s.queue_pop("q")) == (1, b"b"),
    ),
    "queue_len": Case(lambda s: s.queue_push("q", "i"), lambda s: s.queue_len("q"), 1, lambda s: True),
    "barrier": Case(nothing, lambda s: s.barrier("b", 1), None, lambda s: s.get("b") == b"1"),
    "lease": Case(nothing, lambda s: s.lease("k", "v").key, "k", lambda s: s.get("k") == b"v"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server() as server:
        yield server


@pytest.fixture
def cutter(server: rallypoint.Server) -> Iterator[Cutter]:
    with Cutter(server.port) as cutter:
        yield cutter


def connect(port: int) -> Store:
    return rallypoint.connect(f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S)


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str, server: rallypoint.Server, cutter: Cutter) -> None:
    case = CASES[name]
    with connect(server.port) as plain, connect(cutter.port) as store:
        sizes = measure(case, plain, store, cutter)
        for way in (UP, DOWN):
            for after in range(sizes[way] + 1):
                plain.delete_prefix("")
                case.prepare(plain)
                cutter.arm(way, after)
                assert case.act(store) == case.returns, f"cut after {after} bytes {way}"
                assert case.then(plain), f"cut after {after} bytes {way}"
                cutter.disarm()
        assert cutter.connections > sum(sizes.values()) - 10  # it really was cut, again and again


def measure(case: Case, plain: Store, store: Store, cutter: Cutter) -> dict[str, int]:
    """Run a case uncut, and return how many bytes went each way."""
    plain.delete_prefix("")
    case.prepare(plain)
    before = dict(cutter.passed)
    assert case.act(store) == case.returns
    assert case.then(plain)
    return {way: cutter.passed[way] - before[way] for way in (UP, DOWN)}


BLOCKED = {
    "get": (lambda s: s.get("late"), lambda s: s.set("late", "v"), b"v"),
    "wait": (lambda s: s.wait(["late"]), lambda s: s.set("late", "v"), None),
    "multi_get": (lambda s: s.multi_get(["late"]), lambda s: s.set("late", "v"), [b"v"]),
    "queue_pop": (lambda s: s.queue_pop("late"), lambda s: s.queue_push("late", "v"), b"v"),
    "barrier": (lambda s: s.barrier("late", 2), lambda s: s.barrier("late", 2), None),
}


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("while_away", [False, True])
def test_a_blocked_call_goes_on(name: str, while_away: bool, server: rallypoint.Server, cutter: Cutter) -> None:
    act, release, returns = BLOCKED[name]
    with connect(server.port) as plain, connect(cutter.port) as store:
        plain.delete_prefix("")
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(act(store)))
        thread.start()
        await_waiting(server, 1)
        if while_away:
            cutter.refusing = True
        cutter.cut_all()
        if while_away:
            release(plain)
            cutter.refusing = False
        else:
            store.add("connected again", 1)
            release(plain)
        thread.join(DEADLINE_S)
        assert results == [returns]
        assert plain.queue_len("late") == 0


def await_waiting(server: rallypoint.Server, count: int) -> None:
    """Return when so many requests wait at the server."""
    while server.statistics()["waiting"] < count:
        pass
