"""The client's end of our protocol: it numbers requests, decodes replies, and repeats requests after a lost connection.

Incremental, bounded, without I/O: `client/blocking/` puts it on a socket for many threads, `client/async_session.py` on
asyncio.

Unanswered requests are kept as records, not as the bytes sent: a waiting request is repeated with its remaining
timeout, or its wait would start over with every connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from rallypoint.core.ops import BlockingPop, Confirm, Drop, Op, Pop, TurnPop
from rallypoint.core.records import Event, ReplyStatus
from rallypoint.errors import ServerRestarted, SessionLost
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import GARBLED, VERSION, Frames, Hello, Notice, Welcome, frame, unpack_length

__all__ = ["ClientProtocol", "Reply", "RoundRef"]

MAX_FRAME_BYTES = 1 << 30
"""The longest frame that a client accepts; it trusts the server more than the server trusts it."""

CONFIRM_EVERY = 64
"""How many replies a client receives before it tells the server to forget them."""


class Reply(Struct, array_like=True, frozen=True, gc=False):
    """The reply to a request, or (number 0) a push with its number as status."""

    number: int
    status: int
    result: Any

    def event(self) -> tuple[int, Event]:
        """Decode a push: the number of its watch's request, and the event."""
        try:
            number, revision, key, value = msgspec.convert(self.result, tuple[int, int, bytes, bytes | None])
        except msgspec.ValidationError as error:
            raise BadMessage(f"malformed push from server: {error}") from None
        return number, Event(revision, key, value)


_TAKE = frozenset({TurnPop, Pop, BlockingPop})
"""Requests that take an item from a queue."""

_decode = msgspec.msgpack.Decoder(Reply).decode


class _TimedRequest(NamedTuple):
    """A waiting request, and its deadline."""

    request: Any
    until: float

    def left(self, now: float) -> Op:
        """Return the request with its remaining timeout; never more than the original one."""
        timeout_s = min(self.request.timeout_s, max(self.until - now, 0.0))
        again: Op = msgspec.structs.replace(self.request, timeout_s=timeout_s)
        return again


class RoundRef(NamedTuple):
    """The namespace of a run's round, as a hello names it; without a run, the default namespace."""

    run: str = ""
    scope: int = 0
    number: int | None = None


class ClientProtocol:
    """The client's end of one session, over any number of connections.

    With `server`, only a server of that identity is accepted as the store. `former` are sessions that this process has
    lost: what they hold in shared objects still belongs to it. With `session`, 16 random bytes chosen by the caller,
    the session is opened once, under that id, even if its welcome is lost any number of times.
    """

    def __init__(
        self,
        name: str,
        server: bytes = b"",
        former: Sequence[bytes] = (),
        *,
        session: bytes = b"",
        namespace: RoundRef = RoundRef(),  # noqa: B008 - it is never changed
    ) -> None:
        self._name = name
        self._former = list(former)
        self._opens = bool(session)  # until the first welcome
        self._attempt = 0
        self._namespace = namespace
        self.server = server
        """The identity of the store, shared by all of its servers."""

        self.session = session
        """The id of the session, a secret; empty before there is one."""

        self.recovers = False
        """Whether the server restores its sessions after a restart."""

        self.servers: list[str] = []
        """The latest known addresses of all servers of the store; a new list at each change."""

        self.trouble = ""
        """Why the server cannot answer now, if it said so on this connection."""

        self.denied: list[str] = []
        """Hosts that the server denied access, and why, as it reported them; the caller empties the list."""

        self._frames = Frames(MAX_FRAME_BYTES)
        self.number = 1
        """The number of the next request."""

        self._open: dict[int, Op | _TimedRequest] = {}
        self._pushes_seen = 0
        self._unconfirmed = 0
        self._took_items = False  # their confirmation may be lost with a connection

    def greet(self) -> bytes:
        """Return the hello of a new connection, sent after the preface; it resumes the session if there is one."""
        self._frames = Frames(MAX_FRAME_BYTES)
        self.trouble = ""
        self._attempt += 1  # a delayed hello must not take the session from a later one
        who = (self._name, self.session, self._pushes_seen, b"", self._former)
        return frame(Hello(VERSION, *who, self._opens, self._attempt, *self._namespace))

    def welcome(self, reply: Reply, peer: str) -> float:
        """Decode the answer to the hello; raise an error if there is no session.

        Returns how long the session may be without a connection: its grace period, or longer if the server recovers its
        sessions.
        """
        try:
            if reply.status != ReplyStatus.OK:
                identity, why = reply.result
                if not self.session or self._opens:
                    raise BadMessage(f"refused: {why}")
                raise (SessionLost if identity == self.server else ServerRestarted)(peer=peer, why=why)
            welcome = msgspec.convert(reply.result, Welcome)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise BadMessage(f"malformed welcome from server: {error}") from None
        if self.server not in (b"", welcome.server):
            raise ServerRestarted(peer=peer, why="its identity has changed: it is a different store")
        self.server, self.session, self._opens = welcome.server, welcome.session, False
        self.recovers = welcome.recovery_s > 0
        self.servers = welcome.servers
        return max(welcome.grace_s, welcome.recovery_s)

    def repeat(self, now: float) -> bytes:
        """Return, after a resumption, all unanswered requests; those that wait, with their remaining timeout.

        A request whose timeout has passed is repeated with timeout 0: the server reports its outcome. Items taken
        before are confirmed again, after any `Drop` among the requests: otherwise the server would return them to their
        queues when the session ends, however much later that is.
        """
        again = [frame(asked.left(now) if isinstance(asked, _TimedRequest) else asked) for asked in self._open.values()]
        return b"".join([*again, *([self._confirmation()] if self._took_items else [])])

    def ask(self, op: Op, until: float | None = None) -> bytes:
        """Give a request the next `number`, and return the bytes to send; `until` is the deadline of its wait."""
        number = op.number = self.number
        sent = request = frame(op)
        if self._unconfirmed >= CONFIRM_EVERY:
            # A dropped request may have an undelivered answer, which must not be confirmed before the drop.
            sent = request + self.confirm() if isinstance(op, Drop) else self.confirm() + request
        self.number = number + 1
        self._open[number] = op if until is None else _TimedRequest(op, until)
        return sent

    @property
    def has_unconfirmed(self) -> bool:
        """Whether so much is unconfirmed that it is to be confirmed now."""
        return self._unconfirmed >= CONFIRM_EVERY

    @property
    def held(self) -> int:
        """How many bytes of an incomplete frame are buffered."""
        return self._frames.held

    def unanswered(self) -> list[int]:
        """Return the numbers of the unanswered requests."""
        return list(self._open)

    def confirm(self) -> bytes:
        """Return the message that tells the server to forget delivered replies, or b"" if they are few."""
        if self._unconfirmed < CONFIRM_EVERY:
            return b""
        return self._confirmation()

    def _confirmation(self) -> bytes:
        self._unconfirmed = 0
        return frame(Confirm(0, self.number - 1, list(self._open), self._pushes_seen))

    def receive(self, data: bytes) -> list[Reply]:
        """Take received bytes; return the replies in them, in order. Call `settle` for each after its delivery.

        Notices are handled here: they update `servers` and `trouble`.
        """
        size = len(data)
        if size > 4 and not self._frames.held and unpack_length(data)[0] == size - 4:
            replies = [self._read(data[4:])]  # one frame, as nearly always
        else:
            replies = [self._read(payload) for payload in self._frames.feed(data)]
        return [reply for reply in replies if reply.number or not self._noticed(reply)]

    def sole(self, data: bytes, number: int) -> Reply | None:
        """Return the settled reply to a request if the bytes contain nothing else, as usual with one caller; else None.

        After None, pass the bytes to `receive`.
        """
        size = len(data)
        if self._frames.held or size < 5 or unpack_length(data)[0] != size - 4:
            return None
        try:
            reply = _decode(data[4:])
        except GARBLED:
            return None
        if reply.number != number or number not in self._open:
            return None
        self._unconfirmed += 1 + (size >> 14)
        self._settle(reply)
        return reply

    def _read(self, payload: bytes) -> Reply:
        self._unconfirmed += 1 + (len(payload) >> 14)
        try:
            return _decode(payload)
        except GARBLED as error:
            raise BadMessage(f"malformed reply from server: {error}") from None

    def _noticed(self, reply: Reply) -> bool:
        """Handle a notice; return whether the reply was one."""
        if reply.number or reply.status or reply.result.__class__ is not dict:
            return False
        try:
            notice = msgspec.convert(reply.result, Notice)
        except msgspec.ValidationError as error:
            raise BadMessage(f"malformed notice from server: {error}") from None
        self.trouble = notice.trouble
        if notice.denied:
            self.denied.append(notice.denied)
        if notice.servers is not None:
            self.servers = notice.servers
        return True

    def expects(self, reply: Reply) -> bool:
        """Return whether a reply is new; after a reconnect, answers and pushes may arrive twice."""
        return reply.number in self._open if reply.number else reply.status > self._pushes_seen

    def settle(self, reply: Reply) -> None:
        """Record that a reply was delivered: its request is not repeated, and its push not sent again."""
        if reply.number:
            self._settle(reply)
        else:
            self._pushes_seen = reply.status

    def _settle(self, reply: Reply) -> None:
        """Close a request. An unconfirmed item returns to its queue if we die, so confirm it at once."""
        asked = self._open.pop(reply.number, None)
        kind = asked.request.__class__ if isinstance(asked, _TimedRequest) else asked.__class__
        if kind in _TAKE and reply.status == ReplyStatus.OK and reply.result is not None:
            self._unconfirmed += CONFIRM_EVERY
            self._took_items = True

    def answered(self, number: int) -> bool:
        """Return whether a request was answered or withdrawn."""
        return number not in self._open

    def forget(self, number: int) -> None:
        """Remove a request from those to repeat."""
        self._open.pop(number, None)
