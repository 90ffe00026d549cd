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
from rallypoint.relay.requests import Asker, Call, Request, Stage

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


class _Lane:
    """Equal requests: the one that is queued or under way, and those that gather behind it."""

    __slots__ = ("current", "gathering", "key")

    def __init__(self, key: Hashable, current: Request) -> None:
        self.key = key
        self.current = current
        self.gathering: Request | None = None


class Merger:
    """The queue of requests of one session."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._position = 0
        self._lanes: dict[Hashable, _Lane] = {}
        self._queues: dict[bytes, None] = {}  # keys that are known to be queues
        self.released: list[Asker] = []
        """Clients whose call was queued after it had gathered: the host calls `go_on` of each."""

        self.asked = self.sent = 0
        """How many calls there were, and how many requests came of them."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    # What clients call

    def ask(self, call: Call) -> None:
        """Queue a call, or let it join or gather."""
        self.asked += 1
        key = self._merge_key(call.op)
        if key is None:
            self._append(Request(call.op, call))
            return
        lane = self._lanes.get(key)
        if lane is None:
            self._begin(key, Request(call.op, call))
        elif lane.current.stage is Stage.SENT:
            if lane.gathering is None:
                lane.gathering = Request(call.op, call)
                lane.gathering.lane, lane.gathering.stage = lane, Stage.GATHERING
            else:
                lane.gathering.add(call)
        elif call.asker.position <= lane.current.position:
            lane.current.add(call)
            call.asker.position = lane.current.position
        else:  # its client has asked something since, which must come before
            self._append(Request(call.op, call))

    def draw(self, call: Call, turn: Request | None) -> None:
        """Queue a `Draw`, by right of the turn that a wait was answered with or may be."""
        self.asked += 1
        request = Request(call.op, call)
        request.turn = turn
        self._append(request)

    def ping(self, call: Call) -> None:
        """Queue a `Ping`, whose own number is the client's."""
        self.asked += 1
        self._append(Request(ops.Ping(0), call))

    def hurry(self, call: Call) -> None:
        """Queue a wait that gathers, for its client asks something else meanwhile, which may be what it waits for."""
        if call.gathers:
            self._remove(call)
            self._append(Request(call.op, call))

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
        drop = Request(ops.Drop(0, 0))
        drop.target = request
        self._append(drop)
        self._free(request)

    # What the session calls

    def take(self, number: int) -> Request | None:
        """Return the next request to send, which is under way then, by that number; None where there is none."""
        while self._queue:
            request = self._queue.popleft()
            if request.stage is not Stage.QUEUED:
                continue
            request.stage, request.number = Stage.SENT, number
            op = request.op
            if isinstance(op, ops.Add) and len(request.calls) > 1:
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
        request.stage = Stage.ENDED
        calls, op = request.calls, request.op
        request.calls = []  # no cycles for the garbage collector to find
        if isinstance(op, ops.Await):
            if answer is True:
                calls = self._split(op.key, calls)
            else:
                self._queues.pop(op.key, None)
        self._free(request)
        for call in calls:
            call.done, call.answer = True, answer
        if isinstance(op, ops.Add) and len(calls) > 1 and not isinstance(answer, Exception):
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

    def _append(self, request: Request) -> None:
        self._position += 1
        request.position = self._position
        request.stage = Stage.QUEUED
        for call in request.calls:
            call.asker.position = self._position
        self._queue.append(request)

    def _begin(self, key: Hashable, request: Request) -> None:
        request.lane = self._lanes[key] = _Lane(key, request)
        self._append(request)

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
        gathered = request.stage is Stage.GATHERING
        request.stage = Stage.ENDED
        if gathered and request.lane is not None:
            request.lane.gathering = None
        elif request.lane is not None:
            self._free(request)

    def _free(self, request: Request) -> None:
        """After a request has ended: queue what gathered behind it."""
        lane, request.lane = request.lane, None
        if lane is None or lane.current is not request:
            return
        del self._lanes[lane.key]
        gathered = lane.gathering
        if gathered is None:
            return
        self.released += [call.asker for call in gathered.calls]
        op = gathered.op
        if isinstance(op, ops.Await) and op.key in self._queues:
            for call in gathered.calls:
                self._append(Request(call.op, call))
        else:
            self._begin(lane.key, gathered)

    def _split(self, key: bytes, calls: list[Call]) -> list[Call]:
        """Give a turn to the first of those who waited, and let each of the others ask for itself."""
        self._queues[key] = None
        if len(self._queues) > KNOWN_QUEUES:
            del self._queues[next(iter(self._queues))]
        for call in calls[1:]:
            self._append(Request(call.op, call))
        return calls[:1]


def _wrap(number: int) -> int:
    """Return a number as 64 bits have it, as the engine counts."""
    return number if -_INT64 <= number < _INT64 else (number + _INT64) % (2 * _INT64) - _INT64
