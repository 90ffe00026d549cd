"""`rallypoint token`: make the shared secret of a store, and login links for a browser.

A token is printed, for a variable of a script, or written to a file that only its owner can read. It is never an
argument, because other users of the machine can read arguments.
"""

from __future__ import annotations

import json
import os
from http.client import HTTPException

import click

from rallypoint.cli import COMMANDS
from rallypoint.cli.credential_options import credential_options
from rallypoint.deadline import Deadline
from rallypoint.errors import NetworkError, RallypointError
from rallypoint.net import Endpoint
from rallypoint.protocol import BadMessage
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import VARIABLES, Credentials, new_token
from rallypoint.security.http_client import connect_http
from rallypoint.store.url import parse_url

__all__ = ["command"]

REQUEST_S = 30.0
"""Timeout of the request for a link."""


@click.group(short_help=COMMANDS["token"])
def command() -> None:
    """Make a token, which protects a store: servers and clients with the same token trust each other."""


@command.command()
@click.option(
    "--file", "path", type=click.Path(dir_okay=False), help="Write it to this new file, which only you can read."
)
def new(path: str | None) -> None:
    """Print a new random token, or write it to a file, which must not exist yet."""
    if path is None:
        click.echo(new_token())
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token() + "\n")
    except FileExistsError:
        raise click.ClickException(f"{path} exists already; choose another file, or remove it") from None
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from None
    click.echo(f"wrote {path}; pass it with --token-file, or in {VARIABLES['token_file']}", err=True)


@command.command()
@click.argument("url")
@credential_options(serves=False)
def link(url: str, credentials: Credentials) -> None:
    """Print a link that opens the pages of the server at URL in a browser; it is valid once, for five minutes."""
    try:
        parsed = parse_url(url)
        endpoint, security = parsed.endpoint(), parsed.security(credentials)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    path = _new_login(endpoint, security)
    scheme = "http" if security.context_for(endpoint.host) is None else "https"
    click.echo(f"{scheme}://{endpoint}{path}")


def _new_login(endpoint: Endpoint, security: ClientSecurity) -> str:
    """Return the path of a new login link; raise NetworkError if the server refuses."""
    try:
        with connect_http(endpoint, security, Deadline(REQUEST_S)) as connection:
            connection.request("POST", "/login")
            reply = connection.getresponse()
            body = reply.read()
            if reply.status == 200:
                return str(json.loads(body)["path"])
            why = body.decode(errors="replace").strip()
    except RallypointError:
        raise
    except (OSError, HTTPException, BadMessage, ValueError, KeyError) as error:
        why = str(error)
    raise NetworkError(f"no login link from {endpoint}: {why}")
