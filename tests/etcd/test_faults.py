"""Stores on a real cluster whose members are killed, stopped and cut off: nothing is lost, applied twice or stuck.

Threads and processes change the store all the while (tests/replicated/load.py). Each of them finishes some rounds
after the fault begins, and after it ends; the results that they got are then compared with the store.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.etcd.cluster import Cluster
from tests.raw_peer import AMPLE_S, read_line, until
from tests.replicated.load import StoreLoad

import rallypoint
from rallypoint.etcd.local.member import ask

pytestmark = pytest.mark.needs("etcd")


def follower(cluster: Cluster) -> int:
    return (cluster.leader() + 1) % 3


FAULTS: dict[str, tuple[Callable[[Cluster], int], Callable[[Cluster, int], Any], Callable[[Cluster, int], Any]]] = {
    "the leader is killed": (Cluster.leader, Cluster.kill, Cluster.restart),
    "the leader is stopped": (Cluster.leader, Cluster.stop, Cluster.cont),
    "a follower is stopped": (follower, Cluster.stop, Cluster.cont),
    "the leader is cut off": (Cluster.leader, Cluster.partition, lambda cluster, _: cluster.heal()),
    "a follower is cut off": (follower, Cluster.partition, lambda cluster, _: cluster.heal()),
}


@pytest.mark.parametrize("fault", [name for name in FAULTS if "leader" in name])  # test_histories.py has all
def test_work_continues_and_nothing_is_lost_or_applied_twice(cluster: Cluster, url: str, fault: str) -> None:
    choose, begin, end = FAULTS[fault]
    with rallypoint.connect(url) as store, store.watch("seen/") as watch, StoreLoad(url, 2, processes=2) as load:
        index = choose(cluster)
        load.survive(store, lambda: begin(cluster, index), lambda: end(cluster, index))
        load.end()
        load.check(store)
        check_watch(watch, load)


def check_watch(watch: rallypoint.Watch, load: StoreLoad) -> None:
    """Compare the changes that a watch reports with those written: every change, once, in order."""
    seen: dict[str, list[int]] = {name: [] for name in load.names}
    for _ in load.reports:
        change = watch.next(AMPLE_S)
        assert change.value is not None
        seen[change.key.removeprefix("seen/")].append(int(change.value))
    counts = Counter(report["name"] for report in load.reports)
    assert seen == {name: list(range(1, counts[name] + 1)) for name in load.names}


def test_without_a_quorum_every_call_says_so_at_its_deadline_and_works_again_later(cluster: Cluster, url: str) -> None:
    with rallypoint.connect(url, timeout=3) as store:
        store.set("there", "1")
        first = cluster.leader()
        second = (first + 1) % 3
        cluster.kill(first)
        cluster.kill(second)
        calls = {name: Call(call, store) for name, call in CALLS.items()}
        for name, call in calls.items():
            error = call.error()
            assert isinstance(error, rallypoint.NoQuorum), f"{name}: {error!r}"
            assert all(endpoint in str(error) for endpoint in cluster.endpoints), name
        cluster.restart(first)
        cluster.restart(second)
        assert store.get("there") == b"1"
        assert store.add("again", 1) == 1


CALLS: dict[str, Callable[[rallypoint.Store], object]] = {
    "get": lambda store: store.get("there"),
    "wait": lambda store: store.wait(["not there"]),
    "multi_get": lambda store: store.multi_get(["there", "not there"]),
    "check": lambda store: store.check(["there"]),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
    "queue_len": lambda store: store.queue_len("q"),
    "set": lambda store: store.set("a", "1"),
    "large": lambda store: store.set("b", bytes(3 * 1024 * 1024)),
    "multi_set": lambda store: store.multi_set(["c", "d"], ["1", "2"]),
    "add": lambda store: store.add("e", 1),
    "append": lambda store: store.append("f", "1"),
    "compare_set": lambda store: store.compare_set("g", "", "1"),
    "swap": lambda store: store.swap("h", None, "1"),
    "delete_key": lambda store: store.delete_key("there too"),
    "delete_prefix": lambda store: store.delete_prefix("i"),
    "queue_push": lambda store: store.queue_push("q", "1"),
    "queue_pop": lambda store: store.queue_pop("r", block=False),
    "wait for an item": lambda store: store.queue_pop("s"),
    "barrier": lambda store: store.barrier("t", 2),
    "lease": lambda store: store.lease("u", "1"),
    "watch": lambda store: store.watch("v"),
}


def test_the_lease_and_the_arrival_of_a_killed_process_end_with_it(cluster: Cluster, url: str) -> None:
    code = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1])
store.lease("alive", "yes")
print("leased", flush=True)
store.barrier("gate", 3)
"""
    with rallypoint.connect(url) as store:
        child = subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE)
        try:
            assert read_line(child) == "leased"
            mine = Call(store.barrier, "gate", 3, AMPLE_S)
            until(lambda: store.add("gate", 0), lambda count: count == 2)
            cluster.kill(index := cluster.leader())
            assert store.get("alive") == b"yes"
        finally:
            child.kill()
            child.communicate()
        until(lambda: store.check(["alive"]), lambda there: not there)
        until(lambda: store.add("gate", 0), lambda count: count == 1)
        cluster.restart(index)
        others = [Call(store.barrier, "gate", 3, AMPLE_S) for _ in range(2)]
        assert [call.result() for call in (mine, *others)] == [None] * 3


def test_a_compaction_breaks_neither_a_wait_nor_a_watch(cluster: Cluster, url: str) -> None:
    with rallypoint.connect(url) as store, store.watch("seen/") as watch:
        waiting = Call(store.wait, ["go"], AMPLE_S)
        store.set("seen/a", "1")
        assert watch.next(AMPLE_S).value == b"1"
        for number in range(3):
            store.set("other", str(number))
            compact(cluster)
        cluster.kill(index := cluster.leader())  # what it carried begins again elsewhere, from before the compaction
        store.set("seen/a", "2")
        store.set("go", "now")
        assert waiting.result() is None
        found = value_or_reason(watch)
        assert found == b"2" or "compacted" in str(found)
        cluster.restart(index)


def value_or_reason(watch: rallypoint.Watch) -> bytes | str | None:
    """Return the next value, or the reason why the watch ended: it may have missed changes."""
    try:
        return watch.next(AMPLE_S).value
    except rallypoint.SessionLost as error:
        return error.why


def compact(cluster: Cluster) -> None:
    port = cluster.local.members[cluster.leader()].client_port
    revision = ask(port, "/v3/maintenance/status", {})["header"]["revision"]
    assert "error" not in ask(port, "/v3/kv/compaction", {"revision": revision, "physical": True})
