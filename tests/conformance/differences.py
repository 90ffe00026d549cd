"""Where PyTorch's stores differ among themselves or from ours: one row each, with a probe that shows it.

A probe is run on PyTorch's stores and on ours, and what comes of it must be what the row says. The rows are also the
text of docs/differences.md (`page`), so the page cannot say anything that is not so.

`Row` probes are calls on a store. `WireRow` probes speak PyTorch's protocol by hand, to PyTorch's server and to ours: a
ping is answered in its order, so what a connection was told before the answer is known without a clock.
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
"""A timeout for what must time out."""
FOREVER = "waits for ever"
CHANCE = "by chance: answers, or time-out"
NO_QUEUES = "NotImplementedError"


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Make a call and say in words what came of it, in the same words for PyTorch's errors and for ours."""
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
    """A call on a store: what comes of it in PyTorch's three stores and in ours, and why ours does so."""

    name: str
    what: str
    probe: Callable[[Any], Any]
    tcp: str
    hash: str
    file: str
    ours: str
    why: str


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
    """Return a prefix of a store, of the same house."""
    if type(store).__module__.startswith("rallypoint"):
        from rallypoint import PrefixStore

        return PrefixStore(prefix, store)
    import torch.distributed

    return torch.distributed.PrefixStore(prefix, store)


ROWS = [
    Row(
        "get-queue",
        "`get` or `multi_get` of a name that only a queue has",
        briefly(after(lambda s: s.queue_push("q", "item"), lambda s: s.get("q"))),
        tcp="b''",
        hash="time-out",
        file=NO_QUEUES,
        ours="time-out",
        why="A value that nobody wrote is worse than a wait. `check` and `wait` accept the queue, as PyTorch's do.",
    ),
    Row(
        "pop-key",
        "blocking `queue_pop` where only a key has that name",
        briefly(after(lambda s: s.set("q", "key"), lambda s: s.queue_pop("q"))),
        tcp="queue is empty",
        hash="queue is empty",
        file=NO_QUEUES,
        ours="time-out",
        why="A pop that was asked to wait waits. Queues and keys are different things.",
    ),
    Row(
        "add-empty",
        "`add` to an empty value",
        add_to(""),
        tcp="connection closed",
        hash="1",
        file="1",
        ours="NotAnInteger",
        why="PyTorch's stores do not agree. Nothing is not a number; a counter is made by `add` on a missing key.",
    ),
    Row(
        "add-text",
        "`add` to what is no number",
        add_to("twelve"),
        tcp="connection closed",
        hash="ValueError",
        file="ValueError",
        ours="NotAnInteger",
        why="It is a ValueError, too, names the key, and the connection lives.",
    ),
    Row(
        "add-range",
        "`add` to a number that does not fit in 64 bits",
        add_to("9223372036854775808"),
        tcp="connection closed",
        hash="IndexError",
        file="IndexError",
        ours="NotAnInteger",
        why="The same error as for other text that is no such number.",
    ),
    Row(
        "add-zeros",
        "`add` to a number with thousands of leading zeros",
        add_to("0" * 5000 + "1"),
        tcp="2",
        hash="2",
        file="2",
        ours="NotAnInteger",
        why="Past 4096 digits nothing is computed: a limit on everything.",
    ),
    Row(
        "timeout-zero-missing",
        "`wait` with timeout 0 for what is missing",
        lambda s: s.wait(["k"], timedelta(0)),
        tcp="time-out",
        hash=FOREVER,
        file=FOREVER,
        ours="time-out",
        why="0 means: only if it is true now. For ever is `math.inf`.",
    ),
    Row(
        "timeout-zero-ready",
        "`wait` with timeout 0 for what is there",
        after(lambda s: s.set("k", ""), lambda s: s.wait(["k"], timedelta(0))),
        tcp=CHANCE,
        hash="None",
        file="None",
        ours="None",
        why="What is true now needs no time. PyTorch's client looks at the clock before the answer.",
    ),
    Row(
        "timeout-negative",
        "`wait` with a negative timeout",
        lambda s: s.wait(["k"], timedelta(milliseconds=-1)),
        tcp=FOREVER,
        hash="time-out",
        file="time-out",
        ours="ValueError",
        why="A negative duration is a mistake in the caller's sum.",
    ),
    Row(
        "timeout-seconds",
        "a timeout in seconds, not as a `timedelta`",
        after(lambda s: s.set("k", ""), lambda s: s.wait(["k"], 5)),
        tcp="TypeError",
        hash="TypeError",
        file="TypeError",
        ours="None",
        why="Both are durations.",
    ),
    Row(
        "timeout-class",
        "whether a time-out is a `TimeoutError`",
        briefly(lambda s: isinstance(caught(lambda: s.get("k")), TimeoutError)),
        tcp="False",
        hash="False",
        file="False",
        ours="True",
        why="Errors are typed, with fields; nobody has to match on the words. FileStore's is a bare RuntimeError.",
    ),
    Row(
        "barrier-keys",
        "the keys that a `barrier` on `b` leaves",
        after(lambda s: s.barrier("b", 1), lambda s: sorted(key for key in s.list_keys() if key.startswith("b"))),
        tcp="['b']",
        hash="['b/last_member', 'b/num_members']",
        file="['b/last_member', 'b/num_members']",
        ours="['b']",
        why="As PyTorch's server does, on every store: programs on both can meet at one barrier.",
    ),
    Row(
        "barrier-prefix-keys",
        "the keys that a `barrier` on `b` leaves, through a PrefixStore",
        lambda s: after(lambda p: p.barrier("b", 1), lambda p: sorted(p.list_keys()))(prefixed(s)),
        tcp="['b/last_member', 'b/num_members']",
        hash="['b/last_member', 'b/num_members']",
        file="['b/last_member', 'b/num_members']",
        ours="['b']",
        why="A prefix changes names and nothing else.",
    ),
    Row(
        "barrier-timeout",
        "arrivals that are counted after a `barrier` has timed out",
        briefly(
            after(
                failing(lambda s: s.barrier("b", 2, BRIEF)),
                lambda s: max(s.add("b", 0), s.add("b/num_members", 0)),
            )
        ),
        tcp="1",
        hash="1",
        file="1",
        ours="0",
        why="One that gave up is not here. Else its retry is counted twice, and the barrier opens one short.",
    ),
    Row(
        "barrier-nobody",
        "`barrier` of nobody (`world_size` 0)",
        briefly(lambda s: s.barrier("b", 0, BRIEF)),
        tcp="None",
        hash="time-out",
        file="time-out",
        ours="None",
        why="As PyTorch's server: the count is not below 0.",
    ),
    Row(
        "append-same",
        "the value after `append` of `v` to `v`",
        after(lambda s: s.set("k", "v"), after(lambda s: s.append("k", "v"), lambda s: s.get("k"))),
        tcp="b'vv'",
        hash="b'vv'",
        file="b'v'",
        ours="b'vv'",
        why="An append loses nothing, also where it says what is there already.",
    ),
    Row(
        "delete-missing",
        "`delete_key` of what is missing",
        lambda s: s.delete_key("k"),
        tcp="False",
        hash="False",
        file="True",
        ours="False",
        why="It says whether it was there.",
    ),
    Row(
        "queues",
        "queues",
        after(lambda s: s.queue_push("q", "item"), lambda s: s.queue_pop("q")),
        tcp="b'item'",
        hash="b'item'",
        file=NO_QUEUES,
        ours="b'item'",
        why="Every store has every operation of PyTorch's interface.",
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
        why="A store's own bookkeeping is not among the keys.",
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
        "`num_keys` of an empty PrefixStore over a store with a key",
        after(lambda s: s.set("k", ""), lambda s: prefixed(s).num_keys() > 0),
        tcp="True",
        hash="True",
        file="True",
        ours="False",
        why="A prefix sees what is under it.",
    ),
    Row(
        "prefix-list",
        "`list_keys` of PrefixStore `p` where there is a key `pq/x`",
        after(lambda s: s.set("pq/x", ""), lambda s: prefixed(s).list_keys()),
        tcp="['/x']",
        hash="['/x']",
        file="['/x']",
        ours="[]",
        why="`pq/x` is not under `p/`.",
    ),
    Row(
        "prefix-list-same",
        "`list_keys` of PrefixStore `p` where there is a key `p`",
        after(lambda s: s.set("p", ""), lambda s: prefixed(s).list_keys()),
        tcp="IndexError",
        hash="IndexError",
        file="IndexError",
        ours="[]",
        why="Nor is `p`.",
    ),
    Row(
        "clone-timeout",
        "whether a clone's timeout is the original's",
        shared_timeout,
        tcp="False",
        hash="True",
        file="False",
        ours="False",
        why="A clone is a handle of its own.",
    ),
    Row(
        "limit-key",
        "a key of 8192 bytes",
        after(lambda s: s.set("k" * 8192, "v"), lambda s: s.check(["k" * 8192])),
        tcp="connection closed",
        hash="True",
        file="True",
        ours="LimitExceeded",
        why="The limits of PyTorch's server hold on every store, so that a program may move, and exceeding one is an "
        "error of that call alone. (PyTorch's `set` even returns; the next call finds the connection closed.)",
    ),
    Row(
        "limit-value",
        "a value of 8 MiB and a byte",
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
        "a key that is not valid text",
        after(lambda s: s.set(b"\xff", ""), lambda s: s.list_keys()),
        tcp="UnicodeDecodeError",
        hash="UnicodeDecodeError",
        file="UnicodeDecodeError",
        ours="TypeError",
        why="Refused where it is written, not where everybody lists the keys.",
    ),
    Row(
        "bool-add",
        "`add` of True",
        lambda s: s.add("n", True),
        tcp="1",
        hash="1",
        file="1",
        ours="TypeError",
        why="A truth is not an amount.",
    ),
    Row(
        "view-value",
        "a `memoryview` as a value",
        after(lambda s: s.set("k", memoryview(b"v")), lambda s: s.get("k")),
        tcp="TypeError",
        hash="TypeError",
        file="TypeError",
        ours="b'v'",
        why="It is bytes.",
    ),
]


def caught(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it went through")


# On the wire


CODES = {"set": 1, "compare_set": 2, "wait": 6, "delete": 8, "ping": 13, "push": 14, "pop": 15, "barrier": 18}
NONCES = count(0x5250_0000)


class Wire:
    """One connection to a server of PyTorch's protocol, by hand."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), LONG_ENOUGH_S)
        self._socket.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE))
        assert self.heard() == b""

    def ask(self, operation: str, *fields: bytes | int | list[bytes]) -> Wire:
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
        """Send a ping, and return what came before its answer: all that there is to hear by now."""
        nonce = struct.pack("<I", next(NONCES))
        self._socket.sendall(bytes([CODES["ping"]]) + nonce)
        data = b""
        while not data.endswith(nonce):
            piece = self._socket.recv(65536)
            assert piece, "the server hung up"
            data += piece
        return data.removesuffix(nonce)

    def woken(self) -> str:
        return {b"": "waits", b"\0": "is woken"}[self.heard()]

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class WireRow:
    """What a server tells two or three connections, PyTorch's and ours, and why ours does so."""

    name: str
    what: str
    probe: Callable[[Wire, Wire, Wire], str]
    torch: str
    ours: str
    why: str


def _together(a: Wire, b: Wire, _: Wire) -> str:
    a.ask("wait", [b"/j", b"/k"]).heard()
    b.ask("set", b"/j", b"").ask("delete", b"/j").ask("set", b"/k", b"").heard()
    return a.woken()


def _failed_compare_set(a: Wire, b: Wire, _: Wire) -> str:
    a.ask("wait", [b"/k"]).heard()
    b.ask("compare_set", b"/k", b"other", b"wrong").heard()
    return a.woken()


def _smaller_barrier(a: Wire, b: Wire, _: Wire) -> str:
    a.ask("barrier", b"/b", 3).heard()
    b.ask("barrier", b"/b", 2).heard()
    return a.woken()


def _written_barrier(a: Wire, b: Wire, _: Wire) -> str:
    a.ask("barrier", b"/b", 3).heard()
    b.ask("set", b"/b", b"0").heard()
    return a.woken()


def _first_arrival(a: Wire, b: Wire, _: Wire) -> str:
    a.ask("wait", [b"/b"]).heard()
    b.ask("barrier", b"/b", 2).heard()
    return a.woken()


def _queue_line(a: Wire, b: Wire, c: Wire) -> str:
    a.ask("wait", [b"/q"]).heard()
    b.ask("wait", [b"/q"]).heard()
    c.ask("push", b"/q", b"1").heard()
    assert a.woken() == "is woken"
    a.ask("pop", b"/q").heard()
    a.ask("wait", [b"/q"]).heard()
    c.ask("push", b"/q", b"2").heard()
    return "the first, again" if a.woken() == "is woken" else "the second" if b.woken() == "is woken" else "nobody"


def _stale_wake(a: Wire, b: Wire, _: Wire) -> str:
    a.ask("wait", [b"/q"]).heard()
    b.ask("push", b"/q", b"1").heard()
    assert a.woken() == "is woken"
    a.ask("pop", b"/q").heard()
    a.ask("wait", [b"/absent"]).heard()
    b.ask("push", b"/q", b"2").heard()
    return a.woken()


def _queue_and_key(a: Wire, b: Wire, _: Wire) -> str:
    b.ask("push", b"/q", b"1").heard()
    a.ask("wait", [b"/q", b"/k"]).heard()
    b.ask("set", b"/k", b"").heard()
    return a.woken()


WIRE_ROWS = [
    WireRow(
        "together",
        "`wait` for j and k: j is set, j is deleted, k is set",
        _together,
        torch="is woken",
        ours="waits",
        why="A wait returns only if all of it is true at that moment.",
    ),
    WireRow(
        "failed-compare-set",
        "`wait` for k: a `compare_set` on k fails",
        _failed_compare_set,
        torch="is woken",
        ours="waits",
        why="Nothing was written.",
    ),
    WireRow(
        "queue-and-key",
        "`wait` for q and k, queue q has an item: k is set",
        _queue_and_key,
        torch="waits",
        ours="is woken",
        why="Both are there.",
    ),
    WireRow(
        "stale-wake",
        "`wait` for what is absent, after a wait for queue q: an item is pushed to q",
        _stale_wake,
        torch="is woken",
        ours="waits",
        why="That wait is over.",
    ),
    WireRow(
        "queue-line",
        "who is told of the second item when two wait, and the first took one and waits again",
        _queue_line,
        torch="the first, again",
        ours="the second",
        why="Whoever waits longest is next; else one may starve.",
    ),
    WireRow(
        "smaller-barrier",
        "`barrier` of 3 with 2 arrivals, the second of which waits for 2",
        _smaller_barrier,
        torch="is woken",
        ours="waits",
        why="Every caller is released by its own world size.",
    ),
    WireRow(
        "written-barrier",
        "`barrier` of 3: somebody sets its key to 0",
        _written_barrier,
        torch="is woken",
        ours="waits",
        why="The count is not 3.",
    ),
    WireRow(
        "first-arrival",
        "`wait` for a barrier's key: the first of two arrives",
        _first_arrival,
        torch="waits",
        ours="is woken",
        why="The key is there.",
    ),
]

# The file of a FileStore


@dataclass(frozen=True)
class FileRow:
    """What becomes of a FileStore's file, PyTorch's and ours, and why ours does so."""

    name: str
    what: str
    probe: Callable[[Callable[..., Any], str], str]
    """Gets the class and a path."""
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
        "the file, after one of `world_size` 2 has come and dropped its handle",
        _one_of_two,
        torch="stays",
        ours="is removed",
        why="A file that nobody has open is of a run that has ended: the next to come would start it afresh.",
    ),
    FileRow(
        "opened-again",
        "`check` of a key that was set before everybody had gone, without a `world_size`",
        _opened_again,
        torch="True",
        ours="False",
        why="The same. What a dead run left makes the next one hang or go wrong.",
    ),
    FileRow(
        "after-a-death",
        "the file, after a process was killed, and a later one has dropped its handle",
        _after_a_death,
        torch="stays",
        ours="is removed",
        why="Who is alive is known by locks, which the kernel frees, not by a count.",
    ),
]

OPENING = """# Where we differ from PyTorch's stores

rallypoint's stores do what PyTorch 2.13's stores do, except where those differ among themselves, or do what a caller
cannot want. Every row of the tables is run as a test on PyTorch's stores and on ours (tests/conformance), and this page
is written from those rows. A `time-out` is PyTorch's DistStoreError, or RuntimeError in its FileStore, and our
StoreTimeout.
"""

BETWEEN = """
## Told on the wire

What a server tells a client that waits, PyTorch's (libuv) and ours, over PyTorch's own protocol.
"""

THE_FILE = """
## The file of a FileStore

It is removed with the last handle, closed or dropped, in PyTorch and here, where a `world_size` was given. Without one,
a handle that is dropped leaves it behind in both.
"""

CLOSING = """
## Known, and told only by a clock or a crash, so not run as a test

- PyTorch's HashStore does not wake a waiter by `add`; it returns at its time-out. Ours wakes.
- While one thread waits, PyTorch's TCPStore client blocks every other thread that uses it. Ours blocks nobody.
- PyTorch's FileStore counts time-outs in whole seconds. Ours keeps them.
- `multi_set` with fewer values than keys reads past the end in PyTorch's HashStore and FileStore, and may crash the
  process; its TCPStore raises DistStoreError. Ours raises ValueError and writes nothing.
"""


def page() -> str:
    """Return the text of docs/differences.md."""
    lines = ["| what | TCPStore | HashStore | FileStore | rallypoint | why |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        cells = [row.what, *map(_cell, (row.tcp, row.hash, row.file, row.ours)), row.why]
        lines.append(f"| {' | '.join(cells)} |")
    wire = ["| what | PyTorch | rallypoint | why |", "|---|---|---|---|"]
    wire += [f"| {row.what} | {row.torch} | {row.ours} | {row.why} |" for row in WIRE_ROWS]
    file = [wire[0], wire[1], *(f"| {row.what} | {row.torch} | {row.ours} | {row.why} |" for row in FILE_ROWS)]
    return "\n".join([OPENING, *lines, BETWEEN, *wire, THE_FILE, *file, CLOSING])


def _cell(said: str) -> str:
    plain = {"time-out", "queue is empty", "connection closed", FOREVER, CHANCE}
    return said if said in plain else f"`{said}`"
