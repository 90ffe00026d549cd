"""The server's end of our own protocol on one connection: the requests of a session, after the `Greeting`.

Requests that change something go through the log where there is one, and run when they are committed. Reads run at
once, or behind the connection's own changes.

A peer that takes no replies must not make the server hold any, so a commit brings it none: its changes run, for the
log's order is the state's, and their answers, which the session keeps anyway, are encoded when it reads on. Its reads
wait as they came. Such a read may see what the client asked for behind it; it had no answer to either yet.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

from rallypoint.core import entries, ops
from rallypoint.core.arrivals import GATHERS
from rallypoint.core.records import LATER, Push
from rallypoint.core.session import Session
from rallypoint.core.state import Namespace
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.misunderstood import misunderstood
from rallypoint.protocol.native import (
    ACT,
    GARBLED,
    Frames,
    SharedReply,
    decode_act,
    decode_request,
    encode_answer,
    unpack_length,
)
from rallypoint.server.clock import FOLLOWED
from rallypoint.server.commit import MAX_QUEUED_BYTES, QUEUED_BYTES, gives_back
from rallypoint.server.greeting import Greeting, give_back
from rallypoint.server.resumption import check_repeated, encode_pushes, is_read
from rallypoint.server.sliced import LARGE_BYTES, SLICE_ITEMS, look_in_slices, send_list

if TYPE_CHECKING:
    from rallypoint.server.carrier import Carrier
    from rallypoint.server.commit import CommitQueue
    from rallypoint.server.server import StoreServer

__all__ = ["REPLIES_BYTES", "NativeConnection"]

REPLIES_BYTES = 256 * 1024
"""How much is answered before the peer must have taken it; then the rest of what came waits."""

MAX_LISTS = 4
"""How many long lists one connection may have under way before its next requests wait."""

_LATE = b"late"
"""What `_run` returns for an answer that is not encoded yet."""


class NativeConnection:
    """One native client's connection, behind the preface, or its channel of a connection that many share."""

    __slots__ = (
        "_backlog", "_connection", "_crowded", "_engine", "_frames", "_greeting", "_halted", "_lists", "_namespace",
        "_parked", "_parked_bytes", "_pending", "_queued", "_refused", "_resending", "_resent", "_server", "held",
        "one_port", "session"
    )  # fmt: skip

    def __init__(self, server: StoreServer, connection: Carrier, namespace: Namespace) -> None:
        self.session: Session | None = None
        self._server = server
        self._connection = connection
        self._namespace = namespace
        self._engine = namespace.engine
        self._frames = Frames(server.settings.max_connection_memory)
        self._backlog: deque[bytes] = deque()
        self._greeting: Greeting | None = None  # the one that is under way
        self.one_port = False
        """Whether the client is not to be told of other servers."""

        self._refused = False  # whether what follows is ignored, for it was asked behind a hello that was refused
        self._lists = 0  # how many long lists are under way
        self._crowded = False  # whether the next request waits for room in the queue of the log
        self._halted = False  # whether requests wait: for the greeting, for lists, or for the queue
        self._parked: deque[tuple[ops.Op, int]] = deque()  # of what was committed: reads, and changes to be answered
        self._parked_bytes = 0
        self._resending = False  # pushes, after the session was resumed
        self._resent = 0  # the number of the last one
        self._pending = int(server.log is not None and server.log.confirms)  # then reads wait, too, to be confirmed
        self._queued = 0
        self.held = 0
        """How many bytes of requests are held that could not be carried out yet."""

    @property
    def greeted(self) -> bool:
        """Whether there is a session, or about to be one."""
        return self.session is not None or self._greeting is not None

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return bool(self._backlog or self._parked or self._resending) and not self._halted

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that requests of this client wait for."""
        return self.session.waits_for if self.session is not None else ()

    def receive(self, data: bytes) -> bytes:
        """Carry out the requests in what came, and return the answers. Raises BadMessage, and is of no use after."""
        size = len(data)
        frames, backlog = self._frames, self._backlog
        if size > 4 and not (frames.held or backlog or self._halted) and unpack_length(data)[0] == size - 4:
            reply = self._request(data[4:])  # one frame, as nearly all of them come
            return reply if reply.__class__ is bytes else bytes(reply)
        backlog.extend(frames.feed(data))
        replies: list[bytes] = []
        owed = 0
        if self._parked or self._resending:
            owed = self._catch_up(replies)
        while backlog and owed <= REPLIES_BYTES and not self._halted:
            reply = self._request(backlog.popleft())
            owed += len(reply)
            replies.append(bytes(reply))
        self._count()
        if self._halted and self.held > MAX_QUEUED_BYTES:
            self._connection.stall()
        return b"".join(replies)

    def _count(self) -> None:
        self.held = self._frames.held + self._parked_bytes + sum(map(len, self._backlog))

    def end(self) -> None:
        """Note that the connection is gone."""
        self._parked.clear()
        self._backlog.clear()
        if self.session is not None and self.session.link is self:
            give_back(self._server, self.session)

    def deliver(self, number: int, answer: Any) -> None:
        """Send an answer that became ready later, or a push."""
        if self._greeting is not None:
            return  # it comes behind the welcome: pushes are sent again, and requests repeated
        if answer.__class__ is list and len(answer) > SLICE_ITEMS:
            self._send_list(number, answer)
            return
        if answer.__class__ is not Push or not self._resending:  # else its turn comes
            self._connection.send(encode_answer(number, answer))
        if answer.__class__ is Push and self.session is not None and self.session.over:
            self._connection.drop(self.session.overdue)

    def notify(self, notice: bytes) -> None:
        """Send a notice about the server itself, unless the client has not said hello: the welcome will say so."""
        if self.greeted and not self._connection.closing:
            self._connection.send(notice)

    # Requests

    def _request(self, payload: bytes) -> bytes | SharedReply:
        session = self.session
        if session is None and self._refused:
            return b""
        if session is None:
            self._halted = True
            self._greeting = Greeting(self._server, self._connection, self._namespace.id, self)
            self._greeting.begin(payload)
            return b""
        carrier: object = session.link
        if carrier is not self:
            raise BadMessage("another connection carries its session now")
        if session.over and self._server.state.sessions.get(session.serial) is not session:
            return b""  # its round is over, and the connection about to be closed
        try:
            op: ops.Op = decode_request(payload)
        except GARBLED as error:
            return misunderstood(payload, error)
        kind = op.__class__
        if session.late and session.overdue and kind is not ops.Confirm:
            raise BadMessage(session.overdue)
        if op.number <= session.highest:
            check_repeated(session, op, self._server.refusals)
        if isinstance(op, ops.Beat):
            self._server.clock.beat(session)
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
        self._pending += kind is not ops.Confirm  # which nothing waits for
        self._queued += size
        record = entries.encode(entries.Request(session.serial, cast(Any, op))) if kind.changes else None
        log.submit(record, self, op, size)
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()
        return b""

    # Arrivals at a shared object, which others on the same connection may have at the same moment

    def arrival(self, data: bytes) -> ops.Act | None:
        """Return what came, if it is an arrival that can be carried out now; else `receive` has to take it."""
        session = self.session
        if data[4:6] != ACT or unpack_length(data)[0] != len(data) - 4:
            return None
        if session is None or session.link is not self or session.over or session.late:
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
        """Send the answer of an arrival that was carried out at once."""
        self._connection.send(encode_answer(op.number, answer))

    def submitted(self, size: int) -> None:
        """Note that an arrival waits to be committed."""
        self._pending += 1
        self._queued += size
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()

    def arrived(self, op: ops.Act, size: int, answer: Any) -> None:
        """Answer an arrival that was committed and carried out, unless that comes later."""
        connection = self._connection
        if answer is not LATER:
            if self._parked or self._halted or connection.paused or connection.closing:
                self._park_answer(op, size)
            else:
                connection.send(encode_answer(op.number, answer))
        self._pending -= 1
        self._queued -= size
        self._go_on()

    def _run(self, session: Session, op: ops.Op, late: bool = False) -> bytes | SharedReply:
        """Carry out a request; return the reply, or nothing where that comes later; `late`: do not encode it yet."""
        answer = session.execute(op)
        server = self._server
        if self._engine.outbox:
            server.settle(self._engine)
        if answer is LATER or op.__class__ in FOLLOWED:
            server.clock.follow(session, op)
            if answer is LATER:
                return b""
        if late:
            return _LATE
        if answer.__class__ is list and len(answer) > SLICE_ITEMS:
            self._send_list(op.number, answer)
            return b""
        return encode_answer(op.number, answer)

    def _look(self, session: Session, op: ops.Wait | ops.Check, size: int) -> None:
        """Answer a request for many keys, a slice at a time; later requests wait, for one may take this one back."""

        def looked(here: bool) -> None:
            self._parked_bytes -= size
            self._count_lists(-MAX_LISTS)
            self._count()
            if session.link is self and not session.over and not self._connection.closing:
                found = None if isinstance(op, ops.Wait) else True
                self._connection.send(encode_answer(op.number, found) if here else self._run(session, op))
                self._go_on()

        self._parked_bytes += size
        self._count_lists(MAX_LISTS)
        look_in_slices(self._engine, op.keys, looked)

    def _send_list(self, number: int, items: list[Any]) -> None:
        """Send a long list; what comes next is held up only by several of them, for replies have numbers."""

        def sent() -> None:
            self._count_lists(-1)
            self._go_on()

        self._count_lists(1)
        send_list(self._connection, number, items, self._server.settings.max_connection_memory, sent)

    def _count_lists(self, more: int) -> None:
        self._lists += more
        self._halt()

    def _halt(self) -> None:
        self._halted = self._greeting is not None or self._crowded or self._lists >= MAX_LISTS

    def _go_on(self) -> None:
        """After what requests waited for: carry them out, and read on."""
        if self._queued <= MAX_QUEUED_BYTES // 2 and not self._crowded:
            self._connection.read_on()
        if self.blocked:
            self._connection.go_on()

    # The way through the log

    def _wait_for_room(self, log: CommitQueue, payload: bytes) -> None:
        """Put a request back, until the queue of the log has room."""
        self._backlog.appendleft(payload)
        self._crowded = self._halted = True
        self._count()
        self._connection.stall()
        log.wait_for_room(self._admitted)

    def _admitted(self) -> None:
        self._crowded = False
        self._halt()
        self._go_on()

    def committed(self, work: ops.Op, size: int) -> None:
        """Carry out a request that is in the log now."""
        session, connection = self.session, self._connection
        try:
            if session is None or self._server.state.sessions.get(session.serial) is not session:
                return  # it has ended
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
        """Carry out a change, and answer it when the peer reads on; a read waits until then."""
        if not op.changes or self._run(session, op, late=True):
            self._park_answer(op, size)

    def _park_answer(self, op: ops.Op, size: int) -> None:
        if not self._connection.closing:
            self._parked.append((op, size))
            self._parked_bytes += size
            self.held += size
            self._connection.recount()

    def _catch_up(self, replies: list[bytes]) -> int:
        """Add what had to wait for the peer to read; return how much it is."""
        owed = 0
        while (self._resending or self._parked) and owed <= REPLIES_BYTES and not self._halted:
            reply = bytes(self._resend() if self._resending else self._unpark())
            owed += len(reply)
            replies.append(reply)
        return owed

    def _unpark(self) -> bytes | SharedReply:
        """Return the reply to the first request that was parked, if there is one still."""
        op, size = self._parked.popleft()
        self._parked_bytes -= size
        session = self.session
        carrier: object = session.link if session is not None else None
        if session is None or carrier is not self:
            return b""
        if not op.changes:
            return self._run(session, op)
        return encode_answer(op.number, session.kept[op.number][0]) if op.number in session.kept else b""

    def refuse(self, work: ops.Op, size: int, error: StoreError, last: bool) -> bool:
        """Refuse a request that could not be written to the log; it has changed nothing."""
        if not last and gives_back(work):
            return False
        session, confirms = self.session, work.__class__ is ops.Confirm
        if session is not None and confirms:
            self._server.retries.add(entries.Request(session.serial, cast(Any, work)))
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
        """Begin with a session, which this connection carries now."""
        self.session = session
        self._engine = self._server.state.namespaces[session.namespace].engine
        self._resending = bool(session.pushes)
        self.greeting_over()
        self._go_on()

    def session_ended(self) -> None:
        """Hang up, for the session has ended with its round; a greeting that is under way is answered."""
        if self.session is not None:
            self._connection.close()

    def greeting_over(self, refused: bool = False) -> None:
        """Note that there is a session, or, where it was `refused`, that the requests behind the hello are void."""
        self._greeting = None
        self._refused = refused
        self._halt()

    def _resend(self) -> bytes:
        """Return some of the pushes that the client has not seen; those that come meanwhile are behind them."""
        session = self.session
        pushes = session.pushes if session is not None and session.link is self else ()
        data, self._resent, self._resending = encode_pushes(pushes, self._resent, REPLIES_BYTES)
        return data
