"""One PyTorch client of a relay: the order of what it asks and is answered. Pure; `core/visitor.py` is its model.

Replies come in the order of the calls, for they have no numbers. Only a wait lets those that follow pass; they are all
answered by the server, which has carried out the wait first. Else a PING is answered here, behind earlier writes.

A client has one wait at most, so a new one takes the place of the old, and one turn at most, which its next call ends;
if that draws an item, after it. The value that a wait for one key brings along answers the `GET` of that key if that is
the very next call, which is how PyTorch's `get` is made: both lie within it, so the value is one that it may return.

While a call gathers (`relay/merging.py`), later ones are held back. So are reads of which the answers may be large,
where several are under way or the client does not take its replies.

When a client is gone, its waits, arrivals, turn and undelivered items are given back. What it wrote is carried out.

Rejected: to hold back what comes behind a wait. It may be what the client itself waits for.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from rallypoint.core import ops
from rallypoint.relay.merging import WAITS, Merger
from rallypoint.relay.requests import Call, Request

__all__ = ["MAX_CALLS", "MAX_CALL_BYTES", "MAX_LARGE", "VALUE_BYTES", "TorchClient", "TorchLink"]

MAX_CALLS, MAX_CALL_BYTES = 4096, 4 * 1024 * 1024
"""How many calls of a client, and how many bytes of them, may be unanswered before it is not read from."""

VALUE_BYTES = 64 * 1024
"""How long a value may be that comes along with the end of a wait."""

MAX_LARGE = 4
"""How many answers that may be large may be under way for one client."""

_LARGE = frozenset((ops.Peek, ops.MultiPeek, ops.List, ops.CompareSet, ops.Draw))
_REPLACES = WAITS | {ops.Drop}
_HOLDS = _REPLACES | {ops.Draw}
_PLAIN = frozenset(
    (ops.Add, ops.Set, ops.Check, ops.Append, ops.MultiSet, ops.Delete, ops.Push, ops.QueueLen, ops.Count)
)
"""Operations that are simply asked: they do not wait, are not answered here, and their answers are small."""

_ASKED = _PLAIN | {ops.Await}
"""What is asked at once, where the client has asked nothing else and has neither a turn nor a value."""


class TorchLink(Protocol):
    """A client's connection, as the session sees it."""

    def deliver(self) -> None:
        """Send the replies that are ready."""

    def session_lost(self, why: str) -> None:
        """Close the connection."""

    def read_on(self) -> None:
        """Read again, for there is room."""


class TorchClient:
    """What one client has asked and not been answered yet."""

    __slots__ = (
        "_gathering", "_gone", "_held", "_large", "_merger", "_turn", "_value", "_wait", "bytes", "calls", "link",
        "paused", "position",
    )  # fmt: skip

    def __init__(self, merger: Merger, link: Any = None) -> None:
        self.link = link
        """Its connection, a `TorchLink`; None in tests that have none."""

        self.position = 0
        self.bytes = 0
        """The bytes of its calls that were not answered, and of the value that is held for a `GET`."""

        self.calls: deque[Call] = deque()
        """What was not answered, in the order in which it came."""

        self.paused = False
        """Whether it does not take its replies; the host says so."""

        self._merger = merger
        self._held: deque[Call] = deque()  # of the calls, what was not asked yet
        self._gathering: Call | None = None  # the last one that did gather, waits apart
        self._wait: Call | None = None
        self._turn: Request | None = None
        self._value: tuple[bytes, bytes] | None = None  # a key, and the value that came with the end of its wait
        self._large = 0
        self._gone = False

    @property
    def owed_bytes(self) -> int:
        """The same without its wait, however long that is: it may last for ever, and has to be cancelled then."""
        return self.bytes - self._wait.size if self._wait is not None else self.bytes

    @property
    def full(self) -> bool:
        """Whether it has asked as much as it may."""
        return len(self.calls) >= MAX_CALLS or self.owed_bytes >= MAX_CALL_BYTES

    @property
    def eased(self) -> bool:
        """Whether it may ask again after it was full."""
        return len(self.calls) <= MAX_CALLS // 2 and self.owed_bytes <= MAX_CALL_BYTES // 2

    @property
    def held_back(self) -> bool:
        """Whether calls wait until its replies have been sent."""
        return bool(self._held) and not self._must_hold(self._held[0], paused=False)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that it waits for."""
        op = self._wait.op if self._wait is not None else None
        return () if op is None else tuple(op.keys) if isinstance(op, ops.Wait) else (op.key,)

    def ask_alone(self, op: ops.Op, size: int) -> bytes | None:
        """Take a call while no other is unanswered; return its answer if that is the value which the wait brought.

        This is what `ask` comes to, in short, for nearly all calls: PyTorch's client asks one thing at a time.
        """
        if self._turn is None:
            value, kind = self._value, op.__class__
            if value is None:
                if kind in _ASKED:
                    call = Call(self, op, size)
                    self.calls.append(call)
                    self.bytes += size
                    self._ask(call)
                    return None
            elif kind is ops.Peek and value[0] == op.key:  # type: ignore[attr-defined]
                self._merger.asked += 1
                self._take_value()
                return value[1]
        self.ask(op, size)
        return None

    def ask(self, op: ops.Op, size: int) -> None:
        """Take a call."""
        call = Call(self, op, size)
        self.calls.append(call)
        self.bytes += size
        if self._held or self._must_hold(call, self.paused):
            self._held.append(call)
        else:
            self._issue(call)

    def go_on(self) -> None:
        """Ask what was held back, as far as that may be."""
        while self._held and not self._must_hold(self._held[0], self.paused):
            self._issue(self._held.popleft())

    def answered(self, call: Call) -> None:
        """Note that a call is done."""
        if call is not self._wait:
            return
        self._wait = None
        if call.answer.__class__ is bytes:
            self._value = (call.op.key, call.answer)
            self.bytes += len(call.answer)
        elif call.answer is True and call.op.__class__ is ops.Await:
            self._turn = call.request

    def next_reply(self) -> Call | None:
        """Return the call whose reply is next, which is no longer the client's; None where that is not known yet."""
        calls = self.calls
        while calls:
            call = calls[0]
            if call is self._wait:
                if len(calls) == 1 or not calls[1].done:
                    return None
                call = calls[1]
                del calls[1]
            elif call.done:
                calls.popleft()
            else:
                return None
            self.bytes -= call.size
            if self._large and call.op.__class__ in _LARGE and call.request is not None:
                self._large -= 1
            if not call.taken_back:
                return call
        return None

    def end(self) -> None:
        """Note that the client is gone."""
        self._gone = True
        self._end_turn()
        self._value = None
        self._large = 0
        self._held = deque(call for call in self._held if _writes(call.op))
        held = set(map(id, self._held))
        for call in self.calls:
            if id(call) not in held and call.request is not None and not _writes(call.op):
                self._give_up(call)
        self.calls.clear()
        self.bytes = 0
        self.go_on()

    # Inside

    def _must_hold(self, call: Call, paused: bool) -> bool:
        if self._gathering is not None:
            if self._gathering.gathers:
                return True
            self._gathering = None
        return (paused or self._large >= MAX_LARGE) and call.op.__class__ in _LARGE and not self._gone

    def _issue(self, call: Call) -> None:
        """Carry out a call here, or ask for it."""
        op, kind = call.op, call.op.__class__
        value = self._take_value()
        if self._turn is not None and kind is not ops.Draw:
            self._end_turn()
        if self._wait is not None and kind in _REPLACES:
            self._stop_waiting(self._wait)
        if kind is ops.Drop or (kind is ops.Ping and self._wait is None):
            call.done = True
        elif kind is ops.Peek and value is not None and value[0] == op.key:
            self._merger.asked += 1
            call.done, call.answer = True, value[1]
        else:
            if self._wait is not None:
                self._merger.hurry(self._wait)
            self._ask(call)

    def _ask(self, call: Call) -> None:
        op, kind = call.op, call.op.__class__
        if kind in WAITS:
            self._wait = call
            if kind is ops.Await:
                op.limit = VALUE_BYTES
            self._merger.ask(call)
        elif kind is ops.Draw:
            self._large += 1
            self._merger.draw(call, self._turn or self._coming_turn())
            self._turn = None
        elif kind is ops.Ping:
            self._merger.ping(call)
        else:
            if kind not in _PLAIN:
                self._large += 1
            if self._merger.ask(call):
                self._gathering = call

    def _take_value(self) -> tuple[bytes, bytes] | None:
        """Return the value that came with the end of a wait, which is held for one call only."""
        value, self._value = self._value, None
        if value is not None:
            self.bytes -= len(value[1])
        return value

    def _coming_turn(self) -> Request | None:
        """Return the request whose answer may be a turn of this client."""
        request = self._wait.request if self._wait is not None and isinstance(self._wait.op, ops.Await) else None
        return request if request is not None and request.calls[0] is self._wait else None

    def _stop_waiting(self, wait: Call) -> None:
        """Take back a wait, which stays unanswered."""
        self._wait = None
        wait.done = wait.taken_back = True
        self._merger.leave(wait)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._merger.drop(turn)

    def _give_up(self, call: Call) -> None:
        """Forget a call of a client that is gone; an item that was drawn for it and not delivered goes back."""
        if not call.done:
            self._merger.leave(call)
        elif isinstance(call.op, ops.Draw) and call.request is not None:
            self._merger.drop(call.request)


def _writes(op: ops.Op) -> bool:
    """Return whether an operation changes something whether or not its client is still there."""
    return op.changes and op.__class__ not in _HOLDS
