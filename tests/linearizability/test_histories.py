"""Random concurrent histories of real processes, with their connections cut meanwhile, are all linearizable.

A history that is not is printed with its seed. `make soak` runs more of them; HISTORIES says how many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import rallypoint

from .checker import FOREVER
from .history_run import FIRST_SEED, HistoryRun, check_history, proxied

HISTORIES = int(os.environ.get("HISTORIES", "200"))


@pytest.fixture(scope="module")
def history_run() -> Iterator[HistoryRun]:
    with ExitStack() as stack:
        yield HistoryRun(*proxied(stack.enter_context(rallypoint.Server()).port, stack), stack)


@pytest.mark.timeout(0)
def test_histories_are_linearizable(history_run: HistoryRun) -> None:
    lost = 0
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        history = history_run.history(seed)
        lost += sum(operation.returned == FOREVER for operation in history)
        check_history(history, seed)
    connections = sum(cutter.connections for cutter in history_run.cutters)
    assert connections > HISTORIES, f"only {connections} connections in {HISTORIES} histories: nothing was cut"
    print(f"{HISTORIES} histories, {connections} connections, {lost} operations of unknown outcome")
