"""The port of a round, as an agent asks for it: at the relay of its node, by HTTP.

Asking twice is the same as once, so a relay that dies of a request, or before it has answered, is asked again: another
takes its place. What it had open is gone with it, and the agent must know. So the connection on which a port was asked
for is kept: it ends with the process that has the port, neither earlier nor later.

Rejected: to compare how often the relay was started before and after. A relay that dies between the two leaves nothing
to see, and somebody would have to look every so often.
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
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost, MeetingError
from rallypoint.store.route import backoff_s

__all__ = ["RoundOver", "RoundPort", "close_round", "is_gone", "open_port"]

ATTEMPT_S = 10.0
"""How long one that is asked again may take to answer, each time."""


class RoundOver(MeetingError):
    """A later round of the run is open."""


class RoundPort:
    """A port that a relay has open for a round: `lost` once that relay has ended, when `on_end` is called."""

    def __init__(self, port: int, scope: int, pid: int, kept: socket.socket, on_end: Callable[[], object]) -> None:
        self.port = port
        self.scope = scope
        self.pid = pid
        """The relay's process id."""

        self._kept = kept
        self._on_end = on_end
        self._ended = self._closed = False
        threading.Thread(target=self._watch, name=f"end of relay {pid}", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether that relay has ended, also if nobody was called yet: a worker that fails of it may be seen first."""
        if not self._ended and not self._closed:
            try:
                return self._kept.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return not self._closed
        return self._ended

    def close(self) -> None:
        """Watch it no more; the port stays open."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._kept.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with self._kept:
            with contextlib.suppress(OSError):
                self._kept.recv(1)  # nothing was asked: this is the end
            self._ended = not self._closed
        if self._ended:
            self._on_end()


def open_port(
    at: net.Endpoint,
    run: str,
    scope: int,
    timeout_s: float,
    on_end: Callable[[], object],
    *,
    number: int = 0,
    port: int = 0,
    everywhere: bool = False,
) -> RoundPort:
    """Open a port at a relay, this one where it is free; raise RoundOver where a later round has one there."""
    path = _path(run, scope, round=number, port=port, everywhere=int(everywhere))
    deadline = Deadline(timeout_s)
    while True:
        connection, facts = _ask(at, "PUT", path, deadline.remaining())
        try:
            connection.request("GET", "/about")
            pid = int(json.load(connection.getresponse())["pid"])
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            if deadline.expired():
                raise ConnectionLost(peer=str(at), operation=f"PUT {path}", why=str(error)) from error
            continue
        kept = connection.sock
        connection.sock = None
        kept.settimeout(None)
        return RoundPort(int(facts["port"]), scope, pid, kept, on_end)


def close_round(at: net.Endpoint, run: str, timeout_s: float, scope: int | None = None, again: bool = True) -> None:
    """Close a run's round, with `scope` only if it is not a later one; what was stored in it is gone."""
    connection, _ = _ask(at, "DELETE", _path(run, scope), timeout_s, again)
    connection.close()


def is_gone(place: net.Endpoint, within_s: float) -> bool:
    """Return whether nobody has this port any more; silence, as of a machine that is lost, does not say so.

    A process that was killed ends its connections one after the other, and may still accept one in between: it does not
    answer then.
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


def _path(run: str, scope: int | None, **told: int) -> str:
    path = f"/rounds/{urllib.parse.quote(run, safe='')}" + ("" if scope is None else f"/{scope}")
    query = "&".join(f"{name}={value}" for name, value in told.items() if value)
    return f"{path}?{query}" if query else path


def _ask(
    at: net.Endpoint, method: str, path: str, timeout_s: float, again: bool = True
) -> tuple[HTTPConnection, dict[str, Any]]:
    """Ask, and again where another takes the place of one that dies; return the connection, which still stands."""
    deadline = Deadline(timeout_s)
    for times in itertools.count():
        connection = HTTPConnection(*at, timeout=min(timeout_s, ATTEMPT_S) if again else timeout_s)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            status, body = answer.status, answer.read()
            break
        except (OSError, HTTPException) as error:
            connection.close()
            if not again or deadline.expired():
                raise ConnectionLost(peer=str(at), operation=f"{method} {path}", why=str(error)) from error
        time.sleep(min(backoff_s(times), deadline.remaining()))
    if status != HTTPStatus.OK:
        connection.close()
        why = body.decode(errors="replace").strip()
        kind = RoundOver if status == HTTPStatus.CONFLICT else MeetingError
        raise kind(f"{at} refused {method} {path}: {why}")
    facts: dict[str, Any] = json.loads(body)
    return connection, facts
