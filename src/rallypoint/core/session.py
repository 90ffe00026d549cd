"""The server's end of our protocol: sessions, which outlive connections, and what makes a cut harmless.

A `Session` is the owner of waits, watches and leases in the engine. It is *here* while a connection carries it,
*away* in the grace after a cut, and over when the grace ends or the client says bye; then the engine drops all it
owned. `Sessions` keeps them by id and knows when the next grace ends.

Exactly once: the answer of every request that changes something is kept until the client confirms it. A number that
was seen before is a repetition: it gets the kept answer, or none yet if it still waits, or, when it only reads, a new
one. Pushes are numbered and kept until seen. Both are bounded: a client that confirms nothing loses its session.

`Caller` is one connection: it reads the greeting, finds the session, and hands it the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import msgspec

from rallypoint.core import native
from rallypoint.core.c10d import REPLIES_BYTES, BadMessage
from rallypoint.core.engine import Engine
from rallypoint.core.native import GARBLED, Frames, Hello, Request, Status, Welcome, frame, whole
from rallypoint.core.records import Answer, Event, TimedOut, Waiter, Want, Watch
from rallypoint.errors import StoreError

__all__ = ["Caller", "Session", "Sessions"]

MAX_KEPT = 8192
MAX_KEPT_BYTES = 128 * 1024 * 1024
"""How many answers and pushes a session may leave unconfirmed, and how many bytes of them."""

_decode = msgspec.msgpack.Decoder(
    native.Set | native.Get | native.Add | native.Check | native.Wait | native.MultiGet | native.MultiSet
    | native.Append | native.CompareSet | native.Swap | native.Delete | native.DeletePrefix | native.Count
    | native.List | native.Push | native.Pop | native.Take | native.QueueLen | native.Arrive | native.Lease
    | native.Unlease | native.Beat | native.Watch | native.Drop | native.Confirm | native.Ping | native.Bye
).decode  # fmt: skip
_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class Session:
    """What the server knows of one client."""

    __slots__ = (
        "_beating",
        "_beats",
        "_engine",
        "_highest",
        "_kept",
        "_kept_bytes",
        "_pushed",
        "_pushes",
        "_suspended",
        "_taken",
        "_waiting",
        "_watches",
        "id",
        "link",
        "name",
        "over",
    )

    def __init__(self, engine: Engine, identity: bytes, name: str, beating: dict[Session, None]) -> None:
        self.id = identity
        self.name = name
        self.link: object = None
        """The host's connection that carries the session now, or None."""

        self.over = False
        self._engine = engine
        self._highest = 0
        self._kept: dict[int, bytes] = {}
        self._waiting: dict[int, Waiter] = {}
        self._watches: dict[int, Watch] = {}
        self._suspended: set[int] = set()
        self._taken: dict[int, tuple[bytes, bytes]] = {}
        self._pushes: deque[tuple[int, bytes]] = deque()
        self._pushed = 0
        self._kept_bytes = 0
        self._beats: dict[bytes, tuple[float, float]] = {}  # leased key: its time to live, and until when it lives
        self._beating = beating  # all sessions that have such leases

    @property
    def overdue(self) -> str:
        """Why this client has to go: it confirms nothing, and what is kept for it grows. Empty if all is well."""
        kept = len(self._kept) + len(self._pushes)
        if kept <= MAX_KEPT and self._kept_bytes <= MAX_KEPT_BYTES:
            return ""
        return f"{kept} answers and pushes of {self._kept_bytes} bytes are unconfirmed"

    @property
    def leases(self) -> list[bytes]:
        """The keys that vanish with this session."""
        return self._engine.leases(self)

    def expire(self, now: float) -> None:
        """Give up the leases whose heart stopped beating."""
        for key, (_, until) in list(self._beats.items()):
            if until <= now:
                self._still(key)
                self._engine.unlease(key, self)

    def next_end(self) -> float:
        """Return when the next lease ends unless its heart beats; infinity where none can."""
        return min((until for _, until in self._beats.values()), default=float("inf"))

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that requests of this session wait for."""
        return tuple(key for waiter in self._waiting.values() for key in waiter.keys)

    def request(self, request: Request, now: float) -> bytes:
        """Carry out a request; return its answer, or nothing where that comes later."""
        number = request.number
        kind = request.__class__
        if number > self._highest:
            self._highest = number
        elif kind not in _UNNUMBERED:
            if number <= 0:
                raise BadMessage(f"{kind.__name__} has number {number}, and requests count from 1")
            if number in self._waiting:
                return b""
            if number in self._kept:
                return self._kept[number]
            if number in self._suspended:
                self._suspended.discard(number)
            elif kind not in _READS:
                raise BadMessage(f"request {number} came again after it was confirmed")
        try:
            answer = _DO[kind](self, request, now)
        except StoreError as error:
            reply = frame((number, Status.ERROR, (type(error).__name__, error.__dict__)))
        else:
            if answer is _LATER:
                return b""
            if answer.__class__ is TimedOut:
                reply = frame((number, Status.TIMED_OUT, answer.missing))
            else:
                reply = frame((number, Status.OK, answer))
        if kind not in _READS:
            self._keep(number, reply)
        return reply

    def answer(self, handle: Waiter | Watch, answer: Answer) -> bytes:
        """Return what to send when the engine answered a wait, or has an event for a watch."""
        number = handle.tag
        assert isinstance(number, int)
        if isinstance(answer, Event):
            self._pushed += 1
            push = frame((0, self._pushed, (number, *answer)))
            self._pushes.append((self._pushed, push))
            self._kept_bytes += len(push)
            return push
        assert isinstance(handle, Waiter)
        dropped = self._waiting.pop(number, None) is None
        if dropped:
            if isinstance(answer, bytes):
                self._engine.queue_push(handle.keys[0], answer, front=True)
            return b""
        if isinstance(answer, bytes):
            self._taken[number] = (handle.keys[0], answer)
        if isinstance(answer, TimedOut):
            reply = frame((number, Status.TIMED_OUT, answer.missing))
        else:
            reply = frame((number, Status.OK, answer))
        if handle.want in (Want.ITEM, Want.COUNT):  # the others only read, and may do so again
            self._keep(number, reply)
        return reply

    def give_back(self) -> None:
        """At the end: items whose taker may never have seen them go back to the front of their queues."""
        for key, item in reversed(self._taken.values()):
            self._engine.queue_push(key, item, front=True)
        self._taken.clear()

    def suspend(self) -> None:
        """While the client is away, let others have the items that it waits for; it asks again when it comes back."""
        for number, waiter in list(self._waiting.items()):
            if waiter.want is Want.ITEM:
                del self._waiting[number]
                self._suspended.add(number)
                self._engine.drop(waiter)

    def resume(self, pushes_seen: int) -> bytes:
        """Return the pushes that a client which comes back has not seen."""
        self._seen(pushes_seen)
        return b"".join(push for _, push in self._pushes)

    # Inside

    def _keep(self, number: int, reply: bytes) -> None:
        self._kept[number] = reply
        self._kept_bytes += len(reply)

    def _seen(self, push: int) -> None:
        while self._pushes and self._pushes[0][0] <= push:
            self._kept_bytes -= len(self._pushes.popleft()[1])

    def _wait(self, outcome: Any, number: int, timeout_s: float) -> Any:
        if not isinstance(outcome, Waiter):
            return outcome
        if timeout_s <= 0:
            missing = tuple(outcome.missing)
            self._engine.drop(outcome)
            return TimedOut(missing)
        self._waiting[number] = outcome
        return _LATER

    # Operations

    def _get(self, request: native.Get, now: float) -> Any:
        value = self._engine.get(request.key)
        if value is not None:
            return (value,)
        keys, timeout_s = (request.key,), request.timeout_s
        outcome = self._engine.wait_values(keys, self, now + timeout_s, request.number)
        return self._wait(outcome, request.number, timeout_s)

    def _multi_get(self, request: native.MultiGet, now: float) -> Any:
        number, timeout_s = request.number, request.timeout_s
        return self._wait(self._engine.wait_values(request.keys, self, now + timeout_s, number), number, timeout_s)

    def _await(self, request: native.Wait, now: float) -> Any:
        number, timeout_s = request.number, request.timeout_s
        return self._wait(self._engine.wait(request.keys, self, now + timeout_s, number), number, timeout_s)

    def _take(self, request: native.Take, now: float) -> Any:
        number, timeout_s = request.number, request.timeout_s
        outcome = self._engine.wait_item(request.key, self, now + timeout_s, number)
        if isinstance(outcome, bytes):
            self._taken[number] = (request.key, outcome)
        return self._wait(outcome, number, timeout_s)

    def _pop(self, request: native.Pop, now: float) -> Any:
        item = self._engine.queue_pop(request.key)
        if item is not None:
            self._taken[request.number] = (request.key, item)
        return item

    def _arrive(self, request: native.Arrive, now: float) -> Any:
        number, timeout_s = request.number, request.timeout_s
        outcome = self._engine.barrier(request.key, request.size, self, now + timeout_s, number)
        return self._wait(outcome, number, timeout_s)

    def _watch(self, request: native.Watch, now: float) -> Any:
        self._watches[request.number] = self._engine.watch(request.prefix, self, request.number)

    def _drop(self, request: native.Drop, now: float) -> Any:
        held = self._waiting.pop(request.target, None) or self._watches.pop(request.target, None)
        if held is not None:
            self._engine.drop(held)
        elif request.target in self._taken:  # its taker was interrupted: it goes back to the front
            self._engine.queue_push(*self._taken.pop(request.target), front=True)

    def _confirm(self, request: native.Confirm, now: float) -> Any:
        still = set(request.open)
        for number in [number for number in self._kept if number <= request.last and number not in still]:
            self._kept_bytes -= len(self._kept.pop(number))
            self._taken.pop(number, None)
        self._seen(request.pushes)
        return _LATER

    def _lease(self, request: native.Lease, now: float) -> Any:
        self._engine.set(request.key, request.value, self)
        self._still(request.key)
        if request.ttl_s:
            self._beats[request.key] = (request.ttl_s, now + request.ttl_s)
            self._beating[self] = None

    def _unlease(self, request: native.Unlease, now: float) -> Any:
        self._still(request.key)
        return self._engine.unlease(request.key, self)

    def _still(self, key: bytes) -> None:
        """Expect no heartbeat for a lease any more."""
        if self._beats.pop(key, None) and not self._beats:
            self._beating.pop(self, None)

    def _beat(self, request: native.Beat, now: float) -> Any:
        self._beats = {key: (ttl_s, now + ttl_s) for key, (ttl_s, _) in self._beats.items()}
        return _LATER

    def _bye(self, request: native.Bye, now: float) -> Any:
        self._taken.clear()  # who says goodbye has seen its answers
        self.over = True


_LATER = object()
_READS = frozenset(native.READS)
_UNNUMBERED = (native.Confirm, native.Beat)
_DO: dict[type[Request], Callable[[Session, Any, float], Any]] = {
    native.Set: lambda s, r, now: s._engine.set(r.key, r.value),
    native.Get: Session._get,
    native.Add: lambda s, r, now: s._engine.add(r.key, r.amount),
    native.Check: lambda s, r, now: s._engine.check(r.keys),
    native.Wait: Session._await,
    native.MultiGet: Session._multi_get,
    native.MultiSet: lambda s, r, now: s._engine.multi_set(r.pairs),
    native.Append: lambda s, r, now: s._engine.append(r.key, r.value),
    native.CompareSet: lambda s, r, now: s._engine.compare_set(r.key, r.expected, r.desired),
    native.Swap: lambda s, r, now: s._engine.swap(r.key, r.expected, r.desired),
    native.Delete: lambda s, r, now: s._engine.delete(r.key),
    native.DeletePrefix: lambda s, r, now: s._engine.delete_prefix(r.prefix),
    native.Count: lambda s, r, now: s._engine.num_keys(r.prefix),
    native.List: lambda s, r, now: s._engine.list_keys(r.prefix),
    native.Push: lambda s, r, now: s._engine.queue_push(r.key, r.value),
    native.Pop: Session._pop,
    native.Take: Session._take,
    native.QueueLen: lambda s, r, now: s._engine.queue_len(r.key),
    native.Arrive: Session._arrive,
    native.Lease: Session._lease,
    native.Unlease: Session._unlease,
    native.Beat: Session._beat,
    native.Watch: Session._watch,
    native.Drop: Session._drop,
    native.Confirm: Session._confirm,
    native.Ping: lambda s, r, now: None,
    native.Bye: Session._bye,
}


class Sessions:
    """All sessions of one server: those here, and those away in their grace."""

    def __init__(self, engine: Engine, identity: bytes, grace_s: float) -> None:
        self.identity = identity
        self.grace_s = grace_s
        self._engine = engine
        self._sessions: dict[bytes, Session] = {}
        self._away: dict[Session, float] = {}  # until when; in that order, for all have the same grace
        self._beating: dict[Session, None] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def enter(self, hello: Hello, link: object, new_id: bytes) -> tuple[Session | None, bytes]:
        """Open or resume a session on a connection, from whichever carried it before; return it and what to answer."""
        if hello.version != native.VERSION:
            why = f"version {hello.version} of the protocol is not spoken here, only {native.VERSION}"
            return None, frame((0, Status.REFUSED, (self.identity, why)))
        session = self._sessions.get(hello.session)
        if hello.session and session is None:
            why = "it knows no such session, which has ended or was another server's"
            return None, frame((0, Status.REFUSED, (self.identity, why)))
        unseen = b""
        if session is None:
            session = self._sessions[new_id] = Session(self._engine, new_id, hello.name, self._beating)
        else:
            unseen = session.resume(hello.pushes_seen)
            self._away.pop(session, None)
        session.link = link
        welcome = Welcome(native.VERSION, self.identity, session.id, self.grace_s, bool(hello.session))
        return session, frame((0, Status.OK, welcome)) + unseen

    def cut(self, session: Session, link: object, now: float) -> None:
        """Note that a connection is gone: its session is away, unless another connection carries it already."""
        if session.link is not link:
            return
        session.link = None
        if session.over:
            self._end(session)
        else:
            session.suspend()
            self._away[session] = now + self.grace_s

    def expire(self, now: float) -> list[Session]:
        """End the sessions whose grace is over, and return them."""
        ended = [session for session, _ in takewhile(lambda away: away[1] <= now, self._away.items())]
        for session in ended:
            self._end(session)
        for session in list(self._beating):
            session.expire(now)
        return ended

    def next_end(self) -> float:
        """Return when the next grace, or the next heartbeat's time, is over; infinity where none is."""
        beats = min((session.next_end() for session in self._beating), default=float("inf"))
        return min(beats, next(iter(self._away.values()), float("inf")))

    def _end(self, session: Session) -> None:
        session.over = True
        self._away.pop(session, None)
        self._beating.pop(session, None)
        self._sessions.pop(session.id, None)
        session.give_back()
        self._engine.end(session)


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
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return bool(self._backlog)

    def receive(self, data: bytes, now: float) -> bytes:
        """Carry out the requests in what came, and return the answers. Raises BadMessage, and is of no use after."""
        if not self.held:
            payload = whole(data)
            if payload is not None:
                return self._request(payload, now)
        self._backlog.extend(self._frames.feed(data))
        replies: list[bytes] = []
        owed = 0
        try:
            while self._backlog and owed <= REPLIES_BYTES:
                reply = self._request(self._backlog.popleft(), now)
                owed += len(reply)
                replies.append(reply)
        finally:
            self.held = self._frames.held + sum(map(len, self._backlog))
        return b"".join(replies)

    def end(self, now: float) -> None:
        """Note that the connection is gone."""
        if self.session is not None:
            self._sessions.cut(self.session, self._link, now)

    def _request(self, payload: bytes, now: float) -> bytes:
        session = self.session
        if session is None:
            return self._greet(payload)
        if session.link is not self._link:
            raise BadMessage("another connection carries its session now")
        try:
            request = _decode(payload)
        except GARBLED as error:
            return _misunderstood(payload, error)
        if session.overdue and request.__class__ is not native.Confirm:
            raise BadMessage(session.overdue)
        return session.request(request, now)

    def _greet(self, payload: bytes) -> bytes:
        try:
            hello = _decode_hello(payload)
        except GARBLED as error:
            raise BadMessage(f"not a greeting: {error}") from None
        self.session, reply = self._sessions.enter(hello, self._link, self._new_id)
        return reply


def _misunderstood(payload: bytes, error: Exception) -> bytes:
    """Refuse a request that makes no sense here, if it has a number; without one there is nobody to answer."""
    try:
        _, number, *_ = msgspec.msgpack.decode(payload)
    except GARBLED:
        number = None
    if not isinstance(number, int) or number <= 0:
        raise BadMessage(f"not a request: {error}")
    return frame((number, Status.ERROR, ("Misunderstood", {"why": str(error)})))
