"""`rallypoint relay`: the relay of a node, in the foreground.

Once it listens, connected or not, it prints its address and the environment variable that native clients need.
Rejected: wait for the server first. Relays start with their nodes, in any order, and their clients can wait instead.
"""

from __future__ import annotations

from typing import Any

import click

from rallypoint import unix_socket
from rallypoint.cli import COMMANDS
from rallypoint.cli.credential_options import credential_options
from rallypoint.cli.server_options import check_fds, limit_options, listen_options, log_format_option, run_server
from rallypoint.client.routing.relay_address import VARIABLE
from rallypoint.relay.settings import RelaySettings, upstream_store
from rallypoint.security.credentials import Credentials

__all__ = ["UPSTREAM_VARIABLE", "command"]

UPSTREAM_VARIABLE = "RALLYPOINT_UPSTREAM"
"""The environment variable with the URL of the server if `--upstream` is not given."""


def _upstream(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        upstream_store(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _path(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else unix_socket.checked(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(short_help=COMMANDS["relay"])
@click.option(
    "--upstream",
    required=True,
    envvar=UPSTREAM_VARIABLE,
    callback=_upstream,
    metavar="URL",
    help="The server: tcp://host:port (tcps: by TLS), or several servers of one store, tcp://host:port,host:port, or a"
    " store in etcd, etcd://host:2379,host:2379/name. Pass a URL with a password in"
    f" {UPSTREAM_VARIABLE}: other users can read command-line arguments.",
)
@listen_options("Port to listen on.  [a free port]")
@click.option(
    "--unix",
    callback=_path,
    metavar="PATH",
    help="Unix socket to listen on, instead of TCP unless --host or --port is given too.",
)
@limit_options
@log_format_option
@credential_options(serves=True)
def command(
    hosts: tuple[str, ...],
    port: int | None,
    fds: tuple[int, ...],
    credentials: Credentials,
    log_format: str,
    **options: Any,
) -> None:
    """Relay a server to the processes of this node, over one connection, until SIGTERM or Ctrl-C.

    PyTorch clients use the relay as their store: a restart of the server only delays them. Native clients use it for
    their sessions if RALLYPOINT_RELAY names it. HTTP (/, /status, /metrics, /healthz) shares the port.
    """
    from rallypoint.relay.process import serve

    unix = options["unix"]
    check_fds(fds, host=hosts, port=port, unix=unix)
    if unix is None or hosts or port is not None:
        hosts = hosts or ("127.0.0.1",)
    settings = RelaySettings(hosts=hosts, port=port or 0, fds=fds, **options)
    run_server(lambda: serve(settings, credentials, lambda url: _announce(settings, url)), log_format)


def _announce(settings: RelaySettings, url: str) -> None:
    store = upstream_store(settings.upstream)
    place = url if settings.unix is None else unix_socket.SCHEME + settings.unix
    places = url if url == place else f"{url} and {place}"
    click.echo(f"rallypoint relays {store.label} at {places}")
    click.echo(f"{VARIABLE}={store.relay_address(place).variable}")
