"""`rallypoint etcd`: a small local etcd cluster for experiments; docs/etcd.md says how to run a real one.

`up` writes only the URL of the cluster to standard output, so that a script can capture it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import Any

import click

from rallypoint.cli import COMMANDS, FAILED
from rallypoint.etcd.local.cluster import START_S, LocalCluster

__all__ = ["command"]


def _in_folder(function: Any) -> Any:
    kind = click.Path(file_okay=False)
    return click.option("--dir", "folder", type=kind, required=True, help="Directory of the cluster.")(function)


def _command_line(name: str, folder: str) -> str:
    return f"rallypoint etcd {name} --dir {shlex.quote(folder)}"


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn ValueError and OSError into messages of the command line."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None


@click.group(short_help=COMMANDS["etcd"])
def command() -> None:
    """Run a small local etcd cluster for experiments.

    It has no encryption and no passwords, listens on 127.0.0.1 only, and keeps all data on one disk.
    """


@command.command()
@_in_folder
@click.option("--members", type=click.IntRange(1), help="Number of members of a new cluster.  [3]")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="First port; each member uses two consecutive ports.  [free ports]"
)
@click.option("--timeout", type=float, default=START_S, show_default=True, help="Seconds to wait until it is healthy.")
def up(folder: str, members: int | None, port: int | None, timeout: float) -> None:
    """Start a cluster, or restart its dead members, and print its URL once every member is healthy."""
    cluster = LocalCluster(folder)
    with _usage_errors():
        new = not cluster.members
        started = cluster.up(members, port, timeout)
    if not started:
        click.echo(f"the cluster in {folder} is already running", err=True)
    elif not new:
        click.echo(f"restarted with existing data: {', '.join(started)}", err=True)
    click.echo(cluster.url)
    click.echo(f"to stop it: {_command_line('down', folder)}", err=True)


@command.command()
@_in_folder
@click.option("--purge", is_flag=True, help="Remove the data and the logs too.")
def down(folder: str, purge: bool) -> None:
    """Stop the running members. Unless purged, their data is kept, and `up` restarts them with it."""
    cluster = LocalCluster(folder)
    with _usage_errors():
        exists = bool(cluster.members)
        stopped = cluster.down(purge)
    click.echo(f"stopped {', '.join(stopped)}" if stopped else f"no member is running in {folder}", err=True)
    if exists:
        kept = f"data kept; to restart: {_command_line('up', folder)}"
        click.echo("data removed" if purge else kept, err=True)


@command.command()
@_in_folder
def status(folder: str) -> None:
    """Print the state of each member; exit with 0 if all are healthy, else with 1."""
    with _usage_errors():
        members = LocalCluster(folder).status()
    for one in members:
        state = "healthy" if one.healthy else "no answer or no leader" if one.running else "not running"
        click.echo(f"{one.name}  {one.endpoint}  {f'pid {one.pid}  ' if one.running else ''}{state}")
    if not members:
        click.echo(f"no cluster in {folder}", err=True)
    if not members or not all(one.healthy for one in members):
        click.get_current_context().exit(FAILED)
