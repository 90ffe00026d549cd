"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

from typing import Any

import click

from rallypoint.cli import COMMANDS
from rallypoint.cli.server_options import check_fds, limit_options, listen_options, run_server
from rallypoint.core.limits import MAX_GRACE_S
from rallypoint.server.settings import DEFAULT_GRACE_S, DEFAULT_PORT, MAX_SESSIONS, Settings

__all__ = ["STORAGE_VARIABLE", "command"]

STORAGE_VARIABLE = "RALLYPOINT_STORAGE"
"""The environment variable that names the storage where `--storage` does not."""


def _duration(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Check a duration; neither "nan" nor "inf" is one."""
    if value is not None and not 0 <= value <= MAX_GRACE_S:
        raise click.BadParameter(f"{value:g} is not a number of seconds from 0 to {MAX_GRACE_S:g}")
    return value


@click.command(short_help=COMMANDS["serve"])
@listen_options(f"Port to listen on; 0 takes a free one.  [{DEFAULT_PORT}]")
@click.option(
    "--storage",
    "--engine",
    "storage",
    envvar=STORAGE_VARIABLE,
    metavar="URL",
    help="Be one of the servers of a store in etcd: etcd://host:2379,host:2379/name. Give a URL with a password by"
    f" {STORAGE_VARIABLE}, for everybody on the machine can read arguments.  [in memory]",
)
@limit_options
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
    help="How long sessions outlive the server's own absence, with --data-dir, and the store its last server, with"
    " --storage.  [60]",
)
def command(hosts: tuple[str, ...], port: int | None, fds: tuple[int, ...], **options: Any) -> None:
    """Serve a store that rallypoint and PyTorch programs can use, until SIGTERM or Ctrl-C.

    PyTorch's protocol, our own and HTTP (/healthz, /, /statistics) share the one port. It binds exactly the addresses
    asked for. With --storage any number of servers are one store: one leads, the others stand by to take over.
    With --data-dir its clients go on when it has died and was started again, which it leaves to systemd and the like.
    """
    from rallypoint.server.process import serve

    check_fds(fds, host=hosts, port=port)
    options["storage"] = options["storage"] or None  # the variable may be set, and empty
    if options["data_dir"] is not None and options["storage"] is not None:
        raise click.UsageError("--data-dir and --storage exclude each other: the state is in one of them")
    if options["data_dir"] == "":
        raise click.UsageError("--data-dir is empty: name a directory")
    if options["recovery_s"] is not None and options["data_dir"] is None and options["storage"] is None:
        raise click.UsageError("--recovery needs --data-dir or --storage: without one the server forgets all sessions")
    settings = Settings(hosts=hosts or ("127.0.0.1",), port=DEFAULT_PORT if port is None else port, fds=fds, **options)
    run_server(lambda: serve(settings, ready=lambda url: click.echo(f"rallypoint serves at {url}")))
