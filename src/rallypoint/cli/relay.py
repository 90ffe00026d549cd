"""`rallypoint relay`: the relay of a node, in the foreground.

It prints where it is once it listens, connected or not, and then what clients of ours need in their environment.
Rejected: to wait for the server. Relays are started with their nodes, in any order, and its clients can wait as well.
"""

from __future__ import annotations

import logging
from typing import Any

import click

from rallypoint import net, unix_socket
from rallypoint.cli import COMMANDS
from rallypoint.cli.serve import size_option
from rallypoint.errors import RallypointError
from rallypoint.relay.settings import RelaySettings, upstream_endpoints
from rallypoint.store.relay_address import VARIABLE, RelayAddress

__all__ = ["command"]


def _upstream(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        upstream_endpoints(value)
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
    callback=_upstream,
    metavar="URL",
    help="The server: tcp://host:port, or several addresses of one store, tcp://host:port,host:port.",
)
@click.option("--host", "hosts", multiple=True, help="Address or name to listen on; may be repeated.  [127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on.  [a free one]")
@click.option("--fd", "fds", type=click.IntRange(0), multiple=True, help="Descriptor of a bound socket to listen on.")
@click.option(
    "--unix",
    callback=_path,
    metavar="PATH",
    help="Unix socket to listen on: alone, or beside --host and --port where one of them is given.",
)
@click.option("--url-file", type=click.Path(dir_okay=False), help="Write its URL to this file once it listens.")
@size_option("--max-memory", "4G", "All that clients may make it hold.")
@size_option("--max-connection-memory", "256M", "The largest request and answer.")
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    help="How many may be connected at once.  [what the limit on open files allows]",
)
def command(hosts: tuple[str, ...], port: int | None, fds: tuple[int, ...], **options: Any) -> None:
    """Relay a server to the processes of this node, over one connection, until SIGTERM or Ctrl-C.

    PyTorch's clients have the relay as their store: a server that is restarted is a pause to them. Clients of ours use
    it for their sessions when RALLYPOINT_RELAY names it. HTTP (/healthz, /, /statistics) shares the port.
    """
    from rallypoint.relay.process import serve

    unix = options["unix"]
    if fds and (hosts or port is not None or unix is not None):
        raise click.UsageError("--fd is a socket that is bound already; it goes without --host, --port and --unix")
    if len(set(fds)) < len(fds):
        raise click.UsageError("--fd has the same descriptor more than once")
    if unix is None or hosts or port is not None:
        hosts = hosts or ("127.0.0.1",)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    settings = RelaySettings(hosts=hosts, port=port or 0, fds=fds, **options)
    try:
        serve(settings, ready=lambda url: _say(settings, url))
    except (RallypointError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _say(settings: RelaySettings, url: str) -> None:
    endpoints: net.Endpoints = upstream_endpoints(settings.upstream)
    place = url if settings.unix is None else unix_socket.SCHEME + settings.unix
    places = url if url == place else f"{url} and {place}"
    click.echo(f"rallypoint relays tcp://{endpoints} at {places}")
    click.echo(f"{VARIABLE}={RelayAddress(place, endpoints).variable}")
