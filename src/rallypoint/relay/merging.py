"""What PyTorch's clients of a relay ask, merged into fewer requests to the server. Pure: no I/O, no clock.

A `Call` is what one client asked, a `Request` what the server is asked for one call or for many. Requests are sent in
the order in which they were queued, so what one client asked is carried out in its order.

- A read joins an equal one that is queued and not sent. It never joins one that is under way, whose answer may be older
  than the call: equal newcomers gather, and one fresh request is queued for all of them when the first is answered.
- Additions to one key do likewise, and their amounts are summed. Each client gets the count that it would have seen if
  the additions had been carried out one after the other. Only amounts of one sign are summed, so that the counts in
  between lie on the way: a barrier that waits for one of them is passed by the sum, too.
- A wait for a queue may be answered by a turn, which only one client can have: the first of its callers. The others ask
  again, each for itself, and so do all who wait for that queue from then on.
- Everything else is sent as it came.

A client's call must not overtake its own earlier ones: it joins only what is queued behind them, and while one of its
calls gathers, the client holds back the next (`relay/torch_client.py`).

Rejected: to let a newcomer join a wait that is under way. The key may be deleted while the answer is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from rallypoint.core import ops
from rallypoint.relay.requests import ENDED, GATHERING, QUEUED, SENT, Asker, Call, Request

__all__ = ["WAITS", "Merger"]

MERGED_KEYS = 4096
"""Up to how many keys a call is compared with others: to hash them costs a little for each."""

KNOWN_QUEUES = 4096
"""How many names of queues are remembered."""

WAITS = frozenset((ops.Await, ops.Wait, ops.Arrive))
"""Operations that wait until something comes true."""

_ONE_KEY = frozenset((ops.Await, ops.Peek, ops.QueueLen))
_MANY_KEYS = frozenset((ops.Check, ops.Wait, ops.MultiPeek))
_OF_PREFIX = frozenset((ops.Count, ops.List))
_GIVEN_UP = WAITS | {ops.Draw}
"""Requests that leave something at the server, which has to be told when nobody wants the answer any more."""

_INT64 = 1 << 63


class Merger:
    """The queue of requests of one session."""

    def __init__(self) -> None:
        self.queue: deque[Request] = deque()
        """What is to be sent; `take` gives it out."""

        self._position = 0
        self._lanes: dict[Hashable, Request] = {}  # by key, that which is queued or under way
        self._queues: dict[bytes, None] = {}  # keys that are known to be queues
        self.released: list[Asker] = []
        """Clients whose call was queued after it had gathered: the host calls `go_on` of each."""

        self.asked = self.sent = 0
        """How many calls there were, and how many requests came of them."""

    def __bool__(self) -> bool:
        return bool(self.queue)

    # What clients call

    def ask(self, call: Call) -> bool:
        """Queue a call, or let it join or gather; return whether it gathers."""
        self.asked += 1
        key = self._merge_key(call.op)
        current = self._lanes.get(key)
        if current is None:
            request = self._queue_up(call, key)
            if key is not None:
                self._lanes[key] = request
        elif current.stage is SENT:
            if current.behind is None:
                current.behind = call.request = Request(call.op, [call], key, 0, GATHERING)
            else:
                current.behind.add(call)
            return True
        elif call.asker.position <= current.position:
            current.add(call)
            call.asker.position = current.position
        else:  # its client has asked something since, which must come before
            self._queue_up(call)
        return False

    def draw(self, call: Call, turn: Request | None) -> None:
        """Queue a `Draw`, by right of the turn that a wait was answered with or may be."""
        self.asked += 1
        self._queue_up(call).turn = turn

    def ping(self, call: Call) -> None:
        """Queue a `Ping`, whose own number is the client's."""
        self.asked += 1
        self._queue_up(call).op = ops.Ping(0)

    def hurry(self, call: Call) -> None:
        """Queue a wait that gathers, for its client asks something else meanwhile, which may be what it waits for."""
        if call.gathers:
            self._remove(call)
            self._queue_up(call)

    def leave(self, call: Call) -> None:
        """Forget a call; what is under way for it alone is given up."""
        request = call.request
        if request is None or call not in request.calls:
            return
        self._remove(call)
        if not request.calls and request.op.__class__ in _GIVEN_UP:
            self.drop(request)
            if request.turn is not None:  # also if the `Draw` never arrives: it is not repeated
                self.drop(request.turn)

    def drop(self, request: Request) -> None:
        """Give up what a request has at the server: a wait, an arrival, a turn, or an item."""
        if request.dropped or not request.number:
            return
        request.dropped = True
        self._append(Request(ops.Drop(0, 0), [], target=request))
        self._free(request)

    # What the session calls

    def take(self, number: int) -> Request | None:
        """Return the next request to send, which is under way then, by that number; None where there is none."""
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

    def answer(self, request: Request, answer: Any) -> list[Call]:
        """Take an answer, a result or an error; return the calls that are done by it."""
        request.stage = ENDED
        calls, request.calls = request.calls, []  # no cycles for the garbage collector to find
        kind = request.op.__class__
        if kind is ops.Await:
            calls = self._awaited(request.op.key, calls, answer)
        if request.behind is not None:
            self._free(request)
        elif self._lanes.get(request.key) is request:
            del self._lanes[request.key]
        for call in calls:
            call.done, call.answer = True, answer
        if kind is ops.Add and len(calls) > 1 and not isinstance(answer, Exception):
            behind = 0
            for call in reversed(calls):
                call.answer = _wrap(answer - behind)
                behind += call.op.amount
        return calls

    # Inside

    def _merge_key(self, op: Any) -> Hashable | None:
        """Return what equal operations have in common; None for those that are never merged."""
        kind = op.__class__
        if kind in _ONE_KEY:
            return None if kind is ops.Await and op.key in self._queues else (kind, op.key)
        if kind is ops.Add:
            return (kind, op.key, op.amount < 0)
        if kind in _MANY_KEYS:
            return (kind, *op.keys) if len(op.keys) <= MERGED_KEYS else None
        return (kind, op.prefix) if kind in _OF_PREFIX else None

    def _queue_up(self, call: Call, key: Hashable = None) -> Request:
        """Queue a request for one call, and return it."""
        self._position = call.asker.position = position = self._position + 1
        call.request = request = Request(call.op, [call], key, position)
        self.queue.append(request)
        return request

    def _append(self, request: Request) -> None:
        self._position += 1
        request.position = self._position
        request.stage = QUEUED
        for call in request.calls:
            call.asker.position = self._position
        self.queue.append(request)

    def _remove(self, call: Call) -> None:
        """Take a call off its request, and a request that is not sent and has no more calls off the queue."""
        request, call.request = call.request, None
        if request is None:
            return
        request.calls.remove(call)
        if request.sent:
            return
        if request.calls:
            if request.op is call.op:  # which another request may be made of
                request.op = request.calls[0].op
            return
        gathered = request.stage is GATHERING
        request.stage = ENDED
        if gathered:
            self._lanes[request.key].behind = None
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        """After a request has ended: queue what gathered behind it."""
        key = request.key
        if key is None or self._lanes.get(key) is not request:
            return
        del self._lanes[key]
        gathered, request.behind = request.behind, None
        if gathered is None:
            return
        self.released += [call.asker for call in gathered.calls]
        op = gathered.op
        if op.__class__ is ops.Await and op.key in self._queues:
            for call in gathered.calls:
                self._queue_up(call)
        else:
            self._lanes[key] = gathered
            self._append(gathered)

    def _awaited(self, key: bytes, calls: list[Call], answer: Any) -> list[Call]:
        """Give a turn to the first of those who waited, and let each of the others ask for itself."""
        if answer is not True:
            self._queues.pop(key, None)
            return calls
        self._queues[key] = None
        if len(self._queues) > KNOWN_QUEUES:
            del self._queues[next(iter(self._queues))]
        for call in calls[1:]:
            self._queue_up(call)
        return calls[:1]


def _wrap(number: int) -> int:
    """Return a number as 64 bits have it, as the engine counts."""
    return number if -_INT64 <= number < _INT64 else (number + _INT64) % (2 * _INT64) - _INT64
