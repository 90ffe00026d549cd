"""The relay's end of PyTorch's protocol on one connection: bytes to calls, answers to bytes.

The order of both is kept by `relay/torch_client.py`, and what becomes of the calls is the session's business
(`relay/torch_session.py`). A client that has asked as much as it may is not read from until answers have come. The
protocol has no errors: a call that fails closes the connection with the reason in the log, as at a server.

Rejected: to answer a PING before earlier writes of its connection are carried out. It is how a client makes sure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.core import ops
from rallypoint.errors import RallypointError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import ENCODE_ANSWER, Decoder, encode_items, encode_list_head
from rallypoint.relay.requests import Call
from rallypoint.relay.torch_session import TorchSession
from rallypoint.server.connection import COUNTED_BYTES
from rallypoint.server.sliced import SLICE_ITEMS, encode_in_slices

if TYPE_CHECKING:
    from rallypoint.server.connection import Connection

__all__ = ["TorchRelayConnection"]

_SHORT = frozenset((int, bool, bytes, type(None)))
"""What nearly all answers are: neither an error, nor a list, nor an item of a queue."""


class TorchRelayConnection:
    """One PyTorch client's connection; `limit` bounds one request and one answer in bytes."""

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
        """Whether the peer has said the magic number."""
        return self._decoder.greeted

    @property
    def held(self) -> int:
        """How many bytes of requests are held that were not answered yet."""
        return len(self._rest) + self._decoder.held + self._client.bytes

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return self._client.held_back or (bool(self._rest) and not self._stalled)

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that this client waits for."""
        return self._client.waits_for[:100]

    def receive(self, data: bytes) -> bytes:
        """Take what came, and return the answers that are known. Raises BadMessage, and is invalid after that."""
        client, session = self._client, self._session
        client.paused = self._connection.paused
        if client.calls or self._rest or session.crowded or not data:
            return self._receive_behind(data)
        op, stop = self._decoder.read(data, 0)
        if op is None or stop < len(data):
            if op is not None:
                client.ask(op, stop)
            return self._receive_behind(data[stop:])
        value = client.ask_alone(op, stop)  # as nearly always: one request, and it has asked nothing else
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
        """Note that the connection is gone."""
        self._session.leave(self._client)
        self._count()

    # What the session calls

    def deliver(self) -> None:
        """Send the replies that are ready, unless the connection is closing: then `end` gives back what it can."""
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
        if self._stalled and self._client.eased and not self._session.crowded:
            self.read_on()

    def session_lost(self, why: str) -> None:
        """Close the connection, for nobody knows what became of its requests."""
        if not self._connection.closing:
            self._connection.drop(why)

    def read_on(self) -> None:
        """Read again, for there is room."""
        if self._stalled:
            self._stalled = False
            self._connection.read_on()

    # Inside

    def _choked(self) -> bool:
        """Return whether no more may be asked for now; then the connection is not read from."""
        if not self._client.full and not self._session.crowded:
            return False
        if self._session.crowded:
            self._session.wait_for_room(self)
        self._stalled = True
        self._connection.stall()
        return True

    def _receive_behind(self, data: bytes) -> bytes:
        """Take what came behind other requests: as many as the client may ask now; keep the rest."""
        data, self._rest = self._rest + data, b""
        client, read, at = self._client, self._decoder.read, 0
        client.go_on()
        while at < len(data) and not self._choked():
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
        """Return the replies that are next; an item that is among them is the client's now."""
        client = self._client
        call = None if self._listing else client.next_reply()
        if call is None:
            return b""
        reply = self._encode(call)
        if not client.calls:
            return reply
        replies = [reply]
        client.go_on()
        while not self._listing and (call := client.next_reply()) is not None:
            replies.append(self._encode(call))
            client.go_on()
        return b"".join(replies)

    def _encode(self, call: Call) -> bytes:
        op, answer = call.op, call.answer
        if answer.__class__ in _SHORT:
            return ENCODE_ANSWER[op.__class__](op, answer, self._limit)
        if isinstance(answer, RallypointError):
            raise BadMessage(str(answer))
        if answer.__class__ is list and len(answer) > SLICE_ITEMS:
            self._send_list(op, answer)
            return b""
        reply = ENCODE_ANSWER[op.__class__](op, answer, self._limit)
        if op.__class__ is ops.Draw:
            self._session.delivered(call.request)
        return reply

    def _send_list(self, op: ops.Op, items: list[bytes]) -> None:
        """Send a long list a slice at a time; later replies wait behind it."""
        self._listing = True

        def done(parts: list[bytes], size: int) -> None:
            self._listing = False
            if self._connection.closing:
                return
            if size > self._limit:
                self._connection.drop(f"an answer of {size} bytes, the limit is {self._limit}")
                return
            self._connection.send_parts([encode_list_head(op, len(items)), *parts])
            self.deliver()

        encode_in_slices(items, encode_items, self._limit, done)

    def _count(self) -> None:
        more = self._client.owed_bytes - self._counted
        if more:
            self._counted += more
            self._session.count(more)
