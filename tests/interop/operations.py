"""Every operation of a store, as a list of calls, and transcripts of their results.

The same calls run on torch's client and on ours, with torch's servers and ours; the transcript of torch's client on
torch's server is the reference for the others. An error is recorded by its name in torch.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import rallypoint

SOON = timedelta(milliseconds=60)
AMPLE = timedelta(seconds=60)
BYTES = b"\0\n\xff\xfe/"

Transcript = list[tuple[str, Any]]
Truth = tuple[Transcript, list[str]]
"""The transcript of torch's client on torch's server, and the keys that it leaves."""

BASIC: list[tuple[Any, ...]] = [
    ("set", "text", "grüße"),
    ("get", "text"),
    ("set", "bytes", BYTES),
    ("get", "bytes"),
    ("set", "empty", ""),
    ("get", "empty"),
    ("set", "Schlüssel/mit Leerzeichen", "x"),
    ("get", "Schlüssel/mit Leerzeichen"),
    ("add", "count", 5),
    ("add", "count", -7),
    ("add", "count", 0),
    ("get", "count"),
    ("compare_set", "swapped", "", "first"),
    ("compare_set", "swapped", "first", BYTES),
    ("compare_set", "swapped", "first", "third"),
    ("compare_set", "absent", "something", "x"),
    ("check", ["absent"]),
    ("append", "log", "one,"),
    ("append", "log", BYTES),
    ("get", "log"),
    ("multi_set", ["m1", "m2", "m3"], ["1", BYTES, ""]),
    ("multi_get", ["m1", "m2"]),
    ("multi_get", ["m3", "m1"]),
    ("multi_get", []),
    ("check", ["text", "count", "m3"]),
    ("check", ["text", "never"]),
    ("check", []),
    ("wait", ["text", "m1"]),
    ("wait", ["text", "m1"], AMPLE),
    ("delete_key", "text"),
    ("delete_key", "text"),
    ("check", ["text"]),
]

TIMEOUTS: list[tuple[Any, ...]] = [
    ("wait", ["never"], SOON),
    ("wait", ["count", "never"], SOON),
    ("barrier", "alone", 2, SOON),
    ("set_timeout", SOON),
    ("get", "never"),
    ("multi_get", ["count", "never"]),
    ("wait", ["never"]),
    ("set_timeout", AMPLE),
    ("get", "count"),
    ("barrier", "full", 1),
    ("barrier", "full", 1, AMPLE),
]

QUEUES: list[tuple[Any, ...]] = [
    ("queue_len", "jobs"),
    ("queue_pop", "jobs", False),
    ("queue_push", "jobs", "one"),
    ("queue_push", "jobs", BYTES),
    ("queue_push", "jobs", ""),
    ("queue_len", "jobs"),
    ("check", ["jobs"]),
    ("wait", ["jobs"]),
    ("delete_key", "jobs"),
    ("queue_pop", "jobs"),
    ("queue_pop", "jobs", True),
    ("queue_pop", "jobs", False),
    ("check", ["jobs"]),
    ("set_timeout", SOON),
    ("queue_pop", "jobs"),
    ("set_timeout", AMPLE),
    ("queue_len", "jobs"),
    ("get", "count"),
]

EVERYTHING = BASIC + TIMEOUTS + QUEUES


def transcribe(store: Any, calls: list[tuple[Any, ...]], mark: str = "") -> Transcript:
    """Make the calls, with a prefix before every key, and record what each returned or raised."""
    lines: Transcript = []
    for name, *arguments in calls:
        if arguments and name != "set_timeout":
            first = arguments[0]
            arguments[0] = mark + first if isinstance(first, str) else [mark + key for key in first]
        try:
            lines.append((name, getattr(store, name)(*arguments)))
        except Exception as error:
            lines.append((name, kind_of(error)))
    lines.append(("has_extended_api", store.has_extended_api()))
    return lines


def keys_of(store: Any, mark: str = "") -> list[str]:
    """List the keys that the calls left; torch leaves the key of the barrier that timed out, we do not."""
    return sorted(key.removeprefix(mark) for key in store.list_keys() if key.startswith(mark) and "alone" not in key)


def kind_of(error: Exception) -> str:
    """Return torch's name for an error of torch or of ours."""
    dist = importlib.import_module("torch.distributed")

    kinds = {
        "QueueEmptyError": (dist.QueueEmptyError, rallypoint.QueueEmpty),
        "NotImplementedError": (NotImplementedError,),
        "DistStoreError": (dist.DistStoreError, rallypoint.StoreTimeout),
        "DistNetworkError": (dist.DistNetworkError, rallypoint.NetworkError),
    }
    return next((name for name, classes in kinds.items() if isinstance(error, classes)), repr(error))


def on_torchs_own_server() -> Truth:
    """Return the transcript of everything by torch's client on torch's server, and the keys it left."""
    dist = importlib.import_module("torch.distributed")

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=AMPLE)
    return transcribe(store, EVERYTHING), keys_of(store)
