"""`rallypoint status` and `rallypoint top`: what a server is doing, who waits for whom, and what has failed.

The text fits 80 columns where it is piped, and the terminal where it is shown. `--watch` draws it again when it has
changed, on a terminal in place; where there is none, a separator line comes between two.

A status of the standby of a replicated store is that of its leader, which it names. Without a URL, and without a
server at the default address, it is the status of the only run on this machine, which may have a private server.
"""

from __future__ import annotations

import shutil
import sys
import time
from http.client import HTTPException

import click
import msgspec

from rallypoint.cli import COMMANDS
from rallypoint.cli.credential_options import credential_options
from rallypoint.cli.local_runs import runs_here, store_here
from rallypoint.cli.store_command import URL_VARIABLE, print_value
from rallypoint.deadline import Deadline
from rallypoint.errors import AuthenticationFailed, NetworkError, RallypointError
from rallypoint.etcd.address import Address
from rallypoint.net import Endpoint
from rallypoint.protocol import BadMessage
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import Credentials
from rallypoint.security.http_client import connect_http
from rallypoint.server.status.model import ServerStatus, decode_status
from rallypoint.server.status.text import render_text
from rallypoint.storage.etcd.lookup import look_up
from rallypoint.store.url import parse_url
from rallypoint.text import printable

__all__ = ["commands"]

REQUEST_S = 30.0
"""Default timeout of one request."""

DEFAULT_URL = "tcp://127.0.0.1:29400"
WIDTH = 80
"""Columns where the output is not a terminal."""

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
ALTERNATE_ON, ALTERNATE_OFF = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the other screen of a terminal, without a cursor, and back."""


class StatusClient:
    """Requests the status of a server; that of the leader, if it is a standby, or a store in etcd is given."""

    def __init__(self, url: str, credentials: Credentials, timeout_s: float) -> None:
        self._endpoints, self._etcd = [], None
        try:
            parsed = parse_url(url)
            if parsed.scheme == "etcd":
                self._etcd = parsed.etcd()
            elif parsed.scheme in ("tcp", "tcps"):
                self._endpoints = list(parsed.endpoints())
            else:
                raise ValueError(
                    f"{parsed}: status asks a server or a relay: give tcp://HOST:PORT, tcps://HOST:PORT, or a store in "
                    "etcd, etcd://HOST:PORT,…/NAME"
                )
            self._security = parsed.security(credentials)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        self._url, self._credentials, self._timeout_s = url, credentials, timeout_s

    def get(self) -> bytes:
        """Return the model in JSON; raise NetworkError if no server answers."""
        if self._etcd is not None:
            return self._from(self._leader(self._etcd))
        problem: Exception | None = None
        for endpoint in self._endpoints:
            try:
                data = _request(endpoint, self._security, self._timeout_s)
            except NetworkError as error:
                problem = error
                continue
            status = _decode(data, endpoint)
            if status.role != "standby" or not status.leader:
                return data
            return self._from(status.leader)
        assert problem is not None
        raise problem

    def _leader(self, address: Address) -> str:
        found = look_up(address, Deadline(self._timeout_s))
        if found.leader:
            return found.leader
        raise NetworkError(f"no status from {parse_url(self._url)}: no server leads this store at the moment")

    def _from(self, leader: str) -> bytes:
        parsed = parse_url(leader)
        return _request(parsed.endpoint(), parsed.security(self._credentials), self._timeout_s)


def _request(endpoint: Endpoint, security: ClientSecurity, timeout_s: float) -> bytes:
    try:
        with connect_http(endpoint, security, Deadline(timeout_s)) as connection:
            connection.request("GET", "/status")
            reply = connection.getresponse()
            body = reply.read()
            if reply.status == 200:
                return body
            why = body.decode(errors="replace").strip()
    except RallypointError:
        raise
    except (OSError, HTTPException, BadMessage) as error:
        why = str(error) or type(error).__name__
    raise NetworkError(f"no status from {endpoint}: {why}")


def _decode(data: bytes, endpoint: Endpoint | str) -> ServerStatus:
    try:
        return decode_status(data)
    except msgspec.DecodeError as error:
        raise NetworkError(f"no status from {endpoint}: malformed reply: {error}") from None


def _found(url: str | None, run: str | None, credentials: Credentials, timeout_s: float) -> tuple[str, StatusClient]:
    """Return the URL of the server to show, and a client of it."""
    if run is not None:
        url, credentials = store_here(run, credentials)
    if url:
        return url, StatusClient(url, credentials, timeout_s)
    client = StatusClient(DEFAULT_URL, credentials, timeout_s)
    try:
        client.get()
    except AuthenticationFailed:
        raise
    except NetworkError as error:
        runs = runs_here()
        if len(runs) == 1:
            return _found(None, runs[0], credentials, timeout_s)
        if not runs:
            raise
        raise NetworkError(f"{error}; name a run on this machine with --run: {printable(', '.join(runs))}") from None
    return DEFAULT_URL, client


def _status(
    url: str | None,
    run: str | None,
    credentials: Credentials,
    watch: bool,
    as_json: bool,
    interval: float,
    timeout: float,
) -> None:
    url, client = _found(url, run, credentials, timeout)
    if not watch:
        data = client.get()
        text = data.decode() + "\n" if as_json else render_text(_decode(data, url), _width())
        print_value(text, nl=False)
    elif as_json:
        for data in _again(client, interval):
            print_value(data.decode() if isinstance(data, bytes) else _problem_json(data))
    elif sys.stdout.isatty():
        _draw(client, url, interval)
    else:
        for data in _again(client, interval):
            print_value((render_text(_decode(data, url)) if isinstance(data, bytes) else f"{data}\n") + "-" * 40)


def _again(client: StatusClient, interval_s: float):  # type: ignore[no-untyped-def]
    """Yield the model again and again, or the error of a server that does not answer; the first must."""
    yield client.get()
    while True:
        time.sleep(interval_s)
        try:
            yield client.get()
        except NetworkError as error:
            yield error


def _problem_json(error: Exception) -> str:
    return msgspec.json.encode({"error": str(error)}).decode()


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def _draw(client: StatusClient, url: str, interval_s: float) -> None:
    """Draw the status in place until interrupted."""
    last, lost_at = "", None
    models = _again(client, interval_s)
    first = next(models)
    sys.stdout.write(ALTERNATE_ON)
    try:
        while True:
            if isinstance(first, bytes):
                last, lost_at = render_text(_decode(first, url), _width()), None
                note = ""
            else:
                lost_at = lost_at or time.strftime("%H:%M:%S")
                note = f"disconnected since {lost_at}: {first}"
            _paint(last, note)
            first = next(models)
    finally:
        sys.stdout.write(ALTERNATE_OFF)
        sys.stdout.flush()


def _paint(text: str, note: str) -> None:
    """Write as many lines as fit, from the top left corner."""
    columns, rows = shutil.get_terminal_size((WIDTH, 24))
    lines = ([note[: columns - 1]] if note else []) + text.splitlines()
    if len(lines) > rows - 1:
        lines = [*lines[: rows - 2], "..."]
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\r\n" for line in lines) + CLEAR_BELOW)
    sys.stdout.flush()


def _command(name: str, watches: bool) -> click.Command:
    @click.argument("url", envvar=URL_VARIABLE, metavar="[URL]", required=False)
    @click.option("--run", "run_id", metavar="RUN", help="The server of this run on this machine, also a private one.")
    @click.option("--json", "as_json", is_flag=True, help="Print the model as JSON, in one line.")
    @click.option(
        "--interval",
        type=click.FloatRange(0.1, 3600.0),
        default=1.0,
        show_default=True,
        metavar="SECONDS",
        help="Time between two updates of --watch.",
    )
    @click.option(
        "--timeout",
        type=click.FloatRange(0.1, 3600.0),
        default=REQUEST_S,
        show_default=True,
        metavar="SECONDS",
        help="How long the server may take to answer.",
    )
    @credential_options(serves=False)
    def run(url: str | None, run_id: str | None, watch: bool = watches, **options: object) -> None:
        _status(url, run_id, watch=watch, **options)  # type: ignore[arg-type]

    run.__doc__ = (
        "Show what the server at URL is doing: runs, rounds, nodes and ranks, who waits for whom and for how long, the"
        f" first failure.\n\n    URL is tcp://HOST:PORT, or a store in etcd; by default that of {URL_VARIABLE}, else"
        f" {DEFAULT_URL}; if no server is there, that of the only run of this user on this machine."
    )
    if not watches:
        run = click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")(run)
    return click.command(name, short_help=COMMANDS[name])(run)


commands = {"status": _command("status", False), "top": _command("top", True)}
"""The commands of this module, by name."""
