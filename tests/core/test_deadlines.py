"""Deadlines by key: the earliest first, ties in the order of their setting, and those that are over do not pile up."""

from __future__ import annotations

import random

from rallypoint.core.deadlines import NEVER, Deadlines


def test_waits_that_are_over_do_not_pile_up_behind_their_deadlines() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(number, 1e9)
        deadlines.drop(number)
    assert len(deadlines) == 0 and len(deadlines._heap) < 100
    assert deadlines.due(0.0) == [] and deadlines.earliest == NEVER


def test_deadlines_survive_the_clearing_of_those_that_are_over() -> None:
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
    assert deadlines.due(7.0) == ["lease", "other"], "ties in the order of their setting"
    assert deadlines.due(100.0) == [] and "lease" not in deadlines


def test_setting_the_same_again_is_one_deadline() -> None:
    deadlines = Deadlines()
    deadlines.set("k", 5.0)
    deadlines.set("k", 5.0)
    assert deadlines.due(5.0) == ["k"]
    deadlines.set("k", 5.0)
    assert deadlines.due(5.0) == ["k"]


def test_it_does_what_a_sorted_list_does() -> None:
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
