"""Blocking calls: what wakes them and what does not, how they time out, and how they end with their store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

from rallypoint import HashStore, PrefixStore, Store, StoreClosed, StoreTimeout

from .calls import LONG_ENOUGH_S, Call, results, together, until
from .kinds import KINDS, Place

Step = Callable[[Store], Any]


class Wake(NamedTuple):
    """A blocking call, the steps made meanwhile, and the result that the call must have."""

    name: str
    call: Step
    steps: list[Step]
    answer: Any


WAKES = [
    Wake("get, set", lambda s: s.get("k"), [lambda s: s.set("k", "v")], b"v"),
    Wake("get, set to nothing", lambda s: s.get("k"), [lambda s: s.set("k", "")], b""),
    Wake("get, add", lambda s: s.get("k"), [lambda s: s.add("k", 5)], b"5"),
    Wake("get, append", lambda s: s.get("k"), [lambda s: s.append("k", "v")], b"v"),
    Wake("get, compare_set", lambda s: s.get("k"), [lambda s: s.compare_set("k", "", "v")], b"v"),
    Wake("get, swap", lambda s: s.get("k"), [lambda s: s.swap("k", None, "v")], b"v"),
    Wake("get, multi_set", lambda s: s.get("k"), [lambda s: s.multi_set(["j", "k"], ["u", "v"])], b"v"),
    Wake("get, lease", lambda s: s.get("k"), [lambda s: s.lease("k", "v")], b"v"),
    Wake("get, barrier", lambda s: s.get("k"), [lambda s: s.barrier("k", 1)], b"1"),
    Wake(
        "get, not by a compare_set that fails",
        lambda s: s.get("k"),
        [lambda s: s.compare_set("k", "other", "wrong"), lambda s: s.set("k", "v")],
        b"v",
    ),
    Wake(
        "get, not by a swap that fails",
        lambda s: s.get("k"),
        [lambda s: s.swap("k", "other", "wrong"), lambda s: s.set("k", "v")],
        b"v",
    ),
    Wake(
        "get, not by a queue of that name",
        lambda s: s.get("k"),
        [lambda s: s.queue_push("k", "item"), lambda s: s.set("k", "v")],
        b"v",
    ),
    Wake("wait, set", lambda s: s.wait(["j", "k"]), [lambda s: s.set("k", ""), lambda s: s.set("j", "")], None),
    Wake("wait, queue_push", lambda s: s.wait(["q"]), [lambda s: s.queue_push("q", "item")], None),
    Wake(
        "multi_get, at one moment",
        lambda s: s.multi_get(["j", "k", "j"]),
        [lambda s: s.set("j", "old"), lambda s: s.multi_set(["k", "j"], ["v", "u"])],
        [b"u", b"v", b"u"],
    ),
    Wake(
        "multi_get, a deleted key is missing again",
        lambda s: s.multi_get(["j", "k"]),
        [
            lambda s: s.set("j", "old"),
            lambda s: s.delete_key("j"),
            lambda s: s.multi_set(["k", "l"], ["v", ""]),
            lambda s: s.set("k", "w"),
            lambda s: s.set("j", "new"),
        ],
        [b"new", b"w"],
    ),
    Wake("queue_pop, push", lambda s: s.queue_pop("q"), [lambda s: s.queue_push("q", "item")], b"item"),
    Wake("queue_pop, push nothing", lambda s: s.queue_pop("q"), [lambda s: s.queue_push("q", "")], b""),
    Wake(
        "queue_pop, not by a key of that name",
        lambda s: s.queue_pop("q"),
        [lambda s: s.set("q", "key"), lambda s: s.queue_push("q", "item")],
        b"item",
    ),
    Wake("barrier, add", lambda s: s.barrier("b", 3), [lambda s: s.add("b", 1), lambda s: s.add("b", 1)], None),
    Wake("barrier, set", lambda s: s.barrier("b", 3), [lambda s: s.add("b", 1), lambda s: s.set("b", "9")], None),
]


@pytest.mark.parametrize(
    ("kind", "wake"),
    [pytest.param(kind, wake, id=f"{kind}-{wake.name}") for kind in KINDS for wake in WAKES],
    indirect=["kind"],
)
def test_a_blocked_call_is_woken_by_the_right_change(place: Place, wake: Wake) -> None:
    with place.open() as store, store.clone() as other_handle, place.open() as other:
        for writer, name in ((store, "same"), (other_handle, "clone"), (other, "other")):
            view, writers_view = PrefixStore(name, store), PrefixStore(name, writer)
            call = Call(wake.call, view).blocked()
            for step in wake.steps:
                step(writers_view)
            assert call.result() == wake.answer


def test_a_wait_returns_only_when_all_keys_exist_at_once(store: Store) -> None:
    """The keys are set and deleted one after the other, and exist together only at the end."""

    def wait_and_look() -> bool:
        store.wait(["j", "k"])
        return store.check(["j", "k"])

    call = Call(wait_and_look).blocked()
    for _ in range(20):
        store.set("j", "")
        store.delete_key("j")
        store.set("k", "")
        store.delete_key("k")
    store.multi_set(["j", "k"], ["", ""])
    assert call.result() is True


def test_a_blocked_call_does_not_block_its_handle(store: Store) -> None:
    waiting = [Call(store.get, "later").blocked() for _ in range(5)]
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert store.add("n", 1) == 1
    store.queue_push("q", "item")
    assert store.queue_pop("q") == b"item"
    with pytest.raises(StoreTimeout):
        store.wait(["other"], 0)
    store.set("later", "now")
    assert results(waiting) == [b"now"] * 5


def test_every_waiter_is_woken(store: Store, place: Place) -> None:
    with place.open() as other:
        handles = [store, other, PrefixStore("p", store), PrefixStore("p", other)]
        calls = [Call(handles[n % 4].get, "p/k" if n % 4 < 2 else "k").blocked() for n in range(20)]
        store.set("p/k", "v")
        assert results(calls) == [b"v"] * 20


# Time-outs

NEVER: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = {
    "get": (lambda s, **how: s.get("absent", **how), ("absent",), ("absent",)),
    "wait": (lambda s, **how: s.wait(["there", "a", "b"], **how), ("there", "a", "b"), ("a", "b")),
    "multi_get": (lambda s, **how: s.multi_get(["a", "there", "b"], **how), ("a", "there", "b"), ("a", "b")),
    "queue_pop": (lambda s, **how: s.queue_pop("there", **how), ("there",), ("there",)),
    "barrier": (lambda s, **how: s.barrier("gate", 2, **how), ("gate",), ("gate",)),
}
"""Calls that block while only the key `there` exists, their keys, and their missing keys."""

READY: dict[str, Callable[..., Any]] = {
    "get": lambda s, **how: s.get("there", **how),
    "wait": lambda s, **how: s.wait(["there", "items"], **how),
    "multi_get": lambda s, **how: s.multi_get(["there", "there"], **how),
    "queue_pop": lambda s, **how: s.queue_pop("items", **how),
    "barrier": lambda s, **how: s.barrier("gate", 1, **how),
    "wait for nothing": lambda s, **how: s.wait([], **how),
    "multi_get of nothing": lambda s, **how: s.multi_get([], **how),
}

never = pytest.mark.parametrize("operation", NEVER)


@pytest.fixture
def furnished(store: Store) -> Store:
    store.set("there", "")
    store.queue_push("items", "item")
    return store


@never
@pytest.mark.parametrize("timeout", [0, timedelta(0), 0.03, timedelta(milliseconds=30)], ids=str)
def test_a_timeout_names_the_missing_keys(furnished: Store, operation: str, timeout: float | timedelta) -> None:
    call, keys, missing = NEVER[operation]
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    for given_to in ("the call", "the handle"):
        if given_to == "the handle":
            furnished.set_timeout(timeout)
        began_at = time.monotonic()
        with pytest.raises(StoreTimeout) as caught:
            call(furnished, **({"timeout": timeout} if given_to == "the call" else {}))
        assert time.monotonic() - began_at >= timeout_s
        error = caught.value
        assert (error.operation, error.keys, error.missing, error.timeout_s) == (operation, keys, missing, timeout_s)
        assert repr(furnished) in str(error)
    furnished.set("afterwards", "it works")
    assert furnished.get("afterwards", LONG_ENOUGH_S) == b"it works"


@pytest.mark.parametrize("timeout", [0, timedelta(0), 1e9, math.inf], ids=str)
def test_a_condition_that_holds_needs_no_time(furnished: Store, timeout: float | timedelta) -> None:
    answers = {"get": b"", "multi_get": [b"", b""], "queue_pop": b"item", "multi_get of nothing": []}
    for operation, call in READY.items():
        assert call(furnished, timeout=timeout) == answers.get(operation), operation


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, ValueError), (timedelta(microseconds=-1), ValueError), (math.nan, ValueError), ("5", TypeError)],
    ids=str,
)
def test_an_invalid_timeout_is_refused_even_if_the_condition_holds(
    furnished: Store, timeout: Any, error: type[Exception]
) -> None:
    for call in READY.values():
        with pytest.raises(error, match="timeout"):
            call(furnished, timeout=timeout)
    assert furnished.queue_len("items") == 1, "nothing was taken"
    assert not furnished.check(["gate"]), "nobody has arrived"
    with pytest.raises(error, match="timeout"):
        furnished.set_timeout(timeout)


def test_missing_keys_are_named_once_and_a_queue_is_no_value(furnished: Store) -> None:
    with pytest.raises(StoreTimeout) as caught:
        furnished.multi_get(["a", "there", "items", "a"], timeout=0)
    assert (caught.value.keys, caught.value.missing) == (("a", "there", "items", "a"), ("a", "items"))
    with pytest.raises(StoreTimeout) as caught:
        furnished.wait(["a", "there", "items", "a"], timeout=0)
    assert (caught.value.keys, caught.value.missing) == (("a", "there", "items", "a"), ("a",))


def test_a_timeout_belongs_to_a_handle(store: Store) -> None:
    store.set_timeout(timedelta(seconds=70))
    view, other_handle = PrefixStore("p", store), store.clone()
    assert [handle.timeout for handle in (store, view, other_handle)] == [timedelta(seconds=70)] * 3
    view.set_timeout(0)
    other_handle.set_timeout(0.25)
    assert [handle.timeout.total_seconds() for handle in (store, view, view.clone(), other_handle)] == [70, 0, 0, 0.25]
    with pytest.raises(StoreTimeout, match=r"after 0 s"):
        view.get("absent")
    other_handle.close()


def test_an_endless_timeout_can_be_set_and_read(store: Store) -> None:
    store.set_timeout(math.inf)
    assert store.timeout > timedelta(days=365)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_blocking_pop_of_an_empty_queue_is_a_timeout(store: Store) -> None:
    with pytest.raises(TimeoutError):
        store.queue_pop("q", timeout=0)
    with pytest.raises(TimeoutError):
        store.queue_pop("q", True, 0)


# Barriers


def test_a_barrier_releases_all(store: Store) -> None:
    assert together(8, lambda _: store.barrier("gate", 8)) == [None] * 8
    assert store.get("gate") == b"8"


def test_each_caller_of_a_barrier_is_released_by_its_own_world_size(store: Store) -> None:
    assert together(6, lambda number: store.barrier("gate", number + 1)) == [None] * 6
    assert store.get("gate") == b"6"


def test_an_arrival_that_timed_out_is_withdrawn(store: Store, place: Place) -> None:
    for _ in range(3):
        with pytest.raises(StoreTimeout):
            store.barrier("gate", 2, timeout=0)
    assert store.get("gate") == b"0"
    with place.open() as other:
        assert results([Call(store.barrier, "gate", 2), Call(other.barrier, "gate", 2)]) == [None, None]
    assert store.get("gate") == b"2"


@pytest.mark.parametrize("beyond", [2**63, 2**70])
def test_a_barrier_may_have_a_world_size_beyond_64_bits(store: Store, beyond: int) -> None:
    with pytest.raises(StoreTimeout):
        store.barrier("gate", beyond, timeout=0)
    store.barrier("gate", -beyond, timeout=0)
    assert store.get("gate") == b"1"


def test_an_open_barrier_stays_open(store: Store) -> None:
    assert together(2, lambda _: store.barrier("gate", 2)) == [None] * 2
    store.barrier("gate", 2, timeout=0)
    assert store.get("gate") == b"3"


def test_a_deleted_barrier_counts_from_zero(store: Store) -> None:
    assert together(2, lambda _: store.barrier("gate", 2)) == [None] * 2
    assert store.delete_key("gate")
    with pytest.raises(StoreTimeout):
        store.barrier("gate", 2, timeout=0)
    assert together(2, lambda _: store.barrier("gate", 2)) == [None] * 2


# The end of a store

EVERY_OPERATION: dict[str, Step] = {
    "set": lambda s: s.set("k", "v"),
    "get": lambda s: s.get("there"),
    "add": lambda s: s.add("n", 1),
    "compare_set": lambda s: s.compare_set("k", "", "v"),
    "append": lambda s: s.append("k", "v"),
    "check": lambda s: s.check(["there"]),
    "wait": lambda s: s.wait(["there"]),
    "wait for nothing": lambda s: s.wait([]),
    "multi_get": lambda s: s.multi_get(["there"]),
    "multi_set": lambda s: s.multi_set(["k"], ["v"]),
    "delete_key": lambda s: s.delete_key("there"),
    "num_keys": lambda s: s.num_keys(),
    "list_keys": lambda s: s.list_keys(),
    "queue_push": lambda s: s.queue_push("q", "item"),
    "queue_pop": lambda s: s.queue_pop("items"),
    "queue_pop, not blocking": lambda s: s.queue_pop("items", False),
    "queue_len": lambda s: s.queue_len("items"),
    "barrier": lambda s: s.barrier("gate", 1),
}


def test_calls_on_a_closed_store_raise_store_closed(furnished: Store, place: Place) -> None:
    handle = place.open()
    handle.close()
    handle.close()
    for call in EVERY_OPERATION.values():
        with pytest.raises(StoreClosed, match="was closed"):
            call(handle)
    assert furnished.check(["there", "items"]), "other handles stay open"
    assert not furnished.check(["k"]) and not furnished.check(["n"]) and not furnished.check(["gate"])


@never
def test_closing_ends_blocked_calls(furnished: Store, place: Place, operation: str) -> None:
    handle = place.open()
    calls = [Call(NEVER[operation][0], view).blocked() for view in (handle, handle)]
    handle.close()
    errors = [call.error() for call in calls]
    assert operation == "barrier" or [type(error) for error in errors] == [StoreClosed] * 2
    furnished.queue_push("there", "item")
    assert furnished.queue_pop("there", timeout=0) == b"item", "no closed waiter took it"
    if operation == "barrier":
        furnished.barrier("gate", 1, timeout=0)


def test_closing_withdraws_an_arrival(store: Store, place: Place) -> None:
    handle = place.open()
    call = Call(handle.barrier, "gate", 2).blocked()
    store.wait(["gate"])
    handle.close()
    assert isinstance(call.error(), StoreClosed)
    until(lambda: store.get("gate") == b"0")


def test_closing_a_prefix_closes_the_store_beneath(place: Place) -> None:
    store = place.open()
    inner = PrefixStore("q", PrefixStore("p", store))
    call = Call(inner.get, "never").blocked()
    inner.close()
    assert isinstance(call.error(), StoreClosed)
    with pytest.raises(StoreClosed):
        store.set("k", "v")


def test_the_end_of_a_with_block_closes_the_store(place: Place) -> None:
    with place.open() as store, store.clone() as other_handle:
        store.set("k", "v")
        assert other_handle.get("k") == b"v"
    for handle in (store, other_handle):
        with pytest.raises(StoreClosed):
            handle.get("k", timeout=0)


def test_a_clone_outlives_its_original(store: Store) -> None:
    other_handle = store.clone()
    again = other_handle.clone()
    other_handle.close()
    again.set("k", "v")
    assert store.get("k") == b"v"
    again.close()


def test_a_hash_store_keeps_no_trace_of_ended_calls() -> None:
    with HashStore() as store:
        for call, *_ in NEVER.values():
            with pytest.raises(StoreTimeout):
                call(store, timeout=0)
            with pytest.raises(StoreTimeout):
                call(store, timeout=0.01)
        with store.watch("k"), store.clone() as other_handle:
            other_handle.watch("k")
            other_handle.lease("k", "v")
            waiting = Call(other_handle.get, "never").blocked()
        assert isinstance(waiting.error(), StoreClosed)
        store.delete_key("gate")
        left = store.statistics()
        assert (left.keys, left.waiters, left.watches, left.leased_keys, left.size) == (0, 0, 0, 0, 0)
