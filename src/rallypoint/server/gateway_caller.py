"""Our protocol on a store in etcd: one connection behind the preface.

It reads the greeting, has the session opened or taken over (`gateway_session.py`), which takes a round trip to etcd,
and hands it the requests. What comes meanwhile, or when too much is under way, waits here, and no more is read.
`GatewaySessions` are those that are here, and those away in their grace.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from rallypoint.core.records import Status
from rallypoint.core.session import ReplyBudget
from rallypoint.errors import RallypointError
from rallypoint.protocol import BadMessage, native
from rallypoint.protocol.native import GARBLED, Frames, Hello, Welcome, decode_request, frame, misunderstood
from rallypoint.server.gateway_session import GatewaySession

if TYPE_CHECKING:
    from rallypoint.etcd.session import Session
    from rallypoint.server.connection import Connection
    from rallypoint.server.gateway import Gateway

__all__ = ["GatewayCaller", "GatewaySessions"]

LEASE_S = 12.0
"""How much longer than the grace a session lives whose gateway has died: longer than its client takes to find that out
(6 s, `liveness.py`) and then another gateway. That of a client that has died is ended by its gateway."""

_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class GatewayCaller:
    """One connection of ours: its greeting, then its session's requests."""

    def __init__(self, gateway: Gateway, connection: Connection, limit: int) -> None:
        self._gateway = gateway
        self._sessions = gateway.guests
        self.connection = connection
        self.session: GatewaySession | None = None
        self._frames = Frames(limit)
        self._backlog: deque[bytes] = deque()
        self._waiting = 0
        self._greeting = False
        self._over = False

    @property
    def greeted(self) -> bool:
        """Whether there is a session."""
        return self.session is not None

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that requests of its session wait for."""
        return self.session.waits_for if self.session is not None else ()

    @property
    def waiting(self) -> int:
        """How many requests of its session wait for something to come true."""
        return len(self.session.waits_for) if self.session is not None else 0

    @property
    def held(self) -> int:
        """How many bytes of requests are held that could not be carried out yet."""
        return self._frames.held + self._waiting + (self.session.held if self.session is not None else 0)

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent."""
        return bool(self._backlog) and not self._greeting and not (self.session is not None and self.session.busy)

    def receive(self, data: bytes) -> bytes:
        """Take what came; its answers are sent when they are known. Raises BadMessage, and is of no use after."""
        for payload in self._frames.feed(data):
            self._backlog.append(payload)
            self._waiting += len(payload)
        self._pump(time.monotonic())
        return b""

    def end(self) -> None:
        """Note that the connection is gone."""
        self._over = True
        if self.session is not None:
            self._sessions.cut(self.session, self, time.monotonic())

    # What a session calls

    def send(self, data: bytes) -> None:
        """Send an answer or a push."""
        self.connection.send(data)
        self.connection.recount()

    def go_on(self) -> None:
        """After a session was too busy, or being opened: hand it what has come since."""
        if self._over or not self._backlog:
            self.connection.read_on()
            return
        try:
            self._pump(time.monotonic())
        except BadMessage as error:
            self.connection.drop(str(error))

    # Inside

    def _pump(self, now: float) -> None:
        while self._backlog and not self._greeting and not self.connection.paused:
            if self.session is not None and self.session.busy:
                break
            payload = self._backlog.popleft()
            self._waiting -= len(payload)
            if self.session is None:
                self._greeting = True
                self._gateway.spawn(self._greet(_hello(payload)))
            else:
                self._request(self.session, payload, now)
        if self._backlog and not self.connection.paused:
            self.connection.stall()
        else:
            self.connection.read_on()
        self.connection.recount()

    def _request(self, session: GatewaySession, payload: bytes, now: float) -> None:
        if session.link is not self:
            raise BadMessage("another connection carries its session now")
        try:
            request = decode_request(payload)
        except GARBLED as error:
            reply = misunderstood(payload, error)
        else:
            reply = session.request(request, len(payload), now)
        if reply:
            self.connection.send(reply)

    async def _greet(self, hello: Hello) -> None:
        try:
            session, reply = await self._sessions.enter(hello, self)
        except RallypointError as error:
            if not self._over:
                self.connection.drop(f"no session could be had: {error}")
            return
        finally:
            self._greeting = False
        if self._over:
            if session is not None:
                self._sessions.cut(session, self, time.monotonic())
            return
        self.session = session
        self.send(reply)
        self.go_on()


def _hello(payload: bytes) -> Hello:
    try:
        return _decode_hello(payload)
    except GARBLED as error:
        raise BadMessage(f"not a greeting: {error}") from None


class GatewaySessions:
    """The sessions that are here, or away in their grace."""

    limit = 1 << 62

    def __init__(self, gateway: Gateway, ledger: ReplyBudget) -> None:
        self.ledger = ledger
        self._gateway = gateway
        self._sessions: dict[bytes, GatewaySession] = {}
        self._entering: dict[bytes, asyncio.Lock] = {}
        self.beating: dict[GatewaySession, None] = {}
        """Those that have leases with a heartbeat."""

        self._away: dict[GatewaySession, float] = {}  # until when; in that order, for all have the same grace

    def __iter__(self) -> Iterator[GatewaySession]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    async def enter(self, hello: Hello, caller: GatewayCaller) -> tuple[GatewaySession | None, bytes]:
        """Open or resume a session on a connection, from whichever carried it before; return it and what to answer."""
        if hello.version != native.VERSION:
            return self._refuse(f"version {hello.version} of the protocol is not spoken here, only {native.VERSION}")
        if hello.session:
            lock = self._entering.setdefault(hello.session, asyncio.Lock())
            async with lock:
                session, kept_watches = await self._resume(hello)
            self._entering.pop(hello.session, None)
            if session is None:
                return self._refuse("it knows no such session, which has ended or was another store's")
        elif len(self._sessions) >= self.limit:
            self._gateway.refused_sessions += 1
            why = f"it has {len(self._sessions)} sessions, and no more are allowed (serve --max-sessions)"
            return self._refuse(why)
        else:
            ttl_s = self._gateway.settings.grace_s + LEASE_S
            opened = await self._gateway.ask(self._gateway.space.open_session(hello.name, ttl_s))
            session, kept_watches = self._add(opened, 0), True
        unseen = session.resume(hello.pushes_seen)
        self._away.pop(session, None)
        session.link = caller
        return session, self._welcome(session, bool(hello.session), kept_watches) + unseen

    async def _resume(self, hello: Hello) -> tuple[GatewaySession | None, bool]:
        session = self._sessions.get(hello.session)
        if session is not None and not session.over:
            return session, True
        found = None
        if len(hello.session) == 16:
            found = await self._gateway.ask(self._gateway.space.resume_session(hello.session))
        return (self._add(found, hello.pushes_seen), False) if found is not None else (None, False)

    def _add(self, found: Session, pushes_seen: int) -> GatewaySession:
        session = GatewaySession(self._gateway, found, pushes_seen, self.ledger)
        self._sessions[session.id] = session
        self._gateway.spawn(self._until_lost(session))
        return session

    def _welcome(self, session: GatewaySession, resumed: bool, kept_watches: bool) -> bytes:
        space, grace_s = self._gateway.space, self._gateway.settings.grace_s
        welcome = Welcome(native.VERSION, space.identity, session.id, grace_s, resumed, False, kept_watches)
        return frame((0, Status.OK, welcome))

    def _refuse(self, why: str) -> tuple[None, bytes]:
        return None, frame((0, Status.REFUSED, (self._gateway.space.identity, why)))

    async def _until_lost(self, session: GatewaySession) -> None:
        """When its lease is gone, or another gateway has it, forget it here."""
        await session.etcd.lost.wait()
        if not session.over:
            self._forget(session, "its session has ended, or is another gateway's by now")
            session.stop()

    def cut(self, session: GatewaySession, caller: GatewayCaller, now: float) -> None:
        """Note that a connection is gone: its session is away, unless another connection carries it already."""
        if session.link is caller:
            session.link = None
            if not session.over:
                session.suspend()
                self._away[session] = now + self._gateway.settings.grace_s

    def end_soon(self, session: GatewaySession, why: str = "") -> None:
        """End a session; with a reason, its connection is dropped."""
        if self._sessions.get(session.id) is session:
            self._forget(session, why)
            self._gateway.spawn(session.end())

    def _forget(self, session: GatewaySession, why: str) -> None:
        session.over = True
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
        self._away.pop(session, None)
        self.beating.pop(session, None)
        if why and session.link is not None:
            session.link.connection.drop(why)

    def expire(self, now: float) -> None:
        """End the sessions whose grace is over."""
        for session in [session for session, _ in takewhile(lambda away: away[1] <= now, self._away.items())]:
            self.end_soon(session)
        for session in list(self.beating):
            session.expire(now)
            if session.next_end() == float("inf"):
                del self.beating[session]

    def next_end(self) -> float:
        """Return when the next grace, or the next heartbeat's time, is over; infinity where none is."""
        beats = min((session.next_end() for session in self.beating), default=float("inf"))
        return min(beats, next(iter(self._away.values()), float("inf")))

    def leave(self) -> None:
        """Leave all sessions to other gateways."""
        for session in list(self._sessions.values()):
            self._forget(session, "")
            session.stop()
            session.etcd.forget()
