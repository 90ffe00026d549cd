"""What a server shows over HTTP: who it is, how it is, and its rounds. `http.py` has the protocol and the paths.

Every server passes its own functions in an `HttpSite`. This module imports no HTTP, which most servers never speak.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rallypoint.core.records import show

if TYPE_CHECKING:
    from rallypoint.server.listener import Listener
    from rallypoint.server.status.source import StatusSource

__all__ = ["LISTED", "CloseRound", "HttpResource", "HttpSite", "OpenRound", "ServerStatistics", "about", "json_reply",
           "statistics"]  # fmt: skip

LISTED = 10_000
"""Clients, and sessions, listed in the statistics; the rest are only counted."""

HttpResource = tuple[int, str, bytes]
"""The status, type and body of a reply."""

SHOWN = 100
"""Keys of one session named in the statistics."""


class OpenRound(Protocol):
    """Opens a port for the round of a run."""

    def __call__(
        self,
        name: str,
        scope: int,
        number: int | None,
        done: Callable[[int | Exception], None],
        *,
        port: int = 0,
        everywhere: bool = False,
    ) -> None:
        """Open a port, `port` if that is free; `everywhere`: on all interfaces. Call `done` with it, or the error."""


CloseRound = Callable[[str, "int | None", Callable[[bool], None]], None]
"""Closes the round of a run unless its scope is later; calls the function with whether there was one."""


class ServerStatistics(NamedTuple):
    """What `/statistics` shows; entries are made while they are iterated over, for there may be many."""

    facts: dict[str, Any]
    """Counts and sizes by name; `more_clients` and `more_sessions` count those that are not listed."""

    clients: Iterator[dict[str, Any]]
    sessions: Iterator[dict[str, Any]]

    def encode(self, done: Callable[[bytes], object]) -> Iterator[None]:
        """Write the JSON in small steps; the last one calls `done` with it."""
        parts = [json.dumps(self.facts)[:-1]]
        for name, entries in (("clients", self.clients), ("sessions", self.sessions)):
            parts.append(f', "{name}": [')
            for count, entry in enumerate(entries):
                parts.append(f"{', ' * (count > 0)}{json.dumps(entry)}")
                yield
            parts.append("]")
        done("".join((*parts, "}")).encode())


class HttpSite(NamedTuple):
    """What one server answers to HTTP requests."""

    about: Callable[[], dict[str, Any]]
    """The identity of the server, for a program that finds the port taken."""

    health: Callable[[bool], str]
    """The reply to a health check, in full or, for peers without access, without addresses."""

    statistics: Callable[[], ServerStatistics]
    """Counts and sizes by name, and the clients and sessions."""

    open_round: OpenRound | None = None
    """None: this server opens no ports for rounds."""

    close_round: CloseRound | None = None
    """None: this server has no rounds to close."""

    leads: Callable[[], bool] = lambda: True
    """Whether rounds may be changed here: not on a standby."""

    status: Callable[[], StatusSource] | None = None
    """The models of this server's status, created on first use; None: it shows none."""


def json_reply(facts: dict[str, Any]) -> HttpResource:
    """Return a reply in JSON."""
    return 200, "application/json", json.dumps(facts).encode()


def about() -> dict[str, Any]:
    """Return the identity of this process."""
    version = sys.modules["rallypoint"].__version__  # the layering forbids importing the package from here
    return {"server": "rallypoint", "version": version, "pid": os.getpid()}


def statistics(
    listener: Listener,
    about: dict[str, Any],
    holdings: dict[str, Any],
    sessions: Sequence[Any] = (),
    refused_sessions: int = 0,
) -> ServerStatistics:
    """Return counts and sizes by name, the connected clients, and the sessions."""
    facts = {
        **about,
        "uptime_s": round(time.monotonic() - listener.started_at, 1),
        "connections": listener.connections,
        "refused_connections": listener.refused,
        "denied_connections": listener.admission.denied.total,
        "refused_handshakes": listener.admission.tls_queue.refused,
        "refused_sessions": refused_sessions,
        **holdings,
        "bytes": listener.memory.total,
        "max_bytes": listener.settings.max_memory,
        "more_clients": max(0, listener.connections - LISTED),
        "more_sessions": max(0, len(sessions) - LISTED),
    }
    return ServerStatistics(facts, listener.clients(LISTED), map(_describe, sessions[:LISTED]))


def _describe(session: Any) -> dict[str, Any]:
    """Return the entry of a session in the statistics."""
    return {
        "name": session.name,
        "here": session.handler is not None,
        "waits_for": [show(key) for key in session.waits_for[:SHOWN]],
        "leases": [show(key) for key in session.leases[:SHOWN]],
    }
