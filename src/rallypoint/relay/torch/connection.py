"""The relay's end of PyTorch's protocol on one connection: decodes calls, encodes replies.

`relay/torch/client.py` keeps the order of both, and `relay/torch/session.py` sends the calls. The relay does not read
from a client that has reached its limit of unanswered calls until replies have been sent. The protocol has no errors: a
failed call closes the connection, with the reason in the log, as at a server.

Rejected: answer a PING before earlier writes of its connection are applied. Clients use PING to confirm their writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.core import ops
from rallypoint.errors import RallypointError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import ENCODE_ANSWER, Decoder, encode_list_head
from rallypoint.relay.torch.requests import TorchCall
from rallypoint.relay.torch.session import TorchSession
from rallypoint.server.connections.c10d_connection import ENCODER
from rallypoint.server.connections.limits import COUNTED_BYTES
from rallypoint.server.connections.outgoing import Part
from rallypoint.server.connections.sliced import NO_SOURCE, encode_in_slices, is_long

if TYPE_CHECKING:
    from rallypoint.server.connections.connection import Connection

__all__ = ["TorchRelayConnection"]

_SHORT = frozenset((int, bool, bytes, type(None)))
"""The types of nearly all answers, all but errors, lists and queue items."""


class TorchRelayConnection:
    """One PyTorch client's connection; `limit` is the maximum size of a request or reply in bytes."""

    __slots__ = (
        "_client",
        "_connection",
        "_counted",
        "_decoder",
        "_limit",
        "_listing",
        "_rest",
        "_session",
        "_stalled",
    )

    def __init__(self, session: TorchSession, connection: Connection, limit: int) -> None:
        self._session = session
        self._connection = connection
        self._limit = limit
        self._decoder = Decoder(limit)
        self._rest = b""
        self._counted = 0
        self._stalled = False
        self._listing = False  # whether a long list is being encoded
        self._client = session.join(self)

    @property
    def greeted(self) -> bool:
        """Whether the peer has sent the magic number."""
        return self._decoder.greeted

    @property
    def held(self) -> int:
        """Number of bytes held for unanswered requests."""
        return len(self._rest) + self._decoder.held + self._client.bytes

    @property
    def blocked(self) -> bool:
        """Whether requests wait until all replies so far have been sent; then call `receive(b"")`."""
        return self._client.held_back or (bool(self._rest) and not self._stalled)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that this client waits for."""
        return self._client.waits_for[:100]

    def receive(self, data: bytes) -> bytes:
        """Process bytes from the client and return the replies that are ready. BadMessage leaves it unusable."""
        client, session = self._client, self._session
        client.paused = self._connection.paused
        if client.calls or self._rest or session.is_full or not data:
            return self._receive_pipelined(data)
        op, stop = self._decoder.read(data, 0)
        if op is None or stop < len(data):
            if op is not None:
                client.ask(op, stop)
            return self._receive_pipelined(data[stop:])
        value = client.ask_alone(op, stop)  # the common case: a single request
        if value is not None:
            if self._counted:
                self._count()
            return ENCODE_ANSWER[ops.Peek](op, value, self._limit)
        if not session.flushing:
            session.flush_soon()
        if client.bytes > COUNTED_BYTES or self._counted:
            self._count()
        return self._take_replies() if client.calls[0].done else b""

    def end(self) -> None:
        """Release everything of the closed connection."""
        self._session.leave(self._client)
        self._count()

    # Called by the session

    def deliver(self) -> None:
        """Send the replies that are ready. If the connection is closing, `end` returns undelivered items instead."""
        connection = self._connection
        if connection.closing:
            return
        self._client.paused = connection.paused
        try:
            replies = self._take_replies()
        except BadMessage as error:
            connection.drop(str(error))
            return
        if replies:
            connection.send(replies)
        if self._counted:
            self._count()
        if self._stalled and self._client.has_room_again and not self._session.is_full:
            self.read_on()

    def session_lost(self, why: str) -> None:
        """Close the connection, because the outcome of its requests is unknown."""
        if not self._connection.closing:
            self._connection.drop(why)

    def read_on(self) -> None:
        """Resume reading."""
        if self._stalled:
            self._stalled = False
            self._connection.read_on()

    # Internal

    def _at_limit(self) -> bool:
        """Return whether a limit on unanswered calls is reached; if so, stop reading from the connection."""
        if not self._client.full and not self._session.is_full:
            return False
        if self._session.is_full:
            self._session.wait_for_room(self)
        self._stalled = True
        self._connection.stall()
        return True

    def _receive_pipelined(self, data: bytes) -> bytes:
        """Process requests that follow others, as many as the limits allow, and keep the rest."""
        data, self._rest = self._rest + data, b""
        client, read, at = self._client, self._decoder.read, 0
        client.issue_held()
        while at < len(data) and not self._at_limit():
            op, stop = read(data, at)
            if op is not None:
                client.ask(op, stop - at)
            at = stop
        self._rest = data[at:]
        replies = self._take_replies()
        self._session.flush_soon()
        self._count()
        return replies

    def _take_replies(self) -> bytes:
        """Return the next replies in order; a queue item among them now belongs to the client."""
        client = self._client
        call = None if self._listing else client.next_reply()
        if call is None:
            return b""
        reply = self._encode(call)
        if not client.calls:
            return reply
        replies = [reply]
        client.issue_held()
        while not self._listing and (call := client.next_reply()) is not None:
            replies.append(self._encode(call))
            client.issue_held()
        return b"".join(replies)

    def _encode(self, call: TorchCall) -> bytes:
        op, answer = call.op, call.answer
        if answer.__class__ is bytes and is_long(answer):
            self._send_list(op, [answer])
            return b""
        if answer.__class__ in _SHORT:
            return ENCODE_ANSWER[op.__class__](op, answer, self._limit)
        if isinstance(answer, RallypointError):
            raise BadMessage(str(answer))
        if answer.__class__ is list and is_long(answer):
            self._send_list(op, answer)
            return b""
        reply = ENCODE_ANSWER[op.__class__](op, answer, self._limit)
        if op.__class__ is ops.TurnPop:
            self._session.delivered(call.request)
        return reply

    def _send_list(self, op: ops.Op, items: list[bytes]) -> None:
        """Send a long list in slices; later replies wait for its end."""
        self._listing = True

        def done(parts: list[Part], size: int, owned: int) -> None:
            self._listing = False
            if self._connection.closing:
                return
            if size > self._limit:
                self._connection.drop(f"an answer of {size} bytes, the limit is {self._limit}")
                return
            self._connection.send_parts([encode_list_head(op, len(items)), *parts])
            self.deliver()

        encode_in_slices(items, ENCODER, NO_SOURCE, self._limit, lambda size: not self._connection.closing, done)

    def _count(self) -> None:
        more = self._client.owed_bytes - self._counted
        if more:
            self._counted += more
            self._session.count(more)
