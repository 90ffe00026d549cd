"""Batched arrivals at shared objects: the arrivals at one object in one message of a relay share one log entry.

The processes of a node reach a barrier at about the same moment, and their relay sends their requests in one message.
Each is a request of its own session, with its own number: it is kept, confirmed and repeated like any other. This
module groups the arrivals at the same object (`add`) and executes each group together (`carry_out`,
`core/arrivals.py`), at once or when its entry is committed.

Rejected: grouping in the relay. It would have to decode the requests of its clients, and the server would have to check
them again; it is enough that they arrive together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rallypoint.core import entries, ops
from rallypoint.core.arrivals import arrive
from rallypoint.core.records import LATER
from rallypoint.core.session import Session
from rallypoint.errors import StoreError
from rallypoint.server.commit import QUEUED_BYTES

if TYPE_CHECKING:
    from rallypoint.server.commit import CommitQueue
    from rallypoint.server.connections.native_connection import NativeConnection
    from rallypoint.server.connections.store_access import StoreAccess

__all__ = ["Arrivals", "add", "carry_out"]

Arrival = tuple["NativeConnection", Session, ops.Act, int]
"""The handler, the session, the request, and its size in bytes."""

Arrivals = dict[tuple[int, type[Any], bytes], list[Arrival]]
"""Arrivals by the object that they are for: its namespace, the command's class, and its name."""


def add(arrivals: Arrivals, handler: NativeConnection, op: ops.Act, size: int) -> None:
    """Add an arrival to the group of its object."""
    session = handler.session
    assert session is not None
    place = (session.namespace, op.command.__class__, op.name)
    group = arrivals.get(place)
    if group is None:
        arrivals[place] = [(handler, session, op, size)]
    else:
        group.append((handler, session, op, size))


def carry_out(server: StoreAccess, arrivals: Arrivals) -> None:
    """Execute each group of arrivals: now, or when its entry is committed."""
    for group in arrivals.values():
        if server.log is not None:
            _Committing(server, group).submit(server.log)
            continue
        for (handler, _, op, _), answer in zip(group, _run(server, group), strict=True):
            if answer is not LATER:
                handler.answer(op, answer)


def _run(server: StoreAccess, group: list[Arrival]) -> list[Any]:
    """Execute the arrivals at one object; return the answer of each, or `LATER`."""
    requests = [(session, op) for _, session, op, _ in group]
    answers = arrive(server.state.namespaces[requests[0][0].namespace], requests)
    server.deliver()
    server.clock.follow_arrivals(requests)
    return answers


class _Committing:
    """A group of arrivals at one object, while it is committed."""

    def __init__(self, server: StoreAccess, group: list[Arrival]) -> None:
        self._server = server
        self._group = group

    def submit(self, log: CommitQueue) -> None:
        """Commit the group as one entry."""
        group = [(handler, session, op, size + QUEUED_BYTES) for handler, session, op, size in self._group]
        record = entries.encode(
            entries.Arrivals([session.serial for _, session, _, _ in group], [op for _, _, op, _ in group])
        )
        log.submit(record, self, group, sum(size for _, _, _, size in group))
        for handler, _, _, size in group:
            handler.submitted(size)

    def committed(self, work: list[Arrival], size: int) -> None:
        """Execute the committed arrivals, except those whose sessions have ended."""
        sessions = self._server.state.sessions
        lives = [sessions.get(session.serial) is session for _, session, _, _ in work]
        here = [arrival for arrival, alive in zip(work, lives, strict=True) if alive]
        answers = iter(_run(self._server, here) if here else ())
        for (handler, _, op, one_size), alive in zip(work, lives, strict=True):
            handler.arrived(op, one_size, next(answers) if alive else LATER)

    def refuse(self, work: list[Arrival], size: int, error: StoreError, last: bool) -> bool:
        """Refuse the whole group because the disk is full; nothing has changed."""
        for handler, _, op, one_size in work:
            handler.refuse(op, one_size, error, last)
        return True
