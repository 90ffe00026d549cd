"""One who works on a store in etcd while members of it fail: rounds of changes of every kind, each of which is told.

python labourer.py NAME URL       a line of JSON for each round, until its input ends
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import rallypoint

LARGE = 1024 * 1024 + 1


def labour(name: str, url: str, over: threading.Event, tell: Callable[[dict[str, Any]], object]) -> None:
    """Work in rounds until it is over; whatever a store raises is not expected."""
    with rallypoint.connect(url, timeout=120) as store:
        number = 0
        while not over.is_set():
            number += 1
            token = f"{name}.{number}"
            told: dict[str, Any] = {"name": name, "token": token, "total": store.add("total", 1)}
            store.append("log", f"{token} ")
            store.queue_push("queue", token)
            store.set(f"seen/{name}", str(number))
            told["swapped"] = store.swap("swapped", *_next(store)).won
            try:
                told["taken"] = store.queue_pop("queue", block=False).decode()
            except rallypoint.QueueEmpty:
                told["taken"] = None
            if number % 4 == 1:
                large = token.encode().ljust(LARGE, b".")
                store.set(f"large/{name}", large)
                assert store.get(f"large/{name}") == large
            tell(told)


def _next(store: rallypoint.Store) -> tuple[bytes | None, bytes]:
    """Return what a counter is, and what it is next, without `add`."""
    found = store.get("swapped") if store.check(["swapped"]) else None
    return found, b"%d" % (int(found or 0) + 1)


def main() -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    labour(*sys.argv[1:3], over, lambda told: print(json.dumps(told), flush=True))


if __name__ == "__main__":
    main()
