"""The port of a round, which an agent opens on the relay of its node by an HTTP request.

Requests are idempotent, so if a relay dies before it replies, the request is retried on its replacement. The open ports
of a relay die with it, and the agent must know. So the connection of the request that opened a port is kept open: it
ends exactly when the process that has the port ends.

Rejected: to compare the restart count of the relay before and after. A death between the two is invisible, and the
agent would have to poll.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple

from rallypoint import net
from rallypoint.client.routing.route import backoff_s
from rallypoint.deadline import Deadline
from rallypoint.errors import AuthenticationFailed, ConnectionLost, MeetingError
from rallypoint.protocol import BadMessage
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.http_client import open_http

__all__ = ["RelayRequests", "RoundOver", "RoundPort", "close_round", "is_gone", "open_port"]

ATTEMPT_S = 10.0
"""Timeout of each attempt of a request that is retried."""


class RoundOver(MeetingError):
    """A later round of the run is open."""


class RoundPort:
    """A port that a relay has open for a round; when that relay ends, `lost` becomes true and `on_end` is called."""

    def __init__(self, port: int, scope: int, pid: int, kept: socket.socket, on_end: Callable[[], object]) -> None:
        self.port = port
        self.scope = scope
        self.pid = pid
        """Process id of the relay."""

        self._kept = kept
        self._on_end = on_end
        self._ended = self._closed = False
        threading.Thread(target=self._watch, name=f"end of relay {pid}", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether the relay has ended, even before `on_end`: a worker that fails as a consequence may be seen first."""
        if not self._ended and not self._closed:
            try:
                return self._kept.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return not self._closed
        return self._ended

    def close(self) -> None:
        """Stop watching the relay; the port stays open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._kept.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with self._kept:
            with contextlib.suppress(OSError):
                self._kept.recv(1)  # no request is pending: this returns at the end of the connection
            self._ended = not self._closed
        if self._ended:
            self._on_end()


def open_port(
    relay: RelayRequests,
    run: str,
    scope: int,
    timeout_s: float,
    on_end: Callable[[], object],
    *,
    number: int = 0,
    port: int = 0,
    everywhere: bool = False,
) -> RoundPort:
    """Open a port on a relay, `port` if it is free; raise RoundOver if a later round is open there."""
    path = _path(run, scope, round=number, port=port, everywhere=int(everywhere))
    deadline = Deadline(timeout_s)
    while True:
        connection, facts = relay.send("PUT", path, deadline.remaining())
        try:
            connection.request("GET", "/about")
            pid = int(json.load(connection.getresponse())["pid"])
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            if deadline.expired():
                raise ConnectionLost(peer=str(relay.at), operation=f"PUT {path}", why=str(error)) from error
            continue
        kept = connection.sock
        connection.sock = None
        kept.settimeout(None)
        return RoundPort(int(facts["port"]), scope, pid, kept, on_end)


def close_round(relay: RelayRequests, run: str, timeout_s: float, scope: int | None = None, again: bool = True) -> None:
    """Close the round of a run, and delete its data; with `scope`, only if no later round is open."""
    connection, _ = relay.send("DELETE", _path(run, scope), timeout_s, again)
    connection.close()


def is_gone(place: net.Endpoint, within_s: float) -> bool:
    """Return whether the port is closed; a timeout, as of a lost machine, does not count.

    The kernel closes the sockets of a killed process one after the other, so the port may still accept a connection,
    which then ends without a reply.
    """
    with contextlib.closing(HTTPConnection(*place, timeout=within_s)) as connection:
        try:
            connection.request("GET", "/about")
            connection.getresponse().read()
        except (ConnectionError, HTTPException):
            return True
        except OSError:
            pass
    return False


def _path(run: str, scope: int | None, **query: int) -> str:
    path = f"/rounds/{urllib.parse.quote(run, safe='')}" + ("" if scope is None else f"/{scope}")
    text = "&".join(f"{name}={value}" for name, value in query.items() if value)
    return f"{path}?{text}" if text else path


class RelayRequests(NamedTuple):
    """HTTP requests to a relay at an address of this machine."""

    at: net.Endpoint
    security: ClientSecurity

    def send(
        self, method: str, path: str, timeout_s: float, again: bool = True
    ) -> tuple[HTTPConnection, dict[str, Any]]:
        """Send a request, and retry it if the relay dies; return the connection, still open, and the reply."""
        deadline = Deadline(timeout_s)
        for attempt in itertools.count():
            try:
                connection, status, body = self._send(
                    method, path, Deadline(min(timeout_s, ATTEMPT_S) if again else timeout_s)
                )
                break
            except (OSError, HTTPException, BadMessage) as error:
                if not again or deadline.expired() or isinstance(error, AuthenticationFailed):
                    raise ConnectionLost(peer=str(self.at), operation=f"{method} {path}", why=str(error)) from error
            time.sleep(min(backoff_s(attempt), deadline.remaining()))
        if status != HTTPStatus.OK:
            connection.close()
            why = body.decode(errors="replace").strip()
            kind = RoundOver if status == HTTPStatus.CONFLICT else MeetingError
            raise kind(f"{self.at} refused {method} {path}: {why}")
        facts: dict[str, Any] = json.loads(body)
        return connection, facts

    def _send(self, method: str, path: str, deadline: Deadline) -> tuple[HTTPConnection, int, bytes]:
        """Send a request once; return the connection, and the status and body of the reply."""
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(net.connect(*self.at, deadline, once=True))
            connection = open_http(sock, self.security, deadline)
            connection.request(method, path)
            reply = connection.getresponse()
            status, body = reply.status, reply.read()
            undo.pop_all()
        return connection, status, body
