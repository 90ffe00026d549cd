"""Sessions: native clients, as owners in the state, which outlive connections. (PyTorch's are in `core/visitor.py`.)

A session is *attached* while a connection carries it, detached in the grace after a cut, and
over when a host ends it or the client says bye; then the engine drops all it owned.

Exactly once: the answer of every request that changes something is kept until the client confirms it. A number that
was seen before is a repetition: it gets the kept answer, or none yet if it still waits. Reads are no part of the state:
they run again. Pushes are numbered and kept until seen. Both are bounded by a `ReplyBudget`: a client that confirms
nothing is `overdue`, and has to go. What the ranks of an exchange get is kept once for all of them, and counted once.

`execute` carries out an operation and returns its answer, or `LATER`; what the engine answers later goes through
`answer`. A session knows no bytes, clocks or connections; `link` is the host's own, and no part of the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

from rallypoint.core import ops
from rallypoint.core.call_waiter import CallWaiter
from rallypoint.core.engine import EXECUTE, Engine
from rallypoint.core.machine import Call, Done, Waiting
from rallypoint.core.objects import Objects
from rallypoint.core.records import LATER, Event, Push, Turn, Waiter, Want, Watch, show, weigh
from rallypoint.core.reply_budget import ReplyBudget
from rallypoint.errors import LimitExceeded, StoreError

__all__ = ["MAX_KEPT", "MAX_PUSHES", "SHOWN", "Session"]

MAX_KEPT, MAX_PUSHES = 8192, 131_072
"""How many answers, and how many pushes, a session may leave unconfirmed; a `ReplyBudget` counts their bytes."""

MAX_WATCHES = 65_536
"""How many watches a session may have: to end them all takes some ten milliseconds."""

SHOWN = 100
"""How many of its keys a session names to people."""

SHARE = 64
"""When all together keep too much, those go first that keep more than this part of it."""

PUSH_BYTES = 140
"""What a kept push costs beside its key and value; near enough for a limit."""

MAX_LISTED = 4096
"""How long a list may be whose bytes are counted here; those of a longer one the host counts, as it encodes it."""


class Session:
    """What the server knows of one native client."""

    __slots__ = (
        "_budget",
        "_engine",
        "_kept_bytes",
        "_objects",
        "attached",
        "attempt",
        "former",
        "highest",
        "id",
        "kept",
        "late",
        "link",
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
        budget: ReplyBudget,
    ) -> None:
        self.id = identity
        self.serial = serial
        """Unique among the owners of a state; no secret, as the id is."""

        self.tag = str(serial)
        """The serial as shared objects know it."""

        self.name = name
        self.namespace = namespace
        self.former: tuple[str, ...] = ()
        """The tags of sessions that the same process had before, and which have not ended here yet."""

        self.attached = True
        self.restarts = 0
        """How often the server was restarted since the client was last attached."""

        self.over = False
        self.link: Any = None
        """The host's connection that carries the session now, or None."""

        self.attempt = 0  # of the hello by which it came; the host's own, as `link` is

        self.late = False
        """Whether this client may be overdue: looked into whenever more is kept for it."""

        self.highest = self.pushed = 0
        self.kept: dict[int, tuple[Any, int]] = {}
        """Answers that are not confirmed, each with the size that it is counted with."""

        self.waiting: dict[int, Waiter | CallWaiter] = {}
        self.watches: dict[int, Watch] = {}
        self.turns: dict[int, Turn] = {}
        self.suspended: dict[int, None] = {}
        self.taken: dict[int, tuple[bytes, bytes]] = {}
        self.pushes: deque[Push] = deque()
        self.ttls: dict[bytes, tuple[float, int]] = {}
        """The leased keys that end without heartbeats: after how many seconds, and the number of their `Lease`."""

        self._kept_bytes = 0
        self._engine, self._objects, self._budget = engine, objects, budget

    @property
    def overdue(self) -> str:
        """Why this client has to go: it confirms nothing, and what is kept for it grows. Empty if all is well."""
        budget = self._budget
        full = budget.kept > (budget.limit if self._kept_bytes > budget.limit // SHARE else 2 * budget.limit)
        if len(self.kept) <= MAX_KEPT and len(self.pushes) <= MAX_PUSHES and not full:
            return ""
        return f"{len(self.kept)} answers, {len(self.pushes)} pushes, {self._kept_bytes} bytes are unconfirmed"

    @property
    def leases(self) -> list[bytes]:
        """The first of the keys that vanish with this session."""
        return self._engine.leases(self, SHOWN)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The first of the keys that requests of this session wait for."""
        return tuple(islice(chain.from_iterable(waiter.keys for waiter in self.waiting.values()), SHOWN))

    def knows(self, number: int) -> bool:
        """Return whether a request was seen before and its answer is not confirmed yet."""
        waiter = self.waiting.get(number)
        return number in self.kept or number in self.suspended or (waiter is not None and not waiter.reads)

    def execute(self, op: ops.Op) -> Any:
        """Carry out a request; return its answer, or `LATER` where that comes later or never. Never raises."""
        number = op.number
        kind = op.__class__
        answer: Any
        if kind.changes:
            read = self.waiting.get(number)
            if isinstance(read, Waiter) and read.reads:  # by mistake: a read must make no difference
                del self.waiting[number]
                self._engine.drop(read)
            if number > self.highest:
                self.highest = number
            elif kind is not ops.Confirm:
                if number in self.waiting:
                    return LATER
                if number in self.kept:
                    return self.kept[number][0]
                self.suspended.pop(number, None)
                used = self.watches.pop(number, None) or self.turns.pop(number, None)
                if used is not None:  # by mistake: a number names one thing at most
                    self._engine.drop(used)
        elif number in self.waiting:
            return LATER
        special = _SPECIAL.get(kind)
        try:
            answer = EXECUTE[kind](self._engine, op, self) if special is None else special(self, op)
        except StoreError as error:
            answer = error
        except MemoryError:
            raise
        except Exception as error:  # the same at every replay, so it is an answer as any other
            answer = self._engine.note_bug(error, kind.__name__)
        if answer.__class__ is Waiter or answer.__class__ is CallWaiter:
            self.waiting[number] = answer
            return LATER
        return self.finish(op, answer)

    def finish(self, op: ops.Op, answer: Any) -> Any:
        """Return the answer of a request as it may be sent; keep it, if the request changes something."""
        kind = op.__class__
        if answer.__class__ in LONG and (kind.changes or len(answer) <= MAX_LISTED):
            answer = self.bounded(answer, op)
        if kind.changes and answer is not LATER:
            self._keep(op.number, answer)
        return answer

    def answer(self, handle: Waiter | CallWaiter | Watch, answer: Any) -> Any:
        """Return what to send when the engine answered a wait, or has an event for a watch; `LATER` for nothing."""
        number = handle.number
        if answer.__class__ is Event:
            return self._push(number, answer)
        assert not isinstance(handle, Watch)
        if self.waiting.pop(number, None) is None:  # dropped
            if handle.want is Want.ITEM:
                self._engine.push(handle.keys[0], answer, front=True)
            return LATER
        if handle.want is Want.ITEM:
            self.taken[number] = (handle.keys[0], answer)
        elif answer.__class__ is Turn:
            self.turns[number] = answer
        if answer.__class__ in LONG and not (handle.reads and len(answer) > MAX_LISTED):
            answer = self.bounded(answer, None, handle.keys[0])
        if not handle.reads:
            self._keep(number, answer)
        return answer

    def time_out(self, number: int) -> Any:
        """End a wait whose time is over; return what to send, `LATER` for nothing."""
        waiter = self.waiting.get(number)
        if waiter is None or waiter.want is Want.CLEARED:
            return LATER
        answer: Any = self._objects.why(waiter) if isinstance(waiter, CallWaiter) else self._engine.expire(waiter)
        if answer is None:
            return LATER
        del self.waiting[number]
        if not waiter.reads:
            self._keep(number, answer)
        return answer

    def take_back(self, number: int) -> None:
        """Take back a turn that was not used."""
        turn = self.turns.pop(number, None)
        if turn is not None:
            self._engine.drop(turn)

    def lapse(self, key: bytes, number: int) -> None:
        """Give up a lease whose heartbeat stopped, unless it was asked for anew since."""
        if key in self.ttls and self.ttls[key][1] == number:
            del self.ttls[key]
            self._engine.unlease(key, self)

    def live_ttls(self) -> dict[bytes, float]:
        """Return the leases that need heartbeats, without those that were deleted or written by others."""
        lessee = self._engine.lessee
        return {key: ttl_s for key, (ttl_s, _) in self.ttls.items() if lessee(key) is self}

    def detach(self) -> None:
        """While the client is away, let others have the items that it waits for; it asks again when it comes back."""
        self.attached = False
        for number, waiter in list(self.waiting.items()):
            if isinstance(waiter, Waiter) and waiter.want is Want.ITEM:
                del self.waiting[number]
                self.suspended[number] = None
                self._engine.drop(waiter)

    def attach(self, pushes_seen: int) -> None:
        """Note that the client is back, and has seen pushes up to a number; the rest is to be sent again."""
        self.attached = True
        self.restarts = 0
        self._seen(pushes_seen)

    def end(self) -> None:
        """Drop all that the session owns; items whose taker may not have seen them go back to their queues."""
        self.over = True
        for waiter in self.waiting.values():  # first, so that nothing goes to one who is gone
            if isinstance(waiter, Waiter):  # `Objects.end` sees to the others
                self._engine.drop(waiter)
        self.waiting.clear()
        for key, item in reversed(self.taken.values()):
            self._engine.push(key, item, front=True)
        self.taken.clear()
        self._forget(list(self.kept))
        self._seen(self.pushed)
        self._engine.end(self)

    # Inside

    def bounded(self, answer: Any, op: ops.Op | None, name: bytes = b"") -> Any:
        """Return an answer, or an error in its place if it is too long to send or to keep."""
        limit = self._budget.answer_limit
        if answer.__class__ is Done:
            if answer.answer is None:
                return answer
            limit = min(limit, self._budget.limit)  # for it is kept
            name = op.name if isinstance(op, ops.Act) else name
        size = weigh(answer)
        return answer if size <= limit else LimitExceeded(what="answer", key=show(name), size=size, limit=limit)

    def _push(self, watch: int, event: Event) -> Any:
        """Keep and return a push; a client that leaves too many unseen has ended its session by that."""
        if self.over:
            return LATER
        self.pushed += 1
        push = Push(self.pushed, watch, event)
        self.keep_push(push)
        if self.overdue:
            self._be_over()
        return push

    def _be_over(self) -> None:
        """Note that the session is about to end: its watches see nothing more."""
        self.over = True
        for watch in self.watches.values():
            self._engine.drop(watch)
        self.watches.clear()

    def _keep(self, number: int, answer: Any) -> None:
        self.keep(number, answer, weigh(answer))

    def keep(self, number: int, answer: Any, size: int) -> None:
        """Keep an answer until it is confirmed."""
        self.kept[number] = (answer, size)
        budget = self._budget
        self._kept_bytes += size
        budget.hold(answer, size)
        if len(self.kept) > MAX_KEPT or budget.kept > budget.limit:
            self.late = True

    def keep_push(self, push: Push) -> None:
        """Keep a push until it was seen."""
        self.pushes.append(push)
        self._count(_weigh_push(push))

    def _forget(self, numbers: list[int]) -> None:
        """Keep these answers no more."""
        for number in numbers:
            answer, size = self.kept.pop(number)
            self._kept_bytes -= size
            self._budget.release(answer, size)

    def _count(self, size: int) -> None:
        self._kept_bytes += size
        self._budget.kept += size

    def _seen(self, push: int) -> None:
        pushes, freed = self.pushes, 0
        while pushes and pushes[0].push <= push:
            freed += _weigh_push(pushes.popleft())
        self._count(-freed)

    # Operations that are more than the engine's

    def _pop(self, op: ops.Pop) -> bytes | None:
        item: bytes | None = self._engine.execute(op, self)
        if item is not None:
            self.taken[op.number] = (op.key, item)
        return item

    def _take(self, op: ops.Take) -> Any:
        answer = self._engine.execute(op, self)
        if answer.__class__ is bytes:
            self.taken[op.number] = (op.key, answer)
        return answer

    def _await(self, op: ops.Await) -> Any:
        answer = self._engine.execute(op, self)
        if isinstance(answer, Turn):
            self.turns[op.number] = answer
        return answer

    def _draw(self, op: ops.Draw) -> Any:
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
        return self._objects.why(outcome) if isinstance(outcome, CallWaiter) and op.timeout_s <= 0 else outcome

    def _watch(self, op: ops.Watch) -> None:
        if len(self.watches) >= MAX_WATCHES:
            size = len(self.watches) + 1
            raise LimitExceeded(what="watches of one session", key=show(op.prefix), size=size, limit=MAX_WATCHES)
        self.watches[op.number] = self._engine.watch(op.prefix, self, op.number)

    def _drop(self, op: ops.Drop) -> None:
        target = op.target
        self.suspended.pop(target, None)
        held: Waiter | CallWaiter | Watch | Turn | None = self.waiting.pop(target, None)
        if isinstance(held, Waiter) and held.reads:
            self._engine.drop(held)
            held = None
        held = held or self.watches.pop(target, None) or self.turns.pop(target, None)
        if isinstance(held, CallWaiter):
            self._objects.forget(held)
        elif held is not None:
            self._engine.drop(held)
        elif target in self.taken:  # its taker was interrupted: it goes back to the front
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

    def _lease(self, op: ops.Lease) -> None:
        self._engine.execute(op, self)
        self.ttls.pop(op.key, None)
        if op.ttl_s:
            size = len(self.ttls)
            if size >= 64 and not size & (size - 1):  # each time their number has doubled
                self.ttls = {key: self.ttls[key] for key in self.live_ttls()}
            self.ttls[op.key] = (op.ttl_s, op.number)

    def _unlease(self, op: ops.Unlease) -> bool:
        self.ttls.pop(op.key, None)
        return self._engine.unlease(op.key, self)

    def _bye(self, op: ops.Bye) -> None:
        self.taken.clear()  # who says goodbye has seen its answers
        self._be_over()

    def _beat(self, op: ops.Beat) -> Any:
        return LATER  # heartbeats are the host's, who has the clock


def _weigh_push(push: Push) -> int:
    event = push.event
    return PUSH_BYTES + len(event.key) + (len(event.value) if event.value is not None else 0)


LONG: frozenset[type[Any]] = frozenset((list, tuple, Done, Waiting))
_SPECIAL: dict[type[ops.Op], Callable[[Session, Any], Any]] = {
    ops.Pop: Session._pop,
    ops.Take: Session._take,
    ops.Await: Session._await,
    ops.Draw: Session._draw,
    ops.Act: Session._act,
    ops.Watch: Session._watch,
    ops.Drop: Session._drop,
    ops.Confirm: Session._confirm,
    ops.Lease: Session._lease,
    ops.Unlease: Session._unlease,
    ops.Bye: Session._bye,
    ops.Beat: Session._beat,
}
