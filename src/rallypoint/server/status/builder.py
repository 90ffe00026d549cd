"""Builds the model of a store server from its state, in slices.

`StatusBuilder.build` is a generator that yields wherever the event loop may run; `source.py` drives it. Between two
slices the state may change, so the parts of a model may be a few milliseconds apart.

`StatusBuilder.observe` records rounds and failures for the history. It runs once a second, even if nobody reads the
status, and costs nothing if there are no runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from rallypoint.core.state import Namespace
from rallypoint.protocol.native import read_standby
from rallypoint.server.status.history import History
from rallypoint.server.status.model import FollowerStatus, LeaseStatus, ServerStatus, StragglerStatus
from rallypoint.server.status.objects import describe_objects
from rallypoint.server.status.reports import MAX_OVER, MAX_RUNS, ReportReader, RunSource, shown_name
from rallypoint.server.status.runs import RunDescriber

if TYPE_CHECKING:
    from rallypoint.server.listener import Listener
    from rallypoint.server.server import StoreServer

__all__ = ["MAX_LEASES", "MAX_SHOWN_STRAGGLERS", "StatusBuilder", "listener_status"]

MAX_LEASES = 100
"""Maximum number of leased keys listed."""

MAX_SESSIONS = 1000
"""Maximum number of sessions searched for leases."""

MAX_SHOWN_STRAGGLERS = 50
"""Maximum number of stragglers listed: those that cost the most time."""

MIN_LATE_S = 0.001
"""Stragglers that cost less time in total are not listed: some member is always the last."""


class StatusBuilder:
    """Builds the models of one store server."""

    def __init__(self, server: StoreServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._reports = ReportReader(clock)
        self._history = History(clock)
        self._runs = RunDescriber(server.clock.times, self._history, clock)

    def build(self) -> Generator[None, None, ServerStatus]:
        """Build the model; yield between steps of at most about a millisecond."""
        server = self._server
        status = listener_status(server.listener, self._role())
        status.sessions, status.refused_sessions = len(server.state.sessions), server.refused_sessions
        status.trouble = server.notices.trouble
        if server.elsewhere:
            told = read_standby(server.elsewhere)
            if told is not None:
                status.leader, status.servers, status.trouble = told.leader, list(told.servers), told.why
            return status
        status.servers = list(server.notices.servers)
        status.followers = self._followers()
        if server.storage is not None:
            status.storage = {
                **server.storage.statistics(),
                "disk_full": server.log is not None and server.log.disk_full,
            }
        yield
        sources = yield from self._see()
        listed = 0
        for source in sources[: MAX_RUNS + MAX_OVER]:
            run = self._runs.describe(source, listed)
            listed += run.ranks - run.more_ranks
            status.runs.append(run)
            yield
        status.more_runs = max(0, len(sources) - MAX_RUNS - MAX_OVER)
        for namespace in list(server.state.namespaces.values()):
            yield from self._describe_namespace(status, namespace)
        status.leases, status.stragglers = self._leases(), self._stragglers()
        status.rounds, status.failures = self._history.rounds(), self._history.failures()
        return status

    def version(self) -> Hashable:
        """Return a value that differs whenever the model may have changed, apart from durations."""
        server = self._server
        revisions = tuple((one.id, one.engine.revision) for one in server.state.namespaces.values())
        notices = (server.notices.trouble, len(server.notices.servers), tuple(server.status.followers))
        counts = (server.listener.connections, len(server.state.sessions), server.listener.admission.denied.total)
        return revisions, notices, counts, server.elsewhere

    def observe(self) -> Iterator[None]:
        """Record changes of the runs for the history; yields as `build` does."""
        if not self._server.elsewhere:
            yield from self._see()
            times, namespaces = self._server.clock.times, self._server.state.namespaces
            for gone in times.namespaces - namespaces.keys():
                times.forget(gone)

    def _see(self) -> Generator[None, None, list[RunSource]]:
        sources: list[RunSource] = []
        for source in self._reports.read(self._server.state.namespaces[0]):
            if source is not None:
                sources.append(source)
            yield
        self._history.see(sources)
        return sources

    def _role(self) -> str:
        if self._server.elsewhere:
            return "standby"
        return "leader" if self._server.notices.servers else "server"

    def _followers(self) -> list[FollowerStatus]:
        storage = self._server.storage
        head = 0 if storage is None else int(storage.statistics().get("index", 0))
        return [
            FollowerStatus(url=one.url, index=one.index, behind=max(0, head - one.index))
            for one in self._server.status.followers
        ]

    def _describe_namespace(self, status: ServerStatus, namespace: Namespace) -> Iterator[None]:
        """Add the counts and the objects of a namespace."""
        engine = namespace.engine.statistics()
        status.namespaces += namespace.id != 0
        status.keys += engine.keys
        status.leased_keys += engine.leased_keys
        status.waiting += engine.waiters
        yield
        status.waiting += namespace.objects.waiting
        yield
        yield from describe_objects(status, namespace, self._server.clock.times)

    def _leases(self) -> list[LeaseStatus]:
        """Return the first leased keys of the first sessions."""
        state = self._server.state
        found = (
            LeaseStatus(key=shown_name(key), owner=session.name, run=state.namespaces[session.namespace].name)
            for session in islice(state.sessions.values(), MAX_SESSIONS)
            for key in session.leases
        )
        return list(islice(found, MAX_LEASES))

    def _stragglers(self) -> list[StragglerStatus]:
        namespaces = self._server.state.namespaces
        found = [
            (key, rounds, member, one)
            for key, rounds, member, one in self._server.clock.times.stragglers
            if one.late_s >= MIN_LATE_S and key.namespace in namespaces
        ]
        found.sort(key=lambda item: -item[3].late_s)
        return [
            StragglerStatus(
                kind=key.kind,
                name=shown_name(key.name),
                run=namespaces[key.namespace].name,
                member=member,
                rounds=rounds,
                times_last=one.times,
                late_s=round(one.late_s, 6),
                worst_s=round(one.worst_s, 6),
            )
            for key, rounds, member, one in found[:MAX_SHOWN_STRAGGLERS]
        ]


def listener_status(listener: Listener, role: str) -> ServerStatus:
    """Return the part of the model that every kind of server has."""
    return ServerStatus(
        role=role,
        version=sys.modules["rallypoint"].__version__,  # the layering forbids importing the package from here
        pid=os.getpid(),
        uptime_s=round(time.monotonic() - listener.started_at, 3),
        connections=listener.connections,
        max_connections=listener.limit.limit,
        refused_connections=listener.refused,
        denied_connections=listener.admission.denied.total,
        bytes=listener.memory.total,
        max_bytes=listener.settings.max_memory,
    )
