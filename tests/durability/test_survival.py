"""Every feature survives the death of its server: nothing is lost or applied twice, and waits continue.

Each test works while a server with a data directory is killed KILLS times; 5 here, 100 in `make soak`.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

import rallypoint

from .durable import AMPLE_S, KILLS, DurableServer, durable_server, repeatedly_killed

Result = TypeVar("Result")

pytestmark = pytest.mark.timeout(300 + 10 * KILLS)

CLIENTS = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DurableServer]:
    with durable_server(tmp_path / "data") as server:
        yield server


def meanwhile(server: DurableServer, work: Callable[[rallypoint.Store, int, threading.Event], Result]) -> list[Result]:
    """Run `work` for each client, in a thread with its own store, until the last kill; return the results.

    All stores are connected before the first kill: on a busy machine the last kill may come before the fourth store.
    """
    stores = [rallypoint.connect(server.url, timeout=AMPLE_S) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool, repeatedly_killed(server) as over:
        futures = [pool.submit(work, store, place, over) for place, store in enumerate(stores)]
        results = [future.result(AMPLE_S + 5 * KILLS) for future in futures]
    assert server.kills == KILLS
    return results


def test_every_addition_counts_once(server: DurableServer) -> None:
    def add(store: rallypoint.Store, place: int, over: threading.Event) -> int:
        return next(count for count in itertools.count(1) if store.add("count", 1) and over.is_set())

    done = meanwhile(server, add)
    with rallypoint.connect(server.url) as store:
        assert store.get("count") == b"%d" % sum(done)


def test_every_append_happens_once_and_in_its_callers_order(server: DurableServer) -> None:
    def append(store: rallypoint.Store, place: int, over: threading.Event) -> list[str]:
        words: list[str] = []
        while not over.is_set():
            words.append(f"{place}-{len(words)}")
            store.append("words", words[-1] + " ")
        return words

    done = meanwhile(server, append)
    with rallypoint.connect(server.url) as store:
        words = store.get("words").decode().split()
    assert sorted(words) == sorted(itertools.chain(*done))
    for place, theirs in enumerate(done):
        assert [word for word in words if word.startswith(f"{place}-")] == theirs


def test_every_item_is_taken_once(server: DurableServer) -> None:
    def work(store: rallypoint.Store, place: int, over: threading.Event) -> tuple[int, list[bytes]]:
        taken: list[bytes] = []
        if place % 2:
            while (item := store.queue_pop("items", timeout=AMPLE_S)) != b"end":
                taken.append(item)
            return 0, taken
        for number in itertools.count():
            if over.is_set():
                store.queue_push("items", "end")
                return number, taken
            store.queue_push("items", f"{place}-{number}")
        raise AssertionError

    done = meanwhile(server, work)
    taken = list(itertools.chain(*(items for _, items in done)))
    pushed = [b"%d-%d" % (place, number) for place, (count, _) in enumerate(done) for number in range(count)]
    with rallypoint.connect(server.url) as store:
        left = [store.queue_pop("items") for _ in range(store.queue_len("items"))]
    assert sorted(taken + [item for item in left if item != b"end"]) == sorted(pushed)


def test_a_lock_has_one_holder_and_its_fence_grows(server: DurableServer) -> None:
    def work(store: rallypoint.Store, place: int, over: threading.Event) -> list[int]:
        fences = []
        while not over.is_set():
            with rallypoint.Lock(store, "turn") as held:
                before = int(store.get("total")) if store.check(["total"]) else 0
                store.set("total", str(before + 1))  # two holders at once would lose one of these
                fences.append(held.fence)
        return fences

    done = meanwhile(server, work)
    fences = list(itertools.chain(*done))
    assert fences, "the lock was never taken"
    with rallypoint.connect(server.url) as store:
        assert store.get("total") == b"%d" % len(fences)
    assert len(set(fences)) == len(fences)
    assert all(mine == sorted(mine) for mine in done)


def test_exchanges_and_barriers_continue(server: DurableServer) -> None:
    def work(store: rallypoint.Store, place: int, over: threading.Event) -> int:
        exchange = rallypoint.Exchange(store, "step", CLIENTS)
        barrier = rallypoint.Barrier(store, "end of step", CLIENTS)
        for step in itertools.count():
            told = exchange.all_gather(place, b"%d %d %d" % (step, place, over.is_set()), timeout=AMPLE_S)
            words = [gift.split() for gift in told]
            assert [(int(theirs), int(rank)) for theirs, rank, _ in words] == [(step, rank) for rank in range(CLIENTS)]
            barrier.wait(place, timeout=AMPLE_S)
            if all(ended == b"1" for _, _, ended in words):
                return step
        raise AssertionError

    steps = meanwhile(server, work)
    assert len(set(steps)) == 1


def test_a_watch_has_no_gap_and_a_lease_is_kept(server: DurableServer) -> None:
    def work(store: rallypoint.Store, place: int, over: threading.Event) -> list[int]:
        seen: list[int] = []
        if place == 0:
            with store.watch("tick/") as changes:
                store.set("watching", "")
                while not seen or seen[-1] >= 0:
                    value = changes.next(timeout=AMPLE_S).value
                    seen.append(int(value or b"-2"))
        elif place == 1:
            store.get("watching")
            for number in itertools.count():
                last = over.is_set()
                store.set("tick/now", str(-1 if last else number))
                if last:
                    break
        elif place == 2:
            store.lease("alive", "yes", heartbeat=2)
            store.set("leased", "")
            store.get("done", timeout=AMPLE_S)
        else:
            store.get("leased")
            with store.watch("alive") as changes:
                over.wait(AMPLE_S + 5 * KILLS)
                assert store.get("alive", timeout=0) == b"yes"
                with pytest.raises(rallypoint.StoreTimeout):
                    changes.next(timeout=0)  # the lease never expired
            store.set("done", "")
        return seen

    seen = meanwhile(server, work)[0]
    assert seen == [*range(len(seen) - 1), -1]


def test_rounds_are_formed_and_left(server: DurableServer) -> None:
    def work(store: rallypoint.Store, place: int, over: threading.Event) -> list[tuple[int, int]]:
        node = rallypoint.Rendezvous(store, "run", min_nodes=CLIENTS, max_nodes=CLIENTS, node=f"node-{place}")
        rounds = []
        while True:
            now = node.join(timeout=AMPLE_S)
            rounds.append((now.number, now.rank))
            # Rank 0 says whether this round is the last, so that all agree.
            if now.rank == 0:
                store.set(f"last/{now.number}", "1" if over.is_set() else "")
            if store.get(f"last/{now.number}", timeout=AMPLE_S):
                return rounds
            if now.rank == 0:
                node.leave()

    done = meanwhile(server, work)
    for rounds in zip(*done, strict=True):
        assert len({number for number, _ in rounds}) == 1
        assert sorted(rank for _, rank in rounds) == list(range(CLIENTS))


JOB = """
import itertools, os, sys, rallypoint
worker = rallypoint.worker()
for step in itertools.count(1):
    worker.store.add("steps", 1)
    if worker.rank == 0:
        worker.store.set(f"last/{step}", "yes" if os.path.exists(sys.argv[1]) else "")
    last = worker.store.get(f"last/{step}")
    rallypoint.Barrier(worker.store, "step", worker.world_size).wait(worker.rank)
    if step == 1:
        print("begun", flush=True)
    if last:
        print("ended", step, worker.store.add("steps", 0), worker.restarts, flush=True)
        break
"""


def test_a_job_continues_without_a_restart(server: DurableServer, tmp_path: Path) -> None:
    """It runs until the last kill."""
    script, end = tmp_path / "job.py", tmp_path / "end"
    script.write_text(JOB)
    command = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", "--max-restarts", "0"]
    job = subprocess.Popen(
        [*command, "--store", server.url, str(script), str(end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    try:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if line.strip().endswith("begun"):
                break
        reader = threading.Thread(target=lambda: lines.extend(job.stdout))  # type: ignore[arg-type]
        reader.start()
        with repeatedly_killed(server):
            pass
        assert job.poll() is None, "".join(lines)[-3000:]
        end.touch()
        assert job.wait(AMPLE_S + 5 * KILLS) == 0, "".join(lines)[-3000:]
        reader.join(AMPLE_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    said = re.findall(r"ended (\d+) (\d+) (\d+)\n", "".join(lines))
    assert len(said) == 2 and said[0] == said[1], "".join(lines)[-3000:]
    steps, total, restarts = map(int, said[0])
    assert total == 2 * steps and restarts == 0, said
