"""The server's end of PyTorch's protocol on one connection. The protocol has no errors: what goes wrong ends it.

Requests that change something go through the log where there is one, and run when they are committed; the rest runs at
once, or behind the connection's own changes: replies come in the order of the requests, for they have no numbers. While
the peer takes no replies, what a commit brings is parked: answers of changes, and large reads before they are made.

Better than the reference server, and safe for its clients: waits end only when true, poppers get their turn in the
order they came, a barrier's arrival that gives up is taken back, and multi_set and multi_get are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rallypoint.core import ops
from rallypoint.core.engine import EXECUTE
from rallypoint.core.entries import Detach, Visit
from rallypoint.core.entries import encode as encode_entry
from rallypoint.core.records import LATER, Waiter, weigh
from rallypoint.core.state import Namespace
from rallypoint.core.visitor import Visitor
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import ENCODE_ANSWER, WAITED, Decoder, encode_items, encode_list_head
from rallypoint.server.commit import MAX_QUEUED_BYTES, QUEUED_BYTES, gives_back
from rallypoint.server.native_connection import REPLIES_BYTES
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

_Quick = tuple[Callable[..., Any], Callable[..., bytes]]
_QUICK: dict[type, _Quick] = {
    kind: (EXECUTE[kind], ENCODE_ANSWER[kind])
    for kind in (ops.Set, ops.Peek, ops.Add, ops.Check, ops.CompareSet, ops.Append, ops.Delete, ops.Push, ops.Ping)
}
"""What carries out a request that never waits, and what makes its reply."""

_LARGE = frozenset((ops.Peek, ops.MultiPeek, ops.List))
"""Reads whose replies may be much larger than they are."""

_WAITED = ops.Await(0, b"")
"""What a wait that has ended is parked as."""


class C10dConnection:
    """One PyTorch client's connection."""

    __slots__ = (
        "_awaits", "_connection", "_decoder", "_deferred", "_engine", "_halted", "_limit", "_listing", "_log",
        "_namespace", "_numbers", "_parked", "_parked_bytes", "_pending", "_queued", "_replies", "_rest", "_server",
        "held", "visitor"
    )  # fmt: skip

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
        self._parked: deque[tuple[ops.Op, Any, int]] = deque()  # requests, their answers (LATER: not read yet), sizes
        self._parked_bytes = 0
        self._listing = False  # whether a long list is being encoded
        self._deferred: tuple[ops.Op, int] | None = None  # a request that waits for room in the queue of the log
        self._halted = False  # whether requests wait for either
        self._pending = int(server.log is not None and server.log.confirms)  # then reads wait, too, to be confirmed
        self._awaits = 0
        self._numbers = 0
        self._queued = 0
        self._log = server.log
        self.held = 0
        """How many bytes of requests are held that could not be carried out yet."""

    @property
    def greeted(self) -> bool:
        """Whether the peer has said the magic number."""
        return self._decoder.greeted

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return bool(self._rest or self._parked) and not self._halted

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that this client waits for."""
        return self.visitor.waits_for

    def receive(self, data: bytes) -> bytes:
        """Carry out the requests in what came, and return the answers. Raises BadMessage, and is of no use after."""
        if self.held or self._parked or self._halted or not data:
            return self._receive_behind(data)
        op, stop = self._decoder.read(data, 0)
        visitor, log = self.visitor, self._log
        if op is None or stop < len(data) or visitor.waiter is not None or visitor.turn is not None:
            return self._receive(data, op, stop, [])
        quick = _QUICK.get(op.__class__)
        if quick is not None:  # what `_request` comes to, in short
            if log is None or not (op.changes or self._pending):
                return self._run_quick(quick, op)
            if op.changes and not log.crowded:
                self._submit(log, op, stop, True)
                return b""
        elif isinstance(op, ops.Await) and not self._pending and self._engine.holds(op.key):
            return WAITED
        return self._receive(data, op, stop, [])

    def _receive_behind(self, data: bytes) -> bytes:
        """Take what came behind part of a request, or behind requests that could not be carried out yet."""
        data, self._rest = self._rest + data, b""
        replies: list[bytes] = []
        if self._parked:
            self._catch_up(replies)
        if self._parked or self._halted or not data:
            self._rest = data
            self._count()
            return b"".join(replies)
        return self._receive(data, *self._decoder.read(data, 0), replies)

    def _receive(self, data: bytes, op: ops.Op | None, stop: int, replies: list[bytes]) -> bytes:
        """Carry out the requests in what came, the first of which has been read and ends at `stop`."""
        self._replies = replies
        at, owed = 0, sum(map(len, replies))
        try:
            while op is not None:
                reply = self._request(op, stop - at)
                at = stop
                if reply:
                    replies.append(reply)
                    owed += len(reply)
                if self._halted or owed > REPLIES_BYTES:
                    self._rest = data[at:]
                    break
                if at == len(data):
                    break
                op, stop = self._decoder.read(data, at)
        finally:
            self._replies = None
            self._count()
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def _count(self) -> None:
        self.held = len(self._rest) + self._decoder.held + self._parked_bytes

    def end(self) -> None:
        """Note that the connection is gone."""
        self._parked.clear()
        self._deferred = None
        visitor = self.visitor
        visitor.link = None
        self._forget_read()
        if visitor.holds or self._pending:
            self._server.submit(Detach(visitor.serial))

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
        elif self._parked or self._listing:
            self._parked.append((_WAITED, None, 0))
        else:
            self._connection.send(WAITED)

    def _request(self, op: ops.Op, size: int) -> bytes:
        """Carry out a request, or have it carried out; return the reply, or nothing where that comes later."""
        if op.__class__ in _HOLDING:
            self._numbers += 1
            op.number = self._numbers
        visitor, log = self.visitor, self._server.log
        if log is not None:
            changes = visitor.changes(op)
            if changes or self._pending:
                if log.crowded:
                    self._defer(log, op, size)
                else:
                    self._submit(log, op, size, changes)
                return b""
        return self._run(op)

    def _run_quick(self, quick: _Quick, op: ops.Op) -> bytes:
        """Carry out a request that never waits, of a client that neither waits nor has a turn; return the reply."""
        engine = self._engine
        try:
            answer = quick[0](engine, op, self.visitor)
        except StoreError as error:
            raise BadMessage(str(error)) from error
        if engine.outbox:
            self._server.settle(engine)
        return quick[1](op, answer, self._limit)

    def _run(self, op: ops.Op) -> bytes:
        """Carry out a request; return the reply, or nothing where that comes later."""
        quick, visitor = _QUICK.get(op.__class__), self.visitor
        if quick is not None and visitor.waiter is None and visitor.turn is None:
            return self._run_quick(quick, op)
        answer = self._execute(op)
        return b"" if answer is LATER else self._encode(op, answer)

    def _execute(self, op: ops.Op) -> Any:
        """Carry out a request; return its answer, or `LATER`."""
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
        if isinstance(answer, StoreError):
            raise BadMessage(str(answer))
        return answer

    def _encode(self, op: ops.Op, answer: Any) -> bytes:
        if answer.__class__ is list and len(answer) > SLICE_ITEMS:
            return self._send_list(op, answer)
        return ENCODE_ANSWER[op.__class__](op, answer, self._limit)

    def _send_list(self, op: ops.Op, items: list[Any]) -> bytes:
        """Send a long list; what is answered meanwhile is sent behind it, for replies have no numbers."""
        self._listing = self._halted = True
        self._connection.stall()

        def done(parts: list[bytes], size: int) -> None:
            self._listing = False
            self._halted = self._deferred is not None
            if self._connection.closing:
                return
            if size > self._limit:
                self._connection.drop(f"an answer of {size} bytes, the limit is {self._limit}")
                return
            self._connection.send_parts([encode_list_head(op, len(items)), *parts])
            self._connection.read_on()

        encode_in_slices(items, encode_items, self._limit, done)
        return b""

    # The way through the log

    def _defer(self, log: CommitQueue, op: ops.Op, size: int) -> None:
        """Keep a request, and what came behind it, until the queue of the log has room."""
        self._deferred, self._halted = (op, size), True
        self._parked_bytes += size
        self._connection.stall()
        log.wait_for_room(self._admitted)

    def _admitted(self) -> None:
        log = self._server.log
        if self._deferred is not None and log is not None:
            (op, size), self._deferred = self._deferred, None
            self._halted = self._listing
            self._parked_bytes -= size
            self._count()
            self._submit(log, op, size, self.visitor.changes(op))
            self._connection.read_on()

    def _submit(self, log: CommitQueue, op: ops.Op, size: int, changes: bool) -> None:
        """Have a request run once it is in the log, or once what came before it is."""
        visitor = self.visitor
        visit: Any = op
        record = None
        if op.__class__ in _HOLDING:
            self._awaits += 1
        # What waits in line may have its turn by then, which any request ends.
        if changes or self._awaits or visitor.holds:
            record = encode_entry(Visit(visitor.serial, visitor.namespace, visit))
        size += QUEUED_BYTES
        self._pending += 1
        self._queued += size
        log.submit(record, self, op, size)
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()

    def committed(self, work: ops.Op, size: int) -> None:
        """Carry out a request whose turn has come."""
        connection = self._connection
        try:
            if self._namespace.id not in self._server.state.namespaces:
                return
            if self._parked or self._listing or connection.paused or connection.closing:
                self._park(work, size)
                return
            reply = self._run(work)
            if reply:
                connection.send(reply)
        except BadMessage as error:
            if not connection.closing:
                connection.drop(str(error))
        finally:
            if self.visitor.link is None:  # its client is gone
                self._forget_read()
            self._dequeue(work, size)

    def _park(self, op: ops.Op, size: int) -> None:
        """Carry out a request, but for a large read, and let the reply wait."""
        answer: Any = LATER
        if op.__class__ not in _LARGE:
            answer = self._execute(op)
            if answer is LATER:
                return
            size += weigh(answer)
        elif self.visitor.turn is not None:
            self._execute(ops.Ping(0))  # which ends the turn, as the read does in the log
        if not self._connection.closing:
            self._parked.append((op, answer, size))
            self._parked_bytes += size
            self._count()
            self._connection.recount()

    def _catch_up(self, replies: list[bytes]) -> None:
        """Add replies that were parked, as many as may be sent at once."""
        owed = 0
        while self._parked and owed <= REPLIES_BYTES and not self._halted:
            op, answer, size = self._parked.popleft()
            self._parked_bytes -= size
            if answer is LATER:  # not by the visitor, which may have a new turn: no log has this read
                answer = EXECUTE[op.__class__](self._engine, op, None)
            replies.append(self._encode(op, answer))
            owed += len(replies[-1])

    def refuse(self, work: ops.Op, size: int, error: StoreError, last: bool) -> bool:
        """Close the connection of a request that could not be written to the log: the protocol has no errors."""
        if not last and gives_back(work):
            return False
        if not self._connection.closing:
            self._connection.drop(str(error))
        self._dequeue(work, size)
        return True

    def _dequeue(self, op: ops.Op, size: int) -> None:
        self._pending -= 1
        if self._awaits:
            self._awaits -= op.__class__ in _HOLDING
        self._queued -= size
        if self._queued <= MAX_QUEUED_BYTES // 2 and not self._halted:
            self._connection.read_on()
        if self._parked:
            self._connection.go_on()
