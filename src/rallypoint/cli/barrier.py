"""`rallypoint barrier`: no script goes on before all have come."""

from __future__ import annotations

import click

from rallypoint import Store
from rallypoint.cli.opening import store_command, teller, timeout_option, verbose_option
from rallypoint.recipes.barrier import Barrier

__all__ = ["command"]


def _members(ctx: click.Context, param: click.Parameter, value: str) -> int | list[str]:
    """Read how many members there are, or their names."""
    if value.isdecimal():
        if int(value) == 0:
            raise click.BadParameter("there must be at least one member")
        return int(value)
    names = [name.strip() for name in value.removesuffix(",").split(",")]
    if "" in names:
        raise click.BadParameter(f"{value!r} has a name that is empty")
    if len(set(names)) < len(names):
        raise click.BadParameter(f"{value!r} has a name more than once")
    return names


@store_command("barrier")
@click.argument("name")
@click.option(
    "--members", callback=_members, required=True, help="How many there are, called 0 to n-1, or their names: a,b,c."
)
@click.option("--member", required=True, help="Which of them this is, as $SLURM_PROCID or $(hostname).")
@timeout_option
@verbose_option
def command(
    store: Store, name: str, members: int | list[str], member: str, timeout: float | None, verbose: bool
) -> None:
    """Wait at the barrier NAME until all members have come; it can be used again and again.

    On time-out, say who is missing, and exit with 3. When a member dies that had come, exit with 1 at once.
    """
    Barrier(store, name, members, teller(verbose)).wait(member, timeout)
