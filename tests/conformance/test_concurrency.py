"""Concurrent calls: threads on one handle, threads on several, and processes where the store can be shared."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rallypoint import Store, StoreClosed

from .calls import LONG_ENOUGH_S, Call, Child, results, together, until
from .kinds import BARE, KINDS, Kind, Place, prefixed

SHARED = [kind for kind in BARE if kind.shared]
SHARED += [prefixed(kind) for kind in SHARED[:1]]
THREADS, ROUNDS = 8, 40
PROCESSES = 4

shared = pytest.mark.parametrize("kind", SHARED, ids=str, indirect=True)


@pytest.fixture(params=["one handle", "many handles"])
def handles(request: pytest.FixtureRequest, store: Store, place: Place) -> Iterator[Callable[[int], Store]]:
    """Give all threads the same handle, or each thread its own."""
    own = [place.open() if request.param == "many handles" else store for _ in range(THREADS)]
    yield lambda number: own[number]
    for handle in own:
        handle.close()


# Threads


def test_adds_of_threads_are_exact(store: Store, handles: Callable[[int], Store]) -> None:
    seen = together(THREADS, lambda number: [handles(number).add("n", 1) for _ in range(ROUNDS)])
    assert sorted(total for mine in seen for total in mine) == list(range(1, THREADS * ROUNDS + 1))
    assert all(mine == sorted(mine) for mine in seen)
    assert store.get("n") == str(THREADS * ROUNDS).encode()


def test_appends_of_threads_lose_nothing(store: Store, handles: Callable[[int], Store]) -> None:
    def work(number: int) -> None:
        for n in range(ROUNDS):
            handles(number).append("log", f"{number}:{n} ")

    together(THREADS, work)
    assert_complete(store.get("log").decode().split(), map(str, range(THREADS)), ROUNDS)


def assert_complete(words: list[str], names: Any, rounds: int) -> None:
    """Assert that every writer's words are there once, in the order in which they were written."""
    names = list(names)
    assert Counter(words) == Counter(f"{name}:{number}" for name in names for number in range(rounds))
    for name in names:
        numbers = [int(word.split(":")[1]) for word in words if word.startswith(f"{name}:")]
        assert numbers == sorted(numbers)


def take_by_compare_set(store: Store, name: str) -> bool:
    return store.compare_set("lock", "free", name) == name.encode()


def take_by_swap(store: Store, name: str) -> bool:
    return store.swap("lock", "free", name).won


@pytest.mark.parametrize(
    ("kind", "take"),
    [
        pytest.param(kind, take, id=f"{kind}-{operation}")
        for kind in KINDS
        for operation, take in {"compare_set": take_by_compare_set, "swap": take_by_swap}.items()
    ],
    indirect=["kind"],
)
def test_a_lock_made_of_keys_excludes_threads(
    store: Store, handles: Callable[[int], Store], take: Callable[[Store, str], bool]
) -> None:
    inside = threading.Semaphore(1)

    def work(number: int) -> None:
        for _ in range(ROUNDS // 4):
            while not take(handles(number), f"thread {number}"):
                pass
            assert inside.acquire(blocking=False), "somebody else holds the lock"
            store.set("count", str(int(store.get("count")) + 1))
            inside.release()
            handles(number).set("lock", "free")

    store.multi_set(["lock", "count"], ["free", "0"])
    together(THREADS, work)
    assert store.get("count") == str(THREADS * ROUNDS // 4).encode()


def test_every_item_of_a_queue_goes_to_one_thread(store: Store, handles: Callable[[int], Store]) -> None:
    half = THREADS // 2

    def work(number: int) -> list[str]:
        if number < half:
            for n in range(ROUNDS):
                handles(number).queue_push("jobs", f"{number}:{n}")
            return []
        return [handles(number).queue_pop("jobs").decode() for _ in range(ROUNDS)]

    taken = [items for items in together(THREADS, work) if items]
    assert_each_once(taken, map(str, range(half)), ROUNDS)
    assert store.queue_len("jobs") == 0


def assert_each_once(taken: list[list[str]], names: Any, rounds: int) -> None:
    """Assert that every item went to one taker, and that each taker saw a writer's items in order."""
    names = list(names)
    assert Counter(item for items in taken for item in items) == Counter(
        f"{name}:{number}" for name in names for number in range(rounds)
    )
    for items in taken:
        for name in names:
            numbers = [int(item.split(":")[1]) for item in items if item.startswith(f"{name}:")]
            assert numbers == sorted(numbers)


def test_multi_set_is_atomic_for_multi_get(store: Store, handles: Callable[[int], Store]) -> None:
    keys = ["a", "b", "c"]
    store.multi_set(keys, ["start"] * 3)

    def work(number: int) -> list[list[bytes]]:
        if number % 2:
            for n in range(ROUNDS):
                handles(number).multi_set(keys, [f"{number}:{n}"] * 3)
            return []
        return [handles(number).multi_get(keys) for _ in range(ROUNDS)]

    for seen in together(THREADS, work):
        assert [values for values in seen if len(set(values)) > 1] == []


def test_blocked_threads_do_not_delay_others(store: Store) -> None:
    waiting = [Call(store.get, f"go {number % 5}") for number in range(25)]
    assert together(25, lambda _: [store.add("n", 1) for _ in range(4)])
    assert store.get("n") == b"100"
    for number in range(5):
        store.set(f"go {number}", f"{number}")
    assert results(waiting) == [str(number % 5).encode() for number in range(25)]


def test_a_barrier_releases_no_thread_early(store: Store, handles: Callable[[int], Store]) -> None:
    def work(number: int) -> list[int]:
        seen = []
        for round_number in range(5):
            store.add(f"arrived {round_number}", 1)
            handles(number).barrier(f"gate {round_number}", THREADS)
            seen.append(store.add(f"arrived {round_number}", 0))
        return seen

    assert together(THREADS, work) == [[THREADS] * 5] * THREADS


def test_closing_under_load_ends_every_call(store: Store, place: Place) -> None:
    handle, started = place.open(), threading.Semaphore(0)

    def work() -> None:
        started.release()
        while True:
            handle.add("n", 1)
            started.release()

    calls = [Call(work) for _ in range(4)] + [Call(handle.get, "never") for _ in range(4)]
    for _ in range(50):
        assert started.acquire(timeout=LONG_ENOUGH_S)
    handle.close()
    assert [type(call.error()) for call in calls] == [StoreClosed] * 8
    assert int(store.get("n")) >= 46
    store.set("k", "v")


# Processes


@pytest.fixture
def spawn(place: Place) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def spawn(task: str, *arguments: object) -> Child:
        children.append(Child(place.url or "memory://", task, *arguments))
        return children[-1]

    yield spawn
    for child in children:
        child.process.kill()
        child.process.communicate()


@shared
def test_adds_of_processes_are_exact(store: Store, spawn: Callable[..., Child]) -> None:
    children = [spawn("add", "n", 200) for _ in range(PROCESSES)]
    seen = [child.next_result() for child in children]
    assert sorted(total for mine in seen for total in mine) == list(range(1, PROCESSES * 200 + 1))
    assert store.get("n") == str(PROCESSES * 200).encode()


@shared
def test_appends_of_processes_lose_nothing(store: Store, spawn: Callable[..., Child]) -> None:
    for child in [spawn("append", "log", name, 100) for name in range(PROCESSES)]:
        child.ended()
    assert_complete(store.get("log").decode().split(), map(str, range(PROCESSES)), 100)


@shared
def test_a_lock_made_of_keys_excludes_processes(store: Store, spawn: Callable[..., Child]) -> None:
    store.multi_set(["lock", "count"], ["free", "0"])
    for child in [spawn("locked", f"child {number}", 25) for number in range(PROCESSES)]:
        child.ended()
    assert store.get("count") == str(PROCESSES * 25).encode()


@shared
def test_every_item_of_a_queue_goes_to_one_process(store: Store, spawn: Callable[..., Child]) -> None:
    takers = [spawn("pop", "jobs") for _ in range(2)]
    for child in [spawn("push", "jobs", name, 100) for name in range(2)]:
        child.ended()
    for _ in takers:
        store.queue_push("jobs", "stop")
    assert_each_once([child.next_result() for child in takers], map(str, range(2)), 100)
    assert store.queue_len("jobs") == 0


@shared
def test_a_process_wakes_another(store: Store, spawn: Callable[..., Child]) -> None:
    child = spawn("get", "k")
    assert child.next_result() == "waiting"
    child.asleep()
    store.set("k", "from the test")
    assert child.next_result() == "from the test"
    call = Call(store.get, "n").blocked()
    spawn("add", "n", 1)
    assert call.result() == b"1"


@shared
def test_processes_meet_at_a_barrier(store: Store, spawn: Callable[..., Child]) -> None:
    children = [spawn("meet", "gate", PROCESSES + 1) for _ in range(PROCESSES)]
    store.barrier("gate", PROCESSES + 1, LONG_ENOUGH_S)
    assert [child.next_result() for child in children] == ["through"] * PROCESSES
    assert store.get("gate") == str(PROCESSES + 1).encode()


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        pytest.param(kind, operation, id=f"{kind}-{operation}")
        for kind in BARE
        for operation in ("get", "wait", "multi_get", "queue_pop", "barrier", "watch")
    ],
    indirect=["kind"],
)
def test_ctrl_c_ends_a_wait_and_leaves_the_store_clean(
    kind: Kind, store: Store, spawn: Callable[..., Child], operation: str
) -> None:
    child = spawn("interrupted", operation)
    assert child.next_result() == "waiting"
    if kind.shared and operation == "barrier":
        store.wait(["gate"], LONG_ENOUGH_S)
    child.asleep()
    child.process.send_signal(signal.SIGINT)
    assert child.next_result() == [operation, 0], "the store still works in the child, and has no waiter"
    assert "KeyboardInterrupt" in child.ended(-signal.SIGINT)
    if kind.shared:
        assert store.get("after Ctrl-C", LONG_ENOUGH_S) == operation.encode()
        store.queue_push("jobs", "item")
        assert store.queue_pop("jobs", timeout=LONG_ENOUGH_S) == b"item", "the interrupted process did not take it"
        until(lambda: store.add("gate", 0) == 0)


@shared
def test_a_killed_process_leaves_no_arrival_and_no_waiter(store: Store, spawn: Callable[..., Child]) -> None:
    meeting, popping = spawn("meet", "gate", 2), spawn("pop", "jobs")
    store.wait(["gate"], LONG_ENOUGH_S)
    popping.asleep()
    for child in (meeting, popping):
        child.process.kill()
        child.process.wait()
    store.queue_push("jobs", "item")
    assert store.queue_pop("jobs", timeout=LONG_ENOUGH_S) == b"item"
    until(lambda: store.get("gate") == b"0")
