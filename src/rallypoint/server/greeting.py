"""The greeting of a native client: its hello, and the session that it gets or goes on with.

The greeting is an entry of the log, and its client hears nothing before that is committed. Where the disk is full and
even its reserve is used up, a client without a session is told so. One that comes back is hung up on, for a refusal
would end its session: it tries again, and keeps it.

A client may choose the id of its session. Whether its welcome was lost or it is new, the same hello then opens the
session once, so its requests may follow without waiting for the welcome. Hellos that open one id are dealt with one
after the other: the end of an earlier connection must not be logged behind the hello of a later one. An id whose
session has ended is not opened again, for what its client asked then would be carried out twice.

A hello that names the round of a run enters that round's namespace, and the first one creates it. Rejected: a request
that creates it; every client would need another round trip, and a hello could come too early.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rallypoint.core.entries import Attach, End, Open
from rallypoint.core.records import Status
from rallypoint.core.session import Session
from rallypoint.core.state import UNKNOWN_SESSION, Namespace
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import GARBLED, VERSION, Hello, Welcome, decode_hello, frame

if TYPE_CHECKING:
    from rallypoint.server.carrier import Carrier
    from rallypoint.server.native_connection import NativeConnection
    from rallypoint.server.server import StoreServer

__all__ = ["SESSION_BYTES", "Greeting", "give_back"]

SESSION_BYTES = 16
"""How long the id of a session is; it is a secret, so one that a client chooses must not be shorter."""


def give_back(server: StoreServer, session: Session) -> None:
    """Carry a session no more, which may have ended with its round."""
    session.link = None
    if server.state.sessions.get(session.serial) is session:
        server.detach(session)


class Greeting:
    """One greeting, until it is answered."""

    def __init__(self, server: StoreServer, connection: Carrier, namespace: int, handler: NativeConnection) -> None:
        self._server = server
        self._connection = connection
        self._namespace = namespace
        self._handler = handler
        self._resuming: Session | None = None

    def begin(self, payload: bytes) -> None:
        """Ask for the session that a hello wants."""
        try:
            self._hello: Hello = decode_hello(payload)
        except GARBLED as error:
            raise BadMessage(f"not a greeting: {error}") from None
        hello = self._hello
        self._handler.one_port = hello.one_port
        if self._server.notices.trouble:
            self._connection.send(self._server.notices.frame(hello.one_port))
        if hello.version != VERSION:
            self._refuse(f"version {hello.version} of the protocol is not spoken here, only {VERSION}")
        elif hello.opens and len(hello.session) != SESSION_BYTES:
            self._refuse(f"the id of a session has {SESSION_BYTES} bytes, not {len(hello.session)}")
        elif hello.run:
            self._find_namespace(hello)
        else:
            self._find_session()

    # The namespace

    def _find_namespace(self, hello: Hello) -> None:
        found = self._server.state.namespace_of(hello.run)
        if found is not None and found.scope == hello.scope:
            self._enter_namespace(found)
        elif hello.session and not hello.opens:
            self._refuse(f"unknown session: round {hello.scope} of {hello.run!r} is over")
        else:
            self._server.rounds.create(hello.run, hello.scope, hello.round, self._enter_namespace)

    def _enter_namespace(self, namespace: Namespace | Exception) -> None:
        if isinstance(namespace, Exception):
            self._refuse(namespace)
        else:
            self._namespace = namespace.id
            self._find_session()

    # The session

    def _find_session(self) -> None:
        hello, server = self._hello, self._server
        session = server.state.sessions_by_id.get(hello.session) if hello.session else None
        if self._connection.closing:
            return
        if session is not None and hello.attempt < session.attempt:
            self._refuse("a later connection carries the session")
        elif session is None and hello.session in server.ended:
            self._refuse(UNKNOWN_SESSION)
        elif not hello.session:
            server.submit(self._opening(secrets.token_bytes(SESSION_BYTES)), self._opened, self._refuse)
        elif not hello.opens:
            self._take_over(session)
            entry = Attach(hello.session, self._namespace, hello.pushes_seen)
            server.submit(entry, self._resume, self._cannot_resume)
        elif hello.session in server.openings:
            server.openings[hello.session].append(self._find_session)
        else:
            server.openings[hello.session] = []
            self._take_over(session)
            server.submit(self._opening(hello.session), self._opened_chosen, self._cannot_open)

    def _opening(self, identity: bytes) -> Open:
        return Open(identity, self._hello.name, self._namespace, self._hello.former)

    def _take_over(self, session: Session | None) -> None:
        """Carry a session, from whichever connection did before.

        This is not left to the commit: if that connection ended before it, its end would be logged behind our greeting.
        """
        if session is not None and session.namespace == self._namespace and not session.over:
            session.link, session.attempt = self._handler, self._hello.attempt
            self._resuming = session

    def _let_go(self) -> None:
        """Carry no more what was taken over, unless another connection does by now."""
        session = self._resuming
        if session is not None and session.link is self._handler:
            give_back(self._server, session)

    def _opened(self, answer: Session | str) -> None:
        if not isinstance(answer, Session):
            self._server.refused_sessions += 1
        self._resume(answer)

    def _opened_chosen(self, answer: Session | str) -> None:
        if isinstance(answer, Session) and self._resuming not in (None, answer):  # it ended meanwhile
            give_back(self._server, answer)
            self._server.submit(End(answer.serial))
            answer = UNKNOWN_SESSION
        self._opened(answer)
        self._next()

    def _cannot_open(self, error: StoreError) -> None:
        if self._resuming is not None:
            self._cannot_resume(error)
        else:
            self._refuse(error)
        self._next()

    def _next(self) -> None:
        """Let the hellos go on that wait to open the same session."""
        for again in self._server.openings.pop(self._hello.session):
            again()

    def _resume(self, answer: Session | str) -> None:
        if not isinstance(answer, Session):
            self._refuse(answer)
            self._let_go()
        elif answer.link is None or answer.link is self._handler:
            self._welcome(answer)
        else:  # its client gave this connection up, and came back by another
            self._connection.close()

    def _cannot_resume(self, error: StoreError) -> None:
        self._let_go()
        self._connection.close()

    def _refuse(self, why: object) -> None:
        self._handler.greeting_over(refused=self._hello.opens)
        self._connection.send(frame((0, Status.REFUSED, (self._server.state.identity, str(why)))))

    def _welcome(self, session: Session) -> None:
        if self._connection.closing:  # it hung up before its greeting was committed
            give_back(self._server, session)
            return
        server = self._server
        session.link, session.attempt = self._handler, self._hello.attempt
        server.clock.attached(session)
        resumed = session is self._resuming or (bool(self._hello.session) and not self._hello.opens)
        welcome = Welcome(
            VERSION,
            server.state.identity,
            session.id,
            server.settings.grace_s,
            resumed,
            recovery_s=server.recovery_s,
            servers=[] if self._hello.one_port else server.notices.servers,
        )
        self._connection.send(frame((0, Status.OK, welcome)))
        self._handler.enter(session)
