"""A farm of processes that share a work queue and are killed again and again: every item is done, and counted once.

By default, a worker is killed whenever another part of the items is done. With FARM_KILL_S, one is killed every so
many seconds, and FARM_ITEMS is the number of items: `make soak` has 10,000, and a kill every second.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from rallypoint import Server, WorkQueue, connect

ITEMS = int(os.environ.get("FARM_ITEMS", "200"))
KILL_S = float(os.environ.get("FARM_KILL_S", "0"))
KILLS, LOOK_S = 8, 0.02
FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
WORKERS, AMPLE_S = 8, 60.0 + ITEMS / 10

WORKER = """
import hashlib, os, sys, rallypoint
url, acknowledged = sys.argv[1:]
log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
store = rallypoint.connect(url)
queue = rallypoint.WorkQueue(store, "farm")
while True:
    item = queue.take(3600)
    store.add("work/" + item.data.decode(), 1)
    hashlib.pbkdf2_hmac("sha256", item.data, b"", 20_000)
    item.done()
    os.write(log, item.data + b"\\n")
"""


class Farm:
    """Worker processes, which are replaced when they are killed."""

    def __init__(self, url: str, folder: Path) -> None:
        self._command = [sys.executable, "-c", WORKER, url, str(folder / "acknowledged")]
        self._stderr = (folder / "stderr").open("w+b")
        self._chance = random.Random(FIRST_SEED)
        self.workers = [self._start() for _ in range(WORKERS)]
        self.kills = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stderr=self._stderr)

    def kill_one(self) -> None:
        """Kill a worker, and start another in its place."""
        at = self._chance.randrange(WORKERS)
        self.end(self.workers[at])
        self.workers[at] = self._start()
        self.kills += 1

    def end(self, worker: subprocess.Popen[bytes]) -> None:
        """Kill a worker, which must not have ended by itself."""
        worker.kill()
        if worker.wait(AMPLE_S) != -signal.SIGKILL:
            self._stderr.seek(0)
            raise AssertionError(f"a worker failed: {self._stderr.read().decode()}")


@contextlib.contextmanager
def farm_of(url: str, folder: Path) -> Iterator[Farm]:
    farm = Farm(url, folder)
    try:
        yield farm
    finally:
        for worker in farm.workers:
            farm.end(worker)


@pytest.mark.timeout(120 + ITEMS / 5)
@pytest.mark.parametrize("durable", [False, True])
def test_every_item_of_a_farm_is_done_and_counted_once(tmp_path: Path, durable: bool) -> None:
    """The server with a log dies on the way, too."""
    items = [str(number) for number in range(ITEMS)]
    with (
        Server(grace=1.0, data_dir=str(tmp_path / "data") if durable else None) as server,
        connect(server.url) as store,
    ):
        queue = WorkQueue(store, "farm")
        queue.put_many(items, max_deliveries=1000)
        with ThreadPoolExecutor(1) as pool, farm_of(server.url, tmp_path) as farm:
            joined: Future[None] = pool.submit(queue.join, AMPLE_S)
            while not wait([joined], KILL_S or LOOK_S).done:
                if KILL_S or queue.status().done * KILLS > farm.kills * ITEMS:
                    farm.kill_one()
                    if durable and farm.kills == 3:
                        os.kill(server.pid, signal.SIGKILL)
            joined.result()
        assert queue.status()[:4] == (0, 0, 0, ITEMS)
        works = [int(work) for work in store.multi_get([f"work/{item}" for item in items], 0)]
    acknowledged = Counter((tmp_path / "acknowledged").read_text().split())
    assert farm.kills >= 3, "the farm was too fast to be killed"
    assert min(works) >= 1 and sum(works) - ITEMS <= farm.kills, "an item is repeated only after a kill"
    assert set(acknowledged.values()) == {1}, "nobody finishes an item that another has finished"
    assert ITEMS - len(acknowledged) <= farm.kills
    print(f"{ITEMS} items, {farm.kills} kills, {sum(works) - ITEMS} repeated")
