"""HTTP: what changes something and for whom, the login of a browser, and what pages may do there."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.hosts import Host, hosts
from tests.raw_peer import AMPLE_S
from tests.security import strangers
from tests.security.certs import certificate, node
from tests.security.protected import TOKEN
from tests.security.strangers import METHODS, PATHS, http_request

import rallypoint
from rallypoint.protocol import native
from rallypoint.protocol.challenge import HTTP_PREFACE
from rallypoint.security.credentials import OPEN, Credentials

KNOWN = Credentials(token=TOKEN)
BEARER = f"authorization: Bearer {TOKEN}"
FORM = "content-type: application/x-www-form-urlencoded"
ROUND = "/rounds/run/1?round=1"
READABLE = ("/", "/about", "/statistics", "/status", "/metrics")


class Reply(NamedTuple):
    """A parsed reply."""

    status: int
    headers: dict[str, str]
    body: str


def ask(place: Any, *words: str, body: str | None = None, tls: bool = False) -> Reply:
    """Make one request, `METHOD PATH` and headers, to a server or an address; check what every reply must have."""
    address = place if isinstance(place, tuple) else ("127.0.0.1", place.port)
    (method, path), headers = words[0].split(" ", 1), words[1:]
    sock: socket.socket = socket.create_connection(address, AMPLE_S)
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    with sock:
        sock.sendall(http_request(method, path, *headers, "connection: close", body=body))
        data = b""
        with contextlib.suppress(ssl.SSLEOFError):
            while piece := sock.recv(65536):
                data += piece
    head, _, text = data.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert found["content-security-policy"].startswith("default-src 'none'; ")
    assert (found["x-content-type-options"], found["cache-control"]) == ("nosniff", "no-store")
    return Reply(int(first.split()[1]), found, text)


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Host, Host]]:
    with hosts(2) as (here, there):
        yield here, there


# Open servers


@pytest.fixture
def open_pair() -> Iterator[tuple[rallypoint.Server, rallypoint.Relay]]:
    """A server and a relay without credentials."""
    with rallypoint.Server(credentials=OPEN) as server, rallypoint.Relay(server.url, credentials=OPEN) as relay:
        yield server, relay


def rounds(relay: rallypoint.Relay) -> dict[str, Any]:
    found: dict[str, Any] = relay.statistics()["round_ports"]
    return found


def test_an_open_relay_is_changed_from_its_own_machine_but_not_by_web_pages(
    open_pair: tuple[rallypoint.Server, rallypoint.Relay],
) -> None:
    server, relay = open_pair
    for origin in ("https://example.org", f"http://127.0.0.1:{relay.port}", "null"):
        for method in ("PUT", "DELETE", "POST"):
            for place in (server, relay):
                assert ask(place, f"{method} {ROUND}", f"origin: {origin}").status == 403
    assert not rounds(relay)
    assert ask(relay, f"PUT {ROUND}").status == 200 and "run" in rounds(relay)
    assert ask(relay, "DELETE /rounds/run/1", "origin: https://example.org").status == 403 and "run" in rounds(relay)
    assert ask(relay, "DELETE /rounds/run/1").status == 200 and not rounds(relay)


@pytest.mark.needs("netns")
def test_an_open_relay_is_not_changed_from_another_machine(network: tuple[Host, Host]) -> None:
    here, there = network
    with contextlib.ExitStack() as undo:
        with here.inside():
            server = undo.enter_context(rallypoint.Server(here.address, credentials=OPEN))
            relay = undo.enter_context(rallypoint.Relay(server.url, here.address, credentials=OPEN))
        with there.inside():
            for child in (server, relay):
                place = (here.address, child.port)
                for method in METHODS[2:]:
                    reply = ask(place, f"{method} {ROUND}")
                    assert reply.status == 403 and "only from its own machine" in reply.body, method
                assert ask(place, "POST /login", FORM, body="").status == 403
                assert ask(place, "GET /about").status == 200, "it is open"
        with here.inside():
            assert not rounds(relay) and not server.statistics()["namespaces"]
        with there.inside():  # our own clients say who they are first, which no web page can; so do relays
            sock = socket.create_connection((here.address, relay.port), AMPLE_S)
            answer = strangers.ask(sock, HTTP_PREFACE + http_request("PUT", ROUND))
        assert answer.startswith(native.ACCEPTED + b"HTTP/1.1 200 ")


def test_no_get_changes_anything(open_pair: tuple[rallypoint.Server, rallypoint.Relay]) -> None:
    server, relay = open_pair
    with rallypoint.connect(server.url, credentials=OPEN) as store:
        store.set("key", "value")
        assert ask(relay, f"PUT {ROUND}").status == 200
        before = server.statistics()["revision"], [*rounds(relay)]
        ending = [path for path in PATHS if path != "/events"]
        for path in (*ending, "/rounds/other/2", "/rounds/run/2?round=2&port=0", "/rounds/run", "/login?new=1"):
            for method in ("GET", "HEAD"):
                for place in (server, relay):
                    ask(place, f"{method} {path}")
                    ask(place, f"{method} {path}", FORM, body="code=x&method=PUT")
                    ask(place, f"{method} {path}", "x-http-method-override: DELETE")
        assert (server.statistics()["revision"], [*rounds(relay)]) == before


# The login


@pytest.fixture(scope="module")
def protected_pair() -> Iterator[tuple[rallypoint.Server, rallypoint.Relay]]:
    with rallypoint.Server(credentials=KNOWN) as server, rallypoint.Relay(server.url, credentials=KNOWN) as relay:
        yield server, relay


def new_link(place: Any, tls: bool = False) -> str:
    """Return the path of a new login link."""
    path: str = json.loads(ask(place, "POST /login", BEARER, body="", tls=tls).body)["path"]
    assert re.fullmatch(r"/login\?code=[\w-]{43}", path)
    return path


def log_in(place: Any, path: str, tls: bool = False) -> Reply:
    """Press the button of the page behind a link."""
    return ask(place, "POST /login", FORM, body=path.partition("?")[2], tls=tls)


def test_a_link_opens_the_pages_for_reading_once(protected_pair: tuple[rallypoint.Server, rallypoint.Relay]) -> None:
    for place in protected_pair:
        path = new_link(place)
        for _ in range(2):
            assert ask(place, f"GET {path}").status == 200, "as a preview does"
        done = log_in(place, path)
        cookie = done.headers["set-cookie"]
        assert done.status == 303 and done.headers["location"] == "/"
        assert re.fullmatch(r"rallypoint=[\w-]{43}; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200", cookie)
        given = f"cookie: {cookie.partition(';')[0]}"
        assert [ask(place, f"GET {each}", given).status for each in READABLE] == [200] * len(READABLE)
        for method in ("PUT", "DELETE", "POST"):
            assert ask(place, f"{method} /rounds/run/1", given).status == 401
        assert ask(place, "POST /login", given, body="").status == 401, "a cookie makes no links"
        assert log_in(place, path).status == 401 and ask(place, f"GET {path}").status == 401


def test_a_link_of_one_server_is_worth_nothing_at_another(
    protected_pair: tuple[rallypoint.Server, rallypoint.Relay],
) -> None:
    server, relay = protected_pair
    path = new_link(server)
    assert log_in(relay, path).status == 401
    cookie = log_in(server, path).headers["set-cookie"].partition(";")[0]
    assert ask(relay, "GET /", f"cookie: {cookie}").status == 401


@pytest.mark.needs("netns")
def test_where_tls_is_required_the_login_needs_it_too(network: tuple[Host, Host], tmp_path: Path) -> None:
    here, there = network
    credentials = node(certificate(tmp_path / "tls", here.address), token=TOKEN)
    with here.inside():
        server = rallypoint.Server(here.address, credentials=credentials)
    place = (here.address, server.port)
    with server, there.inside():
        path = new_link(place, tls=True)
        for request in (f"GET {path}", "GET /", "POST /login"):
            assert ask(place, request).status == 403
        refused = log_in(place, path)
        assert refused.status == 403 and "set-cookie" not in refused.headers
        assert ask(place, "POST /login", BEARER, body="").status == 403
        done = log_in(place, path, tls=True)
        assert done.status == 303 and done.headers["set-cookie"].endswith("; Secure")
        given = f"cookie: {done.headers['set-cookie'].partition(';')[0]}"
        assert ask(place, "GET /statistics", given, tls=True).status == 200
        assert ask(place, "GET /statistics", given).status == 403


def test_health_checks_of_strangers_name_no_servers() -> None:
    with rallypoint.Relay("tcp://127.0.0.1:1", credentials=KNOWN) as relay:
        for headers in ((), (BEARER,), ("authorization: Bearer wrong",)):
            reply = ask(relay, "GET /healthz", *headers)
            assert (reply.status, reply.body) == (200, "no connection to the server\n"), "the same for all"
        assert relay.statistics()["upstream_address"] == "127.0.0.1:1"
    with rallypoint.Relay("tcp://127.0.0.1:1", credentials=OPEN) as relay:
        assert ask(relay, "GET /healthz").body.startswith("no connection to the server at 127.0.0.1:1 for ")


# Pages in a browser


def test_pages_load_nothing_and_run_only_their_own_script(
    protected_pair: tuple[rallypoint.Server, rallypoint.Relay],
) -> None:
    scripts = 0
    for place in protected_pair:
        for request in ("GET /", f"GET {new_link(place)}"):
            page = ask(place, request, BEARER)
            assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
            (style,) = re.findall(r"(?s)<style>(.*?)</style>", page.body)
            own = re.findall(r"(?s)<script>(.*?)</script>", page.body)
            policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
            allowed = policy.pop("script-src")
            assert allowed.startswith("'sha256-") and " " not in allowed
            assert all(digest(script) == allowed for script in own)
            assert policy == {
                "default-src": "'none'", "base-uri": "'none'", "form-action": "'self'", "frame-ancestors": "'none'",
                "connect-src": "'self'", "style-src": digest(style),
            }  # fmt: skip
            scripts += len(own)
            rest = page.body.replace(style, "").replace("".join(f"<script>{one}</script>" for one in own), "")
            assert not re.search(r"(?i)<script|<link|<img|<iframe|\bon\w+=|style=|javascript:|https?://", rest)
            assert not re.search(
                r"(?i)innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://", "".join(own)
            )
    assert scripts == 2, "the live pages have one each, the login pages have none"


def digest(text: str) -> str:
    """Return the source of a policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_names_of_clients_are_escaped() -> None:
    """A client chooses its name, which is on a page that an operator looks at, and in what it says."""
    name = "<script>alert(1)</script>\x1b[31m"
    with rallypoint.Server(credentials=OPEN) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), AMPLE_S)
        with sock:
            sock.sendall(native.PREFACE + native.frame(native.Hello(native.VERSION, name)))
            assert sock.recv(4) == native.ACCEPTED and sock.recv(4)
            page, facts = ask(server, "GET /"), ask(server, "GET /statistics")
    assert "<script>alert" not in page.body and "\x1b" not in page.body + facts.body
    assert json.loads(facts.body)["sessions"][0]["name"] == name
