"""`StoreLoad`: workers that change a store while its servers and etcd fail, and a check of the results that they got.

A worker is a thread or a process. It makes changes of every kind in rounds, and reports the results of each round.
When all have ended, `check` compares the reports with the store: nothing may be lost or applied twice.

    python -m tests.replicated.load NAME URL      # a worker: prints a line of JSON per round, until its input ends
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from tests.conformance.calls import Call
from tests.raw_peer import AMPLE_S, until

import rallypoint

__all__ = ["Report", "StoreLoad"]

ROOT = Path(__file__).resolve().parents[2]
LARGE = 1024 * 1024 + 1
"""More bytes than one value of etcd holds."""

LARGE_EVERY = 4
Report = dict[str, Any]
"""The worker's name, the round's token, and the results of its changes."""


class StoreLoad:
    """The workers of a store, which run until `end`; a context manager that ends them."""

    def __init__(self, url: str, threads: int = 3, processes: int = 0) -> None:
        self.reports: list[Report] = []
        self._stop = threading.Event()
        self._children: list[subprocess.Popen[str]] = []
        self._calls: list[Call] = []
        in_processes, in_threads = [f"p{at}" for at in range(processes)], [f"t{at}" for at in range(threads)]
        self.names = [*in_processes, *in_threads]
        for name in in_processes:
            command, pipe = [sys.executable, "-m", "tests.replicated.load", name, url], subprocess.PIPE
            child = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
            self._children.append(child)
            self._calls.append(Call(self._until_stopped, self._read_reports, child))
        for name in in_threads:
            self._calls.append(Call(self._until_stopped, run_worker, name, url, self._stop, self.reports.append))

    def __enter__(self) -> StoreLoad:
        self.rounds()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let all workers finish their round; raise what any of them raised."""
        self._stop.set()
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for call in self._calls:
            call.result()
        assert [child.wait(AMPLE_S) for child in self._children] == [0] * len(self._children)

    def rounds(self, number: int = 2) -> None:
        """Wait until each worker has begun and finished this many rounds, or one has ended too early."""
        before, pause = self._counts(), threading.Event()

        def look() -> Counter[str]:
            pause.wait(0.01)
            return self._counts()

        until(look, lambda now: all(now[name] > before[name] + number for name in self.names) or self._stop.is_set())

    def survive(self, store: rallypoint.Store, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Begin and end a fault; the workers go on in each, and blocked calls and a lease of this store survive it."""
        store.lease("alive", "yes")
        waiting, item = Call(store.wait, ["go"], AMPLE_S), Call(store.queue_pop, "late", True, AMPLE_S)
        for change in (begin, end):
            change()
            self.rounds()
        store.set("go", "now")
        store.queue_push("late", "item")
        assert (waiting.result(), item.result()) == (None, b"item")
        assert store.get("alive") == b"yes"

    def check(self, store: rallypoint.Store) -> None:
        """Compare the workers' reports with a store; call it when they have ended."""
        tokens = sorted(report["token"] for report in self.reports)
        assert sorted(report["total"] for report in self.reports) == list(range(1, len(tokens) + 1))
        assert int(store.get("total")) == len(tokens)
        assert sorted(store.get("log").decode().split()) == tokens
        assert int(store.get("swapped")) == sum(report["swapped"] for report in self.reports)
        taken = [report["taken"] for report in self.reports if report["taken"]]
        left = [store.queue_pop("queue").decode() for _ in range(store.queue_len("queue"))]
        assert sorted(taken + left) == tokens, "each item is taken once"

    def _counts(self) -> Counter[str]:
        return Counter(report["name"] for report in list(self.reports))

    def _until_stopped(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run one worker; if it ends too early, stop the others as well."""
        try:
            work(*arguments)
        finally:
            self._stop.set()

    def _read_reports(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self.reports.append(json.loads(line))


def run_worker(name: str, url: str, stop: threading.Event, report: Callable[[Report], object]) -> None:
    """Change the store in rounds until stopped; no error is expected."""
    with rallypoint.connect(url, timeout=120) as store:
        for number in count(1):
            if stop.is_set():
                return
            report(_round(store, name, number))


def _round(store: rallypoint.Store, name: str, number: int) -> Report:
    token = f"{name}.{number}"
    report: Report = {"name": name, "token": token, "total": store.add("total", 1)}
    store.append("log", f"{token} ")
    store.queue_push("queue", token)
    store.set(f"seen/{name}", str(number))
    report["swapped"] = _increment_by_swap(store)
    report["taken"] = _take_item(store, number)
    if number % LARGE_EVERY == 1:
        store.set(f"large/{name}", _large(name, number))
    assert store.get(f"large/{name}") == _large(name, number - (number - 1) % LARGE_EVERY)
    return report


def _increment_by_swap(store: rallypoint.Store) -> bool:
    """Increment a counter by compare-and-set; return whether no other worker was faster."""
    found = store.get("swapped") if store.check(["swapped"]) else None
    return store.swap("swapped", found, b"%d" % (int(found or 0) + 1)).won


def _take_item(store: rallypoint.Store, number: int) -> str | None:
    """Pop an item of the queue, waiting for it or not; in every third round, leave the queue alone."""
    if number % 3 == 0:
        return None
    try:
        return store.queue_pop("queue", block=number % 3 == 1, timeout=100).decode()
    except rallypoint.QueueEmpty:
        return None


def _large(name: str, number: int) -> bytes:
    return f"{name}.{number}".encode().ljust(LARGE, b".")


def main(name: str, url: str) -> None:
    stop = threading.Event()

    def stop_at_end_of_input() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    run_worker(name, url, stop, lambda report: print(json.dumps(report), flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
