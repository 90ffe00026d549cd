"""Stores on a real cluster whose members are killed, held and cut off: nothing is lost, doubled or left waiting.

Threads and processes work all the while (labourer.py). A fault is followed by work of each of them, and so is its end;
what they were told is then compared with what is in the store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.etcd.cluster import Cluster
from tests.etcd.fixtures import etcd_space
from tests.etcd.labourer import labour
from tests.wire import AMPLE_S, read_line, until

import rallypoint
from rallypoint.etcd.member import ask

pytestmark = pytest.mark.needs("etcd")

ROOT = Path(__file__).resolve().parents[2]
THREADS, PROCESSES = 2, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(cuttable=True) as cluster:
        yield cluster


@pytest.fixture
def url(cluster: Cluster) -> str:
    cluster.settle()
    return etcd_space(cluster)


class Crew:
    """All who work on a store, and what they were told."""

    def __init__(self, url: str) -> None:
        self._over = threading.Event()
        self._failed = False
        self.told: list[dict[str, Any]] = []
        self._children: list[subprocess.Popen[str]] = []
        self._threads: list[Call] = []
        script, pipe = Path(__file__).with_name("labourer.py"), subprocess.PIPE
        for at in range(PROCESSES):
            command = [sys.executable, str(script), f"p{at}", url]
            child = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
            self._children.append(child)
            self._threads.append(Call(self._until_over, self._read, child))
        for at in range(THREADS):
            self._threads.append(Call(self._until_over, labour, f"t{at}", url, self._over, self.told.append))

    def __enter__(self) -> Crew:
        self.rounds()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let all finish their round; raise what any of them raised."""
        self._over.set()
        for child in self._children:
            if not child.stdin.closed:
                child.stdin.close()
        for thread in self._threads:
            thread.result()
        assert [child.wait(AMPLE_S) for child in self._children] == [0] * PROCESSES

    def rounds(self, count: int = 2) -> None:
        """Wait until each has done so many rounds from now on, the one that it is in not counted."""
        before = self._counts()
        until(self._counts, lambda now: all(now[name] >= before[name] + count for name in NAMES) or self._failed)

    def _counts(self) -> Counter[str]:
        PAUSE.wait(0.01)
        return Counter(told["name"] for told in list(self.told))

    def _until_over(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do the work of one of them, and note if it ends too early."""
        try:
            work(*arguments)
        finally:
            self._failed = self._failed or not self._over.is_set()

    def _read(self, child: subprocess.Popen[str]) -> None:
        for line in child.stdout:
            self.told.append(json.loads(line))


NAMES = [f"p{at}" for at in range(PROCESSES)] + [f"t{at}" for at in range(THREADS)]
PAUSE = threading.Event()


def follower(cluster: Cluster) -> int:
    return (cluster.leader() + 1) % 3


FAULTS: dict[str, tuple[Callable[[Cluster], int], Callable[[Cluster, int], Any], Callable[[Cluster, int], Any]]] = {
    "the leader is killed": (Cluster.leader, Cluster.kill, Cluster.restart),
    "the leader is held": (Cluster.leader, Cluster.stop, Cluster.cont),
    "a follower is held": (follower, Cluster.stop, Cluster.cont),
    "the leader is cut off": (Cluster.leader, Cluster.partition, lambda cluster, _: cluster.heal()),
    "a follower is cut off": (follower, Cluster.partition, lambda cluster, _: cluster.heal()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_work_goes_on_and_nothing_is_lost_or_doubled(cluster, url, fault):
    choose, begin, end = FAULTS[fault]
    with rallypoint.connect(url) as store, store.watch("seen/") as watch, Crew(url) as crew:
        store.lease("alive", "yes")
        waiting, item = Call(store.wait, ["go"], AMPLE_S), Call(store.queue_pop, "late", True, AMPLE_S)
        index = choose(cluster)
        begin(cluster, index)
        crew.rounds()
        end(cluster, index)
        crew.rounds()
        store.set("go", "now")
        store.queue_push("late", "item")
        assert (waiting.result(), item.result()) == (None, b"item")
        assert store.get("alive") == b"yes"
        crew.end()
        check_told(store, crew.told)
        check_watch(watch, crew.told)


def check_told(store: rallypoint.Store, told: list[dict[str, Any]]) -> None:
    """Compare what all were told with what is there."""
    tokens = sorted(one["token"] for one in told)
    assert sorted(one["total"] for one in told) == list(range(1, len(told) + 1))
    assert store.get("total") == b"%d" % len(told)
    assert sorted(store.get("log").decode().split()) == tokens
    assert store.get("swapped") == b"%d" % sum(one["swapped"] for one in told)
    taken = [one["taken"] for one in told if one["taken"]]
    left = [store.queue_pop("queue").decode() for _ in range(store.queue_len("queue"))]
    assert sorted(taken + left) == tokens


def check_watch(watch: rallypoint.Watch, told: list[dict[str, Any]]) -> None:
    """Compare what a watch told with what was written: every change, once, in order."""
    seen: dict[str, list[int]] = {name: [] for name in NAMES}
    for _ in told:
        change = watch.next(AMPLE_S)
        seen[change.key.removeprefix("seen/")].append(int(change.value))
    counts = Counter(one["name"] for one in told)
    assert seen == {name: list(range(1, counts[name] + 1)) for name in NAMES}


def test_without_a_quorum_every_call_says_so_at_its_deadline_and_works_again_later(cluster, url):
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


def test_what_a_killed_process_had_goes_with_it(cluster, url):
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
            child.wait()
            child.stdout.close()
        until(lambda: store.check(["alive"]), lambda there: not there)
        until(lambda: store.add("gate", 0), lambda count: count == 1)
        cluster.restart(index)
        others = [Call(store.barrier, "gate", 3, AMPLE_S) for _ in range(2)]
        assert [call.result() for call in (mine, *others)] == [None] * 3


def test_a_compaction_breaks_neither_a_wait_nor_a_watch(cluster, url):
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
        told = told_or_ended(watch)
        assert told == b"2" or "compacted" in str(told)
        cluster.restart(index)


def told_or_ended(watch: rallypoint.Watch) -> bytes | str | None:
    """Return the next value; a watch that cannot know whether it missed something ends, and says so."""
    try:
        return watch.next(AMPLE_S).value
    except rallypoint.SessionLost as error:
        return error.why


def compact(cluster: Cluster) -> None:
    port = cluster.local.members[cluster.leader()].client_port
    revision = ask(port, "/v3/maintenance/status", {})["header"]["revision"]
    assert "error" not in ask(port, "/v3/kv/compaction", {"revision": revision, "physical": True})
