"""`rallypoint serve`: a store server in the foreground."""

from __future__ import annotations

from typing import Any

import click

from rallypoint.cli import COMMANDS
from rallypoint.cli.credential_options import credential_options
from rallypoint.cli.server_options import check_fds, limit_options, listen_options, log_format_option, run_server
from rallypoint.core.limits import MAX_GRACE_S
from rallypoint.security.credentials import Credentials
from rallypoint.server.settings import DEFAULT_GRACE_S, DEFAULT_PORT, MAX_SESSIONS, Settings

__all__ = ["STORAGE_VARIABLE", "command"]

STORAGE_VARIABLE = "RALLYPOINT_STORAGE"
"""The environment variable with the URL of the storage if `--storage` is not given."""


def _duration(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Check a duration; reject "nan" and "inf"."""
    if value is not None and not 0 <= value <= MAX_GRACE_S:
        raise click.BadParameter(f"{value:g} is not a number of seconds from 0 to {MAX_GRACE_S:g}")
    return value


@click.command(short_help=COMMANDS["serve"])
@listen_options(f"Port to listen on; 0: a free port.  [{DEFAULT_PORT}]")
@click.option(
    "--storage",
    "--engine",
    "storage",
    envvar=STORAGE_VARIABLE,
    metavar="URL",
    help="Run one of the servers of a store in etcd: etcd://host:2379,host:2379/name. Pass a URL with a password in"
    f" {STORAGE_VARIABLE}: other users can read command-line arguments.  [in memory]",
)
@limit_options
@click.option(
    "--max-sessions",
    type=click.IntRange(1),
    default=MAX_SESSIONS,
    show_default=True,
    help="Maximum number of sessions, including disconnected ones in their grace period.",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    callback=_duration,
    default=DEFAULT_GRACE_S,
    show_default=True,
    help="Seconds that a client's session and its leases survive the loss of its connection.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False),
    help="Keep the state in this directory; a server restarted there recovers it.  [in memory]",
)
@click.option(
    "--recovery",
    "recovery_s",
    type=float,
    callback=_duration,
    metavar="SECONDS",
    help="How long sessions survive a server outage (--data-dir), or the store survives its last server (--storage)."
    "  [60]",
)
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
    """Serve a store that rallypoint and PyTorch programs can use, until SIGTERM or Ctrl-C.

    PyTorch's protocol, the native protocol and HTTP (/, /status, /metrics, /healthz) share one port. The server binds
    only the given addresses. With --storage, any number of servers form one store: one is the leader, the others are
    standbys. With --data-dir, a restarted server resumes its clients' sessions; use systemd or similar to restart it.
    """
    from rallypoint.server.process import serve

    check_fds(fds, host=hosts, port=port)
    options["storage"] = options["storage"] or None  # the variable may be empty
    if options["data_dir"] is not None and options["storage"] is not None:
        raise click.UsageError("--data-dir and --storage are mutually exclusive: choose one place for the state")
    if options["data_dir"] == "":
        raise click.UsageError("--data-dir is empty: name a directory")
    if options["recovery_s"] is not None and options["data_dir"] is None and options["storage"] is None:
        raise click.UsageError("--recovery needs --data-dir or --storage: without them no session survives the server")
    settings = Settings(hosts=hosts or ("127.0.0.1",), port=DEFAULT_PORT if port is None else port, fds=fds, **options)
    run_server(lambda: serve(settings, credentials, lambda url: click.echo(f"rallypoint serves at {url}")), log_format)
