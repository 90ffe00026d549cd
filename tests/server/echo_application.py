"""An application behind a listener that echoes: to test listeners and greetings without a store."""

from __future__ import annotations

from typing import Any

from rallypoint.protocol import BadMessage
from rallypoint.server.admission import Admission
from rallypoint.server.connections.connection import Connection, ProtocolHandler
from rallypoint.server.connections.greeting import PeerProtocol, Redirect
from rallypoint.server.connections.limits import ConnectionLimit
from rallypoint.server.http_site import HttpSite, ServerStatistics, about
from rallypoint.server.listener import Listener
from rallypoint.server.settings import Settings

__all__ = ["EchoApplication", "EchoHandler"]


class EchoHandler:
    """Sends back what it receives."""

    blocked = False
    greeted = True

    def __init__(self, held: int = 0) -> None:
        self.held = held
        self.ended = False

    def receive(self, data: bytes) -> bytes:
        return data

    def end(self) -> None:
        self.ended = True


class EchoApplication:
    """An application that records which handlers it was asked for, and returns those that the test has chosen."""

    def __init__(self, limit: ConnectionLimit | None = None, **settings: Any) -> None:
        self.listener = Listener(Settings(**settings), self, Admission(), limit)
        self.site = HttpSite(about, lambda in_full: "well", lambda: ServerStatistics({}, iter(()), iter(())))
        self.asked: list[PeerProtocol] = []
        self.answers: dict[PeerProtocol, ProtocolHandler | Redirect | BadMessage | None] = {}

    def handler(self, protocol: PeerProtocol, connection: Connection) -> Any:
        self.asked.append(protocol)
        answer = self.answers.get(protocol, EchoHandler())
        if isinstance(answer, BadMessage):
            raise answer
        return answer

    def held_bytes(self) -> int:
        return 0
