"""Random concurrent histories of real processes, with their connections cut meanwhile, are all linearizable.

A history that is not is printed with its seed. `make soak` runs more of them; HISTORIES says how many.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.cutter import DOWN, UP, Cutter

import rallypoint

from .checker import FOREVER, Operation, check

HISTORIES = int(os.environ.get("HISTORIES", "200"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
WORKERS, OPERATIONS = 4, 12
ROOT = Path(__file__).resolve().parents[2]


class Crew:
    """The worker processes, and the proxies that can cut them."""

    def __init__(
        self, urls: Sequence[str], cutters: list[Cutter], stack: ExitStack, operations: int = OPERATIONS
    ) -> None:
        self._operations = operations
        self.cutters = cutters
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.linearizability.worker", f"w{place}", url],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for place, url in enumerate(urls)
        ]
        for worker in self.workers:
            stack.callback(worker.wait)
            stack.callback(worker.kill)

    def history(self, seed: int, number: int) -> list[Operation]:
        """Let all workers run their plans at once, cutting one connection after another until they are done."""
        chance = random.Random(f"{seed} cuts")
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([seed, number, self._operations]) + "\n")
            worker.stdin.flush()
        done = threading.Event()
        cutting = threading.Thread(target=self._cut, args=(chance, done))
        cutting.start()
        try:
            return [operation(row) for worker in self.workers for row in answer(worker)]
        finally:
            done.set()
            cutting.join()

    def _cut(self, chance: random.Random, done: threading.Event) -> None:
        while not done.wait(chance.uniform(0.0, 0.005)):
            self._cut_one(chance)

    def _cut_one(self, chance: random.Random) -> None:
        chance.choice(self.cutters).arm(chance.choice((UP, DOWN)), chance.randrange(1, 200))


def one_each(port: int, stack: ExitStack) -> tuple[list[str], list[Cutter]]:
    """Return a proxy for each of a few workers, and the URLs behind which they are."""
    cutters = [stack.enter_context(Cutter(port)) for _ in range(WORKERS)]
    return [f"tcp://127.0.0.1:{cutter.port}" for cutter in cutters], cutters


def answer(worker: subprocess.Popen[str]) -> list[Any]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    assert line, f"a worker ended with {worker.wait()}"
    rows: list[Any] = json.loads(line)
    return rows


def operation(row: list[Any]) -> Operation:
    process, kind, key, arguments, result, called, returned = row
    done = FOREVER if returned is None else returned
    return Operation(process, kind, key, untext(arguments), untext(result), called, done)


def untext(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["bytes"])
    return tuple(untext(item) for item in value) if isinstance(value, list) else value


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with ExitStack() as stack:
        yield Crew(*one_each(stack.enter_context(rallypoint.Server()).port, stack), stack)


@pytest.mark.timeout(0)
def test_histories_are_linearizable(crew: Crew) -> None:
    lost = 0
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        history = crew.history(seed, seed)
        lost += sum(operation.returned == FOREVER for operation in history)
        bad = check(history)
        assert bad is None, f"seed {seed}:\n" + "\n".join(map(str, bad))
    connections = sum(cutter.connections for cutter in crew.cutters)
    assert connections > HISTORIES, f"only {connections} connections in {HISTORIES} histories: nothing was cut"
    print(f"{HISTORIES} histories, {connections} connections, {lost} operations of unknown outcome")
