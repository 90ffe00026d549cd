"""Cut the connection at every byte of every request and reply: each operation is still executed exactly once.

For each operation, a first run through the proxy measures the sizes of its request and reply. Then it runs once for
every byte of both, with a cut at that byte; the client must reconnect, resume and get its reply, and the store must
look as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from tests.outage_log import DEADLINE_S, until
from tests.served import server_fixture

import rallypoint
from rallypoint import Store, Swap
from rallypoint.testing import DOWN, UP, CuttingProxy


class Case(NamedTuple):
    """An operation on a prepared store: what it does, what it must return, and what must then be true."""

    prepare: Callable[[Store], Any]
    act: Callable[[Store], Any]
    returns: Any
    then: Callable[[Store], bool]


def nothing(store: Store) -> None:
    pass


def push_two_items(store: Store) -> None:
    for item in "ab":
        store.queue_push("q", item)


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
        push_two_items,
        lambda s: s.queue_pop("q"),
        b"a",
        lambda s: (s.queue_len("q"), s.queue_pop("q")) == (1, b"b"),
    ),
    "queue_pop without waiting": Case(
        push_two_items,
        lambda s: s.queue_pop("q", block=False),
        b"a",
        lambda s: (s.queue_len("q"), s.queue_pop("q")) == (1, b"b"),
    ),
    "queue_len": Case(lambda s: s.queue_push("q", "i"), lambda s: s.queue_len("q"), 1, lambda s: True),
    "barrier": Case(nothing, lambda s: s.barrier("b", 1), None, lambda s: s.get("b") == b"1"),
    "lease": Case(nothing, lambda s: s.lease("k", "v").key, "k", lambda s: s.get("k") == b"v"),
}


server = server_fixture("module")


def connect(port: int) -> Store:
    return rallypoint.connect(f"tcp://127.0.0.1:{port}", timeout=DEADLINE_S)


@pytest.mark.parametrize("name", CASES)
def test_a_cut_at_any_byte_executes_the_operation_once(
    name: str, server: rallypoint.Server, cutter: CuttingProxy
) -> None:
    case = CASES[name]
    with connect(server.port) as plain, connect(cutter.port) as store:
        sizes = measure(case, plain, store, cutter)
        check_every_byte(case, plain, store, cutter, sizes)
        assert cutter.connections > sum(sizes.values()) - 10  # each of the cuts happened


def check_every_byte(case: Case, plain: Store, store: Any, cutter: CuttingProxy, sizes: dict[str, int]) -> None:
    """Run a case once for each of its bytes in both directions, and cut the connection at that byte."""
    for way in (UP, DOWN):
        for after in range(sizes[way] + 1):
            plain.delete_prefix("")
            case.prepare(plain)
            cutter.cut_after(way, after)
            assert case.act(store) == case.returns, f"cut after {after} bytes {way}"
            assert case.then(plain), f"cut after {after} bytes {way}"
            cutter.disarm()


def measure(case: Case, plain: Store, store: Store, cutter: CuttingProxy) -> dict[str, int]:
    """Run a case uncut, and return how many bytes went each way."""
    plain.delete_prefix("")
    case.prepare(plain)
    before = dict(cutter.passed)
    assert case.act(store) == case.returns
    assert case.then(plain)
    return {way: cutter.passed[way] - before[way] for way in (UP, DOWN)}


BLOCKED: dict[str, tuple[Callable[[Store], Any], Callable[[Store], Any], Any]] = {
    "get": (lambda s: s.get("late"), lambda s: s.set("late", "v"), b"v"),
    "wait": (lambda s: s.wait(["late"]), lambda s: s.set("late", "v"), None),
    "multi_get": (lambda s: s.multi_get(["late"]), lambda s: s.set("late", "v"), [b"v"]),
    "queue_pop": (lambda s: s.queue_pop("late"), lambda s: s.queue_push("late", "v"), b"v"),
    "barrier": (lambda s: s.barrier("late", 2), lambda s: s.barrier("late", 2), None),
}


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("released_during_cut", [False, True])
def test_a_blocked_call_survives_a_cut(
    name: str, released_during_cut: bool, server: rallypoint.Server, cutter: CuttingProxy
) -> None:
    act, release, returns = BLOCKED[name]
    with connect(server.port) as plain, connect(cutter.port) as store:
        plain.delete_prefix("")
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(act(store)))
        thread.start()
        await_waiting(server, 1)
        with cut(cutter, released_during_cut, lambda: store.add("connected again", 1)):
            release(plain)
        thread.join(DEADLINE_S)
        assert results == [returns]
        assert plain.queue_len("late") == 0


@contextlib.contextmanager
def cut(cutter: CuttingProxy, stays_down: bool, connected_again: Callable[[], object]) -> Iterator[None]:
    """Cut all connections; the block runs before clients can connect again, or after they have."""
    cutter.refusing = stays_down
    cutter.cut_all()
    if not stays_down:
        connected_again()
    yield
    cutter.refusing = False


def await_waiting(server: rallypoint.Server, count: int) -> None:
    """Return when at least this many requests wait at the server."""
    until(lambda: server.statistics()["waiting"] >= count, f"{count} requests wait")
