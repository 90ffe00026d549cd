"""The runs of a store, and the reports of their nodes, which are keys of the store (`core/run_report.py`).

A report is decoded once, when it is new, not for every status request. Reports are untrusted: a value that is not a
report, or that names another node than its key does, is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from rallypoint.core import ops
from rallypoint.core.calls.late_calls import ObjectKey
from rallypoint.core.engine import Engine
from rallypoint.core.machines.rendezvous import RendezvousMachine
from rallypoint.core.records import show
from rallypoint.core.run_keys import quoted, report_prefix
from rallypoint.core.run_report import NodeReport, decode_report
from rallypoint.core.state import Namespace
from rallypoint.server.status.store_status import RUN_KEYS

__all__ = ["MAX_OVER", "MAX_RUNS", "ReceivedReport", "ReportReader", "RunSource", "shown_name"]

MAX_RUNS = 64
"""Maximum number of runs shown and remembered."""

MAX_OVER = 8
"""Maximum number of runs without nodes, the latest, that are shown in addition."""

MAX_SCANNED = 20_000
"""Maximum number of shared objects searched for runs."""

MAX_REPORTS = 4096
"""Maximum number of reports read per run."""

SLICE_BYTES = 64 * 1024
"""Bytes of reports decoded in one step, which takes about a millisecond."""

MAX_PARTS = 8
"""Maximum number of ways to split the name of a rendezvous into the prefix of a store and the name of a run."""


class ReceivedReport(NamedTuple):
    """A report, and when this server first saw it."""

    value: bytes
    report: NodeReport | None
    at: float


class RunSource(NamedTuple):
    """A run: its name, its rendezvous, and the reports of its nodes."""

    name: str
    machine: RendezvousMachine | None
    key: bytes
    """The name of the rendezvous."""

    reports: list[ReceivedReport]


class ReportReader:
    """The decoded reports of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes, ReceivedReport] = {}

    def read(self, namespace: Namespace) -> Iterator[RunSource | None]:
        """Yield the runs of a namespace, and None at further points where the caller may pause."""
        engine, known = namespace.engine, self._known
        fresh: dict[bytes, ReceivedReport] = {}
        self._known = fresh
        machines = namespace.objects.machines
        for place in _rendezvous(namespace):
            machine, name = machines.get(place), place[1]
            if isinstance(machine, RendezvousMachine):
                keys = next(filter(None, (_keys(engine, prefix) for prefix in _prefixes(name))), [])
                yield from self._take(engine, keys, known, fresh)
                yield RunSource(shown_name(name), machine, name, _reports(keys, fresh))
        orphans: dict[bytes, list[bytes]] = {}
        for key in engine.first_keys(RUN_KEYS, MAX_REPORTS):
            run, found, _ = key.partition(b"/node:")
            if found and key not in fresh and (run in orphans or len(orphans) < MAX_RUNS):
                orphans.setdefault(run, []).append(key)
        for keys in orphans.values():
            yield from self._take(engine, keys, known, fresh)
            received = _reports(keys, fresh)
            name_of = next((one.report.run for one in received if one.report is not None), None)
            if name_of is not None:
                yield RunSource(name_of, None, b"", received)

    def _take(
        self, engine: Engine, keys: list[bytes], known: dict[bytes, ReceivedReport], fresh: dict[bytes, ReceivedReport]
    ) -> Iterator[None]:
        """Read the reports at these keys; yield after every `SLICE_BYTES` of them that are new."""
        decoded = 0
        for key in keys:
            value: bytes | None = engine.execute(ops.Peek(0, key))
            if value is None:
                continue
            last = known.get(key)
            if last is None or last.value is not value:
                last = ReceivedReport(value, _decode(key, value), self._clock())
                decoded += len(value)
            fresh[key] = last
            if decoded > SLICE_BYTES:
                decoded = 0
                yield


def _rendezvous(namespace: Namespace) -> list[ObjectKey]:
    """Return the keys of the rendezvous in use, then those of the latest idle ones."""
    machines = namespace.objects.machines
    places = [place for place in islice(machines, MAX_SCANNED) if place[0] is RendezvousMachine]
    used = [place for place in places if not machines[place].idle]
    over = [place for place in places if machines[place].idle]
    return [*used[:MAX_RUNS], *over[-MAX_OVER:]]


def _reports(keys: list[bytes], found: dict[bytes, ReceivedReport]) -> list[ReceivedReport]:
    return [found[key] for key in keys if key in found and found[key].report is not None]


def shown_name(key: bytes) -> str:
    """Return the name of a key or an object as its user gave it: without the slash that a store puts before it."""
    return show(key.removeprefix(b"/"))


def _decode(key: bytes, value: bytes) -> NodeReport | None:
    report = decode_report(value)
    if report is None or not key.endswith(f"{report_prefix(report.run)}{quoted(report.node)}".encode()):
        return None
    return report


def _keys(engine: Engine, prefix: bytes) -> list[bytes]:
    return engine.first_keys(prefix, MAX_REPORTS)


def _prefixes(name: bytes) -> Iterator[bytes]:
    """Yield the possible key prefixes of the reports of a run, given its rendezvous with any store prefix."""
    parts = name.split(b"/")
    for at in range(min(len(parts), MAX_PARTS)):
        store, run = b"/".join(parts[:at]), b"/".join(parts[at:])
        yield (store + b"/" if at else b"") + report_prefix(show(run)).encode("utf-8", "surrogateescape")
