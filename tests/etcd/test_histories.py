"""Random concurrent histories of real processes on a real cluster, whose members fail meanwhile, are all linearizable.

The processes and the checker are those of tests/linearizability. A fault lasts for several histories, and as many
follow its end. `make soak` runs more of them; HISTORIES says how many in all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.etcd.test_faults import FAULTS
from tests.linearizability.history_run import FIRST_SEED, WORKERS, HistoryRun, check_complete_history

pytestmark = pytest.mark.needs("etcd")

HISTORIES = int(os.environ.get("HISTORIES", "40"))
SEEDS = count(FIRST_SEED)


@pytest.fixture(scope="module")
def history_run(cluster: Cluster) -> Iterator[HistoryRun]:
    """Workers on one store of the cluster."""
    with ExitStack() as stack:
        yield HistoryRun([etcd_space(cluster)] * WORKERS, [], stack)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("fault", FAULTS)
def test_histories_are_linearizable(cluster: Cluster, history_run: HistoryRun, fault: str) -> None:
    cluster.settle()
    choose, begin, end = FAULTS[fault]
    index, rounds = choose(cluster), max(1, HISTORIES // (2 * len(FAULTS)))
    for change in (begin, end):
        change(cluster, index)
        for _ in range(rounds):
            seed = next(SEEDS)
            check_complete_history(history_run.history(seed), seed)  # two of three members are a quorum: all return
