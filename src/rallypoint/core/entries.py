"""The entries of the log: every change of a server's state, as data.

Applied in order to an empty `State`, the same entries produce the same state everywhere. So an entry carries everything
that the state itself does not determine: new ids, and each decision of a clock (a passed deadline, an ended grace
period, a missed heartbeat) as an entry of its own, which does nothing if a later event overtook it. Reads, heartbeats
and the timeouts of reads are not logged.

An owner is a session (its serial, from 1) or a connection without a session (negative); see `core/session.py`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from rallypoint.core.ops import Act, Operation

__all__ = [
    "VERSION",
    "Arrivals",
    "AttachSession",
    "CloseNamespace",
    "DetachOwner",
    "EndSession",
    "Entry",
    "FireTimer",
    "ContinueDelete",
    "ExpireLease",
    "OpenSession",
    "OpenNamespace",
    "SessionRequest",
    "StartServer",
    "TimeOutRequest",
    "ConnectionRequest",
    "decode",
    "encode",
]

VERSION = 6
"""The version of the semantics: the state that given entries produce. A log of another version is refused."""


class Entry(Struct, array_like=True, gc=False):
    """One entry of the log."""


class SessionRequest(Entry, tag=0):
    """A request of a session."""

    session: int
    op: Operation


class ConnectionRequest(Entry, tag=1):
    """A request of a connection without a session; the first one makes the connection known."""

    owner: int
    namespace: int
    op: Operation


class StartServer(Entry, tag=2):
    """A server starts with these limits: all sessions are detached, connections without a session are gone."""

    version: int
    identity: bytes
    """The identity of the store if it is new; an existing store keeps its own."""

    max_bytes: int
    max_answer_bytes: int
    max_kept_bytes: int
    max_sessions: int


class OpenSession(Entry, tag=3):
    """A client without a session connects; if it chose the id and that session exists, it resumes it."""

    id: bytes
    name: str
    namespace: int
    former: list[bytes]


class AttachSession(Entry, tag=4):
    """A client resumes its session by id; it has seen pushes up to `pushes_seen`."""

    id: bytes
    namespace: int
    pushes_seen: int


class DetachOwner(Entry, tag=5):
    """The connection of a session, or one without a session, is gone."""

    owner: int


class EndSession(Entry, tag=6):
    """The grace period of a session is over."""

    session: int


class TimeOutRequest(Entry, tag=7):
    """A waiting request has timed out, or a turn was not used in time."""

    owner: int
    number: int


class ExpireLease(Entry, tag=8):
    """The heartbeat of a lease has stopped; `number` is the request that took the lease."""

    session: int
    key: bytes
    number: int


class FireTimer(Entry, tag=9):
    """A timer of a shared object is due."""

    namespace: int
    kind: str
    name: bytes
    timer: int


class ContinueDelete(Entry, tag=10):
    """Another slice of a large change: a deletion by prefix, or of an ended session's leases, or answers of waits."""

    namespace: int


class OpenNamespace(Entry, tag=11):
    """Open the namespace of a run's round, and close that of the run's earlier round."""

    name: str
    scope: int
    number: int | None


class CloseNamespace(Entry, tag=12):
    """A namespace is dropped with all of its content."""

    namespace: int


class Arrivals(Entry, tag=13):
    """Arrivals of several sessions at one shared object, received in one message, in order."""

    sessions: list[int]
    ops: list[Act]


AnyEntry = (
    SessionRequest | ConnectionRequest | StartServer | OpenSession | AttachSession | DetachOwner | EndSession
    | TimeOutRequest | ExpireLease | FireTimer | ContinueDelete | OpenNamespace | CloseNamespace | Arrivals
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
"""Return an entry as a log record."""

decode = msgspec.msgpack.Decoder(AnyEntry).decode
"""Decode a log record; raise msgspec.ValidationError or DecodeError if it is malformed."""
