"""The server's end of PyTorch's protocol on one connection. The protocol has no errors: any error drops the connection.

Changes go through the log, if there is one, and run when they are committed; reads run at once, or behind the
connection's own uncommitted changes. Replies have no numbers, so they are sent in the order of the requests. While the
peer takes no replies, committed work is parked: the answers of changes, and large reads before they are executed.

Better than the reference server, and safe for its clients: a wait ends only when its condition is true, poppers are
served in order of arrival, an arrival at a barrier that times out is undone, multi_set and multi_get are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rallypoint.core import ops
from rallypoint.core.connection_owner import ConnectionOwner
from rallypoint.core.engine import EXECUTE
from rallypoint.core.entries import ConnectionRequest, DetachOwner
from rallypoint.core.entries import encode as encode_entry
from rallypoint.core.long_value import LongValue
from rallypoint.core.records import LATER, Waiter, size_of
from rallypoint.core.state import Namespace
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import ENCODE_ANSWER, WAITED, Decoder, encode_item_head, encode_items, encode_list_head
from rallypoint.server.commit import MAX_QUEUED_BYTES, QUEUED_BYTES, gives_back
from rallypoint.server.connections.native_connection import REPLIES_BYTES, UNCHECKED
from rallypoint.server.connections.outgoing import Part
from rallypoint.server.connections.sliced import (
    LARGE_BYTES,
    VALUE,
    ListEncoder,
    encode_in_slices,
    is_long,
    shared_parts,
    source_of,
)

if TYPE_CHECKING:
    from rallypoint.server.commit import CommitQueue
    from rallypoint.server.connections.connection import Connection
    from rallypoint.server.connections.store_access import StoreAccess

__all__ = ["C10dConnection"]

_HOLDING = frozenset((ops.WaitOrTurn, ops.Arrive))
"""Operations that may leave something in the state for this client."""

_ITS_OWN = _HOLDING | {ops.Drop}
"""Operations on the data that this client holds in the state: its `ConnectionOwner` executes them."""

_Quick = tuple[Callable[..., Any], Callable[..., bytes]]
_QUICK: dict[type, _Quick] = {
    kind: (EXECUTE[kind], ENCODE_ANSWER[kind])
    for kind in (ops.Set, ops.Peek, ops.Add, ops.Check, ops.CompareSet, ops.Append, ops.Delete, ops.Push, ops.Ping)
}
"""For requests that never wait: the function that executes the request, and the one that encodes its reply."""

_LARGE = frozenset((ops.Peek, ops.MultiPeek, ops.List))
"""Reads whose replies may be much larger than the requests."""

_LONG = frozenset((ops.MultiSet, ops.MultiPeek, ops.Wait, ops.Check, ops.List))
"""Requests of which a single one may take long."""
ENCODER = ListEncoder(encode_items, encode_item_head, 8)

_WAITED = ops.WaitOrTurn(0, b"")
"""Placeholder for the parked reply of a wait that has ended."""


class C10dConnection:
    """One PyTorch client's connection."""

    __slots__ = (
        "_awaits", "_connection", "_decoder", "_deferred", "_engine", "_halted", "_limit", "_listing", "_log",
        "_namespace", "_numbers", "_parked", "_parked_bytes", "_pending", "_queued", "_replies", "_rest", "_sent_large",
        "_server", "_turns", "held", "owner"
    )  # fmt: skip

    def __init__(self, server: StoreAccess, connection: Connection, namespace: Namespace) -> None:
        self.owner = ConnectionOwner(server.new_connection_owner(), namespace.id, namespace.engine)
        self.owner.handler = self
        self._server = server
        self._turns = server.turns
        self._connection = connection
        self._namespace = namespace
        self._engine = namespace.engine
        self._limit = server.settings.max_connection_memory
        self._decoder = Decoder(self._limit)
        self._rest = b""
        self._replies: list[bytes] | None = None
        self._parked: deque[tuple[ops.Op, Any, int]] = deque()  # requests, answers (LATER: not executed yet), sizes
        self._parked_bytes = 0
        self._listing = False  # whether a long list is being encoded
        self._sent_large = False  # whether a large value was just sent, which the peer must take first
        self._deferred: tuple[ops.Op, int] | None = None  # waits for room in the commit queue, or for its turn
        self._halted = False  # whether requests wait for room or for their turn
        self._pending = int(server.log is not None and server.log.confirms)  # 1: reads must be confirmed as well
        self._awaits = 0
        self._numbers = 0
        self._queued = 0
        self._log = server.log
        self.held = 0
        """Bytes of received requests that wait to be executed."""

    @property
    def greeted(self) -> bool:
        """Whether the peer has sent the magic number."""
        return self._decoder.greeted

    @property
    def blocked(self) -> bool:
        """Whether requests wait for the peer to take replies, or for a later turn: call `receive(b"")` then."""
        return bool(self._rest or self._parked) and not self._halted

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that this client waits for."""
        return self.owner.waits_for

    def receive(self, data: bytes) -> bytes:
        """Execute the requests in the data, and return the replies. Unusable after it raised BadMessage."""
        if self.held or self._parked or self._halted or not data:
            return self._receive_behind(data)
        op, stop = self._decoder.read(data, 0)
        owner, log = self.owner, self._log
        if op is None or stop < len(data) or owner.waiter is not None or owner.turn is not None:
            return self._receive(data, op, stop, [])
        quick = _QUICK.get(op.__class__)
        if quick is not None:  # a shortcut for `_request`
            if log is None or not (op.changes or self._pending):
                return self._run_quick(quick, op)
            if op.changes and not log.crowded:
                self._submit(log, op, stop, True)
                return b""
        elif isinstance(op, ops.WaitOrTurn) and not self._pending and self._engine.holds(op.key):
            return WAITED
        return self._receive(data, op, stop, [])

    def _receive_behind(self, data: bytes) -> bytes:
        """Process data that follows an incomplete request, or requests that wait."""
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
        """Execute the requests in the data, the first of which is decoded and ends at `stop`."""
        self._replies = replies
        at, owed, count = 0, sum(map(len, replies)), 0
        self._sent_large = False
        try:
            while op is not None:
                reply = self._request(op, stop - at)
                at = stop
                if reply:
                    owed += len(reply)
                    replies.append(reply)
                if at == len(data):
                    break
                count += 1
                full = owed > REPLIES_BYTES or self._sent_large
                if self._halted or full or (not count & UNCHECKED and self._turns.spent()):
                    self._rest = data[at:]
                    break
                op, stop = self._decoder.read(data, at)
        finally:
            self._replies = None
            self._count()
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def _count(self) -> None:
        self.held = len(self._rest) + self._decoder.held + self._parked_bytes

    def end(self) -> None:
        """Release a closed connection, and the data that its client holds in the state."""
        self._parked.clear()
        self._deferred = None
        owner = self.owner
        owner.handler = None
        self._forget_read()
        if owner.holds or self._pending:
            self._server.submit(DetachOwner(owner.serial))

    def _forget_read(self) -> None:
        """Drop a wait that is a read, and so not part of the state."""
        waiter = self.owner.waiter
        if waiter is not None and waiter.reads:
            self._engine.drop(waiter)
            self.owner.waiter = None

    def deliver(self, number: int, answer: Any) -> None:
        """Send the reply to a wait; all waits have the same reply."""
        if self._replies is not None:  # the client's own request ended it: reply before its next requests
            self._replies.append(WAITED)
        elif self._parked or self._listing:
            self._parked.append((_WAITED, None, 0))
        else:
            self._connection.send(WAITED)

    def _request(self, op: ops.Op, size: int) -> bytes:
        """Execute or submit a request; return the reply, or nothing if it comes later."""
        if op.__class__ in _HOLDING:
            self._numbers += 1
            op.number = self._numbers
        if op.__class__ in _LONG and self._turns.spent():
            self._defer(op, size)
            self._turns.resume(self._run_deferred)
            return b""
        return self._start(op, size)

    def _start(self, op: ops.Op, size: int) -> bytes:
        owner, log = self.owner, self._server.log
        if log is not None:
            changes = owner.changes(op)
            if changes or self._pending:
                if log.crowded:
                    self._defer(op, size)
                    log.wait_for_room(self._admitted)
                else:
                    self._submit(log, op, size, changes)
                return b""
        return self._run(op)

    def _run_quick(self, quick: _Quick, op: ops.Op) -> bytes:
        """Execute a request that never waits; return the reply. The client must neither wait nor have a turn."""
        engine = self._engine
        try:
            answer = quick[0](engine, op, self.owner)
        except StoreError as error:
            raise BadMessage(str(error)) from error
        if engine.outbox or engine.read_work:
            self._server.settle(engine)
        if answer.__class__ in VALUE and len(answer) > LARGE_BYTES:
            return self._send_value(op, answer)
        return quick[1](op, answer, self._limit)

    def _run(self, op: ops.Op) -> bytes:
        """Execute a request; return the reply, or nothing if it comes later."""
        quick, owner = _QUICK.get(op.__class__), self.owner
        if quick is not None and owner.waiter is None and owner.turn is None:
            return self._run_quick(quick, op)
        answer = self._execute(op)
        return b"" if answer is LATER else self._encode(op, answer)

    def _execute(self, op: ops.Op) -> Any:
        """Execute a request; return its answer, or `LATER`."""
        owner, engine, kind = self.owner, self._engine, op.__class__
        if kind in _ITS_OWN or owner.waiter is not None or owner.turn is not None:
            answer = self._server.state.execute_for(owner, op)
        else:
            try:
                answer = EXECUTE[kind](engine, op, owner)
            except StoreError as error:
                answer = error.with_traceback(None)
            if answer.__class__ is Waiter:
                owner.waiter, answer = answer, LATER
        if engine.outbox or engine.read_work:
            self._server.settle(engine)
        if isinstance(answer, StoreError):
            raise BadMessage(str(answer))
        return answer

    def _encode(self, op: ops.Op, answer: Any) -> bytes:
        if answer.__class__ is list and is_long(answer):
            size = sum(map(len, filter(None, answer))) + 8 * len(answer)
            if size > self._limit:
                raise BadMessage(f"an answer of {size} bytes, the limit is {self._limit}")
            return self._send_list(op, answer)
        if answer.__class__ in VALUE and len(answer) > LARGE_BYTES:
            return self._send_value(op, answer)
        return ENCODE_ANSWER[op.__class__](op, answer, self._limit)

    def _send_value(self, op: ops.Op, value: bytes | LongValue) -> bytes:
        """Send a large value without copying it, after the replies so far."""
        if len(value) > self._limit:
            raise BadMessage(f"an answer of {len(value)} bytes, the limit is {self._limit}")
        if self._replies:
            self._connection.send(b"".join(self._replies))
            self._replies.clear()
        parts = shared_parts(value, source_of(self._engine, op), 0)
        self._connection.send_parts([encode_item_head(len(value)), *parts])
        self._sent_large = True
        return b""

    def _send_list(self, op: ops.Op, items: list[Any]) -> bytes:
        """Send a long list. Replies have no numbers, so those that become ready meanwhile are sent after it."""
        self._listing = self._halted = True
        self._connection.stall()

        def grown(size: int) -> bool:
            self._parked_bytes += size
            self._count()
            self._connection.recount()
            return not self._connection.closing

        def done(parts: list[Part], size: int, owned: int) -> None:
            self._listing = False
            self._parked_bytes -= owned
            self._count()
            self._halted = self._deferred is not None
            if self._connection.closing:
                return
            if size > self._limit:
                self._connection.drop(f"a reply of {size} bytes; the limit is {self._limit}")
                return
            self._connection.send_parts([encode_list_head(op, len(items)), *parts])
            self._connection.read_on()

        encode_in_slices(items, ENCODER, source_of(self._engine, op), self._limit, grown, done)
        return b""

    # Commits

    def _defer(self, op: ops.Op, size: int) -> None:
        """Hold a request, and those behind it, until the commit queue has room or it is its turn."""
        self._deferred, self._halted = (op, size), True
        self._parked_bytes += size
        self._connection.stall()

    def _resumed(self) -> tuple[ops.Op, int] | None:
        """Return the held request."""
        found, self._deferred = self._deferred, None
        if found is not None:
            self._halted = self._listing
            self._parked_bytes -= found[1]
            self._count()
        return found

    def _admitted(self) -> None:
        log, found = self._server.log, self._resumed()
        if found is not None and log is not None:
            self._submit(log, *found, self.owner.changes(found[0]))
            self._connection.read_on()

    def _run_deferred(self) -> None:
        found = self._resumed()
        if found is None or self._connection.closing:
            return
        try:
            reply = self._start(*found)
        except BadMessage as error:
            self._connection.drop(str(error))
            return
        if reply:
            self._connection.send(reply)
        if not self._halted:
            self._connection.read_on()

    def _submit(self, log: CommitQueue, op: ops.Op, size: int, changes: bool) -> None:
        """Submit a request, to run once it is committed, or, for a read, once earlier changes are."""
        owner = self.owner
        visit: Any = op
        record = None
        if op.__class__ in _HOLDING:
            self._awaits += 1
        # A waiting client may have its turn by then, and any request ends a turn: so the log needs the request.
        if changes or self._awaits or owner.holds:
            record = encode_entry(ConnectionRequest(owner.serial, owner.namespace, visit))
        size += QUEUED_BYTES
        self._pending += 1
        self._queued += size
        log.submit(record, self, op, size)
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()

    def committed(self, work: ops.Op, size: int) -> None:
        """Execute a committed request, or a read behind committed changes."""
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
            if self.owner.handler is None:  # the client is gone
                self._forget_read()
            self._dequeue(work, size)

    def _park(self, op: ops.Op, size: int) -> None:
        """Execute a request, unless it is a large read, and hold back the reply."""
        answer: Any = LATER
        if op.__class__ not in _LARGE:
            answer = self._execute(op)
            if answer is LATER:
                return
            size += size_of(answer)
        elif self.owner.turn is not None:
            self._execute(ops.Ping(0))  # ends the turn, as the read does in the log
        if not self._connection.closing:
            self._parked.append((op, answer, size))
            self._parked_bytes += size
            self._count()
            self._connection.recount()

    def _catch_up(self, replies: list[bytes]) -> None:
        """Append parked replies, up to the amount that may be sent at once."""
        owed, self._replies, self._sent_large = 0, replies, False  # a large value is sent behind them
        while self._parked and owed <= REPLIES_BYTES and not (self._halted or self._sent_large or self._turns.spent()):
            op, answer, size = self._parked.popleft()
            self._parked_bytes -= size
            if answer is LATER:  # without the owner, which may have a new turn: this read is not in the log
                answer = EXECUTE[op.__class__](self._engine, op, None)
            reply = self._encode(op, answer)
            owed += len(reply)
            replies.append(reply)
        self._replies = None

    def refuse(self, work: ops.Op, size: int, error: StoreError, last: bool) -> bool:
        """Drop the connection of a request that found no room in the log: the protocol has no errors."""
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
