"""A child process of test_concurrency.py: `python child.py URL TASK ARGUMENTS…` prints one line of JSON per result.

It shares nothing but the store with the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rallypoint import HashStore, Store, connect


def report(result: Any) -> None:
    print(json.dumps(result), flush=True)


def add(store: Store, key: str, times: str) -> None:
    report([store.add(key, 1) for _ in range(int(times))])


def append(store: Store, key: str, name: str, times: str) -> None:
    for number in range(int(times)):
        store.append(key, f"{name}:{number} ")


def push(store: Store, queue: str, name: str, times: str) -> None:
    for number in range(int(times)):
        store.queue_push(queue, f"{name}:{number}")


def pop(store: Store, queue: str) -> None:
    """Pop until the item is "stop"."""
    items = []
    while (item := store.queue_pop(queue).decode()) != "stop":
        items.append(item)
    report(items)


def locked(store: Store, name: str, times: str) -> None:
    """Count in a key that is read and written in two steps, under a lock made of compare_set."""
    for _ in range(int(times)):
        while store.compare_set("lock", "free", name) != name.encode():
            pass
        store.set("count", str(int(store.get("count")) + 1))
        store.set("lock", "free")


def get(store: Store, key: str) -> None:
    report("waiting")
    report(store.get(key).decode())


def meet(store: Store, key: str, size: str) -> None:
    store.barrier(key, int(size))
    report("through")


def lease(store: Store, key: str) -> None:
    store.lease(key, str(os.getpid()))
    report("leased")
    store.get("never")


WAITS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("never"),
    "wait": lambda store: store.wait(["never", "ever"]),
    "multi_get": lambda store: store.multi_get(["never", "ever"]),
    "queue_pop": lambda store: store.queue_pop("jobs"),
    "barrier": lambda store: store.barrier("gate", 2),
    "watch": lambda store: store.watch().next(),
}


def interrupted(store: Store, operation: str) -> None:
    """Wait until Ctrl-C, use the store once more, and let KeyboardInterrupt end the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        report("waiting")
        WAITS[operation](store)
    except KeyboardInterrupt:
        store.set("after Ctrl-C", operation)
        left = store.statistics().waiters if isinstance(store, HashStore) else 0
        report([store.get("after Ctrl-C").decode(), left])
        raise


TASKS = {task.__name__: task for task in (add, append, push, pop, locked, get, meet, lease, interrupted)}

if __name__ == "__main__":
    _, url, name, *arguments = sys.argv
    TASKS[name](connect(url), *arguments)
