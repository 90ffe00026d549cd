"""The requests of a session that many PyTorch clients share: merged, numbered, sent in order, answered. Pure.

`relay/merging.py` says what is asked, `protocol/client.py` numbers it and knows what to repeat after a cut. What a
client that has gone no longer wants is given up by a `Drop`. An item of a queue is settled when it is handed to its
client's connection, and not when it arrives: the confirmation would make it this session's for good, and it may have to
go back.

At most `MAX_UNDER_WAY` requests are unanswered, waits apart. The rest is queued here, where it can still be merged.

Rejected: to let each client have its share of them. The server answers in order, so the queue is short and fair.
"""

from __future__ import annotations

from rallypoint.core import ops
from rallypoint.core.records import Drawn, Status
from rallypoint.protocol import BadMessage
from rallypoint.protocol.client import Client, Reply
from rallypoint.protocol.reported_errors import error_of
from rallypoint.relay.merging import WAITS, Merger
from rallypoint.relay.requests import Request
from rallypoint.relay.torch_client import TorchClient

__all__ = ["MAX_UNDER_WAY", "SharedSession"]

MAX_UNDER_WAY = 4096
"""How many requests that do not wait may be unanswered; the server keeps the answers of twice as many."""


class SharedSession:
    """What was asked in one session, and is not answered yet."""

    def __init__(self, core: Client, peer: str) -> None:
        self.core = core
        self.merger = Merger()
        self._peer = peer
        self._under_way: dict[int, Request] = {}
        self._undelivered: dict[Request, Reply] = {}  # items that no client has got yet
        self._owed = 0  # how many answers are due: those of waits are not
        self.repeated_to = 0
        """Requests of lower numbers were sent by an earlier channel, too."""

    def repeat(self, now: float) -> bytes:
        """Return, after a resumption, all requests that were not answered."""
        self.repeated_to = self.core.number
        return self.core.repeat(now)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send, and nobody to let go on."""
        merger = self.merger
        return not (merger.queue or merger.released or self.core.owes)

    def send(self, room: int) -> bytes:
        """Return the requests to send next, about as many bytes of them as there is room for, and confirmations."""
        merger, core = self.merger, self.core
        if merger.released:
            self.release()
        parts: list[bytes] = []
        while merger.queue and room > 0 and self._owed < MAX_UNDER_WAY:
            request = merger.take(core.number)
            if request is None:
                break
            if request.target is not None:
                self._forget(request.target)
            self._under_way[request.number] = request
            if request.op.__class__ not in WAITS:
                self._owed += 1
            parts.append(core.ask(request.op))
            room -= len(parts[-1])
        if core.owes:
            parts.append(core.confirm())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """Let clients go on whose calls have gathered."""
        merger = self.merger
        while merger.released:
            released, merger.released = merger.released, []
            for asker in released:
                asker.go_on()

    def take(self, reply: Reply) -> list[TorchClient]:
        """Take an answer; return the clients who may have a reply by it. Raises BadMessage."""
        number, answer = reply.number, reply.result
        request = self._under_way.get(number)
        if request is None:  # it came before, or was given up
            return []
        kind = request.op.__class__
        if reply.status != Status.OK:
            answer = error_of(reply, self._peer)
        elif kind is ops.Draw:
            answer = _drawn(reply)
        self._end(request)
        if kind is ops.Draw:
            self._undelivered[request] = reply
        else:
            self.core.forget(number)  # as good as settled, for it is no item of a queue
        if kind is ops.Wait and number < self.repeated_to:
            self.merger.drop(request)  # the answer and the repetition may have crossed: then it waits again
        calls = self.merger.answer(request, answer)
        if kind in WAITS:
            for call in calls:
                call.asker.answered(call)
        return [call.asker for call in calls]

    def delivered(self, request: Request | None) -> None:
        """Note that an item was handed to its client's connection, and is the client's now."""
        reply = self._undelivered.pop(request, None) if request is not None else None
        if reply is not None:
            self.core.settle(reply)

    def _forget(self, request: Request) -> None:
        """Expect no answer to a request that is about to be given up."""
        self._undelivered.pop(request, None)
        self.core.forget(request.number)
        if request.number in self._under_way:
            self._end(request)

    def _end(self, request: Request) -> None:
        del self._under_way[request.number]
        if request.op.__class__ not in WAITS:
            self._owed -= 1


def _drawn(reply: Reply) -> Drawn:
    try:
        return Drawn(*reply.result)
    except TypeError:
        raise BadMessage(f"not an item of a queue: {reply.result!r:.100}") from None
