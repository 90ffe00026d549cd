"""Deadlines by key: the earliest first, ties in the order in which they were set; dropped ones do not accumulate."""

from __future__ import annotations

import random
from itertools import pairwise

from rallypoint.core.deadlines import MOVED, NEVER, Deadlines


def test_dropped_deadlines_do_not_accumulate() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(number, 1e9)
        deadlines.drop(number)
    assert len(deadlines) == 0 and deadlines.entries < 100
    assert deadlines.due(0.0) == [] and deadlines.earliest == NEVER


def test_deadlines_survive_the_removal_of_dropped_ones() -> None:
    deadlines = Deadlines()
    for at in range(200, 100, -1):
        deadlines.set(at, float(at))
    for _ in range(1_000):
        deadlines.set("over", 150.5)
        deadlines.drop("over")
    assert deadlines.due(150.0) == list(range(101, 151))
    assert deadlines.earliest == 151.0 and len(deadlines) == 50


def test_a_deadline_that_is_moved_is_due_once() -> None:
    deadlines = Deadlines()
    for at in (5.0, 9.0, 3.0, 7.0):
        deadlines.set("lease", at)
    deadlines.set("other", 7.0)
    assert deadlines.due(6.0) == [] and deadlines.earliest == 7.0
    assert deadlines.due(7.0) == ["lease", "other"], "ties in the order in which they were set"
    assert deadlines.due(100.0) == [] and "lease" not in deadlines


def test_setting_a_deadline_twice_fires_once() -> None:
    deadlines = Deadlines()
    deadlines.set("k", 5.0)
    deadlines.set("k", 5.0)
    assert deadlines.due(5.0) == ["k"]
    deadlines.set("k", 5.0)
    assert deadlines.due(5.0) == ["k"]


def test_random_deadlines_fire_as_from_a_sorted_list() -> None:
    for seed in range(300):
        chance, deadlines, now = random.Random(seed), Deadlines(), 0.0
        model: dict[int, float] = {}
        for _ in range(200):
            key = chance.randrange(20)
            match chance.randrange(4):
                case 0 | 1:
                    model[key] = now + chance.random() * 3
                    deadlines.set(key, model[key])
                case 2:
                    model.pop(key, None)
                    deadlines.drop(key)
                case _:
                    now += chance.random()
                    due = sorted((at, key) for key, at in model.items() if at <= now)
                    assert deadlines.due(now) == [key for _, key in due], f"seed {seed}"
                    for _, key in due:
                        del model[key]
                    assert deadlines.earliest == min(model.values(), default=NEVER), f"seed {seed}"
            assert len(deadlines) == len(model) and all(key in deadlines for key in model), f"seed {seed}"
            assert deadlines.earliest <= min(model.values(), default=NEVER), f"seed {seed}"


def test_stale_deadlines_are_discarded_a_few_at_a_time() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(number, 1e9)
    for number in range(10_000):
        deadlines.drop(number)
    left = [deadlines.entries]
    while left[-1] > 100:
        deadlines.set("key", 2e9 - len(left))
        left.append(deadlines.entries)
    assert max(before - after for before, after in pairwise(left)) <= MOVED
    assert deadlines.due(1.9e9) == [] and deadlines.due(2e9) == ["key"] and not deadlines


def test_no_more_entries_are_examined_than_allowed() -> None:
    deadlines = Deadlines()
    for number in range(100):
        deadlines.set(number, float(number))
    for number in (*range(50), *range(51, 100)):
        deadlines.drop(number)
    before = deadlines.entries
    assert deadlines.due(99.0, 10) == [] and deadlines.entries == before - 10
    assert deadlines.earliest <= 99.0, "there is more"
    assert deadlines.due(99.0) == [50]
