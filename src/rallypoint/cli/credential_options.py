"""The options for a token and for TLS, the same for every command that serves a store or uses one.

A command takes the result as `credentials`. The token itself is never an option: other users can read the arguments of
a process. Files for TLS are read when they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from rallypoint.security.credentials import VARIABLES, Credentials, resolve

__all__ = ["FILES", "credential_options", "read_credentials"]

FILES = {
    "token_file": "File with the token of the store; others must not be able to read it.",
    "tls_ca": "CA by which servers are verified; connections to other machines use TLS.",
    "tls_cert": "Certificate of this process: a server's, or a client's for servers with --tls-client-ca.",
    "tls_key": "Key of --tls-cert.",
    "tls_client_ca": "Accept only clients with a certificate of this CA (mutual TLS).",
}
"""The options by name, each a file, and their help."""

SERVER_ONLY = ("tls_client_ca",)


def read_credentials(**files: str | None) -> Credentials:
    """Return the credentials that these options and the environment give; a bad one is a usage error."""
    try:
        return resolve(None, **files)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def credential_options(serves: bool) -> Callable[[Any], Any]:
    """Return a decorator that adds the options and passes their credentials on; some are for servers only."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            files = {name: options.pop(name, None) for name in FILES}
            return function(*arguments, credentials=read_credentials(**files), **options)

        for name in reversed(FILES):  # help shows the last decorator first
            if serves or name not in SERVER_ONLY:
                variables = ("token", name) if name == "token_file" else (name,)
                words = f"{FILES[name]}  [{' or '.join(VARIABLES[each] for each in variables)}]"
                run = click.option(f"--{name.replace('_', '-')}", name, metavar="FILE", type=click.Path(), help=words)(
                    run
                )
        return run

    return decorate
