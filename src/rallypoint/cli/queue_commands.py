"""`rallypoint push` and `pop`: the queues of a store, and with `--work` its work queues, for shell scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from rallypoint import Store
from rallypoint.cli.store_command import (
    as_text,
    print_value,
    progress_printer,
    read_value,
    store_command,
    timeout_option,
    verbose_option,
)
from rallypoint.core.machines.machine import Waiting
from rallypoint.recipes.work_queue import DEFAULT_DELIVERIES, WorkQueue

__all__ = ["commands"]

work_option = click.option("--work", is_flag=True, help="QUEUE is a work queue (rallypoint.WorkQueue).")


@store_command("push", dashed=True)
@click.argument("queue")
@click.argument("values", nargs=-1, required=True, metavar="VALUE...")
@click.option("--lines", is_flag=True, help="With the value -: push each line of standard input.")
@work_option
@click.option(
    "--max-deliveries",
    type=click.IntRange(1),
    metavar="N",
    help=f"With --work: deliver an item at most so often, then it is a dead letter.  [{DEFAULT_DELIVERIES}]",
)
def push(
    store: Store, queue: str, values: tuple[str, ...], lines: bool, work: bool, max_deliveries: int | None
) -> None:
    """Append each VALUE to QUEUE. If VALUE is -, append the exact bytes of standard input."""
    if lines and values != ("-",):
        raise click.UsageError("--lines needs the value -, and no other")
    if max_deliveries is not None and not work:
        raise click.UsageError("--max-deliveries needs --work")
    items = _lines() if lines else map(read_value, values)
    if work:
        WorkQueue(store, queue).put_many(items, max_deliveries or DEFAULT_DELIVERIES)
        return
    for item in items:
        store.queue_push(queue, item)


@store_command("pop")
@click.argument("queue")
@timeout_option
@click.option("--raw", is_flag=True, help="Write the exact item, without a newline after text.")
@work_option
@verbose_option
def pop(store: Store, queue: str, timeout: float | None, raw: bool, work: bool, verbose: bool) -> None:
    """Print the first item of QUEUE and remove it, waiting until there is one; --timeout 0 does not wait.

    With --work the item is acknowledged once it is printed, and goes back if that fails.
    """
    tell = progress_printer(verbose)
    if not work:
        if tell is not None:
            tell(Waiting(f"an item of queue {queue!r}"))
        _print_item(store.queue_pop(queue, timeout=timeout), raw)
        return
    with WorkQueue(store, queue, "pop", tell).take(timeout) as item:
        _print_item(item.data, raw)


def _print_item(item: bytes, raw: bool) -> None:
    print_value(item, nl=not raw and as_text(item) is not None)


def _lines() -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        yield line.removesuffix(b"\n")


commands = {str(command.name): command for command in (push, pop)}
"""The commands by name."""
