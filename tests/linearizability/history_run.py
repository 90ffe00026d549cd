"""`HistoryRun`: worker processes that run random histories on a store, while their connections are cut.

Tests of other faults override `_cut`. `check_history` and `check_complete_history` fail with the seed of the history
and the operations to blame.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rallypoint.testing import DOWN, UP, CuttingProxy

from .checker import FOREVER, Operation, check

__all__ = ["FIRST_SEED", "WORKERS", "HistoryRun", "check_complete_history", "check_history", "proxied"]

FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
WORKERS, OPERATIONS = 4, 12
ROOT = Path(__file__).resolve().parents[2]


class HistoryRun:
    """The worker processes, and the proxies that cut their connections; without proxies, nothing is cut."""

    def __init__(
        self, urls: Sequence[str], cutters: list[CuttingProxy], stack: ExitStack, operations: int = OPERATIONS
    ) -> None:
        self._operations = operations
        self.cutters = cutters
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.linearizability.worker", f"w{index}", url],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index, url in enumerate(urls)
        ]
        for worker in self.workers:
            stack.callback(worker.wait)
            stack.callback(worker.kill)

    def history(self, seed: int) -> list[Operation]:
        """Let all workers run their plans at once, cutting one connection after another until they are done."""
        chance = random.Random(f"{seed} cuts")
        if self.cutters:  # on a busy machine, the thread may come too late to cut anything
            self._cut_one(chance)
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([seed, seed, self._operations]) + "\n")
            worker.stdin.flush()
        done = threading.Event()
        cutting = threading.Thread(target=self._cut, args=(chance, done))
        cutting.start()
        try:
            return [_operation(row) for worker in self.workers for row in _rows(worker)]
        finally:
            done.set()
            cutting.join()

    def _cut(self, chance: random.Random, done: threading.Event) -> None:
        """Make connections fail until the history is done; runs in a thread."""
        while self.cutters and not done.wait(chance.uniform(0.0, 0.005)):
            self._cut_one(chance)

    def _cut_one(self, chance: random.Random) -> None:
        chance.choice(self.cutters).cut_after(chance.choice((UP, DOWN)), chance.randrange(1, 200))


def proxied(port: int, stack: ExitStack) -> tuple[list[str], list[CuttingProxy]]:
    """Return the URLs of a port behind a proxy for each worker, and the proxies."""
    cutters = [stack.enter_context(CuttingProxy(port)) for _ in range(WORKERS)]
    return [f"tcp://127.0.0.1:{cutter.port}" for cutter in cutters], cutters


def check_history(history: list[Operation], seed: int) -> None:
    """Fail if a history is not linearizable."""
    bad = check(history)
    assert bad is None, f"seed {seed}:\n" + "\n".join(map(str, bad))


def check_complete_history(history: list[Operation], seed: int) -> None:
    """Fail if a history is not linearizable, or if an operation never returned."""
    check_history(history, seed)
    lost = [str(operation) for operation in history if operation.returned == FOREVER]
    assert not lost, f"seed {seed}: no answer to\n" + "\n".join(lost)


def _rows(worker: subprocess.Popen[str]) -> list[Any]:
    """Read the operations that a worker reports."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    assert line, f"a worker ended with {worker.wait()}"
    rows: list[Any] = json.loads(line)
    return rows


def _operation(row: list[Any]) -> Operation:
    process, kind, key, arguments, result, called, returned = row
    done = FOREVER if returned is None else returned
    return Operation(process, kind, key, _from_json(arguments), _from_json(result), called, done)


def _from_json(value: Any) -> Any:
    """Return a value as the worker had it: the reverse of its `to_json`."""
    if isinstance(value, dict):
        return base64.b64decode(value["bytes"])
    return tuple(_from_json(item) for item in value) if isinstance(value, list) else value
