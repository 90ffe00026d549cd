"""`rallypoint barrier`: hold scripts until all members have arrived."""

from __future__ import annotations

import click

from rallypoint import Store
from rallypoint.cli.store_command import progress_printer, store_command, timeout_option, verbose_option
from rallypoint.recipes.barrier import Barrier

__all__ = ["command"]


def _members(ctx: click.Context, param: click.Parameter, value: str) -> int | list[str]:
    """Parse the number of members, or their names."""
    if value.isdecimal():
        if int(value) == 0:
            raise click.BadParameter("a barrier needs at least one member")
        return int(value)
    names = [name.strip() for name in value.removesuffix(",").split(",")]
    if "" in names:
        raise click.BadParameter(f"{value!r} contains an empty name")
    if len(set(names)) < len(names):
        raise click.BadParameter(f"{value!r} contains a name more than once")
    return names


@store_command("barrier")
@click.argument("name")
@click.option(
    "--members", callback=_members, required=True, help="Number n of members, named 0 to n-1, or their names: a,b,c."
)
@click.option("--member", required=True, help="Name of this member, for example $SLURM_PROCID or $(hostname).")
@timeout_option
@verbose_option
def command(
    store: Store, name: str, members: int | list[str], member: str, timeout: float | None, verbose: bool
) -> None:
    """Wait at the barrier NAME until all members have arrived. A barrier can be reused.

    On timeout, print the missing members and exit with 3. If a member dies after it arrived, exit with 1 at once.
    """
    Barrier(store, name, members, progress_printer(verbose)).wait(member, timeout)
