"""Random concurrent histories of real processes on a real cluster, whose members fail meanwhile, are all linearizable.

The processes and the checker are those of tests/linearizability. A fault lasts for some histories, and its end is
followed by as many. `make soak` runs more of them; HISTORIES says how many in all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import pytest
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.etcd.test_faults import FAULTS
from tests.linearizability import worker
from tests.linearizability.checker import FOREVER, Operation, check
from tests.linearizability.test_histories import answer, operation

pytestmark = pytest.mark.needs("etcd")

FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
HISTORIES = int(os.environ.get("HISTORIES", "40"))
WORKERS, OPERATIONS = 4, 12
History = Callable[[], list[Operation]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(cuttable=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def history(cluster: Cluster) -> Iterator[History]:
    """What runs the next history."""
    with ExitStack() as stack:
        url = etcd_space(cluster)
        workers = [Worker(f"w{at}", url, stack) for at in range(WORKERS)]
        numbers = count(FIRST_SEED)

        def run() -> list[Operation]:
            seed = next(numbers)
            for one in workers:
                one.tell([seed, seed, OPERATIONS])
            return [operation(row) for one in workers for row in answer(one.child)]

        yield run


class Worker:
    """A process that takes part in histories."""

    def __init__(self, name: str, url: str, stack: ExitStack) -> None:
        command, pipe = [sys.executable, worker.__file__, name, url], subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        stack.callback(self.child.wait)
        stack.callback(self.child.kill)

    def tell(self, plan: list[int]) -> None:
        self.child.stdin.write(json.dumps(plan) + "\n")
        self.child.stdin.flush()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("fault", FAULTS)
def test_histories_are_linearizable(cluster, history, fault):
    cluster.settle()
    choose, begin, end = FAULTS[fault]
    index, rounds = choose(cluster), max(1, HISTORIES // (2 * len(FAULTS)))
    for change in (begin, end):
        change(cluster, index)
        for _ in range(rounds):
            done = history()
            assert all(one.returned < FOREVER for one in done), "a cluster of two answers"
            bad = check(done)
            assert bad is None, "\n".join(map(str, bad))
