"""Programs under simulation: right ones end for every seed, wrong ones are found, and a seed repeats its run."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import rallypoint
from rallypoint.testing import SimulatedProcess, Simulation, Violation, simulate

SEEDS = int(os.environ.get("SEEDS", "1000")) // 5
FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
RANKS = 3


async def count_safely(process: SimulatedProcess) -> None:
    """Add one for this rank, once, by reading and writing under a lock."""
    async with process.lock("count"):
        await count(process)


async def count(process: SimulatedProcess) -> None:
    store, mine = process.store, f"counted/{process.rank}"
    if await store.check([mine]):
        return
    before = int(await store.get("n")) if await store.check(["n"]) else 0
    await process.sleep(0.1 * process.random.random())
    await store.multi_set(["n", mine], [str(before + 1), "1"])


def all_counted(simulation: Simulation) -> None:
    assert simulation.value("n") == str(RANKS).encode()


async def farm(process: SimulatedProcess) -> None:
    """Do all items of a queue, each under its own key, and meet at the end."""
    store = process.store
    queue = store.work_queue("items", process.rank)
    if process.rank == 0 and not await store.check(["filled"]):
        await queue.put_many([str(number) for number in range(5)], max_deliveries=1000)
        await store.set("filled", "1")
    await store.wait(["filled"])
    while (item := await queue.try_take()) is not None:
        async with item:
            await store.set(f"done/{item.data.decode()}", str(process.rank))
            await process.sleep(0.5)
    await queue.join()
    await store.set(f"end/{process.rank}", "1")
    await store.wait([f"end/{rank}" for rank in range(RANKS)])


def all_done(simulation: Simulation) -> None:
    assert None not in [simulation.value(f"done/{number}") for number in range(5)]


def run_all(program: Callable[[SimulatedProcess], Any], check: Callable[[Simulation], None] | None) -> Counter[str]:
    faults: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        faults += simulate(program, RANKS, seed=seed, check=check).faults
    return faults


@pytest.mark.parametrize(("program", "check"), [(count_safely, all_counted), (farm, all_done)])
def test_a_right_program_ends_for_every_seed(
    program: Callable[[SimulatedProcess], Any], check: Callable[[Simulation], None]
) -> None:
    assert set(run_all(program, check)) == {"crash", "freeze", "failed"}, "all kinds of faults happen"


def test_a_lost_update_is_found_and_shown() -> None:
    with pytest.raises(Violation, match=r"seed \d+: AssertionError") as raised:
        run_all(count, all_counted)
    told = str(raised.value)
    assert "again: simulate(count, 3, seed=" in told and " answer " in told
    assert isinstance(raised.value.__cause__, AssertionError)


def test_a_seed_always_gives_the_same_run() -> None:
    one, again, other = (simulate(farm, RANKS, seed=seed) for seed in (7, 7, 8))
    assert one.trace == again.trace and one.now == again.now
    assert one.trace != other.trace


def test_without_faults_there_are_none() -> None:
    for seed in range(30):
        assert not simulate(farm, RANKS, seed=seed, faults=False).faults


# What processes see


def alone(program: Callable[[SimulatedProcess], Any]) -> Simulation:
    """Run a program on one process without faults."""
    return simulate(program, 1, seed=1, faults=False)


def test_timeouts_pass_in_virtual_time() -> None:
    async def wait(process: SimulatedProcess) -> None:
        began_at = process.now()
        with pytest.raises(rallypoint.StoreTimeout, match="timed out after 100 s"):
            await process.store.get("never", timeout=100)
        with pytest.raises(rallypoint.StoreTimeout, match="timed out after 200 s"):
            await process.store.work_queue("q").take(timeout=200)
        with pytest.raises(rallypoint.MembersMissing, match="1 of 2 members") as raised:
            await process.barrier("b", ["here", "there"]).wait("here", timeout=300)
        assert raised.value.missing == ("there",) and raised.value.timeout_s == 300
        await process.sleep(400)
        assert 1000 <= process.now() - began_at < 1010

    alone(wait)


def test_all_operations_of_the_store_work() -> None:
    async def use(process: SimulatedProcess) -> None:
        store = process.store
        await store.set("k", "v")
        assert await store.get("k") == b"v" and await store.add("n", 2) == 2
        assert (await store.swap("k", "v", "w")).won and await store.multi_get(["k", "n"]) == [b"w", b"2"]
        await store.append("k", "x")
        assert await store.list_keys() == ["k", "n"] and await store.num_keys() == 2
        await store.queue_push("q", "item")
        assert await store.queue_len("q") == 1 and await store.queue_pop("q") == b"item"
        await store.lease("leased", "v")
        await store.multi_set([f"many/{number}" for number in range(3000)], ["v"] * 3000)
        assert await store.delete_prefix("many/") == 3000 and await store.delete_key("k")
        await store.set("word", "x")
        with pytest.raises(rallypoint.NotAnInteger):
            await store.add("word", 1)

    ended = alone(use)
    assert ended.value("n") == b"2" and ended.value("leased") is None, "a lease ends with its process"


def test_processes_meet() -> None:
    seen: list[tuple[int, int]] = []

    async def meet(process: SimulatedProcess) -> None:
        for turn in range(5):
            seen.append((turn, process.rank))
            await process.barrier("turn", RANKS).wait(process.rank)

    simulate(meet, RANKS, seed=3, faults=False)
    assert [turn for turn, _ in seen] == sorted(turn for turn, _ in seen)


def test_a_frozen_process_loses_its_session_and_is_started_again() -> None:
    starts: Counter[int] = Counter()

    async def work(process: SimulatedProcess) -> None:
        starts[process.starts] += 1
        for _ in range(20):
            await process.sleep(0.5)
            await process.store.add("n", 1)

    lost = sum("SessionLost" in line for seed in range(40) for line in simulate(work, 2, seed=seed).trace)
    assert lost > 5 and starts[2] > 5


def test_a_crashed_process_does_nothing_more() -> None:
    """Not even what its code does when it is cleaned up, as the end of an `async with` block."""
    ended: list[SimulatedProcess] = []

    async def work(process: SimulatedProcess) -> None:
        try:
            for _ in range(20):
                await process.sleep(0.5)
        finally:
            await process.sleep(0)
            ended.append(process)
            await process.store.set("cleaned up", "1")

    for seed in range(40):
        before: list[SimulatedProcess] = []
        result = simulate(work, 2, seed=seed, check=lambda _, before=before: before.extend(ended))  # type: ignore[misc]
        assert ended == before, "the clean-up is after the check"
        ended.clear()
        assert result.value("cleaned up") == b"1"


def test_the_errors_of_a_crashed_process_have_no_effect() -> None:
    """Its code is ended after the check; what its clean-up raises is not an error of the program."""

    async def work(process: SimulatedProcess) -> None:
        ended = False
        try:
            for _ in range(20):
                await process.sleep(0.1)
            ended = True
        finally:
            assert ended, "cleaned up too soon"

    faults: Counter[str] = Counter()
    for seed in range(40):
        faults += simulate(work, 2, seed=seed).faults
    assert faults["crash"] > 5


def test_the_shortest_sleep_lets_others_run() -> None:
    turns: list[int] = []

    async def spin(process: SimulatedProcess) -> None:
        while process.rank == 0 and 1 not in turns:
            await process.sleep(0)
        turns.append(process.rank)

    simulate(spin, 2, seed=1, faults=False)
    assert turns == [1, 0]


# Violations


def test_a_process_that_waits_for_ever_is_named() -> None:
    async def wait(process: SimulatedProcess) -> None:
        await process.store.get("never", timeout=float("inf"))

    with pytest.raises(Violation, match=r"these cannot end: <process 0, start 1> in get '/never'"):
        alone(wait)


def test_a_process_that_never_ends_is_stopped() -> None:
    async def spin(process: SimulatedProcess) -> None:
        while True:
            await process.store.add("n", 1)

    with pytest.raises(Violation, match="no end after 500 steps"):
        simulate(spin, 2, seed=1, most_steps=500)


def test_other_exceptions_are_violations_even_with_faults() -> None:
    async def fail(process: SimulatedProcess) -> None:
        raise KeyError("bug")

    async def ask(process: SimulatedProcess) -> None:
        asyncio.get_running_loop()

    for program, says in ((fail, r"KeyError\('bug'\)"), (ask, "no running event loop")):
        with pytest.raises(Violation, match=says):
            simulate(program, 1, seed=1)


def test_awaiting_an_event_loop_is_named() -> None:
    """Inside an event loop, as in an asynchronous test, a future only fails later."""

    async def wait(process: SimulatedProcess) -> None:
        await asyncio.get_running_loop().create_future()

    async def run() -> None:
        simulate(wait, 1, seed=1)

    with pytest.raises(Violation, match="can await only what its `process` has, not <Future pending>"):
        asyncio.run(run())


def test_a_program_that_always_fails_is_not_started_for_ever() -> None:
    async def fail(process: SimulatedProcess) -> None:
        raise rallypoint.StoreClosed(store="another one")

    with pytest.raises(Violation, match=r"process \d failed again and again, 200 starts in all") as raised:
        simulate(fail, RANKS, seed=1)
    assert isinstance(raised.value.__cause__, Violation)
    assert isinstance(raised.value.__cause__.__cause__, rallypoint.StoreClosed)


def test_a_deadlock_names_the_locks() -> None:
    async def lock_both(process: SimulatedProcess) -> None:
        names = "ab" if process.rank else "ba"
        for name in names:
            await process.lock(name).acquire(timeout=float("inf"))
            await process.sleep(1)

    with pytest.raises(Violation, match=r"start 1> in lock '/a', <process 1, start 1> in lock '/b'"):
        simulate(lock_both, 2, seed=1, faults=False)


def test_errors_are_violations_without_faults() -> None:
    async def fail(process: SimulatedProcess) -> None:
        await process.store.get("never", timeout=1)

    with pytest.raises(Violation, match="StoreTimeout"):
        alone(fail)


def test_misuse_is_named() -> None:
    async def watch(process: SimulatedProcess) -> None:
        await anext(process.store.watch("k"))

    async def sleep(process: SimulatedProcess) -> None:
        await process.sleep(1e6)

    async def twice(process: SimulatedProcess) -> None:
        lock = process.lock("l")
        await lock.acquire()
        await lock.acquire()

    async def unheld(process: SimulatedProcess) -> None:
        await process.lock("l").release()

    for program, says in (
        (watch, "watch is not available on the simulated store"),
        (sleep, "duration must be at most 3600 s"),
        (twice, "already held by this object"),
        (unheld, "is not held by this object"),
    ):
        with pytest.raises(Violation, match=says):
            alone(program)
    for wrong in (0, -1, True, "3"):
        with pytest.raises(ValueError, match="processes must be a number of at least 1"):
            simulate(count, wrong, seed=1)  # type: ignore[arg-type]
    for seed in (None, "1", True):
        with pytest.raises(TypeError, match="seed must be an integer"):
            simulate(count, 1, seed=seed)  # type: ignore[arg-type]
