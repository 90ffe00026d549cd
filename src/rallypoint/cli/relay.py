"""`rallypoint relay`: the relay of a node, in the foreground.

It prints where it is once it listens, connected or not, and then what clients of ours need in their environment.
Rejected: to wait for the server. Relays are started with their nodes, in any order, and its clients can wait as well.
"""

from __future__ import annotations

from typing import Any

import click

from rallypoint import unix_socket
from rallypoint.cli import COMMANDS
from rallypoint.cli.server_options import check_fds, limit_options, listen_options, run_server
from rallypoint.relay.settings import RelaySettings, upstream_store
from rallypoint.store.relay_address import VARIABLE

__all__ = ["UPSTREAM_VARIABLE", "command"]

UPSTREAM_VARIABLE = "RALLYPOINT_UPSTREAM"
"""The environment variable that names the server where `--upstream` does not."""


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
    help="The server: tcp://host:port, or several addresses of one store, tcp://host:port,host:port, or a store in"
    " etcd, etcd://host:2379,host:2379/name. Give a URL with a password by"
    f" {UPSTREAM_VARIABLE}, for everybody on the machine can read arguments.",
)
@listen_options("Port to listen on.  [a free one]")
@click.option(
    "--unix",
    callback=_path,
    metavar="PATH",
    help="Unix socket to listen on: alone, or beside --host and --port where one of them is given.",
)
@limit_options
def command(hosts: tuple[str, ...], port: int | None, fds: tuple[int, ...], **options: Any) -> None:
    """Relay a server to the processes of this node, over one connection, until SIGTERM or Ctrl-C.

    PyTorch's clients have the relay as their store: a server that is restarted is a pause to them. Clients of ours use
    it for their sessions when RALLYPOINT_RELAY names it. HTTP (/healthz, /, /statistics) shares the port.
    """
    from rallypoint.relay.process import serve

    unix = options["unix"]
    check_fds(fds, host=hosts, port=port, unix=unix)
    if unix is None or hosts or port is not None:
        hosts = hosts or ("127.0.0.1",)
    settings = RelaySettings(hosts=hosts, port=port or 0, fds=fds, **options)
    run_server(lambda: serve(settings, ready=lambda url: _say(settings, url)))


def _say(settings: RelaySettings, url: str) -> None:
    store = upstream_store(settings.upstream)
    place = url if settings.unix is None else unix_socket.SCHEME + settings.unix
    places = url if url == place else f"{url} and {place}"
    click.echo(f"rallypoint relays {store.label} at {places}")
    click.echo(f"{VARIABLE}={store.relay_address(place).variable}")
