"""`rallypoint get`, `set`, `add`, `wait`, `watch`, `ls`, `del`: the keys of a store, for shell scripts."""

from __future__ import annotations

import base64
import json
import math

import click

from rallypoint import Store, StoreTimeout
from rallypoint.cli.opening import given, line, put, store_command, teller, text, timeout_option, verbose_option
from rallypoint.core.machine import Waiting
from rallypoint.deadline import Deadline

__all__ = ["commands"]

PROGRESS_S = 10.0
"""How often `wait` says what is still missing."""


@store_command("get")
@click.argument("key")
@timeout_option
@click.option("--raw", is_flag=True, help="Write exactly the value, with no newline after a text.")
def get(store: Store, key: str, timeout: float | None, raw: bool) -> None:
    """Print the value of KEY, waiting until it exists; --timeout 0 does not wait.

    A newline follows a text. What is not text is written as it is.
    """
    value = store.get(key, timeout)
    put(value, nl=not raw and text(value) is not None)


@store_command("set", dashed=True)
@click.argument("key")
@click.argument("value")
def set_(store: Store, key: str, value: str) -> None:
    """Write VALUE to KEY. A VALUE of - is all of standard input, byte by byte."""
    store.set(key, given(value))


@store_command("add", dashed=True)
@click.argument("key")
@click.argument("amount", type=int)
def add(store: Store, key: str, amount: int) -> None:
    """Add AMOUNT, which may be negative, to the counter KEY, and print its new value. A missing KEY is 0."""
    put(store.add(key, amount))


@store_command("wait")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@timeout_option
@verbose_option
def wait(store: Store, keys: tuple[str, ...], timeout: float | None, verbose: bool) -> None:
    """Wait until all of the keys exist. On time-out, say which do not, and exit with 3."""
    deadline = Deadline(store.timeout if timeout is None else timeout)
    tell = teller(verbose)
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
@click.option("--timeout", type=click.FloatRange(0), metavar="SECONDS", help="End when nothing changes for so long.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, the value in base64.")
@verbose_option
def watch(store: Store, prefix: str, timeout: float | None, as_json: bool, verbose: bool) -> None:
    """Print every change of a key that starts with PREFIX, from now on, until Ctrl-C.

    A line is "set", the key and the value, or "del" and the key, with tabs between.
    """
    with store.watch(prefix, math.inf if timeout is None else timeout) as changes:
        tell = teller(verbose)
        if tell is not None:
            tell(Waiting(f"changes of keys that start with {prefix!r}"))
        for key, value, revision in changes:
            if as_json:
                data = None if value is None else base64.b64encode(value).decode()
                put(json.dumps({"key": key, "value": data, "revision": revision}))
            else:
                put("\t".join(["del", line(key)] if value is None else ["set", line(key), line(value)]))


@store_command("ls")
@click.argument("prefix", default="")
def ls(store: Store, prefix: str) -> None:
    """List the keys that start with PREFIX, sorted, one a line."""
    for key in sorted(store.list_keys()):
        if key.startswith(prefix):
            put(line(key))


@store_command("del")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--prefix", is_flag=True, help="Delete all keys and queues that start with any KEY.")
def del_(store: Store, keys: tuple[str, ...], prefix: bool) -> None:
    """Delete the keys, and print how many there were. A key that is not there is no error."""
    put(sum(store.delete_prefix(key) if prefix else store.delete_key(key) for key in keys))


commands = {str(command.name): command for command in (get, set_, add, wait, watch, ls, del_)}
"""The commands by name."""
