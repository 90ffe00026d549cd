"""`rallypoint exchange`: every rank gives a little data, and gets that of all."""

from __future__ import annotations

import base64
import json

import click

from rallypoint import Store
from rallypoint.cli.opening import given, line, put, store_command, teller, timeout_option, verbose_option
from rallypoint.recipes.exchange import Exchange

__all__ = ["command"]


@store_command("exchange", dashed=True)
@click.argument("name")
@click.argument("data", default="")
@click.option("--size", type=click.IntRange(1), required=True, help="How many ranks there are.")
@click.option("--rank", type=click.IntRange(0), required=True, help="Which of them this is, from 0.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list with the exact bytes in base64.")
@timeout_option
@verbose_option
def command(
    store: Store, name: str, data: str, size: int, rank: int, as_json: bool, timeout: float | None, verbose: bool
) -> None:
    """Give DATA to the exchange NAME, and print what all ranks gave, in their order, one a line.

    DATA of - is all of standard input. On time-out, say who is missing, and exit with 3.
    """
    if rank >= size:
        raise click.BadParameter(f"{rank} is not a rank from 0 to {size - 1}", param_hint="--rank")
    gathered = Exchange(store, name, size, teller(verbose)).all_gather(rank, given(data), timeout)
    if as_json:
        put(json.dumps([base64.b64encode(value).decode() for value in gathered]))
    else:
        put("\n".join(map(line, gathered)))
