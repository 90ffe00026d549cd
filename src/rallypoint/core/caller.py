"""The connections that speak our protocol, and the sessions that they carry, by id.

`Caller` is one connection behind the preface: it reads the greeting, finds or opens the session, and hands it the
requests. `Sessions` are all sessions of one server: those here, and those away in their grace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile

import msgspec

from rallypoint.core import native
from rallypoint.core.c10d import REPLIES_BYTES, BadMessage
from rallypoint.core.engine import Engine
from rallypoint.core.ledger import Ledger, Split
from rallypoint.core.native import GARBLED, Frames, Hello, Status, Welcome, frame, unpack_length
from rallypoint.core.objects import Objects
from rallypoint.core.session import Session, decode_request

__all__ = ["Caller", "Sessions", "misunderstood"]

_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class Sessions:
    """All sessions of one server: those here, and those away in their grace."""

    limit = 1 << 62
    """How many sessions there may be."""

    refused = 0
    """How many callers were turned away because there were so many."""

    def __init__(self, engine: Engine, identity: bytes, grace_s: float, ledger: Ledger | None = None) -> None:
        self.identity = identity
        self.ledger = ledger or Ledger()
        self.grace_s = grace_s
        self.objects = Objects(engine)
        self._engine = engine
        self._opened = 0
        self._sessions: dict[bytes, Session] = {}
        self._away: dict[Session, float] = {}  # until when; in that order, for all have the same grace
        self._beating: dict[Session, None] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, hello: Hello, link: object, new_id: bytes) -> tuple[Session | None, bytes]:
        """Open or resume a session on a connection, from whichever carried it before; return it and what to answer."""
        if hello.version != native.VERSION:
            why = f"version {hello.version} of the protocol is not spoken here, only {native.VERSION}"
            return None, frame((0, Status.REFUSED, (self.identity, why)))
        session = self._sessions.get(hello.session)
        if hello.session and session is None:
            why = "it knows no such session, which has ended or was another server's"
            return None, frame((0, Status.REFUSED, (self.identity, why)))
        if session is None and len(self._sessions) >= self.limit:
            self.refused += 1
            why = f"it has {len(self._sessions)} sessions, and no more are allowed (serve --max-sessions)"
            return None, frame((0, Status.REFUSED, (self.identity, why)))
        unseen = b""
        if session is None:
            session = Session(self._engine, self.objects, new_id, hello.name, self.ledger, self._beating)
            self._opened += 1
            session.serial = str(self._opened)
            former = (self._sessions.get(identity) for identity in hello.former)
            session.former = tuple(one.serial for one in former if one is not None)
            self._sessions[new_id] = session
        else:
            unseen = session.resume(hello.pushes_seen)
            self._away.pop(session, None)
            self.objects.back(session.serial)
        session.link = link
        welcome = Welcome(native.VERSION, self.identity, session.id, self.grace_s, bool(hello.session), True)
        return session, frame((0, Status.OK, welcome)) + unseen

    def cut(self, session: Session, link: object, now: float) -> None:
        """Note that a connection is gone: its session is away, unless another connection carries it already."""
        if session.link is not link:
            return
        session.link = None
        if session.over:
            self._end(session, now)
        else:
            session.suspend()
            self.objects.doubts.away(session.serial)
            self._away[session] = now + self.grace_s

    def expire(self, now: float) -> list[Session]:
        """End the sessions whose grace is over, and return them."""
        ended = [session for session, _ in takewhile(lambda away: away[1] <= now, self._away.items())]
        for session in ended:
            self._end(session, now)
        for session in list(self._beating):
            session.expire(now)
        return ended

    def next_end(self) -> float:
        """Return when the next grace, or the next heartbeat's time, is over; infinity where none is."""
        beats = min((session.next_end() for session in self._beating), default=float("inf"))
        return min(beats, next(iter(self._away.values()), float("inf")))

    def _end(self, session: Session, now: float) -> None:
        session.over = True
        self._away.pop(session, None)
        self._beating.pop(session, None)
        self._sessions.pop(session.id, None)
        session.give_back()
        self._engine.end(session)
        self.objects.end(session.serial, now)


class Caller:
    """One connection of ours, behind the preface: its greeting, then its session's requests."""

    __slots__ = ("_backlog", "_frames", "_link", "_new_id", "_sessions", "held", "session")

    def __init__(self, sessions: Sessions, link: object, limit: int, new_id: bytes) -> None:
        self.session: Session | None = None
        self._sessions = sessions
        self._link = link
        self._new_id = new_id
        self._frames = Frames(limit)
        self._backlog: deque[bytes] = deque()
        self.held = 0
        """How many bytes of requests are held that could not be carried out yet."""

    @property
    def greeted(self) -> bool:
        """Whether there is a session."""
        return self.session is not None

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return bool(self._backlog)

    def receive(self, data: bytes, now: float) -> bytes:
        """Carry out the requests in what came, and return the answers. Raises BadMessage, and is of no use after."""
        size = len(data)
        if size > 4 and not self.held and unpack_length(data)[0] == size - 4:  # one frame, as nearly all of them come
            reply = self._request(data[4:], now)
            return reply if reply.__class__ is bytes else bytes(reply)
        self._backlog.extend(self._frames.feed(data))
        replies: list[bytes] = []
        owed = 0
        try:
            while self._backlog and owed <= REPLIES_BYTES:
                reply = self._request(self._backlog.popleft(), now)
                owed += len(reply)
                replies.append(bytes(reply))
        finally:
            self.held = self._frames.held + sum(map(len, self._backlog))
        return b"".join(replies)

    def end(self, now: float) -> None:
        """Note that the connection is gone."""
        if self.session is not None:
            self._sessions.cut(self.session, self._link, now)

    def _request(self, payload: bytes, now: float) -> bytes | Split:
        session = self.session
        if session is None:
            return self._greet(payload)
        if session.link is not self._link:
            raise BadMessage("another connection carries its session now")
        try:
            request = decode_request(payload)
        except GARBLED as error:
            return misunderstood(payload, error)
        if session.late and session.overdue and request.__class__ is not native.Confirm:
            raise BadMessage(session.overdue)
        return session.request(request, now)

    def _greet(self, payload: bytes) -> bytes:
        try:
            hello = _decode_hello(payload)
        except GARBLED as error:
            raise BadMessage(f"not a greeting: {error}") from None
        self.session, reply = self._sessions.enter(hello, self._link, self._new_id)
        return reply


def misunderstood(payload: bytes, error: Exception) -> bytes:
    """Refuse a request that makes no sense here, if it has a number; without one there is nobody to answer."""
    number = _number_in(payload)
    if not number:
        raise BadMessage(f"not a request: {error}")
    return frame((number, Status.ERROR, ("Misunderstood", {"why": str(error)})))


def _number_in(payload: bytes) -> int:
    """Read the second element of a msgpack array, if it is a positive integer, and nothing of what follows; else 0."""
    at = {0xDC: 3, 0xDD: 5}.get(payload[0] if payload else 0, 1 if payload[:1] and 0x92 <= payload[0] <= 0x9F else 0)
    if not at:
        return 0
    number = 0
    for _ in range(2):
        head = payload[at] if at < len(payload) else 0xC1
        width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(head, 0)
        if head >= 0x80 and not width:
            return 0
        number = int.from_bytes(payload[at + 1 : at + 1 + width], "big") if width else head
        at += 1 + width
    return number
