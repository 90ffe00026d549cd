"""The client's end of our protocol: it numbers requests, reads what comes, and knows what to say again after a cut.

Fed incrementally, bounded, without I/O: `store/wire.py` puts it on a socket for many threads, and
`store/async_session.py` on asyncio.

What is not answered is kept as a record, not as the bytes that were sent: a request that waits is repeated with the
time that is left to it, or its wait would begin again with every connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from rallypoint.core.ops import Confirm, Draw, Drop, Op, Pop, Take
from rallypoint.core.records import Event, Status
from rallypoint.errors import ServerRestarted, SessionLost
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import GARBLED, VERSION, Frames, Hello, Notice, Welcome, frame, unpack_length

__all__ = ["Client", "Reply", "Round"]

MAX_FRAME_BYTES = 1 << 30
"""The longest frame that a client takes from a server, which it trusts more than the server trusts it."""

CONFIRM_EVERY = 64
"""How many answers a client takes before it tells the server to forget them."""


class Reply(Struct, array_like=True, frozen=True, gc=False):
    """What came for a request, or (number 0) a push with its number as status."""

    number: int
    status: int
    result: Any

    def event(self) -> tuple[int, Event]:
        """Read a push: the number of its watch's request, and what happened."""
        try:
            number, revision, key, value = msgspec.convert(self.result, tuple[int, int, bytes, bytes | None])
        except msgspec.ValidationError as error:
            raise BadMessage(f"the server's push makes no sense: {error}") from None
        return number, Event(revision, key, value)


_TAKE = frozenset({Draw, Pop, Take})
"""Requests that take an item of a queue."""

_decode = msgspec.msgpack.Decoder(Reply).decode


class _Timed(NamedTuple):
    """A request that waits, and until when."""

    request: Any
    until: float

    def left(self, now: float) -> Op:
        """Return the request with the time that is left; never more than it was given."""
        timeout_s = min(self.request.timeout_s, max(self.until - now, 0.0))
        again: Op = msgspec.structs.replace(self.request, timeout_s=timeout_s)
        return again


class Round(NamedTuple):
    """The namespace of a run's round, as a hello names it; of no run, it is the namespace of everybody."""

    run: str = ""
    scope: int = 0
    number: int | None = None


class Client:
    """The client's end of one session, over as many connections as it takes.

    With `server`, only one of that identity is taken for the store. `former` are sessions that this process has lost:
    what they hold in shared objects is still its own. With `session`, an id of 16 random bytes that the caller chose,
    the session is opened under it however often its welcome is lost.
    """

    def __init__(
        self,
        name: str,
        server: bytes = b"",
        former: Sequence[bytes] = (),
        *,
        session: bytes = b"",
        namespace: Round = Round(),  # noqa: B008 - it is never changed
    ) -> None:
        self._name = name
        self._former = list(former)
        self._opens = bool(session)  # and was not welcomed yet
        self._attempt = 0
        self._namespace = namespace
        self.server = server
        """The identity of the store, which all servers of one share."""

        self.session = session
        """The id of the session, which is a secret; empty before there is one."""

        self.recovers = False
        """Whether the server comes back with its sessions when it is restarted."""

        self.servers: list[str] = []
        """The addresses of all servers of the store, as one of them said last; a new list whenever that changes."""

        self.trouble = ""
        """Why the server can answer nothing at the moment, where it said so since this connection was made."""

        self._frames = Frames(MAX_FRAME_BYTES)
        self.number = 1
        """What the next request will be numbered."""

        self._open: dict[int, Op | _Timed] = {}
        self._pushes_seen = 0
        self._unconfirmed = 0
        self._took_items = False  # and what confirms them may be lost with a connection

    def greet(self) -> bytes:
        """Return the hello of a new connection, sent behind the preface; it resumes the session if there is one."""
        self._frames = Frames(MAX_FRAME_BYTES)
        self.trouble = ""
        self._attempt += 1  # so that a late hello cannot take the session back from a later one
        who = (self._name, self.session, self._pushes_seen, b"", self._former)
        return frame(Hello(VERSION, *who, self._opens, self._attempt, *self._namespace))

    def welcome(self, reply: Reply, peer: str) -> float:
        """Read the answer to the greeting; raise why there is no session.

        Returns how long the session may be without a connection: its grace, or longer where the server recovers.
        """
        try:
            if reply.status != Status.OK:
                identity, why = reply.result
                if not self.session or self._opens:
                    raise BadMessage(f"refused: {why}")
                raise (SessionLost if identity == self.server else ServerRestarted)(peer=peer, why=why)
            welcome = msgspec.convert(reply.result, Welcome)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise BadMessage(f"the server's welcome makes no sense: {error}") from None
        if self.server not in (b"", welcome.server):
            raise ServerRestarted(peer=peer, why="its identity is another, and so is what it stores")
        self.server, self.session, self._opens = welcome.server, welcome.session, False
        self.recovers = welcome.recovery_s > 0
        self.servers = welcome.servers
        return max(welcome.grace_s, welcome.recovery_s)

    def repeat(self, now: float) -> bytes:
        """Return, after a resumption, all requests that were not answered; those that wait, with the time left to them.

        One whose time is over is repeated with none: the server says what became of it. Items that were taken before
        are confirmed again, after a `Drop` among the requests: the server would else put them back when the session
        ends, however much later that is.
        """
        again = [frame(asked.left(now) if isinstance(asked, _Timed) else asked) for asked in self._open.values()]
        return b"".join([*again, *([self._confirmation()] if self._took_items else [])])

    def ask(self, op: Op, until: float | None = None) -> bytes:
        """Give a request the next `number`, and return what to send; one that waits does so `until` then."""
        number = op.number = self.number
        sent = request = frame(op)
        if self._unconfirmed >= CONFIRM_EVERY:
            # What is dropped may have been answered and not taken: it must not be confirmed before.
            sent = request + self.confirm() if isinstance(op, Drop) else self.confirm() + request
        self.number = number + 1
        self._open[number] = op if until is None else _Timed(op, until)
        return sent

    @property
    def owes(self) -> bool:
        """Whether there is more than a little to confirm."""
        return self._unconfirmed >= CONFIRM_EVERY

    @property
    def held(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return self._frames.held

    def unanswered(self) -> list[int]:
        """Return the numbers of the requests that wait for an answer."""
        return list(self._open)

    def confirm(self) -> bytes:
        """Return what tells the server to forget what was delivered, or nothing when that was little."""
        if self._unconfirmed < CONFIRM_EVERY:
            return b""
        return self._confirmation()

    def _confirmation(self) -> bytes:
        self._unconfirmed = 0
        return frame(Confirm(0, self.number - 1, list(self._open), self._pushes_seen))

    def receive(self, data: bytes) -> list[Reply]:
        """Take what came; return what is in it, in order. Each is to be settled once it was delivered.

        Notices are taken in here: `servers` and `trouble` are what they said.
        """
        size = len(data)
        if size > 4 and not self._frames.held and unpack_length(data)[0] == size - 4:
            replies = [self._read(data[4:])]  # one frame, as nearly all of them come
        else:
            replies = [self._read(payload) for payload in self._frames.feed(data)]
        return [reply for reply in replies if reply.number or not self._noticed(reply)]

    def sole(self, data: bytes, number: int) -> Reply | None:
        """Return the answer to a request, settled, if it is all that came, as it is for a lone caller; else None.

        After None, `receive` has to take in what came.
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
            raise BadMessage(f"the server said what makes no sense: {error}") from None

    def _noticed(self, reply: Reply) -> bool:
        """Take in a notice; return whether it was one."""
        if reply.number or reply.status or reply.result.__class__ is not dict:
            return False
        try:
            notice = msgspec.convert(reply.result, Notice)
        except msgspec.ValidationError as error:
            raise BadMessage(f"malformed notice from the server: {error}") from None
        self.trouble = notice.trouble
        if notice.servers is not None:
            self.servers = notice.servers
        return True

    def expects(self, reply: Reply) -> bool:
        """Say whether a reply is new; a cut may make answers and pushes come twice."""
        return reply.number in self._open if reply.number else reply.status > self._pushes_seen

    def settle(self, reply: Reply) -> None:
        """Note that a reply was delivered: its request is not repeated, and its push not sent again."""
        if reply.number:
            self._settle(reply)
        else:
            self._pushes_seen = reply.status

    def _settle(self, reply: Reply) -> None:
        """Close a request. An item goes back to its queue if we die unconfirmed, so it is to be confirmed at once."""
        asked = self._open.pop(reply.number, None)
        kind = asked.request.__class__ if isinstance(asked, _Timed) else asked.__class__
        if kind in _TAKE and reply.status == Status.OK and reply.result is not None:
            self._unconfirmed += CONFIRM_EVERY
            self._took_items = True

    def answered(self, number: int) -> bool:
        """Say whether a request has its answer, or was taken back."""
        return number not in self._open

    def forget(self, number: int) -> None:
        """Take a request off the list of those to repeat."""
        self._open.pop(number, None)
