"""The server's end of HTTP, for browsers and scrapers: HTTP/1.1 on the same port, parsed by h11.

`GET /healthz` answers "ok" while the server serves, and tells where its disk is full. `GET /about` tells which server
this is and `GET /statistics` what it holds and who is here, both as JSON. `GET /` is a plain page that says what this
is, what it holds and who is here, as far as a person reads. At a relay, `PUT /rounds/RUN/SCOPE?round=N` opens the
port of a round (`relay/rounds.py`) and answers which: that of `&port=P` if it is free, and with `&everywhere=1` on all
interfaces. `DELETE /rounds/RUN/SCOPE` closes the round, if it is not a later one; without the scope, whichever it is.
"""

from __future__ import annotations

import asyncio
import html
import json
import urllib.parse
from typing import TYPE_CHECKING, Any

import h11

from rallypoint.server.round_errors import NoPorts, TooLate
from rallypoint.text import printable

if TYPE_CHECKING:
    from rallypoint.server.base import ServerBase
    from rallypoint.server.connection import Connection

__all__ = ["HttpHandler"]

MAX_HEAD_BYTES = 16 * 1024
SCOPE_DIGITS = 20
PIPELINED = 8
"""How many requests are answered at a time; then others get their turn."""

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rallypoint</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; margin: 3em auto; max-width: 40em; padding: 0 1em }}
td {{ padding-right: 2em }}</style>
<h1>rallypoint</h1>
<p>A store where the processes of a distributed job find each other and wait for each other.
PyTorch programs reach it as a TCPStore at this same address and port.
This is version {version}, process {pid}.</p>
{engine}<table>{rows}</table>
<h2>Here now</h2>
<ul>{clients}</ul>
"""

ON_THE_PAGE = 100
"""How many clients the page names."""


class HttpHandler:
    """The server's end of one HTTP connection."""

    def __init__(self, server: ServerBase, connection: Connection) -> None:
        self._server = server
        self._connection = connection
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.held = 0
        self.blocked = False
        self.greeted = False
        self._waiting = False  # for a round to be opened or closed
        self._answers: list[bytes] = []

    def receive(self, data: bytes) -> bytes:
        """Answer the requests in what came, and hang up where the peer wants that or HTTP demands it."""
        if data:  # to h11, no bytes would mean that no more will come
            self._http.receive_data(data)
        answers = self._answers
        try:
            self.blocked = self._answer(answers)
            over = self._http.our_state in (h11.MUST_CLOSE, h11.CLOSED)
        except h11.RemoteProtocolError as error:
            self._server.complain(self._connection, f"bad HTTP: {error}")
            self.blocked, over = False, True
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                answers.append(self._write(error.error_status_hint, "text/plain", f"{error}\n".encode(), close=True))
        self.held = len(self._http.trailing_data[0])
        self._answers = []
        self._connection.send(b"".join(answers))
        if over and not self._waiting:
            self._connection.close()
        return b""

    def end(self) -> None:
        """Nothing outlives an HTTP connection."""

    def _answer(self, answers: list[bytes]) -> bool:
        """Add the answers to what came; say whether it was too much for now."""
        while not self._waiting:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self.greeted = True
                resource = self._resource(event)
                if resource is not None:
                    answers.append(self._write(*resource, bare=event.method == b"HEAD"))
            elif event is h11.PAUSED and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                if len(answers) >= PIPELINED:
                    return True
                self._http.start_next_cycle()
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return False
        return False

    def _write(self, status: int, kind: str, body: bytes, bare: bool = False, close: bool = False) -> bytes:
        headers = [
            ("content-type", f"{kind}; charset=utf-8"),
            ("content-length", str(len(body))),
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
        ]
        if status == 405:
            headers.append(("allow", "GET, HEAD"))
        if close:
            headers.append(("connection", "close"))
        send = self._http.send
        head = send(h11.Response(status_code=status, headers=headers)) or b""
        payload = b"" if bare else send(h11.Data(data=body)) or b""
        return head + payload + (send(h11.EndOfMessage()) or b"")

    def _resource(self, request: h11.Request) -> tuple[int, str, bytes] | None:
        """Return the status, type and body of the answer; None where that comes later."""
        path, _, query = request.target.partition(b"?")
        if path.startswith(b"/rounds/") and request.method in (b"PUT", b"DELETE"):
            return self._round(request.method, query, *path.decode("ascii", "replace").split("/")[2:])
        if request.method not in (b"GET", b"HEAD"):
            return 405, "text/plain", b"only GET and HEAD are answered here\n"
        if path == b"/healthz":
            return 200, "text/plain", f"{self._server.health()}\n".encode()
        if path == b"/about":
            return 200, "application/json", json.dumps(self._server.about()).encode()
        if path == b"/statistics":
            return 200, "application/json", json.dumps(self._server.statistics()).encode()
        if path == b"/":
            return 200, "text/html", _page(self._server.statistics(ON_THE_PAGE)).encode()
        return 404, "text/plain", b"nothing here: try /, /about, /healthz or /statistics\n"

    def _round(self, method: bytes, query: bytes, run: str, *rest: str) -> tuple[int, str, bytes] | None:
        name = urllib.parse.unquote(run)
        scope = _number(rest[0].encode()) if len(rest) == 1 else None
        if not name or (scope is None and (method == b"PUT" or rest)):
            return 404, "text/plain", b"nothing here: PUT or DELETE /rounds/RUN/SCOPE, or DELETE /rounds/RUN\n"
        if self._server.elsewhere:  # its state is that of the log, and nothing else may change it
            return 503, "text/plain", b"another server leads\n"
        self._waiting = True
        if scope is None or method == b"DELETE":
            self._server.close_round(name, scope, lambda closed: self._later(_json({"closed": closed})))
        else:
            asked = urllib.parse.parse_qs(query)
            number, port = (_number(asked.get(what, [b""])[0]) for what in (b"round", b"port"))
            if port is not None and port > 65535:
                self._waiting = False
                return 404, "text/plain", b"there is no such port\n"
            everywhere = asked.get(b"everywhere") == [b"1"]
            self._server.open_round(
                name, scope, number, lambda opened: self._later(_opened(opened)), port=port or 0, everywhere=everywhere
            )
        if self._waiting:
            self._connection.stall()
        return None

    def _later(self, resource: tuple[int, str, bytes]) -> None:
        """Answer the request that was waiting, and go on with those behind it."""
        self._waiting = False
        if self._connection.closing:
            return
        self._answers.append(self._write(*resource))
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._answers and not self._connection.closing:
            self._connection.data_received(b"")
            if not self._waiting:
                self._connection.read_on()


def _json(facts: dict[str, Any]) -> tuple[int, str, bytes]:
    return 200, "application/json", json.dumps(facts).encode()


def _opened(answer: int | Exception) -> tuple[int, str, bytes]:
    if isinstance(answer, int):
        return _json({"port": answer})
    status = 409 if isinstance(answer, TooLate) else 404 if isinstance(answer, NoPorts) else 503
    return status, "text/plain", f"{answer}\n".encode()


def _number(text: bytes) -> int | None:
    """Read a number of at most `SCOPE_DIGITS` digits; None where it is none."""
    return int(text) if text.isdigit() and len(text) <= SCOPE_DIGITS else None


def _page(facts: dict[str, Any]) -> str:
    """Show the numbers, and who is connected; keys and values are nobody's business."""
    numbers = [(name, fact) for name, fact in facts.items() if isinstance(fact, (int, float)) and name != "pid"]
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in numbers)
    clients = [f"{client['peer']} speaks {client['speaks']}" for client in facts["clients"]]
    if facts["more_clients"]:
        clients.append(f"and {facts['more_clients']} more")
    items = "".join(f"<li>{html.escape(printable(client))}</li>" for client in clients)
    return _PAGE.format(version=facts["version"], pid=facts["pid"], engine=_engine(facts), rows=rows, clients=items)


def _engine(facts: dict[str, Any]) -> str:
    """Say where the state is, if not here, and whether it can be had."""
    if "engine" not in facts:
        return ""
    trouble = f" It does not answer now: {facts['trouble']}" if facts["trouble"] else ""
    return "<p>" + html.escape(f"The state is in {facts['engine']}.{trouble}") + "</p>\n"
