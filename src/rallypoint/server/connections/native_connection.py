"""The server's end of the native protocol on one connection: the requests of a session, after the `Handshake`.

Changes go through the log, if there is one, and run when they are committed. Reads run at once, or behind the
connection's own uncommitted changes.

A peer that takes no replies must not make the server hold them. So while it does not read, its committed changes run,
because state order is log order, but their replies, which the session keeps anyway, are encoded only when it reads
again. Its reads wait unexecuted. Such a read may see a later change of the same client, which had no reply to either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from rallypoint.core import entries, ops
from rallypoint.core.arrivals import GATHERS
from rallypoint.core.long_value import LongValue
from rallypoint.core.records import LATER, PushedEvent
from rallypoint.core.session import Session
from rallypoint.core.state import Namespace
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.bad_request import misunderstood
from rallypoint.protocol.long_reply import LongReply
from rallypoint.protocol.native import (
    ACT,
    GARBLED,
    Frames,
    Reply,
    decode_act,
    decode_request,
    encode_answer,
    unpack_length,
)
from rallypoint.server.clock import FOLLOWED
from rallypoint.server.commit import MAX_QUEUED_BYTES, QUEUED_BYTES, gives_back
from rallypoint.server.connections.handshake import Handshake, release_session
from rallypoint.server.connections.resumption import check_repeated, encode_pushes, is_read
from rallypoint.server.connections.sliced import (
    LARGE_BYTES,
    VALUE,
    ValueSource,
    is_long,
    look_in_slices,
    send_list,
    source_of,
    value_parts,
)

if TYPE_CHECKING:
    from rallypoint.server.commit import CommitQueue
    from rallypoint.server.connections.session_transport import SessionTransport
    from rallypoint.server.connections.store_access import StoreAccess

__all__ = ["REPLIES_BYTES", "UNCHECKED", "NativeConnection"]

REPLIES_BYTES = 256 * 1024
"""Bytes of replies after which further requests wait until the peer has taken them."""

LIGHT_BYTES = 64 * 1024
"""A single request up to this size runs as it arrives; larger and pipelined ones share a `TurnBudget`."""

UNCHECKED = 3
"""Every fourth pipelined request, it is checked whether the rest must wait: to ask costs a tenth of a request."""

MAX_LISTS = 4
"""Long lists of one connection that may be in progress before its next requests wait."""

_MAY_BE_LONG = frozenset((bytes, LongValue, list, tuple))

_LATE = b"late"
"""Returned by `_run` for a reply that is not encoded yet."""


class NativeConnection:
    """One native client's connection, after the preface, or its channel on a shared connection."""

    __slots__ = (
        "_backlog", "_backlog_bytes", "_connection", "_crowded", "_engine", "_frames", "_greeting", "_halted", "_lists",
        "_namespace", "_parked", "_parked_bytes", "_pending", "_queued", "_refused", "_resending", "_resent", "_server",
        "_turns", "held", "one_port", "session"
    )  # fmt: skip

    def __init__(self, server: StoreAccess, connection: SessionTransport, namespace: Namespace) -> None:
        self.session: Session | None = None
        self._server = server
        self._turns = server.turns
        self._connection = connection
        self._namespace = namespace
        self._engine = namespace.engine
        self._frames = Frames(server.settings.max_connection_memory)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._greeting: Handshake | None = None  # in progress
        self.one_port = False
        """Whether the client must not learn of other servers."""

        self._refused = False  # whether to ignore requests, which followed a refused hello
        self._lists = 0  # long lists in progress
        self._crowded = False  # whether the next request waits for room in the commit queue
        self._halted = False  # whether requests wait: for the handshake, for lists, or for the commit queue
        self._parked: deque[tuple[ops.Op, int]] = deque()  # committed: reads to run, and changes to answer
        self._parked_bytes = 0
        self._resending = False  # whether pushes are sent again, after the session was resumed
        self._resent = 0  # the number of the last push sent again
        self._pending = int(server.log is not None and server.log.confirms)  # 1: reads must be confirmed as well
        self._queued = 0
        self.held = 0
        """Bytes of received requests that wait to be executed."""

    @property
    def greeted(self) -> bool:
        """Whether the client has sent its hello."""
        return self.session is not None or self._greeting is not None

    @property
    def blocked(self) -> bool:
        """Whether requests wait for the peer to take replies, or for a later turn: call `receive(b"")` then."""
        return bool(self._backlog or self._parked or self._resending) and not self._halted

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that requests of this client wait for."""
        return self.session.waits_for if self.session is not None else ()

    def receive(self, data: bytes) -> bytes:
        """Execute the requests in the data, and return the replies. Unusable after it raised BadMessage."""
        size = len(data)
        frames, backlog = self._frames, self._backlog
        if (
            4 < size <= LIGHT_BYTES
            and not (frames.held or backlog or self._halted)
            and unpack_length(data)[0] == size - 4
        ):
            reply = self._request(data[4:])  # the common case: exactly one frame
            return reply if reply.__class__ is bytes else self._flat(reply)
        for payload in frames.feed(data):
            backlog.append(payload)
            self._backlog_bytes += len(payload)
        replies: list[bytes] = []
        owed = 0
        if self._parked or self._resending:
            owed = self._catch_up(replies)
            if replies:  # first: a request below may cause a push, which is sent at once
                self._connection.send(b"".join(replies))
                replies.clear()
        count = 0
        while backlog and owed <= REPLIES_BYTES and not (self._halted or self._connection.paused):
            count += 1
            if not (count & UNCHECKED and len(backlog[0]) <= LIGHT_BYTES) and self._turns.spent():
                break
            payload = backlog.popleft()
            self._backlog_bytes -= len(payload)
            reply = self._request(payload)
            owed += len(reply)
            replies.append(self._flat(reply))
        self._count()
        if self._halted and self.held > MAX_QUEUED_BYTES:
            self._connection.stall()
        return b"".join(replies)

    def _flat(self, reply: Reply) -> bytes:
        """Return a reply as bytes; send one that is too long for that, and return nothing."""
        if isinstance(reply, LongReply):
            self._connection.send_parts(reply.parts)
            return b""
        return bytes(reply)

    def _count(self) -> None:
        self.held = self._frames.held + self._parked_bytes + self._backlog_bytes

    def end(self) -> None:
        """Release the connection, which is gone; detach its session."""
        self._parked.clear()
        self._backlog.clear()
        self._backlog_bytes = 0
        if self.session is not None and self.session.handler is self:
            release_session(self._server, self.session)

    def deliver(self, number: int, answer: Any) -> None:
        """Send a reply that became ready later, or a push."""
        if self._greeting is not None:
            return  # sent after the welcome: pushes are sent again, and the client repeats requests
        if answer.__class__ in _MAY_BE_LONG and is_long(answer):
            self._send_long(number, answer, ValueSource(self._engine, None))
            return
        if answer.__class__ is PushedEvent and self._connection.paused and not self._resending:
            self._resending, self._resent = True, answer.push - 1  # the session keeps it: encode it when the peer reads
        if answer.__class__ is not PushedEvent or not self._resending:  # otherwise `_resend` sends it
            self._connection.send(encode_answer(number, answer))
        if answer.__class__ is PushedEvent and self.session is not None and self.session.over:
            self._connection.drop(self.session.overdue)

    def notify(self, notice: bytes) -> None:
        """Send a notice about the server, unless the client has not said hello yet: its welcome will contain it."""
        if self.greeted and not self._connection.closing:
            self._connection.send(notice)

    # Requests

    def _request(self, payload: bytes) -> Reply:
        session = self.session
        if session is None and self._refused:
            return b""
        if session is None:
            self._halted = True
            self._greeting = Handshake(self._server, self._connection, self._namespace.id, self)
            self._greeting.begin(payload)
            return b""
        transport: object = session.handler
        if transport is not self:
            raise BadMessage("another connection has taken over the session")
        if session.over and self._server.state.sessions.get(session.serial) is not session:
            return b""  # its round is over, and the connection is about to be closed
        try:
            op: ops.Op = decode_request(payload)
        except GARBLED as error:
            return misunderstood(payload, error)
        kind = op.__class__
        if session.late and session.overdue and kind is not ops.Confirm:
            raise BadMessage(session.overdue)
        if op.number <= session.highest:
            check_repeated(session, op, self._server.refusals)
        if isinstance(op, ops.SessionHeartbeat):
            self._server.clock.heartbeat(session)
            return b""
        log = self._server.log
        if log is None or not (self._pending or (kind.changes and not is_read(session, op, self._engine))):
            if len(payload) > LARGE_BYTES and isinstance(op, (ops.Wait, ops.Check)):
                self._look(session, op, len(payload))
                return b""
            if log is not None and kind.changes:
                return encode_answer(op.number, self._engine.execute(op, session))
            return self._run(session, op)
        if log.crowded:
            self._wait_for_room(log, payload)
            return b""
        size = len(payload) + QUEUED_BYTES
        self._pending += kind is not ops.Confirm  # nothing has to wait for a confirmation
        self._queued += size
        record = entries.encode(entries.SessionRequest(session.serial, cast(Any, op))) if kind.changes else None
        log.submit(record, self, op, size)
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()
        return b""

    # Arrivals at a shared object, batched with others on the same connection (`arrivals.py`)

    def arrival(self, data: bytes) -> ops.Act | None:
        """Decode the data if it is an arrival that can be executed now; None: pass it to `receive`."""
        session = self.session
        if data[4:6] != ACT or unpack_length(data)[0] != len(data) - 4:
            return None
        if session is None or session.handler is not self or session.over or session.late:
            return None
        if self._halted or self._backlog or self._parked or self._resending or self._frames.held:
            return None
        if self._server.log is not None and self._server.log.crowded:
            return None
        try:
            op: ops.Act = decode_act(data[4:])
        except GARBLED:
            return None
        return op if op.number > session.highest and op.command.__class__ in GATHERS else None

    def answer(self, op: ops.Act, answer: Any) -> None:
        """Send the reply to an arrival that was executed at once."""
        self._connection.send(encode_answer(op.number, answer))

    def submitted(self, size: int) -> None:
        """Note that an arrival waits to be committed."""
        self._pending += 1
        self._queued += size
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()

    def arrived(self, op: ops.Act, size: int, answer: Any) -> None:
        """Answer an arrival that was committed and executed, unless the answer comes later."""
        connection = self._connection
        if answer is not LATER:
            if self._parked or self._halted or connection.paused or connection.closing:
                self._park_answer(op, size)
            else:
                connection.send(encode_answer(op.number, answer))
        self._pending -= 1
        self._queued -= size
        self._go_on()

    def _run(self, session: Session, op: ops.Op, late: bool = False) -> Reply:
        """Execute a request; return the reply, or nothing if it comes later; `late`: do not encode it yet."""
        answer = session.execute(op)
        server = self._server
        if self._engine.outbox or self._engine.read_work:
            server.settle(self._engine)
        if answer is LATER or op.__class__ in FOLLOWED:
            server.clock.follow(session, op)
            if answer is LATER:
                return b""
        if late:
            return _LATE
        if answer.__class__ in _MAY_BE_LONG and is_long(answer):
            self._send_long(op.number, answer, source_of(self._engine, op))
            return b""
        return encode_answer(op.number, answer)

    def _look(self, session: Session, op: ops.Wait | ops.Check, size: int) -> None:
        """Look up the many keys of a request in slices; later requests wait, because one may cancel this one."""

        def looked(here: bool) -> None:
            self._parked_bytes -= size
            self._count_lists(-MAX_LISTS)
            self._count()
            if session.handler is self and not session.over and not self._connection.closing:
                found = None if isinstance(op, ops.Wait) else True
                self._connection.send(encode_answer(op.number, found) if here else self._run(session, op))
                self._go_on()

        self._parked_bytes += size
        self._count_lists(MAX_LISTS)
        look_in_slices(self._engine, op.keys, looked)

    def _send_long(self, number: int, answer: Any, source: ValueSource) -> None:
        """Send a long value or list."""
        if answer.__class__ in VALUE or len(answer) == 1:
            self._connection.send_parts(value_parts(number, answer, source))
        else:
            self._send_list(number, answer, source)

    def _send_list(self, number: int, answer: Any, source: ValueSource) -> None:
        """Send a long list. Replies have numbers, so later requests wait only once `MAX_LISTS` are in progress."""

        def grown(size: int) -> bool:
            self._parked_bytes += size
            self._count()
            self._connection.recount()
            return not self._connection.closing

        def sent(owned: int) -> None:
            self._parked_bytes -= owned
            self._count()
            self._count_lists(-1)
            asyncio.get_running_loop().call_soon(self._go_on)

        self._count_lists(1)
        limit = self._server.settings.max_connection_memory
        send_list(self._connection, number, answer, source, limit, grown, sent)

    def _count_lists(self, more: int) -> None:
        self._lists += more
        self._halt()

    def _halt(self) -> None:
        self._halted = self._greeting is not None or self._crowded or self._lists >= MAX_LISTS

    def _go_on(self) -> None:
        """Execute requests that waited, and read again."""
        if self._queued <= MAX_QUEUED_BYTES // 2 and not self._crowded:
            self._connection.read_on()
        if self.blocked:
            self._connection.go_on()

    # Commits

    def _wait_for_room(self, log: CommitQueue, payload: bytes) -> None:
        """Put a request back until the commit queue has room."""
        self._backlog.appendleft(payload)
        self._backlog_bytes += len(payload)
        self._crowded = self._halted = True
        self._count()
        self._connection.stall()
        log.wait_for_room(self._admitted)

    def _admitted(self) -> None:
        self._crowded = False
        self._halt()
        self._go_on()

    def committed(self, work: ops.Op, size: int) -> None:
        """Execute a committed request."""
        session, connection = self.session, self._connection
        try:
            if session is None or self._server.state.sessions.get(session.serial) is not session:
                return  # the session has ended
            if self._parked or self._halted or connection.paused or connection.closing:
                self._park(session, work, size)
                return
            reply = self._run(session, work)
            if reply:
                connection.send(reply)
        finally:
            self._pending -= work.__class__ is not ops.Confirm
            self._queued -= size
            self._go_on()

    def _park(self, session: Session, op: ops.Op, size: int) -> None:
        """Execute a change, and answer it when the peer reads again; a read waits until then."""
        if not op.changes or self._run(session, op, late=True):
            self._park_answer(op, size)

    def _park_answer(self, op: ops.Op, size: int) -> None:
        if not self._connection.closing:
            self._parked.append((op, size))
            self._parked_bytes += size
            self.held += size
            self._connection.recount()

    def _catch_up(self, replies: list[bytes]) -> int:
        """Append replies that waited for the peer to read; return their size."""
        owed = 0
        while (self._resending or self._parked) and owed <= REPLIES_BYTES:
            if self._halted or self._turns.spent():
                break
            reply = self._resend() if self._resending else self._unpark()
            owed += len(reply)
            replies.append(self._flat(reply))
        return owed

    def _unpark(self) -> Reply:
        """Return the reply to the first parked request, if it still has one."""
        op, size = self._parked.popleft()
        self._parked_bytes -= size
        session = self.session
        transport: object = session.handler if session is not None else None
        if session is None or transport is not self:
            return b""
        if not op.changes:
            return self._run(session, op)
        return encode_answer(op.number, session.kept[op.number][0]) if op.number in session.kept else b""

    def refuse(self, work: ops.Op, size: int, error: StoreError, last: bool) -> bool:
        """Refuse a request that found no room in the log; it has changed nothing."""
        if not last and gives_back(work):
            return False
        session, confirms = self.session, work.__class__ is ops.Confirm
        if session is not None and confirms:
            self._server.retries.add(entries.SessionRequest(session.serial, cast(Any, work)))
        elif session is not None:
            self._server.note_refusal(session, work.number)
        if not confirms:
            self._connection.send(encode_answer(work.number, error))
        self._pending -= not confirms
        self._queued -= size
        self._go_on()
        return True

    # The session

    def enter(self, session: Session) -> None:
        """Attach a session to this connection, and process waiting requests."""
        self.session = session
        self._engine = self._server.state.namespaces[session.namespace].engine
        self._resending = bool(session.pushes)
        self.greeting_over()
        self._go_on()

    def session_ended(self) -> None:
        """Close the connection, because the session ended with its round; a handshake in progress is still answered."""
        if self.session is not None:
            self._connection.close()

    def greeting_over(self, refused: bool = False) -> None:
        """Note the end of the handshake; if it was `refused`, ignore the requests that followed the hello."""
        self._greeting = None
        self._refused = refused
        self._halt()

    def _resend(self) -> bytes:
        """Return some of the pushes that the client has not seen; new pushes follow in their order."""
        session = self.session
        pushes = session.pushes if session is not None and session.handler is self else ()
        data, self._resent, self._resending = encode_pushes(pushes, self._resent, REPLIES_BYTES)
        return data
