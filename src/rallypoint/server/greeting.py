"""The greeting of a native client: its hello, and the session that it gets or goes on with.

The greeting is an entry of the log, and its client hears nothing before that is committed. Where the disk is full and
even its reserve is used up, a client without a session is told so. One that comes back is hung up on, for a refusal
would end its session: it tries again, and keeps it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rallypoint.core.entries import Attach, Open
from rallypoint.core.records import Status
from rallypoint.core.session import Session
from rallypoint.errors import StoreError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import GARBLED, VERSION, Welcome, decode_hello, frame

if TYPE_CHECKING:
    from rallypoint.server.connection import Connection
    from rallypoint.server.native_connection import NativeConnection
    from rallypoint.server.server import StoreServer

__all__ = ["Greeting", "give_back"]


def give_back(server: StoreServer, session: Session) -> None:
    """Carry a session no more, which may have ended with its round."""
    session.link = None
    if server.state.sessions.get(session.serial) is session:
        server.detach(session)


class Greeting:
    """One greeting, until it is answered."""

    def __init__(self, server: StoreServer, connection: Connection, namespace: int, handler: NativeConnection) -> None:
        self._server = server
        self._connection = connection
        self._namespace = namespace
        self._handler = handler
        self._resuming: Session | None = None

    def begin(self, payload: bytes) -> None:
        """Ask for the session that a hello wants."""
        try:
            hello = decode_hello(payload)
        except GARBLED as error:
            raise BadMessage(f"not a greeting: {error}") from None
        server = self._server
        if hello.version != VERSION:
            self._refuse(f"version {hello.version} of the protocol is not spoken here, only {VERSION}")
        elif hello.session:
            self._take_over(server.state.sessions_by_id.get(hello.session))
            entry = Attach(hello.session, self._namespace, hello.pushes_seen)
            server.submit(entry, self._resume, self._cannot_resume)
        else:
            opening = Open(secrets.token_bytes(16), hello.name, self._namespace, hello.former)
            server.submit(opening, self._open, self._refuse)

    def _take_over(self, session: Session | None) -> None:
        """Carry a session, from whichever connection did before.

        This is not left to the commit: if that connection ended before it, its end would be logged behind our greeting.
        """
        if session is not None and session.namespace == self._namespace and not session.over:
            session.link = self._handler
            self._resuming = session

    def _let_go(self) -> None:
        """Carry no more what was taken over, unless another connection does by now."""
        session = self._resuming
        if session is not None and session.link is self._handler:
            give_back(self._server, session)

    def _open(self, answer: Session | str) -> None:
        if isinstance(answer, Session):
            self._welcome(answer, resumed=False)
        else:
            self._server.refused_sessions += 1
            self._refuse(answer)

    def _resume(self, answer: Session | str) -> None:
        if not isinstance(answer, Session):
            self._refuse(answer)
            self._let_go()
        elif answer.link is None or answer.link is self._handler:
            self._welcome(answer, resumed=True)
        else:  # its client gave this connection up, and came back by another
            self._connection.close()

    def _cannot_resume(self, error: StoreError) -> None:
        self._let_go()
        self._connection.close()

    def _refuse(self, why: object) -> None:
        self._handler.greeting_over()
        self._connection.send(frame((0, Status.REFUSED, (self._server.state.identity, str(why)))))

    def _welcome(self, session: Session, resumed: bool) -> None:
        if self._connection.closing:  # it hung up before its greeting was committed
            give_back(self._server, session)
            return
        server = self._server
        session.link = self._handler
        server.clock.attached(session)
        welcome = Welcome(
            VERSION, server.state.identity, session.id, server.settings.grace_s, resumed, recovery_s=server.recovery_s
        )
        self._connection.send(frame((0, Status.OK, welcome)))
        self._handler.enter(session)
