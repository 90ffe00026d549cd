"""The server's end of PyTorch's protocol on one connection. The protocol has no errors: what goes wrong ends it.

Requests that change something go through the log where there is one, and run when they are committed; the rest runs at
once, or behind the connection's own changes: replies come in the order of the requests, for they have no numbers.

Better than the reference server, and safe for its clients: waits end only when true, poppers get their turn in the
order they came, a barrier's arrival that gives up is taken back, and multi_set and multi_get are atomic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rallypoint.core import entries, ops
from rallypoint.core.engine import EXECUTE
from rallypoint.core.records import LATER, Waiter
from rallypoint.core.session import Visitor
from rallypoint.core.state import Namespace
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import ENCODE_ANSWER, WAITED, Decoder, encode_items, encode_list_head
from rallypoint.server.native_connection import MAX_QUEUED_BYTES, QUEUED_BYTES, REPLIES_BYTES
from rallypoint.server.sliced import SLICE_ITEMS, encode_in_slices

if TYPE_CHECKING:
    from rallypoint.server.commit import CommitQueue
    from rallypoint.server.connection import Connection
    from rallypoint.server.server import StoreServer

__all__ = ["C10dConnection"]

_HOLDING = frozenset((ops.Await, ops.Arrive))
"""Operations that may leave something in the state for this client."""

_ITS_OWN = _HOLDING | {ops.Drop}
"""Operations that concern what this client holds, and are its visitor's to carry out."""


class C10dConnection:
    """One PyTorch client's connection."""

    __slots__ = (
        "_awaits",
        "_connection",
        "_decoder",
        "_engine",
        "_held",
        "_limit",
        "_listing",
        "_namespace",
        "_numbers",
        "_pending",
        "_queued",
        "_replies",
        "_rest",
        "_server",
        "visitor",
    )

    def __init__(self, server: StoreServer, connection: Connection, namespace: Namespace) -> None:
        self.visitor = Visitor(server.new_visitor(), namespace.id, namespace.engine)
        self.visitor.link = self
        self._server = server
        self._connection = connection
        self._namespace = namespace
        self._engine = namespace.engine
        self._limit = server.settings.max_connection_memory
        self._decoder = Decoder(self._limit)
        self._rest = b""
        self._replies: list[bytes] | None = None
        self._held: list[bytes] | None = None  # replies that wait until a long list was sent
        self._listing = False  # whether a list waits for its turn, and what came behind it for the list
        self._pending = 0
        self._awaits = 0
        self._numbers = 0
        self._queued = 0

    @property
    def held(self) -> int:
        """How many bytes of requests are held that could not be carried out yet."""
        return len(self._rest) + self._decoder.held + self._queued

    @property
    def greeted(self) -> bool:
        """Whether the peer has said the magic number."""
        return self._decoder.greeted

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return bool(self._rest) and self._held is None and not self._listing

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that this client waits for."""
        return self.visitor.waits_for

    def receive(self, data: bytes, now: float) -> bytes:
        """Carry out the requests in what came, and return the answers. Raises BadMessage, and is of no use after."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        replies: list[bytes] = []
        self._replies = replies
        at, end, owed = 0, len(data), 0
        read, visitor, engine, limit = self._decoder.read, self.visitor, self._engine, self._limit
        direct = self._server.log is None
        try:
            while at < end:
                op, stop = read(data, at)
                if op is None:
                    break
                kind = op.__class__
                if direct and kind not in _ITS_OWN and visitor.waiter is None and visitor.turn is None:
                    answer = EXECUTE[kind](engine, op, visitor)  # what `_request` comes to, in short
                    if engine.outbox:
                        self._server.settle(engine)
                    if answer.__class__ is Waiter:
                        visitor.waiter, reply = answer, b""
                    elif answer.__class__ is list and len(answer) > SLICE_ITEMS:
                        reply = self._send_list(op, answer)
                    else:
                        reply = ENCODE_ANSWER[kind](op, answer, limit)
                else:
                    reply = self._request(op, stop - at)
                at = stop
                if self._held is not None or self._listing:
                    self._rest = data[at:]
                    break
                if reply:
                    replies.append(reply)
                    owed += len(reply)
                    if owed > REPLIES_BYTES:
                        self._rest = data[at:]
                        break
        except StoreError as error:
            raise BadMessage(str(error)) from error
        finally:
            self._replies = None
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def end(self, now: float) -> None:
        """Note that the connection is gone."""
        visitor = self.visitor
        visitor.link = None
        self._forget_read()
        if visitor.holds or self._pending:
            self._server.submit(entries.Detach(visitor.serial))

    def _forget_read(self) -> None:
        """Drop a wait that is no part of the state."""
        waiter = self.visitor.waiter
        if waiter is not None and waiter.reads:
            self._engine.drop(waiter)
            self.visitor.waiter = None

    def deliver(self, number: int, answer: Any) -> None:
        """Send the answer of a wait: they all have the same."""
        if self._replies is not None:  # its own request ended it: the answer comes before what it asked next
            self._replies.append(WAITED)
        else:
            self._send(WAITED)

    def _request(self, op: ops.Op, size: int) -> bytes:
        """Carry out a request, or have it carried out; return the reply, or nothing where that comes later."""
        if op.__class__ in _HOLDING:
            self._numbers += 1
            op.number = self._numbers
        visitor, log = self.visitor, self._server.log
        if log is not None:
            changes = visitor.changes(op)
            if changes or self._pending:
                self._submit(log, op, size, changes)
                return b""
        if isinstance(op, ops.Await) and visitor.waiter is None and visitor.turn is None and self._engine.holds(op.key):
            return WAITED
        return self._run(op)

    def _run(self, op: ops.Op) -> bytes:
        """Carry out a request; return the reply, or nothing where that comes later."""
        visitor, engine, kind = self.visitor, self._engine, op.__class__
        if kind in _ITS_OWN or visitor.waiter is not None or visitor.turn is not None:
            answer = self._server.state.visit(visitor, op)
        else:
            try:
                answer = EXECUTE[kind](engine, op, visitor)
            except StoreError as error:
                answer = error
            if answer.__class__ is Waiter:
                visitor.waiter, answer = answer, LATER
        if engine.outbox:
            self._server.settle(engine)
        if answer is LATER:
            return b""
        if isinstance(answer, StoreError):
            raise BadMessage(str(answer))
        if answer.__class__ is list and len(answer) > SLICE_ITEMS:
            return self._send_list(op, answer)
        return ENCODE_ANSWER[kind](op, answer, self._limit)

    def _send_list(self, op: ops.Op, items: list[Any]) -> bytes:
        """Send a long list; what is answered meanwhile is sent behind it, for replies have no numbers."""
        self._held = []
        self._connection.stall()

        def done(parts: list[bytes], size: int) -> None:
            held, self._held = self._held or [], None
            if self._connection.closing:
                return
            if size > self._limit:
                self._connection.drop(f"an answer of {size} bytes, the limit is {self._limit}")
                return
            self._connection.send_parts([encode_list_head(op, len(items)), *parts, *held])
            self._connection.read_on()

        encode_in_slices(items, encode_items, self._limit, done)
        return b""

    def _send(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
        else:
            self._connection.send(data)

    def _submit(self, log: CommitQueue, op: ops.Op, size: int, changes: bool) -> None:
        """Have a request run once it is in the log, or once what came before it is."""
        kind, visitor = op.__class__, self.visitor
        awaits = kind in _HOLDING
        # What waits in line may have its turn by then, which any request ends.
        if changes or awaits or self._awaits or visitor.holds:
            record = entries.encode(entries.Visit(visitor.serial, visitor.namespace, cast(Any, op)))
        else:
            record = None
        if kind is ops.List:
            self._listing = True
            self._connection.stall()
        size += QUEUED_BYTES
        self._pending += 1
        self._awaits += awaits
        self._queued += size
        log.submit(record, self, op, size)
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()

    def committed(self, work: ops.Op, size: int) -> None:
        """Carry out a request whose turn has come."""
        if work.__class__ is ops.List:
            self._listing = False
        try:
            reply = self._run(work) if self._namespace.id in self._server.state.namespaces else b""
            if reply and not self._connection.closing:
                self._send(reply)
        except BadMessage as error:
            if not self._connection.closing:
                self._connection.drop(str(error))
        if self.visitor.link is None:  # its client is gone
            self._forget_read()
        self._dequeue(work, size)

    def refuse(self, work: ops.Op, size: int, error: StoreError) -> bool:
        """Close the connection of a request that could not be written to the log: the protocol has no errors."""
        self._dequeue(work, size)
        if not self._connection.closing:
            self._connection.drop(str(error))
        return True

    def _dequeue(self, op: ops.Op, size: int) -> None:
        self._pending -= 1
        self._awaits -= op.__class__ in _HOLDING
        self._queued -= size
        if self._queued <= MAX_QUEUED_BYTES // 2 and self._held is None and not self._listing:
            self._connection.read_on()
        if not self._queued:
            self._connection.recount()
