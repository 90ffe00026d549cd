"""One PyTorch client of a relay: the order of its calls and replies. Pure; modelled on `core/connection_owner.py`.

Replies have no numbers, so they are sent in the order of the calls. Only a wait lets later calls pass; the server
answers all of these, and has executed the wait first. Without a wait, a PING is answered here, after earlier writes.

A client has at most one wait, which a new wait replaces, and at most one turn, which its next call ends; if that call
takes an item, the turn ends after it. A wait for one key may return the value as well. It answers the `GET` of that key
if that is the very next call, as in PyTorch's `get`. The value was current during that `get`, so it is a valid result.

While a call gathers (`relay/torch/merging.py`), later calls are held back. So are reads with possibly large answers
while several are in flight or the client does not read its replies.

When a client disconnects, its waits, arrivals, turn and undelivered items are released. Its writes are executed.

Rejected: hold back calls after a wait. They may be what it waits for.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from rallypoint.core import ops
from rallypoint.relay.torch.merging import WAITS, Merger
from rallypoint.relay.torch.requests import MergedRequest, TorchCall

__all__ = ["MAX_CALLS", "MAX_CALL_BYTES", "MAX_LARGE", "VALUE_BYTES", "TorchClient", "ReplyReceiver"]

MAX_CALLS, MAX_CALL_BYTES = 4096, 4 * 1024 * 1024
"""Limits on a client's unanswered calls and their bytes; at a limit, the relay stops reading from it."""

VALUE_BYTES = 64 * 1024
"""Maximum size of a value that the answer to a wait includes."""

MAX_LARGE = 4
"""Maximum number of possibly large answers in flight for one client."""

_LARGE = frozenset((ops.Peek, ops.MultiPeek, ops.List, ops.CompareSet, ops.TurnPop))
_REPLACES = WAITS | {ops.Drop}
"""Operations that end the wait of their client."""

_OF_CLIENT = _REPLACES | {ops.TurnPop}
"""Operations whose effect at the server ends with their client."""

_PLAIN = frozenset(
    (ops.Add, ops.Set, ops.Check, ops.Append, ops.MultiSet, ops.Delete, ops.Push, ops.QueueLen, ops.Count)
)
"""Operations without special treatment: they do not wait, are not answered here, and have small answers."""

_AT_ONCE = _PLAIN | {ops.WaitOrTurn}
"""Operations issued at once if the client has no other call, no turn and no value."""


class ReplyReceiver(Protocol):
    """A client's connection, as the session sees it."""

    def deliver(self) -> None:
        """Send the replies that are ready."""

    def session_lost(self, why: str) -> None:
        """Close the connection."""

    def read_on(self) -> None:
        """Resume reading."""


class TorchClient:
    """The unanswered calls of one client."""

    __slots__ = (
        "_gathering",
        "_gone",
        "_held",
        "_large",
        "_merger",
        "_turn",
        "_value",
        "_wait",
        "bytes",
        "calls",
        "paused",
        "position",
        "receiver",
    )  # fmt: skip

    def __init__(self, merger: Merger, receiver: Any = None) -> None:
        self.receiver = receiver
        """Its connection, a `ReplyReceiver`; None in tests without one."""

        self.position = 0
        self.bytes = 0
        """The bytes of its unanswered calls, and of the value held for a `GET`."""

        self.calls: deque[TorchCall] = deque()
        """The unanswered calls, in order of arrival."""

        self.paused = False
        """Whether it does not read its replies; set by the host."""

        self._merger = merger
        self._held: deque[TorchCall] = deque()  # calls not issued yet
        self._gathering: TorchCall | None = None  # the last call that gathered, not counting waits
        self._wait: TorchCall | None = None
        self._turn: MergedRequest | None = None
        self._value: tuple[bytes, bytes] | None = None  # a key, and its value from the answer to the wait
        self._large = 0
        self._gone = False

    @property
    def owed_bytes(self) -> int:
        """`bytes` without its wait: a wait may last for ever, and the client must still be read to cancel it."""
        return self.bytes - self._wait.size if self._wait is not None else self.bytes

    @property
    def full(self) -> bool:
        """Whether it has reached a limit on unanswered calls."""
        return len(self.calls) >= MAX_CALLS or self.owed_bytes >= MAX_CALL_BYTES

    @property
    def has_room_again(self) -> bool:
        """Whether it may make calls again after it was full."""
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
        """Make a call while no other is unanswered; return the value if the answer to the last wait included it.

        The fast path of `ask`, for nearly all calls: PyTorch's client makes one call at a time.
        """
        if self._turn is None:
            value, kind = self._value, op.__class__
            if value is None:
                if kind in _AT_ONCE:
                    call = TorchCall(self, op, size)
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
        """Make a call, or hold it back."""
        call = TorchCall(self, op, size)
        self.calls.append(call)
        self.bytes += size
        if self._held or self._must_hold(call, self.paused):
            self._held.append(call)
        else:
            self._issue(call)

    def issue_held(self) -> None:
        """Issue the calls that were held back, as far as possible."""
        while self._held and not self._must_hold(self._held[0], self.paused):
            self._issue(self._held.popleft())

    def answered(self, call: TorchCall) -> None:
        """Process the answer to a wait: note its value or its turn."""
        if call is not self._wait:
            return
        self._wait = None
        if call.answer.__class__ is bytes:
            self._value = (call.op.key, call.answer)
            self.bytes += len(call.answer)
        elif call.answer is True and call.op.__class__ is ops.WaitOrTurn:
            self._turn = call.request

    def next_reply(self) -> TorchCall | None:
        """Remove and return the call whose reply is next; None if its answer is not known yet."""
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
            if not call.cancelled:
                return call
        return None

    def end(self) -> None:
        """Release everything that the disconnected client holds, and issue its remaining writes."""
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
        self.issue_held()

    # Internal

    def _must_hold(self, call: TorchCall, paused: bool) -> bool:
        if self._gathering is not None:
            if self._gathering.gathers:
                return True
            self._gathering = None
        return (paused or self._large >= MAX_LARGE) and call.op.__class__ in _LARGE and not self._gone

    def _issue(self, call: TorchCall) -> None:
        """Answer a call here, or pass it to the merger."""
        op, kind = call.op, call.op.__class__
        value = self._take_value()
        if self._turn is not None and kind is not ops.TurnPop:
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
                self._merger.queue_now(self._wait)
            self._ask(call)

    def _ask(self, call: TorchCall) -> None:
        op, kind = call.op, call.op.__class__
        if kind in WAITS:
            self._wait = call
            if kind is ops.WaitOrTurn:
                op.limit = VALUE_BYTES
            self._merger.ask(call)
        elif kind is ops.TurnPop:
            self._large += 1
            self._merger.pop(call, self._turn or self._coming_turn())
            self._turn = None
        elif kind is ops.Ping:
            self._merger.ping(call)
        else:
            if kind not in _PLAIN:
                self._large += 1
            if self._merger.ask(call):
                self._gathering = call

    def _take_value(self) -> tuple[bytes, bytes] | None:
        """Return and forget the value from the answer to a wait; it is held for one call only."""
        value, self._value = self._value, None
        if value is not None:
            self.bytes -= len(value[1])
        return value

    def _coming_turn(self) -> MergedRequest | None:
        """Return the request whose answer may give this client a turn."""
        request = self._wait.request if self._wait is not None and isinstance(self._wait.op, ops.WaitOrTurn) else None
        return request if request is not None and request.calls[0] is self._wait else None

    def _stop_waiting(self, wait: TorchCall) -> None:
        """Cancel a wait, which gets no reply."""
        self._wait = None
        wait.done = wait.cancelled = True
        self._merger.leave(wait)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._merger.drop(turn)

    def _give_up(self, call: TorchCall) -> None:
        """Abandon a call of a disconnected client; an item taken for it but not delivered returns to its queue."""
        if not call.done:
            self._merger.leave(call)
        elif isinstance(call.op, ops.TurnPop) and call.request is not None:
            self._merger.drop(call.request)


def _writes(op: ops.Op) -> bool:
    """Return whether an operation takes effect even if its client has disconnected."""
    return op.changes and op.__class__ not in _OF_CLIENT
