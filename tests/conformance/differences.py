"""Differences among PyTorch's stores, and between them and ours: one row each, with a probe that shows it.

A probe runs on PyTorch's stores and on ours, and its outcome must be the row's. docs/differences.md is generated from
the rows (`page`), so the page says only what is tested.

`Row` probes are calls on a store. `SocketRow` probes speak PyTorch's protocol over bare sockets, to PyTorch's server
and ours. Servers answer a ping in order, so the bytes before its answer are all that was sent: no clock is needed.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from rallypoint import QueueEmpty, StoreTimeout

from .calls import LONG_ENOUGH_S

BRIEF = timedelta(milliseconds=5)
"""The timeout of a call that must time out."""
FOREVER = "waits forever"
CHANCE = "race: returns, or time-out"
NO_QUEUES = "NotImplementedError"


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Make a call and describe its outcome, in the same words for PyTorch's errors and ours."""
    try:
        return repr(call(*arguments, **options))
    except Exception as error:
        name = type(error).__name__
        if isinstance(error, QueueEmpty) or name == "QueueEmptyError":
            return "queue is empty"
        if isinstance(error, StoreTimeout) or (isinstance(error, RuntimeError) and "timeout" in str(error).lower()):
            return "time-out"
        return "connection closed" if name == "DistNetworkError" else name


@dataclass(frozen=True)
class Row:
    """A call on a store: its outcome in PyTorch's three stores and in ours, and the reason for ours."""

    name: str
    what: str
    probe: Callable[[Any], Any]
    tcp: str
    hash: str
    file: str
    ours: str
    why: str


def alike(theirs: str) -> dict[str, str]:
    """Return the outcome of all three of PyTorch's stores, for a row."""
    return {"tcp": theirs, "hash": theirs, "file": theirs}


def after(call: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def probe(store: Any) -> Any:
        call(store)
        return then(store)

    return probe


def briefly(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return after(lambda store: store.set_timeout(BRIEF), call)


def add_to(value: str) -> Callable[[Any], Any]:
    return after(lambda store: store.set("n", value), lambda store: store.add("n", 1))


def failing(call: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Make a call that must time out."""

    def probe(store: Any) -> None:
        assert outcome(call, store) == "time-out"

    return probe


def shared_timeout(store: Any) -> bool:
    store.set_timeout(timedelta(seconds=5))
    store.clone().set_timeout(timedelta(seconds=7))
    return bool(store.timeout == timedelta(seconds=7))


def prefixed(store: Any, prefix: str = "p") -> Any:
    """Return a PrefixStore over the store: ours over ours, PyTorch's over PyTorch's."""
    if type(store).__module__.startswith("rallypoint"):
        from rallypoint import PrefixStore

        return PrefixStore(prefix, store)
    import torch.distributed

    return torch.distributed.PrefixStore(prefix, store)


ROWS = [
    Row(
        "get-queue",
        "`get` or `multi_get` of a name used only by a queue",
        briefly(after(lambda s: s.queue_push("q", "item"), lambda s: s.get("q"))),
        tcp="b''",
        hash="time-out",
        file=NO_QUEUES,
        ours="time-out",
        why="A wait is better than a value that was never written. `check` and `wait` accept queues, as in PyTorch.",
    ),
    Row(
        "pop-key",
        "blocking `queue_pop` of a name used only by a key",
        briefly(after(lambda s: s.set("q", "key"), lambda s: s.queue_pop("q"))),
        tcp="queue is empty",
        hash="queue is empty",
        file=NO_QUEUES,
        ours="time-out",
        why="A blocking pop blocks. Queues and keys are separate.",
    ),
    Row(
        "add-empty",
        "`add` to an empty value",
        add_to(""),
        tcp="connection closed",
        hash="1",
        file="1",
        ours="NotAnInteger",
        why="PyTorch's stores disagree. The empty string is not a number; `add` on a missing key creates a counter.",
    ),
    Row(
        "add-text",
        "`add` to a value that is not a number",
        add_to("twelve"),
        tcp="connection closed",
        hash="ValueError",
        file="ValueError",
        ours="NotAnInteger",
        why="The error is also a ValueError and names the key; the connection stays open.",
    ),
    Row(
        "add-range",
        "`add` to a number that does not fit in 64 bits",
        add_to("9223372036854775808"),
        tcp="connection closed",
        hash="IndexError",
        file="IndexError",
        ours="NotAnInteger",
        why="The same error as for any other value that is not a 64-bit integer.",
    ),
    Row(
        "add-zeros",
        "`add` to a number with thousands of leading zeros",
        add_to("0" * 5000 + "1"),
        **alike("2"),
        ours="NotAnInteger",
        why="Values longer than 4096 digits are rejected unparsed: everything has a limit.",
    ),
    Row(
        "timeout-zero-missing",
        "`wait` with timeout 0 for a missing key",
        lambda s: s.wait(["k"], timedelta(0)),
        tcp="time-out",
        hash=FOREVER,
        file=FOREVER,
        ours="time-out",
        why="Timeout 0 polls. To wait forever, pass `math.inf`.",
    ),
    Row(
        "timeout-zero-ready",
        "`wait` with timeout 0 for an existing key",
        after(lambda s: s.set("k", ""), lambda s: s.wait(["k"], timedelta(0))),
        tcp=CHANCE,
        hash="None",
        file="None",
        ours="None",
        why="The key exists, so no time is needed. PyTorch's client checks the clock before the reply.",
    ),
    Row(
        "timeout-negative",
        "`wait` with a negative timeout",
        lambda s: s.wait(["k"], timedelta(milliseconds=-1)),
        tcp=FOREVER,
        hash="time-out",
        file="time-out",
        ours="ValueError",
        why="A negative timeout is a bug in the caller.",
    ),
    Row(
        "timeout-seconds",
        "a timeout in seconds, not as a `timedelta`",
        after(lambda s: s.set("k", ""), lambda s: s.wait(["k"], 5)),
        **alike("TypeError"),
        ours="None",
        why="Both forms are accepted.",
    ),
    Row(
        "timeout-class",
        "whether a time-out is a `TimeoutError`",
        briefly(lambda s: isinstance(caught(lambda: s.get("k")), TimeoutError)),
        **alike("False"),
        ours="True",
        why="Errors are typed and have fields, so nobody has to parse messages. FileStore raises a RuntimeError.",
    ),
    Row(
        "barrier-keys",
        "keys left by a `barrier` on `b`",
        after(lambda s: s.barrier("b", 1), lambda s: sorted(key for key in s.list_keys() if key.startswith("b"))),
        tcp="['b']",
        hash="['b/last_member', 'b/num_members']",
        file="['b/last_member', 'b/num_members']",
        ours="['b']",
        why="Every store does as PyTorch's server does, so both kinds of client can meet at one barrier.",
    ),
    Row(
        "barrier-prefix-keys",
        "keys left by a `barrier` on `b` through a PrefixStore",
        lambda s: after(lambda p: p.barrier("b", 1), lambda p: sorted(p.list_keys()))(prefixed(s)),
        **alike("['b/last_member', 'b/num_members']"),
        ours="['b']",
        why="A prefix changes only names.",
    ),
    Row(
        "barrier-timeout",
        "arrivals still counted after a `barrier` timed out",
        briefly(
            after(
                failing(lambda s: s.barrier("b", 2, BRIEF)),
                lambda s: max(s.add("b", 0), s.add("b/num_members", 0)),
            )
        ),
        **alike("1"),
        ours="0",
        why="A caller that timed out has left. Otherwise its retry counts twice and the barrier opens early.",
    ),
    Row(
        "barrier-nobody",
        "`barrier` with `world_size` 0",
        briefly(lambda s: s.barrier("b", 0, BRIEF)),
        tcp="None",
        hash="time-out",
        file="time-out",
        ours="None",
        why="As on PyTorch's server: the count is not below 0.",
    ),
    Row(
        "append-same",
        "the value after `append` of `v` to `v`",
        after(lambda s: s.set("k", "v"), after(lambda s: s.append("k", "v"), lambda s: s.get("k"))),
        tcp="b'vv'",
        hash="b'vv'",
        file="b'v'",
        ours="b'vv'",
        why="An append is never dropped, even if it repeats the current value.",
    ),
    Row(
        "delete-missing",
        "`delete_key` of a missing key",
        lambda s: s.delete_key("k"),
        tcp="False",
        hash="False",
        file="True",
        ours="False",
        why="It returns whether the key existed.",
    ),
    Row(
        "queues",
        "queues",
        after(lambda s: s.queue_push("q", "item"), lambda s: s.queue_pop("q")),
        tcp="b'item'",
        hash="b'item'",
        file=NO_QUEUES,
        ours="b'item'",
        why="Every store implements all of PyTorch's operations.",
    ),
    Row(
        "extended-api",
        "`has_extended_api`",
        lambda s: s.has_extended_api(),
        tcp="True",
        hash="True",
        file="False",
        ours="True",
        why="The same.",
    ),
    Row(
        "list-own",
        "`list_keys` of a new store",
        lambda s: s.list_keys(),
        tcp="[]",
        hash="[]",
        file="['efcount/']",
        ours="[]",
        why="Internal bookkeeping is not listed as keys.",
    ),
    Row(
        "num-own",
        "`num_keys` of a new store",
        lambda s: s.num_keys(),
        tcp="0",
        hash="0",
        file="1",
        ours="0",
        why="The same.",
    ),
    Row(
        "prefix-num",
        "`num_keys() > 0` for an empty PrefixStore over a store with a key",
        after(lambda s: s.set("k", ""), lambda s: prefixed(s).num_keys() > 0),
        **alike("True"),
        ours="False",
        why="A PrefixStore sees only the keys under its prefix.",
    ),
    Row(
        "prefix-list",
        "`list_keys` of PrefixStore `p` if key `pq/x` exists",
        after(lambda s: s.set("pq/x", ""), lambda s: prefixed(s).list_keys()),
        **alike("['/x']"),
        ours="[]",
        why="`pq/x` is not under `p/`.",
    ),
    Row(
        "prefix-list-same",
        "`list_keys` of PrefixStore `p` if key `p` exists",
        after(lambda s: s.set("p", ""), lambda s: prefixed(s).list_keys()),
        **alike("IndexError"),
        ours="[]",
        why="`p` is not under `p/`.",
    ),
    Row(
        "clone-timeout",
        "whether a clone shares the timeout of the original",
        shared_timeout,
        tcp="False",
        hash="True",
        file="False",
        ours="False",
        why="A clone is a separate handle.",
    ),
    Row(
        "limit-key",
        "a key of 8192 bytes",
        after(lambda s: s.set("k" * 8192, "v"), lambda s: s.check(["k" * 8192])),
        tcp="connection closed",
        hash="True",
        file="True",
        ours="LimitExceeded",
        why="Every store enforces the limits of PyTorch's server, so programs can move between stores. Exceeding one "
        "fails only that call. (PyTorch's `set` returns normally; the next call finds the connection closed.)",
    ),
    Row(
        "limit-value",
        "a value of 8 MiB + 1 byte",
        after(lambda s: s.set("k", bytes(8 * 1024 * 1024 + 1)), lambda s: s.check(["k"])),
        tcp="connection closed",
        hash="True",
        file="True",
        ours="LimitExceeded",
        why="The same.",
    ),
    Row(
        "limit-list",
        "131,073 keys in one call",
        lambda s: s.check(["k"] * 131_073),
        tcp="connection closed",
        hash="False",
        file="False",
        ours="LimitExceeded",
        why="The same.",
    ),
    Row(
        "bytes-key",
        "a key that is not valid UTF-8",
        after(lambda s: s.set(b"\xff", ""), lambda s: s.list_keys()),
        **alike("UnicodeDecodeError"),
        ours="TypeError",
        why="Rejected on write, instead of breaking `list_keys` for all clients.",
    ),
    Row(
        "bool-add",
        "`add` of True",
        lambda s: s.add("n", True),
        **alike("1"),
        ours="TypeError",
        why="A bool is not an amount.",
    ),
    Row(
        "view-value",
        "a `memoryview` as a value",
        after(lambda s: s.set("k", memoryview(b"v")), lambda s: s.get("k")),
        **alike("TypeError"),
        ours="b'v'",
        why="A `memoryview` is bytes-like.",
    ),
]


def caught(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("the call did not fail")


# PyTorch's protocol


CODES = {"set": 1, "compare_set": 2, "wait": 6, "delete": 8, "ping": 13, "push": 14, "pop": 15, "barrier": 18}
NONCES = count(0x5250_0000)


class C10dSocket:
    """A bare connection that speaks PyTorch's protocol."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), LONG_ENOUGH_S)
        self._socket.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
        assert self.heard() == b""

    def ask(self, operation: str, *fields: bytes | int | list[bytes]) -> C10dSocket:
        request = bytes([CODES[operation]])
        for field in fields:
            if isinstance(field, list):
                request += struct.pack("<Q", len(field)) + b"".join(struct.pack("<Q", len(f)) + f for f in field)
            elif isinstance(field, bytes):
                request += struct.pack("<Q", len(field)) + field
            else:
                request += struct.pack("<q", field)
        self._socket.sendall(request)
        return self

    def heard(self) -> bytes:
        """Send a ping, and return the bytes before its answer: everything that the server has sent by now."""
        nonce = struct.pack("<I", next(NONCES))
        self._socket.sendall(bytes([CODES["ping"]]) + nonce)
        data = b""
        while not data.endswith(nonce):
            piece = self._socket.recv(65536)
            assert piece, "the server closed the connection"
            data += piece
        return data.removesuffix(nonce)

    def woken(self) -> str:
        return {b"": "waits", b"\0": "is woken"}[self.heard()]

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class SocketRow:
    """Which of two or three connections PyTorch's server and ours wake, and the reason for ours."""

    name: str
    what: str
    probe: Callable[[C10dSocket, C10dSocket, C10dSocket], str]
    torch: str
    ours: str
    why: str


def _together(a: C10dSocket, b: C10dSocket, _: C10dSocket) -> str:
    a.ask("wait", [b"/j", b"/k"]).heard()
    b.ask("set", b"/j", b"").ask("delete", b"/j").ask("set", b"/k", b"").heard()
    return a.woken()


def _failed_compare_set(a: C10dSocket, b: C10dSocket, _: C10dSocket) -> str:
    a.ask("wait", [b"/k"]).heard()
    b.ask("compare_set", b"/k", b"other", b"wrong").heard()
    return a.woken()


def _smaller_barrier(a: C10dSocket, b: C10dSocket, _: C10dSocket) -> str:
    a.ask("barrier", b"/b", 3).heard()
    b.ask("barrier", b"/b", 2).heard()
    return a.woken()


def _written_barrier(a: C10dSocket, b: C10dSocket, _: C10dSocket) -> str:
    a.ask("barrier", b"/b", 3).heard()
    b.ask("set", b"/b", b"0").heard()
    return a.woken()


def _first_arrival(a: C10dSocket, b: C10dSocket, _: C10dSocket) -> str:
    a.ask("wait", [b"/b"]).heard()
    b.ask("barrier", b"/b", 2).heard()
    return a.woken()


def _queue_line(a: C10dSocket, b: C10dSocket, c: C10dSocket) -> str:
    a.ask("wait", [b"/q"]).heard()
    b.ask("wait", [b"/q"]).heard()
    c.ask("push", b"/q", b"1").heard()
    assert a.woken() == "is woken"
    a.ask("pop", b"/q").heard()
    a.ask("wait", [b"/q"]).heard()
    c.ask("push", b"/q", b"2").heard()
    return "the first, again" if a.woken() == "is woken" else "the second" if b.woken() == "is woken" else "nobody"


def _stale_wake(a: C10dSocket, b: C10dSocket, _: C10dSocket) -> str:
    a.ask("wait", [b"/q"]).heard()
    b.ask("push", b"/q", b"1").heard()
    assert a.woken() == "is woken"
    a.ask("pop", b"/q").heard()
    a.ask("wait", [b"/absent"]).heard()
    b.ask("push", b"/q", b"2").heard()
    return a.woken()


def _queue_and_key(a: C10dSocket, b: C10dSocket, _: C10dSocket) -> str:
    b.ask("push", b"/q", b"1").heard()
    a.ask("wait", [b"/q", b"/k"]).heard()
    b.ask("set", b"/k", b"").heard()
    return a.woken()


SOCKET_ROWS = [
    SocketRow(
        "together",
        "`wait` for j and k: j is set, j is deleted, k is set",
        _together,
        torch="is woken",
        ours="waits",
        why="A wait returns only if all its keys exist at the same time.",
    ),
    SocketRow(
        "failed-compare-set",
        "`wait` for k: a `compare_set` on k fails",
        _failed_compare_set,
        torch="is woken",
        ours="waits",
        why="Nothing was written.",
    ),
    SocketRow(
        "queue-and-key",
        "`wait` for q and k, queue q has an item: k is set",
        _queue_and_key,
        torch="waits",
        ours="is woken",
        why="Both exist.",
    ),
    SocketRow(
        "stale-wake",
        "`wait` for a missing key, after a wait for queue q: an item is pushed to q",
        _stale_wake,
        torch="is woken",
        ours="waits",
        why="The wait for q is over.",
    ),
    SocketRow(
        "queue-line",
        "which client is woken for the second item, if two wait and the first has popped one and waits again",
        _queue_line,
        torch="the first, again",
        ours="the second",
        why="The longest waiter is next; otherwise a client can starve.",
    ),
    SocketRow(
        "smaller-barrier",
        "`barrier` of 3: a second client arrives with `world_size` 2",
        _smaller_barrier,
        torch="is woken",
        ours="waits",
        why="Each caller is released by its own `world_size`.",
    ),
    SocketRow(
        "written-barrier",
        "`barrier` of 3: another client sets its key to 0",
        _written_barrier,
        torch="is woken",
        ours="waits",
        why="The count is not 3.",
    ),
    SocketRow(
        "first-arrival",
        "`wait` for a barrier's key: the first of two arrives",
        _first_arrival,
        torch="waits",
        ours="is woken",
        why="The key exists.",
    ),
]

# The file of a FileStore


@dataclass(frozen=True)
class FileRow:
    """The fate of a FileStore's file, with PyTorch and with ours, and the reason for ours."""

    name: str
    what: str
    probe: Callable[[Callable[..., Any], str], str]
    """Called with the class and a path."""
    torch: str
    ours: str
    why: str


def _one_of_two(store: Callable[..., Any], path: str) -> str:
    store(path, 2)
    return "stays" if os.path.exists(path) else "is removed"


def _opened_again(store: Callable[..., Any], path: str) -> str:
    store(path).set("k", "v")
    return outcome(store(path).check, ["k"])


def _after_a_death(store: Callable[..., Any], path: str) -> str:
    if not (child := os.fork()):
        kept = store(path, 1)
        kept.set("k", "v")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    store(path, 1)
    return "stays" if os.path.exists(path) else "is removed"


FILE_ROWS = [
    FileRow(
        "one-of-two",
        "the file, after one process of `world_size` 2 opened it and dropped its handle",
        _one_of_two,
        torch="stays",
        ours="is removed",
        why="A file without open handles belongs to a finished run; the next run would start afresh anyway.",
    ),
    FileRow(
        "opened-again",
        "`check` of a key set before the last handle was dropped, without a `world_size`",
        _opened_again,
        torch="True",
        ours="False",
        why="The same. Leftovers of a dead run make the next run hang or fail.",
    ),
    FileRow(
        "after-a-death",
        "the file, after a process was killed and a later one dropped its handle",
        _after_a_death,
        torch="stays",
        ours="is removed",
        why="Live handles are tracked by locks, which the kernel releases, not by a counter.",
    ),
]

OPENING = """# Differences from PyTorch's stores

rallypoint's stores behave like PyTorch 2.13's stores, except where PyTorch's stores disagree with each other or do
something no caller can want. This page is generated from tests: tests/conformance runs every row of the tables on
PyTorch's stores and on rallypoint's. A `time-out` is a DistStoreError in PyTorch (a RuntimeError in its FileStore) and
a StoreTimeout in rallypoint.
"""

BETWEEN = """
## Wake-ups

When a waiting client is woken, by PyTorch's server (libuv) and by rallypoint's, over PyTorch's protocol.
"""

THE_FILE = """
## The file of a FileStore

With a `world_size`, both PyTorch and rallypoint remove the file when the last handle is closed or dropped. Without one,
dropping a handle leaves the file behind in both.
"""

CLOSING = """
## Untested differences

These show only in timing or as a crash, so no test covers them.

- PyTorch's HashStore does not wake a waiter on `add`; the waiter returns at its timeout. rallypoint wakes it.
- While one thread waits, PyTorch's TCPStore client blocks every other thread that uses it. rallypoint's does not.
- PyTorch's FileStore rounds timeouts to whole seconds. rallypoint does not.
- `multi_set` with fewer values than keys reads out of bounds in PyTorch's HashStore and FileStore and may crash the
  process; its TCPStore raises DistStoreError. rallypoint raises ValueError and writes nothing.
"""


def page() -> str:
    """Return the text of docs/differences.md."""
    lines = ["| what | TCPStore | HashStore | FileStore | rallypoint | why |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        cells = [row.what, *map(_cell, (row.tcp, row.hash, row.file, row.ours)), row.why]
        lines.append(f"| {' | '.join(cells)} |")
    head = ["| what | PyTorch | rallypoint | why |", "|---|---|---|---|"]
    protocol, files = (
        [*head, *(f"| {row.what} | {row.torch} | {row.ours} | {row.why} |" for row in rows)]
        for rows in (SOCKET_ROWS, FILE_ROWS)
    )
    return "\n".join([OPENING, *lines, BETWEEN, *protocol, THE_FILE, *files, CLOSING])


def _cell(result: str) -> str:
    plain = {"time-out", "queue is empty", "connection closed", FOREVER, CHANCE}
    return result if result in plain else f"`{result}`"
