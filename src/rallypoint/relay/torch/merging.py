"""Merges the calls of a relay's PyTorch clients into fewer requests to the server. Pure: no I/O, no clock.

A `TorchCall` is one client's call; a `MergedRequest` is sent to the server for one call or for many. Requests are sent
in the order in which they were queued, so the calls of one client are executed in order.

- A read joins an equal request that is queued but not sent. It never joins one in flight, whose answer may be older
  than the call: equal new calls gather, and one new request is queued for all of them when the first is answered.
- Additions to one key are merged likewise, and their amounts are summed. Each client gets the count that it would have
  seen if the additions had been executed one after the other. Only amounts of the same sign are summed, so that the
  sum passes every count in between: a barrier that waits for one of them still opens.
- A wait for a queue may be answered with a turn, which only one client can have: the first of its callers. The others
  are queued again, each with a request of its own, and so are all later waits for that queue.
- All other calls are sent unchanged.

A call must not overtake earlier calls of its client: it joins only requests that are queued after them, and while one
of its calls gathers, the client holds back the next (`relay/torch/client.py`).

Rejected: join a wait in flight. The key may be deleted while the answer is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from rallypoint.core import ops
from rallypoint.relay.torch.requests import ENDED, GATHERING, QUEUED, SENT, CallOwner, MergedRequest, TorchCall

__all__ = ["WAITS", "Merger"]

MAX_MERGED_KEYS = 4096
"""Calls with more keys are not merged: each key costs a hash."""

MAX_KNOWN_QUEUES = 4096
"""Maximum number of remembered queue names."""

WAITS = frozenset((ops.WaitOrTurn, ops.Wait, ops.Arrive))
"""Operations that wait for a condition."""

_ONE_KEY = frozenset((ops.WaitOrTurn, ops.Peek, ops.QueueLen))
_MANY_KEYS = frozenset((ops.Check, ops.Wait, ops.MultiPeek))
_OF_PREFIX = frozenset((ops.Count, ops.List))
_HELD_AT_SERVER = WAITS | {ops.TurnPop}
"""Requests with state at the server, which needs a `Drop` when no client wants the answer any more."""

_INT64 = 1 << 63


class Merger:
    """The queue of requests of one session."""

    def __init__(self) -> None:
        self.queue: deque[MergedRequest] = deque()
        """Requests to send; `take` removes them."""

        self._position = 0
        self._open_requests: dict[Hashable, MergedRequest] = {}  # by key: queued or in flight
        self._queues: dict[bytes, None] = {}  # keys that are known to be queues
        self.released: list[CallOwner] = []
        """Clients whose gathering call has been queued; the host calls `issue_held` of each."""

        self.asked = self.sent = 0
        """Number of calls made, and of requests sent for them."""

    def __bool__(self) -> bool:
        return bool(self.queue)

    # Called by clients

    def ask(self, call: TorchCall) -> bool:
        """Queue a call, or let it join or gather; return whether it gathers."""
        self.asked += 1
        key = self._merge_key(call.op)
        current = self._open_requests.get(key)
        if current is None:
            request = self._queue_up(call, key)
            if key is not None:
                self._open_requests[key] = request
        elif current.stage is SENT:
            if current.successor is None:
                current.successor = call.request = MergedRequest(call.op, [call], key, 0, GATHERING)
            else:
                current.successor.add(call)
            return True
        elif call.owner.position <= current.position:
            current.add(call)
            call.owner.position = current.position
        else:  # an earlier call of its client is queued after `current`
            self._queue_up(call)
        return False

    def pop(self, call: TorchCall, turn: MergedRequest | None) -> None:
        """Queue a `TurnPop`, which uses the turn that is, or may become, the answer to a wait."""
        self.asked += 1
        self._queue_up(call).turn = turn

    def ping(self, call: TorchCall) -> None:
        """Queue a `Ping` without the client's own number."""
        self.asked += 1
        self._queue_up(call).op = ops.Ping(0)

    def queue_now(self, call: TorchCall) -> None:
        """Queue a gathering wait now: the next call of its client may fulfil what it waits for."""
        if call.gathers:
            self._remove(call)
            self._queue_up(call)

    def leave(self, call: TorchCall) -> None:
        """Forget a call; abandon its request if no other call needs it."""
        request = call.request
        if request is None or call not in request.calls:
            return
        self._remove(call)
        if not request.calls and request.op.__class__ in _HELD_AT_SERVER:
            self.drop(request)
            if request.turn is not None:  # even if the `TurnPop`, which is not repeated, never arrives
                self.drop(request.turn)

    def drop(self, request: MergedRequest) -> None:
        """Release a request's state at the server: a wait, an arrival, a turn, or an item."""
        if request.dropped or not request.number:
            return
        request.dropped = True
        self._append(MergedRequest(ops.Drop(0, 0), [], target=request))
        self._release(request)

    # Called by the session

    def take(self, number: int) -> MergedRequest | None:
        """Mark the next request as sent under `number` and return it; None if there is none."""
        while self.queue:
            request = self.queue.popleft()
            if request.stage is not QUEUED:
                continue
            request.stage, request.number = SENT, number
            op = request.op
            if len(request.calls) > 1:
                if op.__class__ is ops.Add:
                    request.op = ops.Add(0, op.key, _wrap(sum(call.op.amount for call in request.calls)))
            elif request.target is not None:
                op.target = request.target.number
            elif request.turn is not None:
                op.turn = request.turn.number
            self.sent += 1
            return request
        return None

    def answer(self, request: MergedRequest, answer: Any) -> list[TorchCall]:
        """Process an answer, a result or an error; return the calls that it completes."""
        request.stage = ENDED
        calls, request.calls = request.calls, []  # no cycles for the garbage collector to find
        kind = request.op.__class__
        if kind is ops.WaitOrTurn:
            calls = self._awaited(request.op.key, calls, answer)
        if request.successor is not None:
            self._release(request)
        elif self._open_requests.get(request.key) is request:
            del self._open_requests[request.key]
        for call in calls:
            call.done, call.answer = True, answer
        if kind is ops.Add and len(calls) > 1 and not isinstance(answer, Exception):
            later = 0
            for call in reversed(calls):
                call.answer = _wrap(answer - later)
                later += call.op.amount
        return calls

    # Internal

    def _merge_key(self, op: Any) -> Hashable | None:
        """Return a key that is equal for operations that can be merged; None if never."""
        kind = op.__class__
        if kind in _ONE_KEY:
            return None if kind is ops.WaitOrTurn and op.key in self._queues else (kind, op.key)
        if kind is ops.Add:
            return (kind, op.key, op.amount < 0)
        if kind in _MANY_KEYS:
            return (kind, *op.keys) if len(op.keys) <= MAX_MERGED_KEYS else None
        return (kind, op.prefix) if kind in _OF_PREFIX else None

    def _queue_up(self, call: TorchCall, key: Hashable = None) -> MergedRequest:
        """Queue a request for one call, and return it."""
        self._position = call.owner.position = position = self._position + 1
        call.request = request = MergedRequest(call.op, [call], key, position)
        self.queue.append(request)
        return request

    def _append(self, request: MergedRequest) -> None:
        self._position += 1
        request.position = self._position
        request.stage = QUEUED
        for call in request.calls:
            call.owner.position = self._position
        self.queue.append(request)

    def _remove(self, call: TorchCall) -> None:
        """Remove a call from its request; cancel the request if it has no more calls and was not sent."""
        request, call.request = call.request, None
        if request is None:
            return
        request.calls.remove(call)
        if request.sent:
            return
        if request.calls:
            if request.op is call.op:  # the call may get another request, with this op
                request.op = request.calls[0].op
            return
        gathered = request.stage is GATHERING
        request.stage = ENDED
        if gathered:
            self._open_requests[request.key].successor = None
        else:
            self._release(request)

    def _release(self, request: MergedRequest) -> None:
        """Queue the calls that gathered while a request, which has ended, was in flight."""
        key = request.key
        if key is None or self._open_requests.get(key) is not request:
            return
        del self._open_requests[key]
        gathered, request.successor = request.successor, None
        if gathered is None:
            return
        self.released += [call.owner for call in gathered.calls]
        op = gathered.op
        if op.__class__ is ops.WaitOrTurn and op.key in self._queues:
            for call in gathered.calls:
                self._queue_up(call)
        else:
            self._open_requests[key] = gathered
            self._append(gathered)

    def _awaited(self, key: bytes, calls: list[TorchCall], answer: Any) -> list[TorchCall]:
        """Return the calls that a wait's answer completes: a turn goes to the first, the others are queued singly."""
        if answer is not True:
            self._queues.pop(key, None)
            return calls
        self._queues[key] = None
        if len(self._queues) > MAX_KNOWN_QUEUES:
            del self._queues[next(iter(self._queues))]
        for call in calls[1:]:
            self._queue_up(call)
        return calls[:1]


def _wrap(number: int) -> int:
    """Return a number wrapped to signed 64 bits, as the engine counts."""
    return number if -_INT64 <= number < _INT64 else (number + _INT64) % (2 * _INT64) - _INT64
