"""The clusters for tests: their methods work, and their members never outlive the tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.etcd.cluster import Cluster
from tests.raw_peer import AMPLE_S, read_line, until

from rallypoint.deadline import Deadline
from rallypoint.etcd.local.process import Process

pytestmark = pytest.mark.needs("etcd")

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_has_a_prefix_of_its_own(etcd_url: str, etcd_cluster: Cluster) -> None:
    assert etcd_url.startswith(f"{etcd_cluster.url}/") and len(etcd_cluster.endpoints) == 3
    assert all(member.healthy() for member in etcd_cluster)
    assert not any(endpoint.endswith((":2379", ":2380")) for endpoint in etcd_cluster.endpoints)


def test_a_member_that_is_killed_stopped_or_cut_off_no_longer_leads() -> None:
    with Cluster(cuttable=True) as cluster:
        first = cluster.leader()
        cluster.partition(first)
        second = cluster.leader(other_than=first)
        assert [member.healthy() for member in cluster] == [index != first for index in range(3)]
        cluster.heal()
        cluster.settle()
        second = cluster.leader()
        cluster.kill(second)
        third = cluster.leader(other_than=second)
        cluster.restart(second)
        cluster.stop(third)
        cluster.leader(other_than=third)
        cluster.cont(third)
        cluster.settle()


def test_a_member_stays_cut_off_after_a_restart() -> None:
    with Cluster(cuttable=True) as cluster:
        follower = (cluster.leader() + 1) % 3
        cluster.partition(follower)
        cluster.kill(follower)
        cluster.restart(follower, wait=False)
        assert not cluster.local.members[follower].healthy()
        cluster.heal()
        cluster.settle()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_members_end_with_the_process_that_runs_the_tests(number: int) -> None:
    code = """
import signal, sys
from tests.etcd.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
with Cluster(members=1) as cluster:
    print(cluster.local.members[0].pid, cluster.local.folder, flush=True)
    sys.stdin.read()
"""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as child:
        pid, folder = read_line(child).split()
        member = Process.of(int(pid))
        assert member is not None
        child.send_signal(number)
        assert child.stdin is not None
        child.stdin.close()  # a signal that arrives just before the read blocks does not end it
        assert child.wait(AMPLE_S) != 0
    assert member.wait(Deadline(AMPLE_S))
    until(Path(folder).exists, lambda there: not there)
