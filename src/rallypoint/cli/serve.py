"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import click

from rallypoint.cli import COMMANDS
from rallypoint.core.limits import LEAST_BYTES, MAX_GRACE_S
from rallypoint.errors import RallypointError
from rallypoint.server.settings import DEFAULT_GRACE_S, DEFAULT_PORT, MAX_SESSIONS, Settings

__all__ = ["command", "size_option"]

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Read a number of bytes, as 1500000, 512k, 64MiB or 4G."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", value.strip().lower())
    if not match or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a size; write bytes, or a number with K, M, G or T")
    size = int(match[1]) * _UNITS[match[2]]
    least = LEAST_BYTES[str(param.name)]
    if size < least:
        raise click.BadParameter(f"{value!r} is too little: requests that are allowed need {least} bytes")
    if size >= 2**63:
        raise click.BadParameter(f"{value!r} is more than fits in 64 bits")
    return size


def size_option(name: str, default: str, words: str) -> Callable[[Any], Any]:
    """Return an option that is a limit in bytes, written as people do."""
    return click.option(name, callback=_size, default=default, show_default=True, help=words)


def _duration(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Check a duration; neither "nan" nor "inf" is one."""
    if value is not None and not 0 <= value <= MAX_GRACE_S:
        raise click.BadParameter(f"{value:g} is not a number of seconds from 0 to {MAX_GRACE_S:g}")
    return value


@click.command(short_help=COMMANDS["serve"])
@click.option("--host", "hosts", multiple=True, help="Address or name to listen on; may be repeated.  [127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help=f"Port to listen on; 0 takes a free one.  [{DEFAULT_PORT}]")
@click.option("--fd", "fds", type=click.IntRange(0), multiple=True, help="Descriptor of a bound socket to listen on.")
@click.option("--engine", metavar="URL", help="Keep the state in etcd: etcd://host:2379,host:2379/space.  [in memory]")
@click.option("--url-file", type=click.Path(dir_okay=False), help="Write tcp://host:port to this file once it serves.")
@size_option("--max-memory", "4G", "All that clients may make it hold.")
@size_option("--max-connection-memory", "256M", "The largest request and answer.")
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    help="How many may be connected at once.  [what the limit on open files allows]",
)
@click.option(
    "--max-sessions",
    type=click.IntRange(1),
    default=MAX_SESSIONS,
    show_default=True,
    help="How many clients may have a session, those included that are away in their grace.",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    callback=_duration,
    default=DEFAULT_GRACE_S,
    show_default=True,
    help="Seconds that a client's session, and its leases, outlive its connection.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False),
    help="Keep the state in this directory: started again there, the server goes on with it.  [in memory]",
)
@click.option(
    "--recovery",
    "recovery_s",
    type=float,
    callback=_duration,
    metavar="SECONDS",
    help="How long sessions outlive the server's own absence, with --data-dir.  [60]",
)
def command(hosts: tuple[str, ...], port: int | None, fds: tuple[int, ...], **options: Any) -> None:
    """Serve a store that rallypoint and PyTorch programs can use, until SIGTERM or Ctrl-C.

    PyTorch's protocol, our own and HTTP (/healthz, /, /statistics) share the one port. It binds exactly the addresses
    asked for. With --engine it is a gateway: any number of them, on the same cluster and space, are one store.
    With --data-dir its clients go on when it has died and was started again, which it leaves to systemd and the like.
    """
    from rallypoint.server.process import serve

    if fds and (hosts or port is not None):
        raise click.UsageError("--fd is a socket that is bound already; it goes without --host and --port")
    if len(set(fds)) < len(fds):
        raise click.UsageError("--fd has the same descriptor more than once")
    if options["data_dir"] is not None and options["engine"] is not None:
        raise click.UsageError("--data-dir and --engine exclude each other: the state is in one of them")
    if options["data_dir"] == "":
        raise click.UsageError("--data-dir is empty: name a directory")
    if options["recovery_s"] is not None and options["data_dir"] is None:
        raise click.UsageError("--recovery needs --data-dir: without one the server forgets all sessions")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    settings = Settings(hosts=hosts or ("127.0.0.1",), port=DEFAULT_PORT if port is None else port, fds=fds, **options)
    try:
        serve(settings, ready=lambda url: click.echo(f"rallypoint serves at {url}"))
    except (RallypointError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
