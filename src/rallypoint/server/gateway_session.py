"""Sessions of our protocol on a store in etcd: what makes a cut harmless, also one that is a gateway's death.

A session is in etcd (`etcd/session.py`): whichever gateway its client comes to takes it over, and what its former
gateway still had under way does nothing. A request that the client repeats there, because no answer came, is made again
under its old number: if it has taken effect, etcd has the proof of that and the answer, and it takes no effect again.
What a gateway remembers of a session only makes it quick: answers that were not confirmed, and what is under way.

Order: changes are carried out one after the other, as they came. Reads and waits begin when the changes that came
before them are done, and hold up nobody.

Liveness: the gateway keeps the session's lease alive while its client is connected, and for the grace after a cut. Then
it ends the session, which does nothing if another gateway has taken it over. When a gateway dies, the lease lives on
for its time, in which the client has to come to another one.

Watches are the gateway's: those that began at another one are not known here, and the client asks for them again, from
where they were (`ops.Watch`); if etcd has compacted what is missing, the session ends: so the client hears of it.
Heartbeats of leases are the gateway's, too: after a move, leases hang on the session alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.core import ops
from rallypoint.core.records import Event, Status, TimedOut
from rallypoint.core.session import ReplyBudget
from rallypoint.deadline import Deadline
from rallypoint.errors import LimitExceeded, RallypointError, SessionLost, Unsupported
from rallypoint.etcd.watcher import PLACES
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import frame

if TYPE_CHECKING:
    from rallypoint.etcd.session import Mark, Session
    from rallypoint.etcd.watcher import Feed
    from rallypoint.server.gateway import Gateway
    from rallypoint.server.gateway_caller import GatewayCaller

__all__ = ["GatewaySession"]

MAX_UNDER_WAY = 8192
"""How many requests of a session may be under way; then no more are read."""

WINDOW_BYTES = 1024 * 1024
"""How much may wait for the changes before it."""

MAX_KEPT, MAX_PUSHES, PUSH_BYTES = 8192, 131_072, 120
"""As in core/session.py."""


class _Asked(NamedTuple):
    """A request that was not answered yet."""

    request: Any
    deadline: Deadline
    size: int


class GatewaySession:
    """What this gateway knows of one client that is here, or was a moment ago."""

    def __init__(self, gateway: Gateway, session: Session, pushes_seen: int, ledger: ReplyBudget) -> None:
        self.id = session.id
        self.name = session.name
        self.etcd = session
        self.link: GatewayCaller | None = None
        self.over = False
        self.held = 0
        """How many bytes of its requests are under way."""

        self._gateway = gateway
        self._space = gateway.space
        self._ledger = ledger
        self._highest = 0
        self._asked: dict[int, _Asked] = {}
        self._lane: deque[int] = deque()
        self._lane_bytes = 0
        self._was_busy = False
        self._worker: asyncio.Task[None] | None = None
        self._apart: dict[int, asyncio.Task[None]] = {}
        self._watches: dict[int, tuple[Feed, asyncio.Task[None]]] = {}
        self._kept: dict[int, bytes] = {}
        self._kept_bytes = 0
        self._suspended: set[int] = set()
        self._dropped: set[int] = set()
        self._taken: dict[int, tuple[bytes, bytes]] = {}
        self._pushes: deque[tuple[int, bytes]] = deque()
        self._pushed = pushes_seen
        self._beats: dict[bytes, tuple[float, float]] = {}
        self._leased: dict[bytes, None] = {}

    # What is asked of it

    @property
    def busy(self) -> bool:
        """Whether no more may be asked for now."""
        return len(self._asked) >= MAX_UNDER_WAY or self._lane_bytes > WINDOW_BYTES

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that its requests wait for."""
        asked = [self._asked[number].request for number in self._apart if number in self._asked]
        return tuple(key for request in asked for key in getattr(request, "keys", ()) or (request.key,))

    @property
    def leases(self) -> list[bytes]:
        """The keys that it has leased here."""
        return list(self._leased)

    @property
    def overdue(self) -> str:
        """Why this client has to go: it confirms nothing, and what is kept for it grows. Empty if all is well."""
        full = self._ledger.kept > self._ledger.limit
        if len(self._kept) <= MAX_KEPT and len(self._pushes) <= MAX_PUSHES and not full:
            return ""
        return f"{len(self._kept)} answers, {len(self._pushes)} pushes, {self._kept_bytes} bytes are unconfirmed"

    def request(self, request: ops.Op, size: int, now: float) -> bytes:
        """Begin with a request; return its answer if that is known, or nothing where it comes later."""
        number, kind = request.number, request.__class__
        if kind is ops.Confirm:
            self._confirm(request)
            return b""
        if kind is ops.Beat:
            self._beats = {key: (ttl_s, now + ttl_s) for key, (ttl_s, _) in self._beats.items()}
            return b""
        if kind not in _DO:
            raise BadMessage(f"{kind.__name__} is not spoken here")
        if number <= 0:
            raise BadMessage(f"{kind.__name__} has number {number}, and requests count from 1")
        if number in self._asked:
            return b""
        if number in self._kept:
            return self._kept[number]
        if number > self._highest:
            self._highest = number
        elif number in self._suspended:
            self._suspended.discard(number)
        elif kind not in _READS:
            raise BadMessage(f"request {number} came again after it was confirmed")
        if self.overdue:
            raise BadMessage(self.overdue)
        self._begin(_Asked(request, Deadline(getattr(request, "timeout_s", 0.0)), size))
        return b""

    def resume(self, pushes_seen: int) -> bytes:
        """Return the pushes that a client which comes back has not seen."""
        self._seen(pushes_seen)
        return b"".join(push for _, push in self._pushes)

    def suspend(self) -> None:
        """While the client is away, let others have the items that it waits for; it asks again when it comes back."""
        for number, task in list(self._apart.items()):
            if isinstance(self._asked[number].request, ops.Take):
                self._suspended.add(number)
                task.cancel()

    # Carrying out

    def _begin(self, asked: _Asked) -> None:
        request = asked.request
        self._asked[request.number] = asked
        self.held += asked.size
        if isinstance(request, ops.Drop) and (request.target in self._asked or request.target in self._taken):
            self._dropped.add(request.target)
        if self._worker is None and request.__class__ not in _CHANGES:
            self._run_apart(asked)
            self._was_busy = self.busy
            return
        self._lane.append(request.number)
        self._lane_bytes += asked.size
        self._was_busy = self.busy
        if self._worker is None:
            self._worker = self._gateway.spawn(self._work())

    async def _work(self) -> None:
        """Carry out, in order, what came; what only reads or waits is begun, and goes on beside."""
        try:
            while self._lane:
                asked = self._asked[self._lane.popleft()]
                self._lane_bytes -= asked.size
                self._make_room()
                if asked.request.__class__ in _CHANGES:
                    await self._carry_out(asked)
                elif asked.request.number in self._dropped:
                    self._finish(asked)
                else:
                    self._run_apart(asked)
        finally:
            self._worker = None

    def _run_apart(self, asked: _Asked) -> None:
        task = self._gateway.spawn(self._carry_out(asked))
        self._apart[asked.request.number] = task

    async def _carry_out(self, asked: _Asked) -> None:
        """Do what was asked for and answer it; who is cancelled does not answer."""
        request, number = asked.request, asked.request.number
        try:
            answer = await self._gateway.ask(_DO[request.__class__](self, asked))
            if request.__class__ in _TAKERS and isinstance(answer, bytes):
                self._taken[number] = (request.key, answer)
            reply = self._reply(number, answer)
        except SessionLost:
            self._finish(asked)
            return  # `_until_lost` sees to it
        except RallypointError as error:
            reply = frame((number, Status.ERROR, (type(error).__name__, error.__dict__)))
        except asyncio.CancelledError:
            self._finish(asked)
            raise
        if request.__class__ not in _READS:
            self._suspended.discard(number)
            self._keep(number, reply)
        self._finish(asked, reply)

    def _finish(self, asked: _Asked, reply: bytes = b"") -> None:
        number = asked.request.number
        self._apart.pop(number, None)
        if self._asked.pop(number, None) is not None:
            self.held -= asked.size
        if reply and self.link is not None:
            self.link.send(reply)
        self._make_room()

    def _make_room(self) -> None:
        """If there was too much under way, and is no more, go on with what waits at the connection."""
        if self._was_busy and not self.busy:
            self._was_busy = False
            if self.link is not None:
                self.link.go_on()

    def _reply(self, number: int, answer: Any) -> bytes:
        if isinstance(answer, TimedOut):
            return frame((number, Status.TIMED_OUT, answer.missing))
        if answer.__class__ is list and answer and answer[0].__class__ is bytes:
            size, limit = sum(map(len, answer)), self._ledger.answer_limit
            if size > limit:
                raise LimitExceeded(what="answer", key="", size=size, limit=limit)
        return frame((number, Status.OK, answer))

    def _mark(self, asked: _Asked) -> Mark:
        return self.etcd.mark(asked.request.number)

    # What is more than one call

    async def _ping(self, asked: _Asked) -> None:
        """Everything that came before is done."""

    async def _act(self, asked: _Asked) -> Any:
        why = "its state is in etcd, and the members host shared objects themselves"
        raise Unsupported(operation="act", store=self._space.name, why=why)

    async def _lease(self, asked: _Asked) -> Any:
        request = asked.request
        await self._space.lease_key(self._mark(asked), request.key, request.value)
        self._leased[request.key] = None
        self._beats.pop(request.key, None)
        if request.ttl_s:
            self._beats[request.key] = (request.ttl_s, time.monotonic() + request.ttl_s)
            self._gateway.guests.beating[self] = None

    async def _unlease(self, asked: _Asked) -> bool:
        key = asked.request.key
        self._leased.pop(key, None)
        self._beats.pop(key, None)
        return await self._space.unlease(self._mark(asked), key)

    async def _watch(self, asked: _Asked) -> int:
        request = asked.request
        feed = self._space.feed(request.prefix)
        after: int = request.after
        if after >= 0:
            feed.start(after // PLACES - 1)
        else:
            revision = await self._space.revision()
            feed.start(revision)
            after = (revision + 1) * PLACES - 1
        self._watches[request.number] = (feed, self._gateway.spawn(self._follow(request.number, feed, after)))
        return after

    async def _follow(self, number: int, feed: Feed, after: int) -> None:
        """Send every change of a watch; when there can be no more, the session ends: who watches must know."""
        try:
            while True:
                event = await feed.next()
                if event.revision <= after:
                    continue
                if event.value is not None:
                    whole = await self._space.whole(event.key, event.value, event.revision // PLACES)
                    event = event._replace(value=whole)
                self._push(number, event)
        except RallypointError as error:
            if number in self._watches and not self.over:
                self._gateway.guests.end_soon(self, f"its watch cannot go on: {error}")

    async def _drop(self, asked: _Asked) -> None:
        target = asked.request.target
        task = self._apart.get(target)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        if target in self._watches:
            self._end_watch(target)
        if target in self._taken:
            await self._space.put_back(self.etcd, *self._taken.pop(target))
        self._dropped.discard(target)

    async def _bye(self, asked: _Asked) -> None:
        self._taken.clear()  # who says goodbye has seen its answers
        self._gateway.guests.end_soon(self)

    # What is kept, and pushed

    def _confirm(self, request: Any) -> None:
        still = set(request.open) | self._dropped
        numbers = [number for number in self._kept if number <= request.last and number not in still]
        size = 0
        for number in numbers:
            size += len(self._kept.pop(number))
            self._taken.pop(number, None)
        self._count(-size)
        self.etcd.confirm(numbers)
        self._seen(request.pushes)

    def _keep(self, number: int, reply: bytes) -> None:
        self._kept[number] = reply
        self._count(len(reply))

    def _push(self, number: int, event: Event) -> None:
        self._pushed += 1
        push = frame((0, self._pushed, (number, *event)))
        self._pushes.append((self._pushed, push))
        self._count(len(push) + PUSH_BYTES)
        if self.link is not None:
            self.link.send(push)
        if self.overdue:
            self._gateway.guests.end_soon(self, self.overdue)

    def _seen(self, last: int) -> None:
        while self._pushes and self._pushes[0][0] <= last:
            self._count(-len(self._pushes.popleft()[1]) - PUSH_BYTES)

    def _count(self, size: int) -> None:
        self._kept_bytes += size
        self._ledger.kept += size

    # The end

    def next_end(self) -> float:
        """Return when the next lease ends unless its heart beats; infinity where none can."""
        return min((until for _, until in self._beats.values()), default=float("inf"))

    def expire(self, now: float) -> None:
        """Give up the leases whose heart stopped beating."""
        for key, (_, until) in list(self._beats.items()):
            if until <= now:
                del self._beats[key]
                self._leased.pop(key, None)
                self._gateway.spawn(self._give_up(key))

    async def _give_up(self, key: bytes) -> None:
        with contextlib.suppress(RallypointError), self.etcd.own_mark() as mark:
            await self._gateway.ask(self._space.unlease(mark, key))

    def stop(self) -> None:
        """Give up all that is under way here, and forget what was kept."""
        self.over = True
        for task in (self._worker, *self._apart.values()):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for number in list(self._watches):
            self._end_watch(number)
        self._count(-self._kept_bytes)
        self._kept.clear()
        self._pushes.clear()

    async def end(self) -> None:
        """End the session in etcd; items whose taker may not have seen them go back to their queues."""
        under_way = [task for task in (self._worker, *self._apart.values()) if task is not None]
        self.stop()
        if under_way:
            await asyncio.wait(under_way)
        with contextlib.suppress(RallypointError):
            for key, item in reversed(list(self._taken.values())):
                await self._space.put_back(self.etcd, key, item)
        await self.etcd.end()

    def _end_watch(self, number: int) -> None:
        feed, task = self._watches.pop(number)
        feed.close()
        if task is not asyncio.current_task():
            task.cancel()


_Do = Callable[[GatewaySession, _Asked], Awaitable[Any]]
_CHANGES: dict[type[ops.Op], _Do] = {
    ops.Set: lambda s, a: s._space.set(s._mark(a), a.request.key, a.request.value),
    ops.Add: lambda s, a: s._space.add(s._mark(a), a.request.key, a.request.amount),
    ops.MultiSet: lambda s, a: s._space.multi_set(s._mark(a), a.request.pairs),
    ops.Append: lambda s, a: s._space.append(s._mark(a), a.request.key, a.request.value),
    ops.CompareSet: lambda s, a: s._space.compare_set(s._mark(a), a.request.key, a.request.expected, a.request.desired),
    ops.Swap: lambda s, a: s._space.swap(s._mark(a), a.request.key, a.request.expected, a.request.desired),
    ops.Delete: lambda s, a: s._space.delete(s._mark(a), a.request.key),
    ops.DeletePrefix: lambda s, a: s._space.delete_prefix(s._mark(a), a.request.prefix),
    ops.Push: lambda s, a: s._space.queue_push(s._mark(a), a.request.key, a.request.value),
    ops.Pop: lambda s, a: s._space.queue_pop(s._mark(a), a.request.key),
    ops.Lease: GatewaySession._lease,
    ops.Unlease: GatewaySession._unlease,
    ops.Watch: GatewaySession._watch,
    ops.Drop: GatewaySession._drop,
    ops.Act: GatewaySession._act,
    ops.Bye: GatewaySession._bye,
}
"""What is carried out in order."""

_DO: dict[type[ops.Op], _Do] = {
    **_CHANGES,
    ops.Get: lambda s, a: s._space.wait_values((a.request.key,), a.deadline),
    ops.MultiGet: lambda s, a: s._space.wait_values(a.request.keys, a.deadline),
    ops.Wait: lambda s, a: s._space.wait(a.request.keys, a.deadline),
    ops.Check: lambda s, a: s._space.check(a.request.keys),
    ops.Count: lambda s, a: s._space.num_keys(a.request.prefix),
    ops.List: lambda s, a: s._space.list_keys(a.request.prefix),
    ops.QueueLen: lambda s, a: s._space.queue_len(a.request.key),
    ops.Ping: GatewaySession._ping,
    ops.Take: lambda s, a: s._space.wait_item(s._mark(a), a.request.key, a.deadline),
    ops.Arrive: lambda s, a: s._space.barrier(s._mark(a), a.request.key, a.request.size, a.deadline),
}
_READS = frozenset(kind for kind in _DO if not kind.changes) | {ops.Ping}
_TAKERS = (ops.Pop, ops.Take)
