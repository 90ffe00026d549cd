"""The handshake of a native client: its hello, and the session that it opens or resumes.

A hello is an entry of the log, and the welcome follows its commit. If the disk is full and its reserve exhausted, a new
client is refused. A client that resumes is disconnected instead, because a refusal would end its session: it
reconnects, and keeps the session.

A client may choose the id of its session. The same hello then opens the session only once, even if the welcome was
lost, so requests may follow without waiting for the welcome. Hellos that open the same id are handled one after
another: the end of an earlier connection must not be logged behind the hello of a later one. The id of an ended session
is not opened again, because the requests of its client would be executed twice.

A hello that names a round of a run enters the namespace of that round, and the first such hello creates it. Rejected: a
separate request that creates it; every client would need another round trip, and a hello could arrive too early.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rallypoint.core.entries import AttachSession, EndSession, OpenSession
from rallypoint.core.records import ReplyStatus
from rallypoint.core.session import Session
from rallypoint.core.state import UNKNOWN_SESSION, Namespace
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import GARBLED, VERSION, Hello, Welcome, decode_hello, frame

if TYPE_CHECKING:
    from rallypoint.server.connections.native_connection import NativeConnection
    from rallypoint.server.connections.session_transport import SessionTransport
    from rallypoint.server.connections.store_access import StoreAccess

__all__ = ["SESSION_BYTES", "Handshake", "release_session"]

SESSION_BYTES = 16
"""Length of a session id; it is a secret, so an id chosen by a client must not be shorter."""


def release_session(server: StoreAccess, session: Session) -> None:
    """Detach a session from its connection, unless it has ended with its round."""
    session.handler = None
    if server.state.sessions.get(session.serial) is session:
        server.detach(session)


class Handshake:
    """One hello, until it is answered."""

    def __init__(
        self, server: StoreAccess, connection: SessionTransport, namespace: int, handler: NativeConnection
    ) -> None:
        self._server = server
        self._connection = connection
        self._namespace = namespace
        self._handler = handler
        self._resuming: Session | None = None

    def begin(self, payload: bytes) -> None:
        """Open or resume the session that a hello asks for."""
        try:
            self._hello: Hello = decode_hello(payload)
        except GARBLED as error:
            raise BadMessage(f"malformed hello: {error}") from None
        hello = self._hello
        self._handler.one_port = hello.one_port
        if self._server.notices.trouble:
            self._connection.send(self._server.notices.frame(hello.one_port))
        if hello.version != VERSION:
            self._refuse(f"protocol version {hello.version} is not supported, only {VERSION}")
        elif hello.opens and len(hello.session) != SESSION_BYTES:
            self._refuse(f"a session id has {SESSION_BYTES} bytes, got {len(hello.session)}")
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
            self._refuse("a later connection has taken over the session")
        elif session is None and hello.session in server.ended:
            self._refuse(UNKNOWN_SESSION)
        elif not hello.session:
            server.submit(self._opening(secrets.token_bytes(SESSION_BYTES)), self._opened, self._refuse)
        elif not hello.opens:
            self._detach_previous(session)
            entry = AttachSession(hello.session, self._namespace, hello.pushes_seen)
            server.submit(entry, self._resume, self._cannot_resume)
        elif hello.session in server.openings:
            server.openings[hello.session].append(self._find_session)
        else:
            server.openings[hello.session] = []
            self._detach_previous(session)
            server.submit(self._opening(hello.session), self._opened_chosen, self._cannot_open)

    def _opening(self, identity: bytes) -> OpenSession:
        return OpenSession(identity, self._hello.name, self._namespace, self._hello.former)

    def _detach_previous(self, session: Session | None) -> None:
        """Take over a session from its previous connection.

        This does not wait for the commit: if that connection ended first, its end would be logged behind this hello.
        """
        if session is not None and session.namespace == self._namespace and not session.over:
            session.handler, session.attempt = self._handler, self._hello.attempt
            self._resuming = session

    def _let_go(self) -> None:
        """Release a session that was taken over, unless another connection has it by now."""
        session = self._resuming
        if session is not None and session.handler is self._handler:
            release_session(self._server, session)

    def _opened(self, answer: Session | str) -> None:
        if not isinstance(answer, Session):
            self._server.refused_sessions += 1
        self._resume(answer)

    def _opened_chosen(self, answer: Session | str) -> None:
        if isinstance(answer, Session) and self._resuming not in (None, answer):  # the session ended meanwhile
            release_session(self._server, answer)
            self._server.submit(EndSession(answer.serial))
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
        """Resume the hellos that wait to open the same session."""
        for again in self._server.openings.pop(self._hello.session):
            again()

    def _resume(self, answer: Session | str) -> None:
        if not isinstance(answer, Session):
            self._refuse(answer)
            self._let_go()
        elif answer.handler is None or answer.handler is self._handler:
            self._welcome(answer)
        else:  # the client abandoned this connection, and has reconnected
            self._connection.close()

    def _cannot_resume(self, error: StoreError) -> None:
        self._let_go()
        self._connection.close()

    def _refuse(self, why: object) -> None:
        self._handler.greeting_over(refused=self._hello.opens)
        self._connection.send(frame((0, ReplyStatus.REFUSED, (self._server.state.identity, str(why)))))

    def _welcome(self, session: Session) -> None:
        if self._connection.closing:  # the client disconnected before the commit
            release_session(self._server, session)
            return
        server = self._server
        session.handler, session.attempt = self._handler, self._hello.attempt
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
        self._connection.send(frame((0, ReplyStatus.OK, welcome)))
        self._handler.enter(session)
