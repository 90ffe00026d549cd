"""The requests of a session that many PyTorch clients share: merged, numbered, sent in order, answered. Pure.

`relay/torch/merging.py` chooses the requests; `protocol/native_client.py` numbers them and repeats them after a lost
connection. Requests of a client that has disconnected are abandoned with a `Drop`. A queue item is confirmed when it is
handed to its client's connection, not when it arrives: a confirmed item can no longer be returned to its queue.

At most `MAX_IN_FLIGHT` requests are unanswered, not counting waits. Others are queued here, where they can be merged.

Rejected: a share of that limit for each client. The server answers in order, so the queue is short and fair.
"""

from __future__ import annotations

from rallypoint.core import ops
from rallypoint.core.records import PopResult, ReplyStatus
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native_client import ClientProtocol, Reply
from rallypoint.protocol.reported_errors import error_of
from rallypoint.relay.torch.client import TorchClient
from rallypoint.relay.torch.merging import WAITS, Merger
from rallypoint.relay.torch.requests import MergedRequest

__all__ = ["MAX_IN_FLIGHT", "SharedSession"]

MAX_IN_FLIGHT = 4096
"""Maximum number of unanswered requests, not counting waits; the server keeps the answers of twice as many."""


class SharedSession:
    """The unanswered requests of one session."""

    def __init__(self, core: ClientProtocol, peer: str) -> None:
        self.core = core
        self.merger = Merger()
        self._peer = peer
        self._in_flight: dict[int, MergedRequest] = {}
        self._undelivered: dict[MergedRequest, Reply] = {}  # queue items not yet handed to a client
        self._counted = 0  # number of requests in flight, not counting waits
        self.repeated_to = 0
        """Requests with lower numbers were also sent on an earlier channel."""

    def repeat(self, now: float) -> bytes:
        """Return all unanswered requests, to send again after the session was resumed."""
        self.repeated_to = self.core.number
        return self.core.repeat(now)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send and no client to resume."""
        merger = self.merger
        return not (merger.queue or merger.released or self.core.has_unconfirmed)

    def send(self, room: int) -> bytes:
        """Return the next requests, about `room` bytes of them, and confirmations."""
        merger, core = self.merger, self.core
        if merger.released:
            self.release()
        parts: list[bytes] = []
        while merger.queue and room > 0 and self._counted < MAX_IN_FLIGHT:
            request = merger.take(core.number)
            if request is None:
                break
            if request.target is not None:
                self._forget(request.target)
            self._in_flight[request.number] = request
            if request.op.__class__ not in WAITS:
                self._counted += 1
            parts.append(core.ask(request.op))
            room -= len(parts[-1])
        if core.has_unconfirmed:
            parts.append(core.confirm())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """Resume the clients whose gathering calls have been queued."""
        merger = self.merger
        while merger.released:
            released, merger.released = merger.released, []
            for owner in released:
                owner.issue_held()

    def take(self, reply: Reply) -> list[TorchClient]:
        """Process an answer; return the clients that may have a reply now. Raises BadMessage."""
        number, answer = reply.number, reply.result
        request = self._in_flight.get(number)
        if request is None:  # already answered, or abandoned
            return []
        kind = request.op.__class__
        if reply.status != ReplyStatus.OK:
            answer = error_of(reply, self._peer)
        elif kind is ops.TurnPop:
            answer = _pop_result(reply)
        self._end(request)
        if kind is ops.TurnPop:
            self._undelivered[request] = reply
        else:
            self.core.forget(number)  # only queue items need a confirmation
        if kind is ops.Wait and number < self.repeated_to:
            self.merger.drop(request)  # if the answer and the repetition crossed, it waits again at the server
        calls = self.merger.answer(request, answer)
        if kind in WAITS:
            for call in calls:
                call.owner.answered(call)
        return [call.owner for call in calls]

    def delivered(self, request: MergedRequest | None) -> None:
        """Confirm a queue item that was handed to its client's connection."""
        reply = self._undelivered.pop(request, None) if request is not None else None
        if reply is not None:
            self.core.settle(reply)

    def _forget(self, request: MergedRequest) -> None:
        """Expect no answer to a request that is about to be dropped."""
        self._undelivered.pop(request, None)
        self.core.forget(request.number)
        if request.number in self._in_flight:
            self._end(request)

    def _end(self, request: MergedRequest) -> None:
        del self._in_flight[request.number]
        if request.op.__class__ not in WAITS:
            self._counted -= 1


def _pop_result(reply: Reply) -> PopResult:
    try:
        return PopResult(*reply.result)
    except TypeError:
        raise BadMessage(f"not an item of a queue: {reply.result!r:.100}") from None
