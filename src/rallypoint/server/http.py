"""The HTTP handler, for browsers and scrapers: HTTP/1.1 on the same port, parsed by h11.

    GET /healthz               "ok" while the server serves; says if its disk is full
    GET /login?code=CODE       the page behind a login link; its button is POST /login, which sets a cookie
    POST /login                without a code: return the path of a new login link
    GET /about                 the identity of this server, in JSON
    GET /                      the live page, for people
    GET /status                the model that it shows (`status/model.py`), in JSON
    GET /events                the model as server-sent events, whenever it changes
    GET /metrics               for Prometheus; `?ranks=1` adds series of each rank
    GET /statistics            counts, sizes, clients and sessions, in JSON
    PUT /rounds/RUN/SCOPE?round=N
                               at a relay: open a port for a round (`relay/round_ports.py`) and return it; `&port=P`
                               asks for that port, if it is free, and `&everywhere=1` binds all interfaces
    DELETE /rounds/RUN/SCOPE   close the round, unless its scope is later; without SCOPE, close whichever is open

A standby neither opens nor closes rounds (503): only the log may change its state.

All but /healthz and the login needs access (`http_access.py`). No GET changes anything. A peer without access gets one
reply, the same for all such peers, and is disconnected: it must not hold connections that others need.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import h11

from rallypoint.server.admission import NEEDS_TLS
from rallypoint.server.http_access import HttpRefusal, set_cookie
from rallypoint.server.http_pages import POLICY, login_page, status_page
from rallypoint.server.http_rounds import RoundRequests
from rallypoint.server.http_site import HttpResource, HttpSite, json_reply
from rallypoint.server.status.event_streams import MAX_WATCHERS, Watcher
from rallypoint.server.status.metrics import METRICS_TYPE, render_metrics

if TYPE_CHECKING:
    from rallypoint.server.admission import Admission
    from rallypoint.server.connections.connection import Connection
    from rallypoint.server.status.event_streams import EventStreams
    from rallypoint.server.status.source import BuiltStatus

__all__ = ["HttpHandler"]

MAX_HEAD_BYTES = 16 * 1024
PIPELINED = 8
"""Pipelined requests answered in one turn of the event loop."""

MAX_BODY_BYTES = 4096
"""The longest body of a request."""

_BAD_LINK = b"this login link is not valid, or was used; make one with: rallypoint token link\n"


class HttpHandler:
    """The server's end of one HTTP connection."""

    def __init__(self, site: HttpSite, connection: Connection, admission: Admission, trusted: bool = False) -> None:
        """Serve a site; a `trusted` peer has proved that it knows the token."""
        self._site = site
        self._connection = connection
        self._admission = admission
        self._trusted = trusted
        self._known = trusted or not admission.protects  # whether the peer has shown that it has access
        self._bare = False  # whether the reply has no body
        self._login: HttpRefusal | Literal[True] | None = None  # a POST /login whose body is read: may it have a code?
        self._body = b""
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.held = 0
        self.blocked = False
        self.greeted = False
        self._waiting = False  # for a reply that comes later
        self._watcher: Watcher | None = None  # once events are streamed, which is the last reply
        self._answers: list[bytes] = []

    def receive(self, data: bytes) -> bytes:
        """Answer the requests in the data; close the connection if the peer asks for it or HTTP demands it."""
        if self._watcher is not None:
            return b""  # it has nothing more to ask
        if data:  # h11 takes empty data as the end of the stream
            self._http.receive_data(data)
        answers = self._answers
        try:
            self.blocked = self._answer(answers)
            over = self._http.our_state in (h11.MUST_CLOSE, h11.CLOSED)
        except h11.RemoteProtocolError as error:
            self._connection.log_error(f"bad HTTP: {error}")
            self.blocked, over = False, True
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._bare = False
                answers.append(self._write(error.error_status_hint, "text/plain", b"bad request\n", close=True))
        self.held = len(self._http.trailing_data[0])
        self._answers = []
        self._connection.send(b"".join(answers))
        if over and not self._waiting:
            self._connection.close()
        return b""

    def end(self) -> None:
        """Stop to send events; nothing else outlives an HTTP connection."""
        if self._watcher is not None:
            self._watcher.stop()

    def _answer(self, answers: list[bytes]) -> bool:
        """Append the replies to the received requests; return whether more requests wait."""
        while not self._waiting and self._watcher is None and self._http.our_state is not h11.MUST_CLOSE:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._bare = event.method == b"HEAD"
                resource = self._resource(event)
                self.greeted = self.greeted or self._login is None  # a login is one when its body is there
                if resource is not None:
                    answers.append(self._write(*resource))
            elif isinstance(event, h11.Data):
                self._body = (self._body + event.data)[: MAX_BODY_BYTES + 1]
            elif isinstance(event, h11.EndOfMessage):
                self.greeted = True
                self._log_in(answers)
                self._body = b""
            elif event is h11.PAUSED and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                if len(answers) >= PIPELINED:
                    return True
                self._http.start_next_cycle()
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return False
        return False

    def _write(
        self, status: int, kind: str, body: bytes, more: tuple[tuple[str, str], ...] = (), *, close: bool = False
    ) -> bytes:
        headers = [*_headers(kind, len(body)), *more]
        if status == 405:
            headers.append(("allow", "GET, HEAD"))
        if status == 401:
            headers.append(("www-authenticate", "Bearer"))
        if close or not self._known:
            headers.append(("connection", "close"))
        send = self._http.send
        head = send(h11.Response(status_code=status, headers=headers)) or b""
        payload = b"" if self._bare else send(h11.Data(data=body)) or b""
        return head + payload + (send(h11.EndOfMessage()) or b"")

    def _resource(self, request: h11.Request) -> HttpResource | None:
        """Return the reply to a request; None if it comes later."""
        path, _, query = request.target.partition(b"?")
        if path == b"/healthz" and request.method in (b"GET", b"HEAD"):
            return 200, "text/plain", f"{self._site.health(self._known)}\n".encode()
        if not self._trusted and self._admission.why_not_native(self._connection.socket, self._connection.over_tls):
            return 403, "text/plain", f"{NEEDS_TLS}\n".encode()
        if path == b"/login":
            return self._login_page(request, query)
        refusal = self._refusal(request)
        if refusal is not None:
            return self._refuse(refusal)
        self._known = True
        if path.startswith(b"/rounds/") and request.method in (b"PUT", b"DELETE"):
            asked = RoundRequests(self._site, self._wait, self._later)
            return asked.answer(request.method, query, *path.decode("ascii", "replace").split("/")[2:])
        if request.method not in (b"GET", b"HEAD"):
            return 405, "text/plain", b"method not allowed: use GET or HEAD\n"
        if path == b"/about":
            return json_reply(self._site.about())
        if path == b"/statistics":
            self._wait(lambda: self._connection.turns.run(self._site.statistics().encode(self._answer_json)))
            return None
        return self._show(path, query)

    def _show(self, path: bytes, query: bytes) -> HttpResource | None:
        """Return a page that shows the status; None if it comes later."""
        render = _RENDERED.get(path)
        if self._site.status is None or (render is None and path != b"/events"):
            return 404, "text/plain", b"nothing here: try /, /status, /metrics, /about, /healthz or /statistics\n"
        source = self._site.status()
        if render is None:
            return self._watch(source.streams)
        self._wait(lambda: source.get(lambda built: self._later(_NO_STATUS if built is None else render(built, query))))
        return None

    def _watch(self, streams: EventStreams) -> HttpResource | None:
        """Begin a stream of events, which lasts as long as the connection."""
        if self._bare:
            return 200, "text/event-stream", b""
        if streams.full:
            return 503, "text/plain", f"{MAX_WATCHERS} pages are open already; close one\n".encode()
        head = self._http.send(h11.Response(status_code=200, headers=_headers("text/event-stream"))) or b""
        self._connection.send(b"".join((*self._answers, head)))  # before the first event
        self._answers.clear()
        self._watcher = Watcher(streams, self._connection, self._write_event)
        self._watcher.start()
        return None

    def _write_event(self, event: bytes) -> None:
        self._connection.send(self._http.send(h11.Data(data=event)) or b"")

    # Access

    def _refusal(self, request: h11.Request) -> HttpRefusal | None:
        """Return why a request is refused; None if its sender may make it."""
        if self._trusted:
            return None
        local = self._connection.is_local
        private = local or self._connection.over_tls
        headers = {name: bytes(value) for name, value in request.headers}
        return self._admission.http.refusal(request.method, headers, local=local, private=private)

    def _refuse(self, refusal: HttpRefusal) -> HttpResource | None:
        """Return the reply to a refused request; one with a wrong token may get it later."""
        resource = refusal.status, "text/plain", f"{refusal.why}\n".encode()
        if not refusal.failed:
            return resource
        connection, denied = self._connection, self._admission.denied
        host = connection.peer.host or "unix socket"
        self._wait(lambda: denied.deny(host, "wrong token over HTTP", lambda: self._later(resource), connection.close))
        return None

    def _login_page(self, request: h11.Request, query: bytes) -> HttpResource | None:
        """Return the page behind a login link; for POST, wait for the body."""
        if request.method == b"POST":
            self._login = self._refusal(request) or True
            self._known = self._known or self._login is True
            return None
        code = urllib.parse.parse_qs(query.decode("latin-1")).get("code", [""])[0]
        if request.method not in (b"GET", b"HEAD") or not self._admission.http.has_code(code):
            return 401, "text/plain", _BAD_LINK
        return 200, "text/html", login_page(code)

    def _log_in(self, answers: list[bytes]) -> None:
        """Answer POST /login: a cookie for a valid code; without a code, a new one for a sender with the token."""
        login, self._login = self._login, None
        if login is None:
            return
        access, form = self._admission.http, urllib.parse.parse_qs(self._body[:MAX_BODY_BYTES].decode("latin-1"))
        if "code" not in form:
            resource = self._refuse(login) if login is not True else json_reply({"path": access.new_login()})
            if resource is not None:
                answers.append(self._write(*resource))
            return
        cookie = access.redeem(form["code"][0])
        if cookie is None:
            answers.append(self._write(401, "text/plain", _BAD_LINK))
        else:
            self._known = True
            headers = ("location", "/"), ("set-cookie", set_cookie(cookie, self._connection.over_tls))
            answers.append(self._write(303, "text/plain", b"logged in\n", headers))

    # Replies that come later

    def _wait(self, ask: Callable[[], None]) -> None:
        """Ask for a reply; unless it comes at once, stop reading until it does."""
        self._waiting = True
        ask()
        if self._waiting:
            self._connection.stall()

    def _answer_json(self, body: bytes) -> None:
        self._later((200, "application/json", body))

    def _later(self, resource: HttpResource) -> None:
        """Answer the pending request, then go on with those behind it."""
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


def _headers(kind: str, size: int | None = None) -> list[tuple[str, str]]:
    """Return the headers of every reply; a stream has no size."""
    return [
        ("content-type", f"{kind}; charset=utf-8"),
        *(() if size is None else (("content-length", str(size)),)),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("content-security-policy", POLICY),
    ]


def _metrics(built: BuiltStatus, query: bytes) -> HttpResource:
    by_rank = urllib.parse.parse_qs(query).get(b"ranks") == [b"1"]
    return 200, METRICS_TYPE, render_metrics(built.status, by_rank)


_NO_STATUS: HttpResource = (500, "text/plain", b"cannot build the status; the log of the server says why\n")
_RENDERED: dict[bytes, Callable[[BuiltStatus, bytes], HttpResource]] = {
    b"/": lambda built, query: (200, "text/html", status_page(built.status)),
    b"/status": lambda built, query: (200, "application/json", built.json),
    b"/metrics": _metrics,
}
"""The pages that show the status."""
