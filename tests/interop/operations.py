"""Every operation of a store, as a list of calls, and a transcript of what they did.

The same calls run on torch's client and on ours, against torch's servers and ours; the transcript that torch's client
makes on torch's own server is the truth that the others are compared with. An error is written down as the name that
torch has for it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import rallypoint

SOON = timedelta(milliseconds=60)
AMPLE = timedelta(seconds=60)
BYTES = b"\0\n\xff\xfe/"

Transcript = list[tuple[str, Any]]

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
    """Make the calls, every key with a mark before it, and write down what each returned or raised."""
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
    """List what the calls left behind; the barrier that timed out is torch's to leave and ours to take back."""
    return sorted(key.removeprefix(mark) for key in store.list_keys() if key.startswith(mark) and "alone" not in key)


def kind_of(error: Exception) -> str:
    """Return torch's name for an error, be it torch's or ours."""
    import torch.distributed as dist

    kinds = {
        "QueueEmptyError": (dist.QueueEmptyError, rallypoint.QueueEmpty),
        "NotImplementedError": (NotImplementedError,),
        "DistStoreError": (dist.DistStoreError, rallypoint.StoreTimeout),
        "DistNetworkError": (dist.DistNetworkError, rallypoint.NetworkError),
    }
    return next((name for name, classes in kinds.items() if isinstance(error, classes)), repr(error))


def on_torchs_own_server() -> tuple[Transcript, list[str]]:
    """Return the transcript of everything by torch's client on torch's server, and the keys it left."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=AMPLE)
    return transcribe(store, EVERYTHING), keys_of(store)
