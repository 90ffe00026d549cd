"""`Crew`: threads that change a store while its servers and etcd fail, and whether all they were told is so."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from tests.conformance.calls import Call
from tests.wire import until

import rallypoint

LARGE = 1024 * 1024 + 1
"""More than one value of etcd holds."""


class Crew:
    """So many threads, each with a store of its own; a context manager that ends them."""

    def __init__(self, url: str, count: int = 3) -> None:
        self.told: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._names = [f"t{at}" for at in range(count)]
        self._calls = [Call(self._work, name, url) for name in self._names]

    def __enter__(self) -> Crew:
        self.rounds()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let all finish their round; raise what any of them raised."""
        self._over.set()
        for call in self._calls:
            call.result()

    def rounds(self, count: int = 2) -> None:
        """Wait until each has done so many rounds from now on, the one that it is in not counted."""
        before, pause = self._counts(), threading.Event()

        def look() -> Counter[str]:
            pause.wait(0.01)
            return self._counts()

        until(look, lambda now: all(now[name] > before[name] + count for name in self._names) or self._over.is_set())

    def check(self, store: rallypoint.Store) -> None:
        """Compare what the threads were told with what is in a store; to be called when they have ended."""
        tokens = [told["token"] for told in self.told]
        assert sorted(told["total"] for told in self.told) == list(range(1, len(tokens) + 1))
        assert int(store.get("total")) == len(tokens)
        assert sorted(store.get("log").decode().split()) == sorted(tokens)
        taken = [told["taken"] for told in self.told if told["taken"]]
        left = [store.queue_pop("queue").decode() for _ in range(store.queue_len("queue"))]
        assert sorted(taken + left) == sorted(tokens), "each item is taken once"

    def _counts(self) -> Counter[str]:
        return Counter(told["name"] for told in list(self.told))

    def _work(self, name: str, url: str) -> None:
        try:
            with rallypoint.connect(url, timeout=120) as store:
                number = 0
                while not self._over.is_set():
                    number += 1
                    self.told.append(self._round(store, name, number))
        finally:
            self._over.set()

    def _round(self, store: rallypoint.Store, name: str, number: int) -> dict[str, Any]:
        token = f"{name}.{number}"
        told: dict[str, Any] = {"name": name, "token": token, "total": store.add("total", 1), "taken": None}
        store.append("log", f"{token} ")
        store.queue_push("queue", token)
        if number % 3:
            told["taken"] = store.queue_pop("queue", timeout=100).decode()
        if number % 8 == 1:
            store.set(f"large/{name}", token.encode().ljust(LARGE, b"."))
        assert not store.check(["large/" + name]) or store.get("large/" + name)[: len(name)] == name.encode()
        return told
