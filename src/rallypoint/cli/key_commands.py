"""`rallypoint get`, `set`, `add`, `wait`, `watch`, `ls`, `del`, `ping`: keys of a store, for shell scripts."""

from __future__ import annotations

import base64
import json
import math
import time

import click

from rallypoint import Store, StoreTimeout
from rallypoint.cli.store_command import (
    as_text,
    one_line,
    print_value,
    progress_printer,
    read_value,
    store_command,
    timeout_option,
    verbose_option,
)
from rallypoint.core.machines.machine import Waiting
from rallypoint.deadline import Deadline

__all__ = ["commands"]

SHOWN = 40
"""How many bytes of a value `ls -l` shows."""

PROGRESS_S = 10.0
"""How often `wait` reports the missing keys."""


@store_command("get")
@click.argument("key")
@timeout_option
@click.option("--raw", is_flag=True, help="Write the exact value, without a newline after text.")
def get(store: Store, key: str, timeout: float | None, raw: bool) -> None:
    """Print the value of KEY, waiting until it exists; --timeout 0 does not wait.

    Text is followed by a newline. Binary data is written unchanged.
    """
    value = store.get(key, timeout)
    print_value(value, nl=not raw and as_text(value) is not None)


@store_command("set", dashed=True)
@click.argument("key")
@click.argument("value")
def set_(store: Store, key: str, value: str) -> None:
    """Write VALUE to KEY. If VALUE is -, write the exact bytes of standard input."""
    store.set(key, read_value(value))


@store_command("add", dashed=True)
@click.argument("key")
@click.argument("amount", type=int, default=1)
def add(store: Store, key: str, amount: int) -> None:
    """Add AMOUNT (1; it may be negative) to the counter KEY and print its new value. A missing KEY counts as 0."""
    print_value(store.add(key, amount))


@store_command("wait")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@timeout_option
@verbose_option
def wait(store: Store, keys: tuple[str, ...], timeout: float | None, verbose: bool) -> None:
    """Wait until all of the keys exist. On timeout, print the missing keys and exit with 3."""
    deadline = Deadline(store.timeout if timeout is None else timeout)
    tell = progress_printer(verbose)
    while tell is not None and deadline.remaining() > PROGRESS_S:
        try:
            return store.wait(keys, PROGRESS_S)
        except StoreTimeout as error:
            missing = f"{len(error.missing)} of {len(keys)} keys are missing: {', '.join(error.missing)}"
            tell(Waiting(error.down or missing))
    try:
        store.wait(keys, deadline.remaining())
    except StoreTimeout as error:
        raise StoreTimeout(
            operation="wait",
            keys=keys,
            missing=error.missing,
            timeout_s=deadline.timeout_s,
            store=error.store,
            down=error.down,
        ) from None


@store_command("watch")
@click.argument("prefix", default="")
@click.option("--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Exit after this long without a change.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, with the value in base64.")
@verbose_option
def watch(store: Store, prefix: str, timeout: float | None, as_json: bool, verbose: bool) -> None:
    """Print every new change of a key that starts with PREFIX, until Ctrl-C.

    A line is "set", the key and the value, or "del" and the key, separated by tabs.
    """
    with store.watch(prefix, math.inf if timeout is None else timeout) as changes:
        tell = progress_printer(verbose)
        if tell is not None:
            tell(Waiting(f"changes of keys that start with {prefix!r}"))
        for key, value, revision in changes:
            if as_json:
                data = None if value is None else base64.b64encode(value).decode()
                print_value(json.dumps({"key": key, "value": data, "revision": revision}))
            else:
                print_value(
                    "\t".join(["del", one_line(key)] if value is None else ["set", one_line(key), one_line(value)])
                )


@store_command("ls")
@click.argument("prefix", default="")
@click.option("-l", "long", is_flag=True, help="Print the size of each value in bytes, and how it begins.")
def ls(store: Store, prefix: str, long: bool) -> None:
    """List the keys that start with PREFIX, sorted, one per line."""
    keys = [key for key in sorted(store.list_keys()) if key.startswith(prefix)]
    if not long:
        for key in keys:
            print_value(one_line(key))
        return
    for key in keys:
        try:
            value = store.get(key, 0)
        except StoreTimeout:  # deleted meanwhile
            continue
        shown = as_text(value[:SHOWN])
        beginning = "(binary)" if shown is None else one_line(shown) + ("..." if len(value) > SHOWN else "")
        print_value(f"{len(value):>9}  {one_line(key)}  {beginning}".rstrip())


@store_command("del")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--prefix", is_flag=True, help="Delete all keys and queues that start with any KEY.")
def del_(store: Store, keys: tuple[str, ...], prefix: bool) -> None:
    """Delete the keys and print how many existed. A missing key is not an error."""
    print_value(sum(store.delete_prefix(key) if prefix else store.delete_key(key) for key in keys))


@store_command("ping")
def ping(store: Store) -> None:
    """Make one round trip to the store, and print how long it took."""
    began_at = time.perf_counter()
    store.check(["ping"])
    print_value(f"{store!r} answered in {1000 * (time.perf_counter() - began_at):.2f} ms")


commands = {str(command.name): command for command in (get, set_, add, wait, watch, ls, del_, ping)}
"""The commands by name."""
