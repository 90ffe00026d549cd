"""Heavy calls: how long a small `get` takes while another client does what used to grow with everything that is held.

The server holds 200,000 keys. One process calls `get` and takes the time of each; another does one heavy call over and
over. The 99th percentile counts, and the longest is shown. Some heavy calls are made of raw requests, as no client of
ours sends them: pipelined, or waits in great numbers.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterable

import rallypoint
from benchmarks.rig import PLACEMENTS, say, team
from benchmarks.servers import serving
from benchmarks.table import Line, Target
from rallypoint.core import ops
from rallypoint.protocol.native import ACCEPTED, PREFACE, VERSION, Frames, Hello, frame

TITLE = "Heavy calls: a small get beside them"
NOTES = (
    "The 99th percentile of a small `get`, in milliseconds, while another client does a heavy call over and over: "
    "less is better. *nothing* is the same `get` while nobody else does anything."
)

KEYS, MANY = 200_000, 100_000
WATCHES, NAMES = 20_000, 20_000
PIPELINED, LONG_MB, LEASES, WAITS, BATCH = 5_000, 240, 500_000, 300_000, 2_000
SLICE_S = 3.0
ONCE, ONCE_S, STALL_MS = "end at once", 40.0, 100
"""Calls that take long to prepare are made once, within so many seconds; the longest pause of the loop counts."""


class Heavy:
    """A client that does heavy calls."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._store = rallypoint.connect(f"tcp://127.0.0.1:{port}", timeout=300)
        self._fill("held/", KEYS)
        self._held = [f"held/{number}" for number in range(MANY)]
        self._names = [f"node-{number}.cluster.example" for number in range(NAMES)]
        self._watches: list[rallypoint.Watch] = []

    def _fill(self, prefix: str, count: int) -> None:
        for start in range(0, count, 5000):
            numbers = range(start, min(start + 5000, count))
            self._store.multi_set([f"{prefix}{number}" for number in numbers], [b"v"] * len(numbers))

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the heavy calls by name."""
        store = self._store
        part = rallypoint.PrefixStore("held", store)
        return {
            "nothing": functools.partial(time.sleep, 0.01),
            f"list_keys of {KEYS:,}": store.list_keys,
            "num_keys with a prefix": part.num_keys,
            "delete_prefix of 50,000": self._delete,
            f"wait on {MANY:,} keys": functools.partial(store.wait, self._held),
            f"wait on {MANY:,} keys, one missing": self._wait_in_vain,
            f"set under {WATCHES:,} watched prefixes": self._set_watched,
            f"a barrier of {NAMES:,} names": self._arrive,
            f"{PIPELINED:,} pipelined num_keys": self._pipeline,
            f"append of a byte to {LONG_MB} MB": functools.partial(store.append, "long", b"x"),
            f"{LEASES:,} leases that end at once": self._end_leases,
            f"{WAITS:,} waits that end at once": self._end_waits,
        }

    def names(self) -> list[str]:
        """Return the names of the heavy calls."""
        return list(self.calls())

    def prepare(self, name: str) -> None:
        """Do what a call needs once."""
        if "watched" in name and not self._watches:
            self._watches = [self._store.watch(f"watched/{number}/") for number in range(WATCHES)]
        if name.startswith("append"):
            for _ in range(LONG_MB // 8):
                self._store.append("long", b"x" * 8_000_000)

    def work(self, name: str, for_s: float) -> int:
        """Do one call over and over; return how often."""
        call, end_at, count = self.calls()[name], time.monotonic() + for_s, 0
        while time.monotonic() < end_at:
            call()
            count += 1
        return count

    def _delete(self) -> None:
        self._fill("gone/", 50_000)
        self._store.delete_prefix("gone/")

    def _wait_in_vain(self) -> None:
        try:
            self._store.wait([*self._held, "missing"], timeout=0.2)
        except rallypoint.StoreTimeout:
            pass

    def _pipeline(self) -> None:
        with Raw(self._port) as raw:
            raw.ask(ops.Count(number, b"held/") for number in range(1, PIPELINED + 1))
            raw.hear(PIPELINED)

    def _end_leases(self) -> None:
        with Raw(self._port) as raw:
            for first in range(1, LEASES, BATCH):
                raw.ask(ops.SetLease(number, b"lease/%d" % number, b"", 60.0) for number in range(first, first + BATCH))
                raw.hear(BATCH)
                raw.ask([ops.Confirm(0, first + BATCH - 1, [], 0)])
            raw.ask([ops.Bye(LEASES + 1)])
            raw.hear(1)
        while self._store.num_keys() > KEYS + LEASES // 2:
            time.sleep(0.01)

    def _end_waits(self) -> None:
        with Raw(self._port) as raw:
            for first in range(1, WAITS, BATCH):
                raw.ask(ops.Get(number, b"awaited", 60.0) for number in range(first, first + BATCH))
            raw.ask([ops.Ping(WAITS + 1)])
            raw.hear(1)
            self._store.set("awaited", "x")
            raw.hear(WAITS)
        self._store.delete_key("awaited")

    def _set_watched(self) -> None:
        self._store.set("watched/7/now", "x")

    def _arrive(self) -> None:
        try:
            rallypoint.Barrier(self._store, "all", self._names).wait(self._names[0], timeout=0.2)
        except rallypoint.MembersMissing:
            pass


class Raw:
    """A client that sends requests without waiting for their replies."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 300)
        self._frames = Frames(1 << 30)
        self._heard = 0
        self._socket.sendall(PREFACE)
        assert self._socket.recv(4) == ACCEPTED
        self._socket.sendall(frame(Hello(VERSION, "heavy")))
        self.hear(1)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, requests: Iterable[ops.Op]) -> None:
        """Send requests."""
        self._socket.sendall(b"".join(map(frame, requests)))

    def hear(self, count: int) -> None:
        """Read so many replies."""
        self._heard -= count
        while self._heard < 0:
            data = self._socket.recv(1 << 20)
            assert data, "the server closed the connection"
            self._heard += sum(1 for _ in self._frames.feed(data))


class Small:
    """A client that calls `get`."""

    def __init__(self, port: int) -> None:
        self._store = rallypoint.connect(f"tcp://127.0.0.1:{port}", timeout=300)
        self._store.set("small", "x")

    def percentile_ms(self, for_s: float) -> tuple[float, float]:
        """Return the 99th percentile and the longest of its calls."""
        taken, end_at = [], time.monotonic() + for_s
        while (began_at := time.perf_counter()) and time.monotonic() < end_at:
            self._store.get("small")
            taken.append(time.perf_counter() - began_at)
            time.sleep(0.0005)
        taken.sort()
        return taken[int(len(taken) * 0.99)] * 1e3, taken[-1] * 1e3


def run(quick: bool) -> list[Line]:
    """Measure a small get beside each heavy call."""
    rounds, slice_s = (1, 0.5) if quick else (4, SLICE_S)
    placement, lines = PLACEMENTS[-1], []
    with serving(("rallypoint",)) as servers:
        (server,) = servers.values()
        with team(1, Heavy, server.port) as heavy, team(1, Small, server.port) as small:
            placement.put([server.pid], [*heavy.pids, *small.pids])
            for name in heavy.ask("names")[0]:
                say(f"  {name}")
                heavy.ask("prepare", name)
                once, figures = ONCE in name, []
                for _ in range(1 if once else rounds):
                    heavy.tell("work", name, 0.1 if once else slice_s)
                    figures += small.ask("percentile_ms", ONCE_S if once else slice_s)
                    heavy.hear()
                p99, longest = ([*column] for column in zip(*figures, strict=True))
                lines.append(
                    Line(f"get beside {name}", placement.name, "ms", p99, target=Target(at_most=15, unit="ms"))
                )
                stall = Target(at_most=STALL_MS, unit="ms")
                lines.append(Line("  the longest", placement.name, "ms", longest, target=stall))
    return lines
