"""One process of a history: runs a random plan on a store, and prints its operations, their results and their times.

    python -m tests.linearizability.worker NAME URL

At torch://host:port it speaks PyTorch's protocol.

It reads one JSON line per history, `[seed, number, operations]`, and replies with one line that lists its operations.
Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import time
from typing import Any

import rallypoint

KINDS = ("set", "get", "get", "add", "append", "swap", "delete", "push", "pop", "pop", "length")


def to_json(value: Any) -> Any:
    """Return a value as JSON can hold it: bytes in base64, tuples as lists."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def plan(chance: random.Random, name: str, number: int, place: int) -> tuple[str, str, tuple[Any, ...]]:
    """Choose an operation: its kind, its key and its arguments. Every written value is unique."""
    kind = chance.choice(KINDS)
    key = f"{number}/{chance.choice('ab')}"
    mark = f"{name}{place}.".encode()
    if kind in ("push", "pop", "length"):
        return kind, f"{number}/q", (mark,) if kind == "push" else ()
    if kind == "add":
        return kind, f"{number}/count", (chance.choice((1, 1, 10, -1)),)
    if kind in ("set", "append"):
        return kind, key, (mark,)
    if kind == "swap":
        return kind, key, (chance.choice((None, b"", mark)), mark + b"s")
    return kind, chance.choice((key, f"{number}/count")) if kind == "get" else key, ()


def open_store(name: str, url: str) -> Any:
    if not url.startswith("torch:"):
        return rallypoint.connect(url, timeout=60)
    from tests.linearizability.torch_client import TorchClient

    host, port = url.removeprefix("torch://").split(":")
    return TorchClient(host, int(port), name)


def perform(store: Any, kind: str, key: str, arguments: tuple[Any, ...]) -> Any:
    """Perform one operation; return its result in the form that the model returns."""
    try:
        if kind == "get":
            return store.get(key, timeout=0)
        if kind == "pop":
            return store.queue_pop(key, block=False)
    except (rallypoint.StoreTimeout, rallypoint.QueueEmpty):
        return None
    if kind == "swap":
        return tuple(store.swap(key, *arguments))
    method = {"delete": "delete_key", "push": "queue_push", "length": "queue_len"}.get(kind, kind)
    return getattr(store, method)(key, *arguments)


def run(name: str, url: str) -> None:
    store = open_store(name, url)
    for line in sys.stdin:
        seed, number, count = json.loads(line)
        chance, rows = random.Random(f"{seed} {name}"), []
        for place in range(count):
            kind, key, arguments = plan(chance, name, number, place)
            called, returned, result = time.monotonic(), None, None
            try:
                result = perform(store, kind, key, arguments)
                returned = time.monotonic()
            except rallypoint.NetworkError as error:  # whether it happened is not known
                print(f"{name}, {kind} of {key}: {error}", file=sys.stderr, flush=True)
                store = open_store(name, url)
            rows.append([name, kind, key, to_json(arguments), to_json(result), called, returned])
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:])
