"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

import logging
import re
from typing import Any

import click

from rallypoint.cli import COMMANDS
from rallypoint.errors import RallypointError
from rallypoint.server.settings import DEFAULT_PORT, Settings

__all__ = ["command"]

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_LEAST = {
    "max_memory": 1024**2,
    "max_connection_memory": 32 * 1024**2,
}  # the largest request is two of the largest values


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Read a number of bytes, as 1500000, 512k, 64MiB or 4G."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", value.strip().lower())
    if not match or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a size; write bytes, or a number with K, M, G or T")
    size = int(match[1]) * _UNITS[match[2]]
    if size < _LEAST[str(param.name)]:
        raise click.BadParameter(
            f"{value!r} is too little: requests that are allowed need {_LEAST[str(param.name)]} bytes"
        )
    return size


@click.command(short_help=COMMANDS["serve"])
@click.option("--host", "hosts", multiple=True, help="Address or name to listen on; may be repeated.  [127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help=f"Port to listen on; 0 takes a free one.  [{DEFAULT_PORT}]")
@click.option("--fd", "fds", type=click.IntRange(0), multiple=True, help="Descriptor of a bound socket to listen on.")
@click.option("--url-file", type=click.Path(dir_okay=False), help="Write tcp://host:port to this file once it serves.")
@click.option(
    "--max-memory", callback=_size, default="4G", show_default=True, help="All that clients may make it hold."
)
@click.option(
    "--max-connection-memory",
    callback=_size,
    default="256M",
    show_default=True,
    help="The largest request and answer.",
)
def command(hosts: tuple[str, ...], port: int | None, fds: tuple[int, ...], **options: Any) -> None:
    """Serve a store that rallypoint and PyTorch programs can use, until SIGTERM or Ctrl-C.

    PyTorch's protocol, our own and HTTP (/healthz, /, /statistics) share the one port. It binds exactly the addresses
    asked for.
    """
    from rallypoint.server.process import serve

    if fds and (hosts or port is not None):
        raise click.UsageError("--fd is a socket that is bound already; it goes without --host and --port")
    if len(set(fds)) < len(fds):
        raise click.UsageError("--fd has the same descriptor more than once")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    settings = Settings(hosts=hosts or ("127.0.0.1",), port=DEFAULT_PORT if port is None else port, fds=fds, **options)
    try:
        serve(settings, ready=lambda url: click.echo(f"rallypoint serves at {url}"))
    except (RallypointError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
