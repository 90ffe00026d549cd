"""The server's end of our protocol: sessions, which outlive connections, and what makes a cut harmless.

A `Session` is the owner of waits, watches and leases in the engine. It is *here* while a connection carries it,
*away* in the grace after a cut, and over when the grace ends or the client says bye; then the engine drops all it
owned. `Sessions` keeps them by id and knows when the next grace ends.

Exactly once: the answer of every request that changes something is kept until the client confirms it. A number that
was seen before is a repetition: it gets the kept answer, or none yet if it still waits, or, when it only reads, a new
one. Pushes are numbered and kept until seen. Both are bounded: a client that confirms nothing loses its session. What
the ranks of an exchange get is kept once for all of them, and counted once (`core/ledger.py`).

`core/caller.py` has the connections that carry sessions, and keeps all sessions of a server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from rallypoint.core import native
from rallypoint.core.c10d import BadMessage
from rallypoint.core.engine import Engine
from rallypoint.core.ledger import Ledger, Split
from rallypoint.core.machine import Call, Done, Refused, Waiting
from rallypoint.core.native import Request, Status, frame
from rallypoint.core.objects import Objects
from rallypoint.core.records import Answer, Event, Shared, TimedOut, Waiter, Want, Watch, show
from rallypoint.errors import LimitExceeded, StoreError

__all__ = ["Session", "decode_request"]

MAX_KEPT, MAX_PUSHES = 8192, 131_072
"""How many answers, and how many pushes, a session may leave unconfirmed; their bytes are counted in a `Ledger`."""

SHARE = 64
"""When all together keep too much, those go first that keep more than this part of it."""

PUSH_BYTES = 120
"""What a kept push costs beside its own bytes; near enough for a limit."""


decode_request = msgspec.msgpack.Decoder(
    native.Set | native.Get | native.Add | native.Check | native.Wait | native.MultiGet | native.MultiSet
    | native.Append | native.CompareSet | native.Swap | native.Delete | native.DeletePrefix | native.Count
    | native.List | native.Push | native.Pop | native.Take | native.QueueLen | native.Arrive | native.Lease
    | native.Unlease | native.Beat | native.Watch | native.Drop | native.Confirm | native.Act | native.Ping | native.Bye
).decode  # fmt: skip
"""Read a request, checking all of it; raise one of `native.GARBLED` where it makes no sense."""


class Session:
    """What the server knows of one client."""

    __slots__ = (
        "_beating",
        "_beats",
        "_engine",
        "_highest",
        "_kept",
        "_kept_bytes",
        "_ledger",
        "_objects",
        "_pushed",
        "_pushes",
        "_suspended",
        "_taken",
        "_waiting",
        "_watches",
        "former",
        "id",
        "late",
        "link",
        "name",
        "over",
        "serial",
    )

    def __init__(
        self,
        engine: Engine,
        objects: Objects,
        identity: bytes,
        name: str,
        ledger: Ledger,
        beating: dict[Session, None],
    ) -> None:
        self.id = identity
        self.name = name
        self.serial = ""
        """What tells it from all other sessions, and is no secret, as its id is."""

        self.former: tuple[str, ...] = ()
        """The serials of sessions that the same process had before, and which have not ended here yet."""

        self.link: object = None
        """The host's connection that carries the session now, or None."""

        self.over = False
        self.late = False
        """Whether this client may be overdue: looked into whenever more is kept for it."""

        self._engine = engine
        self._objects = objects
        self._highest = 0
        self._kept: dict[int, bytes | Split] = {}
        self._waiting: dict[int, Waiter] = {}
        self._watches: dict[int, Watch] = {}
        self._suspended: set[int] = set()
        self._taken: dict[int, tuple[bytes, bytes]] = {}
        self._pushes: deque[tuple[int, bytes]] = deque()
        self._pushed = 0
        self._kept_bytes = 0
        self._ledger = ledger
        self._beats: dict[bytes, tuple[float, float]] = {}  # leased key: its time to live, and until when it lives
        self._beating = beating  # all sessions that have such leases

    @property
    def overdue(self) -> str:
        """Why this client has to go: it confirms nothing, and what is kept for it grows. Empty if all is well."""
        ledger = self._ledger
        full = ledger.kept > (ledger.limit if self._kept_bytes > ledger.limit // SHARE else 2 * ledger.limit)
        if len(self._kept) <= MAX_KEPT and len(self._pushes) <= MAX_PUSHES and not full:
            return ""
        return f"{len(self._kept)} answers, {len(self._pushes)} pushes, {self._kept_bytes} bytes are unconfirmed"

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

    def request(self, request: Request, now: float) -> bytes | Split:
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
        reply: bytes | Split
        try:
            answer = _DO[kind](self, request, now)
        except StoreError as error:
            reply = _error(number, error)
        else:
            if answer is _LATER:
                return b""
            if answer.__class__ in _SMALL:
                reply = frame((number, Status.OK, answer))
            else:
                reply = self._reply(number, answer, request.name if isinstance(request, native.Act) else b"")
        if kind not in _READS:
            self._keep(number, reply)
        return reply

    def answer(self, handle: Waiter | Watch, answer: Answer) -> bytes | Split:
        """Return what to send when the engine answered a wait, or has an event for a watch."""
        number = handle.tag
        assert isinstance(number, int)
        if isinstance(answer, Event):
            return self._push(number, answer)
        assert isinstance(handle, Waiter)
        dropped = self._waiting.pop(number, None) is None
        if dropped:
            if isinstance(answer, bytes):
                self._engine.queue_push(handle.keys[0], answer, front=True)
            return b""
        if isinstance(answer, bytes):
            self._taken[number] = (handle.keys[0], answer)
        if handle.want is Want.CALL and isinstance(answer, TimedOut):
            answer = self._objects.why(handle)
        reply = self._reply(number, answer, handle.keys[0])
        if handle.want in (Want.ITEM, Want.COUNT, Want.CALL):  # the others only read, and may do so again
            self._keep(number, reply)
        return reply

    def give_back(self) -> None:
        """At the end, forget what was kept; items whose taker may not have seen them go back to their queues."""
        for key, item in reversed(self._taken.values()):
            self._engine.queue_push(key, item, front=True)
        self._taken.clear()
        self._forget(list(self._kept))
        self._count(-self._kept_bytes)

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

    def _reply(self, number: int, answer: Any, key: bytes) -> bytes | Split:
        kind = answer.__class__
        if kind is TimedOut:
            return frame((number, Status.TIMED_OUT, answer.missing))
        if kind is Done and answer[0] is None:
            return frame((number, Status.OK, (native.DONE, None)))
        if kind in _OUTCOMES:
            shared = kind is Done and answer[0].__class__ is Shared
            reply = Split(number, answer[0]) if shared else frame((number, Status.OK, (_OUTCOMES[kind], *answer)))
            limit = min(self._ledger.answer_limit, self._ledger.limit)  # for it is kept
            return reply if len(reply) <= limit else _too_long(number, key, len(reply), limit)
        if (kind is list or kind is tuple) and answer and answer[0].__class__ is bytes:
            size, limit = sum(map(len, answer)), self._ledger.answer_limit
            if size > limit:
                return _too_long(number, b"", size, limit)
        return frame((number, Status.OK, answer))

    def _push(self, number: int, event: Event) -> bytes:
        """Keep and return a push; a client that leaves too many unseen has ended its session by that."""
        if self.over:
            return b""
        self._pushed += 1
        push = frame((0, self._pushed, (number, *event)))
        self._pushes.append((self._pushed, push))
        self._count(len(push) + PUSH_BYTES)
        self.over = bool(self.overdue)
        return push

    def _keep(self, number: int, reply: bytes | Split) -> None:
        self._kept[number] = reply
        size, ledger = len(reply), self._ledger
        self._kept_bytes += size
        ledger.kept += reply.hold() if isinstance(reply, Split) else size
        if len(self._kept) > MAX_KEPT or ledger.kept > ledger.limit:
            self.late = True

    def _forget(self, numbers: list[int]) -> None:
        """Keep these answers no more."""
        size = freed = 0
        for number in numbers:
            reply = self._kept.pop(number)
            size += len(reply)
            freed += reply.let_go() if isinstance(reply, Split) else len(reply)
        self._kept_bytes -= size
        self._ledger.kept -= freed

    def _count(self, size: int) -> None:
        self._kept_bytes += size
        self._ledger.kept += size

    def _seen(self, push: int) -> None:
        while self._pushes and self._pushes[0][0] <= push:
            self._count(-len(self._pushes.popleft()[1]) - PUSH_BYTES)

    def _wait(self, outcome: Any, number: int, timeout_s: float) -> Any:
        if not isinstance(outcome, Waiter):
            return outcome
        if timeout_s <= 0:
            missing = tuple(outcome.missing)
            self._engine.drop(outcome)
            return self._objects.why(outcome) if outcome.want is Want.CALL else TimedOut(missing)
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

    def _act(self, request: native.Act, now: float) -> Any:
        number, timeout_s = request.number, request.timeout_s
        call = Call(request.member, self.serial, request.call, self.name, self.former)
        outcome = self._objects.act(request.name, call, request.command, self, now, timeout_s, number)
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
        numbers = [number for number in self._kept if number <= request.last and number not in still]
        self._forget(numbers)
        if self._taken:
            for number in numbers:
                self._taken.pop(number, None)
        self._seen(request.pushes)
        self.late = bool(self.overdue)
        return _LATER

    def _lease(self, request: native.Lease, now: float) -> Any:
        self._engine.set(request.key, request.value, self)
        self._still(request.key)
        if request.ttl_s:
            size = len(self._beats)
            if size >= 64 and not size & (size - 1):  # each time their number has doubled
                self._forget_beats()
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
        self._forget_beats()
        self._beats = {key: (ttl_s, now + ttl_s) for key, (ttl_s, _) in self._beats.items()}
        return _LATER

    def _forget_beats(self) -> None:
        """Expect no heartbeat for keys that were deleted or written by others; they are leases no more."""
        for key in self._beats.keys() - self.leases:
            self._still(key)

    def _bye(self, request: native.Bye, now: float) -> Any:
        self._taken.clear()  # who says goodbye has seen its answers
        self.over = True


def _error(number: int, error: StoreError) -> bytes:
    return frame((number, Status.ERROR, (type(error).__name__, error.__dict__)))


def _too_long(number: int, key: bytes, size: int, limit: int) -> bytes:
    return _error(number, LimitExceeded(what="answer", key=show(key), size=size, limit=limit))


_LATER = object()
_OUTCOMES: dict[type, int] = {Done: native.DONE, Refused: native.REFUSED, Waiting: native.WAITING}
_SMALL = frozenset((int, bool, type(None)))
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
    native.Act: Session._act,
    native.Lease: Session._lease,
    native.Unlease: Session._unlease,
    native.Beat: Session._beat,
    native.Watch: Session._watch,
    native.Drop: Session._drop,
    native.Confirm: Session._confirm,
    native.Ping: lambda s, r, now: None,
    native.Bye: Session._bye,
}
