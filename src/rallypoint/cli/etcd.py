"""`rallypoint etcd`: a small etcd cluster on this machine, for trying; docs/etcd.md says how to run a real one.

The URL of the cluster is all that `up` writes to standard output, so that a script can take it from there.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import Any

import click

from rallypoint.cli import COMMANDS, FAILED
from rallypoint.etcd.local import START_S, LocalCluster

__all__ = ["command"]


def _in_folder(function: Any) -> Any:
    kind = click.Path(file_okay=False)
    return click.option("--dir", "folder", type=kind, required=True, help="Folder of the cluster.")(function)


def _words(name: str, folder: str) -> str:
    return f"rallypoint etcd {name} --dir {shlex.quote(folder)}"


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Turn what the system and the cluster refuse into words."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None


@click.group(short_help=COMMANDS["etcd"])
def command() -> None:
    """Run a small etcd cluster on this machine, for trying.

    It has no encryption and no passwords, listens on 127.0.0.1 only, and is all on one disk.
    """


@command.command()
@_in_folder
@click.option("--members", type=click.IntRange(1), help="How many members a new cluster has.  [3]")
@click.option("--port", type=click.IntRange(1, 65535), help="First of two ports a member, in a row.  [free ones]")
@click.option("--timeout", type=float, default=START_S, show_default=True, help="Seconds to wait until it answers.")
def up(folder: str, members: int | None, port: int | None, timeout: float) -> None:
    """Start a cluster, or those of its members that have died, and print its URL once every member is healthy."""
    cluster = LocalCluster(folder)
    with _said():
        new = not cluster.members
        started = cluster.up(members, port, timeout)
    if not started:
        click.echo(f"the cluster in {folder} runs already", err=True)
    elif not new:
        click.echo(f"started again, with its data: {', '.join(started)}", err=True)
    click.echo(cluster.url)
    click.echo(f"to end it: {_words('down', folder)}", err=True)


@command.command()
@_in_folder
@click.option("--purge", is_flag=True, help="Remove the data and the logs too.")
def down(folder: str, purge: bool) -> None:
    """End the members that run. Their data stays, and `up` goes on with it, unless it is purged."""
    cluster = LocalCluster(folder)
    with _said():
        there = bool(cluster.members)
        ended = cluster.down(purge)
    click.echo(f"ended {', '.join(ended)}" if ended else f"no member runs in {folder}", err=True)
    if there:
        kept = f"the data stays; to go on with it: {_words('up', folder)}"
        click.echo("the data is removed" if purge else kept, err=True)


@command.command()
@_in_folder
def status(folder: str) -> None:
    """Print how each member stands; exit with 0 if all are healthy, else with 1."""
    with _said():
        members = LocalCluster(folder).status()
    for one in members:
        stands = "healthy" if one.healthy else "does not answer, or knows no leader" if one.running else "does not run"
        click.echo(f"{one.name}  {one.endpoint}  {f'pid {one.pid}  ' if one.running else ''}{stands}")
    if not members:
        click.echo(f"there is no cluster in {folder}", err=True)
    if not members or not all(one.healthy for one in members):
        click.get_current_context().exit(FAILED)
