"""The server's end of our own protocol on one connection: the greeting, then the requests of a session.

Requests that change something go through the log where there is one, and run when they are committed. Reads run at
once, or behind the connection's own changes, so that a client sees its requests carried out in the order it sent them.
"""

from __future__ import annotations

import functools
import secrets
from collections import deque
from typing import TYPE_CHECKING

from rallypoint.core import ops
from rallypoint.core.entries import Attach, Open
from rallypoint.core.records import LATER, Push, Status
from rallypoint.core.session import Session
from rallypoint.core.state import Namespace
from rallypoint.errors import LimitExceeded, StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import (
    GARBLED,
    VERSION,
    Frames,
    SharedReply,
    Welcome,
    decode_hello,
    decode_request,
    encode_answer,
    encode_items,
    encode_list_head,
    frame,
    misunderstood,
    unpack_length,
)
from rallypoint.server.sliced import SLICE_ITEMS, encode_in_slices

if TYPE_CHECKING:
    from typing import Any

    from rallypoint.server.connection import Connection
    from rallypoint.server.server import StoreServer

__all__ = ["MAX_QUEUED_BYTES", "QUEUED_BYTES", "REPLIES_BYTES", "NativeConnection"]

REPLIES_BYTES = 256 * 1024
"""How much is answered before the peer must have taken it; then the rest of what came waits."""

MAX_LISTS = 4
"""How many long lists one connection may have under way before its next requests wait."""

QUEUED_BYTES = 100
"""What a request that waits to be committed costs beside its own bytes; near enough for a limit."""

MAX_QUEUED_BYTES = 1024 * 1024
"""How many bytes of requests of one connection may wait to be committed before no more is read from it."""


_RELEASES = frozenset((ops.Confirm, ops.Drop, ops.Unlease, ops.Bye))
"""Requests that are carried out also where the disk is full: they free something, or nobody waits for an answer."""


class NativeConnection:
    """One native client's connection, behind the preface."""

    __slots__ = (
        "_backlog",
        "_connection",
        "_engine",
        "_frames",
        "_greeting",
        "_halted",
        "_lists",
        "_namespace",
        "_pending",
        "_queued",
        "_resuming",
        "_server",
        "held",
        "session",
    )

    def __init__(self, server: StoreServer, connection: Connection, namespace: Namespace) -> None:
        self.session: Session | None = None
        self._server = server
        self._connection = connection
        self._namespace = namespace
        self._engine = namespace.engine
        self._frames = Frames(server.settings.max_connection_memory)
        self._backlog: deque[bytes] = deque()
        self._greeting = False
        self._resuming: Session | None = None  # what the greeting under way goes on with
        self._lists = 0  # how many long lists are under way
        self._halted = False  # whether requests wait for the greeting, or for lists
        self._pending = 0
        self._queued = 0
        self.held = 0
        """How many bytes of requests are held that could not be carried out yet."""

    @property
    def greeted(self) -> bool:
        """Whether there is a session."""
        return self.session is not None

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent: call `receive(b"")` then."""
        return bool(self._backlog) and not self._halted

    @property
    def waits_for(self) -> tuple[bytes, ...]:
        """The keys that requests of this client wait for."""
        return self.session.waits_for if self.session is not None else ()

    def receive(self, data: bytes, now: float) -> bytes:
        """Carry out the requests in what came, and return the answers. Raises BadMessage, and is of no use after."""
        size = len(data)
        frames, backlog = self._frames, self._backlog
        if size > 4 and not (frames.held or backlog or self._halted) and unpack_length(data)[0] == size - 4:
            reply = self._request(data[4:])  # one frame, as nearly all of them come
            return reply if reply.__class__ is bytes else bytes(reply)
        backlog.extend(frames.feed(data))
        replies: list[bytes] = []
        owed = 0
        while backlog and owed <= REPLIES_BYTES and not self._halted:
            reply = self._request(backlog.popleft())
            owed += len(reply)
            replies.append(bytes(reply))
        self._count()
        if self._halted and self.held > MAX_QUEUED_BYTES:
            self._connection.stall()
        return b"".join(replies)

    def _count(self) -> None:
        self.held = self._frames.held + self._queued + sum(map(len, self._backlog))

    def end(self, now: float) -> None:
        """Note that the connection is gone."""
        if self.session is not None and self.session.link is self:
            self._give_back(self.session)

    def deliver(self, number: int, answer: Any) -> None:
        """Send an answer that became ready later, or a push."""
        if self._greeting:
            return  # it comes behind the welcome: pushes are sent again, and requests repeated
        if answer.__class__ is list and len(answer) > SLICE_ITEMS:
            self._send_list(number, answer)
            return
        self._connection.send(encode_answer(number, answer))
        session = self.session
        if answer.__class__ is Push and session is not None and session.over:
            self._connection.drop(session.overdue)

    # Requests

    def _request(self, payload: bytes) -> bytes | SharedReply:
        session = self.session
        if session is None:
            return self._greet(payload)
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
            self._check_repeated(session, op)
        if isinstance(op, ops.Beat):
            self._server.beat(session)
            return b""
        log = self._server.log
        if log is None or not (kind.changes or self._pending):
            return self._run(session, op)
        size = len(payload) + QUEUED_BYTES
        self._pending += kind is not ops.Confirm  # which nothing waits for
        if kind is ops.List:
            self._count_lists(1)
        self._queued += size
        self.held += size
        record = self._server.record(session, payload) if kind.changes else None
        log.submit(record, self, op, size)
        if self._queued > MAX_QUEUED_BYTES:
            self._connection.stall()
        return b""

    def _check_repeated(self, session: Session, op: ops.Op) -> None:
        if isinstance(op, (ops.Confirm, ops.Beat)):
            return
        if op.number <= 0:
            raise BadMessage(f"{op.__class__.__name__} has number {op.number}, and requests count from 1")
        refusals = self._server.refusals.get(session.serial, ())
        if op.changes and not session.knows(op.number) and op.number not in refusals:
            raise BadMessage(f"request {op.number} came again after it was confirmed")

    def _run(self, session: Session, op: ops.Op) -> bytes | SharedReply:
        """Carry out a request; return the reply, or nothing where that comes later."""
        answer = session.execute(op)
        server = self._server
        if self._engine.outbox:
            server.settle(self._engine)
        if answer is LATER:
            server.waits(session, op)
            return b""
        if op.__class__ in server.FOLLOWED:
            server.follow_up(session, op)
        if answer.__class__ is list and len(answer) > SLICE_ITEMS:
            self._send_list(op.number, answer)
            return b""
        return encode_answer(op.number, answer)

    def _send_list(self, number: int, items: list[Any]) -> None:
        """Send a long list; what comes next is held up only by several of them, for replies have numbers."""
        limit = self._server.settings.max_connection_memory

        def done(parts: list[bytes], size: int) -> None:
            if size > limit:
                error = LimitExceeded(what="answer", key="", size=size, limit=limit)
                self._connection.send(encode_answer(number, error))
            else:
                self._connection.send_parts([encode_list_head(number, len(items), size), *parts])
            self._count_lists(-1)
            self._go_on()

        self._count_lists(1)
        encode_in_slices(items, encode_items, limit, done)

    def _count_lists(self, more: int) -> None:
        self._lists += more
        self._halted = self._lists >= MAX_LISTS

    def _go_on(self) -> None:
        """After what requests waited for: carry them out, and read on."""
        if self._queued <= MAX_QUEUED_BYTES // 2:
            self._connection.read_on()
        if self.blocked:
            self._connection.go_on()

    def committed(self, work: ops.Op, size: int) -> None:
        """Carry out a request that is in the log now."""
        if work.__class__ is ops.List:
            self._count_lists(-1)
        session = self.session
        if session is not None and self._server.state.sessions.get(session.serial) is session:  # else it has ended
            reply = self._run(session, work)
            if reply and not self._connection.closing:
                self._connection.send(reply)
        self._dequeue(work, size)

    def refuse(self, work: ops.Op, size: int, error: StoreError) -> bool:
        """Refuse a request that could not be written to the log; it has changed nothing."""
        if work.__class__ in _RELEASES:
            return False
        if self.session is not None:
            self._server.note_refusal(self.session, work.number)
        self._connection.send(encode_answer(work.number, error))
        self._dequeue(work, size)
        return True

    def _dequeue(self, op: ops.Op, size: int) -> None:
        self._pending -= op.__class__ is not ops.Confirm
        self._queued -= size
        self.held -= size
        self._go_on()
        if self._queued == 0:
            self._connection.recount()

    # The greeting

    def _greet(self, payload: bytes) -> bytes:
        try:
            hello = decode_hello(payload)
        except GARBLED as error:
            raise BadMessage(f"not a greeting: {error}") from None
        server = self._server
        if hello.version != VERSION:
            why = f"version {hello.version} of the protocol is not spoken here, only {VERSION}"
            return frame((0, Status.REFUSED, (server.state.identity, why)))
        namespace = self._namespace.id
        self._greeting = self._halted = True
        if hello.session:
            self._take_over(server.state.sessions_by_id.get(hello.session))
            server.submit(Attach(hello.session, namespace, hello.pushes_seen), self._enter)
        else:
            entry = Open(secrets.token_bytes(16), hello.name, namespace, hello.former)
            server.submit(entry, functools.partial(self._enter, new=True))
        return b""

    def _take_over(self, session: Session | None) -> None:
        """Carry a session, from whichever connection did before.

        This is not left to the commit: if that connection ended before it, its end would be logged behind our greeting.
        """
        if session is not None and session.namespace == self._namespace.id and not session.over:
            session.link = self
            self._resuming = session

    def _give_back(self, session: Session | None) -> None:
        """Carry a session no more, which may have ended with its round."""
        if session is not None and session.link in (None, self):
            session.link = None
            if self._server.state.sessions.get(session.serial) is session:
                self._server.detach(session)

    def _enter(self, answer: Session | str, new: bool = False) -> None:
        """Welcome the client to its session, or tell why there is none."""
        self._greeting = self._halted = False
        resuming, self._resuming = self._resuming, None
        server = self._server
        if not isinstance(answer, Session):
            server.refused_sessions += new
            self._connection.send(frame((0, Status.REFUSED, (server.state.identity, str(answer)))))
            self._give_back(resuming)
            return
        if self._connection.closing:  # it hung up before its greeting was committed
            self._give_back(answer)
            return
        self.session = answer
        answer.link = self
        server.attached(answer)
        settings = server.settings
        welcome = Welcome(
            VERSION, server.state.identity, answer.id, settings.grace_s, not new, recovery_s=server.recovery_s
        )
        pushes = b"" if new else b"".join(bytes(encode_answer(0, push)) for push in answer.pushes)
        self._connection.send(frame((0, Status.OK, welcome)) + pushes)
        self._go_on()
