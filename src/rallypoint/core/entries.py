"""The entries of the log: everything that changes a server's state, as data.

Applied in order to an empty `State`, they make the same state everywhere. So an entry holds whatever is not decided by
the state itself: new ids come in it, and what a clock decided (a deadline, a grace, a heartbeat that stopped) is an
entry of its own, which does nothing when it was overtaken. Reads, heartbeats and the time-outs of reads are not here.

An owner is a session (its serial, from 1) or a visitor (negative); see `core/session.py`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from rallypoint.core.ops import Act, Operation

__all__ = [
    "VERSION",
    "Arrivals",
    "Attach",
    "CloseNamespace",
    "Detach",
    "End",
    "Entry",
    "Fire",
    "GoOn",
    "Lapse",
    "Open",
    "OpenNamespace",
    "Request",
    "Start",
    "TimeOut",
    "Visit",
    "decode",
    "encode",
]

VERSION = 2
"""The version of the semantics: what the same entries come to. A log of another version is refused."""


class Entry(Struct, array_like=True, gc=False):
    """One entry of the log."""


class Request(Entry, tag=0):
    """A request of a session."""

    session: int
    op: Operation


class Visit(Entry, tag=1):
    """A request of a visitor, which is known from its first one on."""

    visitor: int
    namespace: int
    op: Operation


class Start(Entry, tag=2):
    """A server starts, with these limits: nobody is connected, and visitors are gone."""

    version: int
    identity: bytes
    """The identity of the store, if it is new; one that exists keeps its own."""

    max_bytes: int
    max_answer_bytes: int
    max_kept_bytes: int
    max_sessions: int


class Open(Entry, tag=3):
    """A client without a session connects; where it chose the id and the session is there, it comes back to it."""

    id: bytes
    name: str
    namespace: int
    former: list[bytes]


class Attach(Entry, tag=4):
    """A client comes back to its session, by its id, and has seen pushes up to a number."""

    id: bytes
    namespace: int
    pushes_seen: int


class Detach(Entry, tag=5):
    """The connection of a session, or of a visitor, is gone."""

    owner: int


class End(Entry, tag=6):
    """The grace of a session is over."""

    session: int


class TimeOut(Entry, tag=7):
    """The time of a request that waits is over, or of a turn that was not used."""

    owner: int
    number: int


class Lapse(Entry, tag=8):
    """The heartbeat of a lease, asked for by the request of that number, has stopped."""

    session: int
    key: bytes
    number: int


class Fire(Entry, tag=9):
    """A timer of a shared object is due."""

    namespace: int
    kind: str
    name: bytes
    timer: int


class GoOn(Entry, tag=10):
    """A deletion that is under way, by prefix or of an ended session's leases, deletes another slice."""

    namespace: int


class OpenNamespace(Entry, tag=11):
    """A round of a run gets a namespace, which ends that of the run's earlier round."""

    name: str
    scope: int
    number: int | None


class CloseNamespace(Entry, tag=12):
    """A namespace is dropped, with all that is in it."""

    namespace: int


class Arrivals(Entry, tag=13):
    """Arrivals of several sessions at one shared object, which came in one message, in their order."""

    sessions: list[int]
    ops: list[Act]


AnyEntry = (
    Request | Visit | Start | Open | Attach | Detach | End | TimeOut | Lapse | Fire | GoOn | OpenNamespace |
    CloseNamespace | Arrivals
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
"""Return an entry as a record of the log."""

decode = msgspec.msgpack.Decoder(AnyEntry).decode
"""Read a record of the log; raise msgspec.ValidationError or DecodeError where it is none."""
