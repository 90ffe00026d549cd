"""`rallypoint exchange`: every rank contributes a little data and receives the data of all ranks."""

from __future__ import annotations

import base64
import json

import click

from rallypoint import Store
from rallypoint.cli.store_command import (
    one_line,
    print_value,
    progress_printer,
    read_value,
    store_command,
    timeout_option,
    verbose_option,
)
from rallypoint.recipes.exchange import Exchange

__all__ = ["command"]


@store_command("exchange", dashed=True)
@click.argument("name")
@click.argument("data", default="")
@click.option("--size", type=click.IntRange(1), required=True, help="Number of ranks.")
@click.option("--rank", type=click.IntRange(0), required=True, help="Rank of this process, from 0.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list with the exact bytes in base64.")
@timeout_option
@verbose_option
def command(
    store: Store, name: str, data: str, size: int, rank: int, as_json: bool, timeout: float | None, verbose: bool
) -> None:
    """Contribute DATA to the exchange NAME and print the data of all ranks, in rank order, one per line.

    If DATA is -, read standard input. On timeout, print the missing ranks and exit with 3.
    """
    if rank >= size:
        raise click.BadParameter(f"{rank} is not a rank from 0 to {size - 1}", param_hint="--rank")
    gathered = Exchange(store, name, size, progress_printer(verbose)).all_gather(rank, read_value(data), timeout)
    if as_json:
        print_value(json.dumps([base64.b64encode(value).decode() for value in gathered]))
    else:
        print_value("\n".join(map(one_line, gathered)))
