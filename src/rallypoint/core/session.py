"""Sessions: native clients as owners in the state, which outlive connections.

(PyTorch's clients are in `core/connection_owner.py`.) A session is *attached* while a connection carries it, detached
during the grace period after a lost connection, and over when a host ends it or the client says bye; the engine then
drops all it owned.

Exactly once: the answer of every request that changes the state is kept until the client confirms it. A repeated number
gets the kept answer, or none yet if it still waits. Reads are not part of the state: they run again. Pushes are
numbered and kept until seen. The `MemoryBudget` bounds both: a client that confirms nothing becomes `overdue` and is
evicted. The shared result of an exchange is kept and counted once for all ranks.

`execute` runs an operation and returns its answer, or `LATER`; later answers of the engine pass through `answer`. A
session knows no bytes, clocks or sockets; `handler` belongs to the host and is not part of the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

from rallypoint.core import ops
from rallypoint.core.calls.call_waiter import CallWaiter
from rallypoint.core.costs import KEPT_BYTES, PUSH_BYTES
from rallypoint.core.engine import EXECUTE, Engine
from rallypoint.core.machines.machine import Call, Done, Waiting
from rallypoint.core.memory_budget import MemoryBudget
from rallypoint.core.objects import Objects
from rallypoint.core.records import LATER, Event, PushedEvent, Turn, Waiter, WaitKind, WatchHandle, show, size_of
from rallypoint.errors import LimitExceeded, StoreError

__all__ = ["MAX_KEPT", "MAX_PUSHES", "SHOWN", "Session"]

MAX_KEPT, MAX_PUSHES = 8192, 131_072
"""How many answers, and how many pushes, a session may leave unconfirmed; the `MemoryBudget` counts their bytes."""

MAX_WATCHES = 65_536
"""How many watches a session may have: ending them all takes some ten milliseconds."""

SHOWN = 100
"""How many of its keys a session lists for people."""

SHARE = 64
"""When all sessions together keep too much, those that keep more than 1/SHARE of the limit are evicted first."""

MAX_LISTED = 4096
"""Lists up to this length are measured here; the host measures longer ones while it encodes them."""


class Session:
    """The server's record of one native client."""

    __slots__ = (
        "_engine",
        "_kept_bytes",
        "_memory",
        "_objects",
        "attached",
        "attempt",
        "former",
        "handler",
        "highest",
        "id",
        "kept",
        "late",
        "name",
        "namespace",
        "over",
        "pushed",
        "pushes",
        "restarts",
        "serial",
        "suspended",
        "tag",
        "taken",
        "ttls",
        "turns",
        "waiting",
        "watches",
    )

    def __init__(
        self,
        identity: bytes,
        serial: int,
        name: str,
        namespace: int,
        engine: Engine,
        objects: Objects,
        memory: MemoryBudget,
    ) -> None:
        self.id = identity
        self.serial = serial
        """Unique among the owners of a state; not secret, unlike the id."""

        self.tag = str(serial)
        """The serial as a string, as shared objects use it."""

        self.name = name
        self.namespace = namespace
        self.former: tuple[str, ...] = ()
        """The tags of earlier sessions of the same process that have not ended yet."""

        self.attached = True
        self.restarts = 0
        """How often the server has restarted since the client was last attached."""

        self.over = False
        self.handler: Any = None
        """The host's connection that carries the session, or None."""

        self.attempt = 0  # of the hello that attached it; the host's, like `handler`

        self.late = False
        """Whether this client may be overdue: checked whenever more is kept for it."""

        self.highest = self.pushed = 0
        self.kept: dict[int, tuple[Any, int]] = {}
        """Unconfirmed answers, each with the size charged for it."""

        self.waiting: dict[int, Waiter | CallWaiter] = {}
        self.watches: dict[int, WatchHandle] = {}
        self.turns: dict[int, Turn] = {}
        self.suspended: dict[int, None] = {}
        self.taken: dict[int, tuple[bytes, bytes]] = {}
        self.pushes: deque[PushedEvent] = deque()
        self.ttls: dict[bytes, tuple[float, int]] = {}
        """The leased keys that need heartbeats: their time to live in seconds, and the number of their `SetLease`."""

        self._kept_bytes = 0
        self._engine, self._objects, self._memory = engine, objects, memory

    @property
    def overdue(self) -> str:
        """Why this client must be evicted: it confirms nothing, and what is kept for it grows. Empty if it is fine."""
        kept, reserve = self._memory.kept, self._memory.reserve
        full = kept > (reserve if self._kept_bytes > reserve // SHARE else reserve + reserve // 4)
        if len(self.kept) <= MAX_KEPT and len(self.pushes) <= MAX_PUSHES and not full:
            return ""
        return f"{len(self.kept)} answers, {len(self.pushes)} pushes, {self._kept_bytes} bytes are unconfirmed"

    @property
    def leases(self) -> list[bytes]:
        """The first keys that vanish with this session."""
        return self._engine.leases(self, SHOWN)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The first keys that requests of this session wait for."""
        return tuple(islice(chain.from_iterable(waiter.keys for waiter in self.waiting.values()), SHOWN))

    def knows(self, number: int) -> bool:
        """Return whether a request was seen before and its answer is not yet confirmed."""
        waiter = self.waiting.get(number)
        return number in self.kept or number in self.suspended or (waiter is not None and not waiter.reads)

    def execute(self, op: ops.Op) -> Any:
        """Run a request; return its answer, or `LATER` if the answer comes later or never. Never raises."""
        number = op.number
        kind = op.__class__
        answer: Any
        if kind.changes:
            read = self.waiting.get(number)
            if isinstance(read, Waiter) and read.reads:  # a client error: a read must make no difference
                del self.waiting[number]
                self._engine.drop(read)
            if number > self.highest:
                self.highest = number
            elif kind is not ops.Confirm:
                if number in self.waiting:
                    return LATER
                if number in self.kept:
                    return self.kept[number][0]
                self._resume(number)
                used = self.watches.pop(number, None) or self.turns.pop(number, None)
                if used is not None:  # a client error: a number names at most one thing
                    self._engine.drop(used)
        elif number in self.waiting:
            return LATER
        special = _SPECIAL.get(kind)
        try:
            answer = EXECUTE[kind](self._engine, op, self) if special is None else special(self, op)
        except StoreError as error:
            answer = error.with_traceback(None)  # which holds the request, and so its value, for as long as it is kept
        except MemoryError:
            raise
        except Exception as error:  # the same at every replay, so it is an answer like any other
            answer = self._engine.note_bug(error, kind.__name__)
        if answer.__class__ is Waiter or answer.__class__ is CallWaiter:
            self.waiting[number] = answer
            return LATER
        return self.finish(op, answer)

    def finish(self, op: ops.Op, answer: Any) -> Any:
        """Return a request's answer, bounded for sending; keep it if the request changes the state."""
        kind = op.__class__
        if answer.__class__ in LONG and (kind.changes or len(answer) <= MAX_LISTED):
            answer = self.bounded(answer, op)
        if kind.changes and answer is not LATER:
            self._keep(op.number, answer)
        return answer

    def answer(self, handle: Waiter | CallWaiter | WatchHandle, answer: Any) -> Any:
        """Return what to send when the engine answers a wait or has an event for a watch; `LATER` for nothing."""
        number = handle.number
        if answer.__class__ is Event:
            return self._push(number, answer)
        assert not isinstance(handle, WatchHandle)
        if self.waiting.pop(number, None) is None:  # dropped
            if handle.want is WaitKind.ITEM:
                self._engine.push(handle.keys[0], answer, front=True)
            return LATER
        if handle.want is WaitKind.ITEM:
            self.taken[number] = (handle.keys[0], answer)
        elif answer.__class__ is Turn:
            self.turns[number] = answer
        if answer.__class__ in LONG and not (handle.reads and len(answer) > MAX_LISTED):
            answer = self.bounded(answer, None, handle.keys[0])
        if not handle.reads:
            self._keep(number, answer)
        return answer

    def time_out(self, number: int) -> Any:
        """End a wait that timed out; return what to send, `LATER` for nothing."""
        waiter = self.waiting.get(number)
        if waiter is None or waiter.want is WaitKind.CLEARED:
            return LATER
        answer: Any = self._objects.explain(waiter) if isinstance(waiter, CallWaiter) else self._engine.expire(waiter)
        if answer is None:
            return LATER
        del self.waiting[number]
        if not waiter.reads:
            self._keep(number, answer)
        return answer

    def take_back(self, number: int) -> None:
        """Take back an unused turn."""
        turn = self.turns.pop(number, None)
        if turn is not None:
            self._engine.drop(turn)

    def expire_lease(self, key: bytes, number: int) -> None:
        """Delete a lease whose heartbeat stopped, unless it was renewed since."""
        if key in self.ttls and self.ttls[key][1] == number:
            del self.ttls[key]
            self._engine.unlease(key, self)

    def live_ttls(self) -> dict[bytes, float]:
        """Return the leases that need heartbeats, without keys that were deleted or overwritten."""
        lessee = self._engine.lease_owner
        return {key: ttl_s for key, (ttl_s, _) in self.ttls.items() if lessee(key) is self}

    def detach(self) -> None:
        """While the client is away, leave the items it waits for to others; it asks again when it reconnects."""
        self.attached = False
        for number, waiter in sorted(self.waiting.items()):  # by number: a restored state has another order
            if isinstance(waiter, Waiter) and waiter.want is WaitKind.ITEM:
                self._engine.drop(waiter)
            elif not isinstance(waiter, CallWaiter) or not self._objects.suspend(waiter):
                continue
            del self.waiting[number]
            self.suspend(number)
        self.late = self.late or self._memory.kept > self._memory.reserve

    def suspend(self, number: int) -> None:
        """Remember that a request waited for an item when its client went away."""
        self.suspended[number] = None
        self._count(KEPT_BYTES)

    def _resume(self, number: int) -> None:
        if number in self.suspended:
            del self.suspended[number]
            self._count(-KEPT_BYTES)

    def attach(self, pushes_seen: int) -> None:
        """Record that the client is back and has seen pushes up to a number; the rest is to be sent again."""
        self.attached = True
        self.restarts = 0
        self._seen(pushes_seen)

    def end(self) -> None:
        """Drop all that the session owns; items that their taker may not have seen return to their queues."""
        self.over = True
        self._engine.drop_reads(self)
        for waiter in self._engine.lasting_waits(self):  # first, so that nothing goes to a client that is gone
            self._engine.drop(waiter)
        self.waiting.clear()
        for key, item in reversed(self.taken.values()):
            self._engine.push(key, item, front=True)
        self.taken.clear()
        for number in list(self.suspended):
            self._resume(number)
        self._forget(list(self.kept))
        self._seen(self.pushed)
        self._engine.end(self)

    # Inside

    def bounded(self, answer: Any, op: ops.Op | None, name: bytes = b"") -> Any:
        """Return an answer, or an error in its place if it is too long to send or to keep."""
        limit = self._memory.answer_limit
        if answer.__class__ is Done:
            if answer.answer is None:
                return answer
            limit = min(limit, self._memory.reserve)  # because it is kept
            name = op.name if isinstance(op, ops.Act) else name
        size = size_of(answer)
        return answer if size <= limit else LimitExceeded(what="answer", key=show(name), size=size, limit=limit)

    def _push(self, watch: int, event: Event) -> Any:
        """Keep and return a push; a client that leaves too many unseen thereby ends its session."""
        if self.over:
            return LATER
        self.pushed += 1
        push = PushedEvent(self.pushed, watch, event)
        self.keep_push(push)
        if self.overdue:
            self._end_quietly()
        return push

    def _end_quietly(self) -> None:
        """Mark the session as over: its watches deliver nothing more."""
        self.over = True
        for watch in self.watches.values():
            self._engine.drop(watch)
        self.watches.clear()

    def _keep(self, number: int, answer: Any) -> None:
        self.keep(number, answer, KEPT_BYTES + size_of(answer))

    def keep(self, number: int, answer: Any, size: int) -> None:
        """Keep an answer until it is confirmed."""
        self.kept[number] = (answer, size)
        memory = self._memory
        self._kept_bytes += size
        memory.hold(answer, size)
        if len(self.kept) > MAX_KEPT or memory.kept > memory.reserve:
            self.late = True

    def keep_push(self, push: PushedEvent) -> None:
        """Keep a push until it is seen."""
        self.pushes.append(push)
        self._count(_weigh_push(push))

    def _forget(self, numbers: list[int]) -> None:
        """Stop keeping these answers."""
        for number in numbers:
            answer, size = self.kept.pop(number)
            self._kept_bytes -= size
            self._memory.release(answer, size)

    def _count(self, size: int) -> None:
        self._kept_bytes += size
        self._memory.kept += size

    def _seen(self, push: int) -> None:
        pushes, freed = self.pushes, 0
        while pushes and pushes[0].push <= push:
            freed += _weigh_push(pushes.popleft())
        self._count(-freed)

    # Operations that do more than the engine's

    def _pop(self, op: ops.Pop) -> bytes | None:
        item: bytes | None = self._engine.execute(op, self)
        if item is not None:
            self.taken[op.number] = (op.key, item)
        return item

    def _blocking_pop(self, op: ops.BlockingPop) -> Any:
        answer = self._engine.execute(op, self)
        if answer.__class__ is bytes:
            self.taken[op.number] = (op.key, answer)
        return answer

    def _await(self, op: ops.WaitOrTurn) -> Any:
        answer = self._engine.execute(op, self)
        if isinstance(answer, Turn):
            self.turns[op.number] = answer
        return answer

    def _turn_pop(self, op: ops.TurnPop) -> Any:
        drawn = self._engine.execute(op, self)
        if drawn.item is not None:
            self.taken[op.number] = (op.key, drawn.item)
        turn = self.turns.pop(op.turn, None)
        if turn is not None:
            self._engine.drop(turn)
        return drawn

    def _act(self, op: ops.Act) -> Any:
        call = Call(op.member, self.tag, op.call, self.name, self.former)
        outcome = self._objects.act(op.name, call, op.command, self, op.timeout_s, op.number)
        return self._objects.explain(outcome) if isinstance(outcome, CallWaiter) and op.timeout_s <= 0 else outcome

    def _watch(self, op: ops.WatchPrefix) -> None:
        if len(self.watches) >= MAX_WATCHES:
            size = len(self.watches) + 1
            raise LimitExceeded(what="watches of one session", key=show(op.prefix), size=size, limit=MAX_WATCHES)
        self.watches[op.number] = self._engine.watch(op.prefix, self, op.number)

    def _drop(self, op: ops.Drop) -> None:
        target = op.target
        self._resume(target)
        held: Waiter | CallWaiter | WatchHandle | Turn | None = self.waiting.pop(target, None)
        if isinstance(held, Waiter) and held.reads:
            self._engine.drop(held)
            held = None
        held = held or self.watches.pop(target, None) or self.turns.pop(target, None)
        if isinstance(held, CallWaiter):
            self._objects.forget(held)
        elif held is not None:
            self._engine.drop(held)
        elif target in self.taken:  # its taker was interrupted: return it to the front
            key, item = self.taken.pop(target)
            self._engine.push(key, item, front=True)

    def _confirm(self, op: ops.Confirm) -> Any:
        still = frozenset(op.open)
        numbers = [number for number in self.kept if number <= op.last and number not in still]
        self._forget(numbers)
        if self.taken:
            for number in numbers:
                self.taken.pop(number, None)
        self._seen(op.pushes)
        self.late = bool(self.overdue)
        return LATER

    def _lease(self, op: ops.SetLease) -> None:
        self._engine.execute(op, self)
        self.ttls.pop(op.key, None)
        if op.ttl_s:
            size = len(self.ttls)
            if size >= 64 and not size & (size - 1):  # whenever their number has doubled
                self.ttls = {key: self.ttls[key] for key in self.live_ttls()}
            self.ttls[op.key] = (op.ttl_s, op.number)

    def _unlease(self, op: ops.ReleaseLease) -> bool:
        self.ttls.pop(op.key, None)
        return self._engine.unlease(op.key, self)

    def _bye(self, op: ops.Bye) -> None:
        self.taken.clear()  # a client that says bye has seen its answers
        self._end_quietly()

    def _heartbeat(self, op: ops.SessionHeartbeat) -> Any:
        return LATER  # heartbeats belong to the host, which has the clock


def _weigh_push(push: PushedEvent) -> int:
    event = push.event
    return PUSH_BYTES + len(event.key) + (len(event.value) if event.value is not None else 0)


LONG: frozenset[type[Any]] = frozenset((list, tuple, Done, Waiting))
_SPECIAL: dict[type[ops.Op], Callable[[Session, Any], Any]] = {
    ops.Pop: Session._pop,
    ops.BlockingPop: Session._blocking_pop,
    ops.WaitOrTurn: Session._await,
    ops.TurnPop: Session._turn_pop,
    ops.Act: Session._act,
    ops.WatchPrefix: Session._watch,
    ops.Drop: Session._drop,
    ops.Confirm: Session._confirm,
    ops.SetLease: Session._lease,
    ops.ReleaseLease: Session._unlease,
    ops.Bye: Session._bye,
    ops.SessionHeartbeat: Session._heartbeat,
}
