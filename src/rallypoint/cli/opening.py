"""What the commands that use a store have in common: how it is named and opened, how values are read and shown.

A value that is text goes out with a newline, as scripts expect; any other as it is. Where one line must hold it, what
is not printable is shown as an escape, for people; programs ask for --json, which has the exact bytes as base64.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

import rallypoint
from rallypoint.cli import COMMANDS
from rallypoint.store.url import parse_url

if TYPE_CHECKING:
    from rallypoint.core.machine import Waiting

__all__ = ["URL_VARIABLE", "given", "line", "store_command", "timeout_option", "teller", "text", "verbose_option"]

URL_VARIABLE = "RALLYPOINT_URL"
"""The environment variable that names the store where `--store` does not."""

CONNECT_S = 30.0
"""How long to try to reach a store where nobody says."""

timeout_option = click.option(
    "--timeout", type=click.FloatRange(0), metavar="SECONDS", help="How long to wait.  [the URL's ?timeout=, else 300]"
)
"""For commands that wait."""

verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Say on standard error what is waited for, as on a terminal."
)
"""For commands that tell about their waiting."""


def store_command(name: str, **settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that takes an open store, and what its options say."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.option("--store", "url", envvar=URL_VARIABLE, metavar="URL", help=f"The store.  [{URL_VARIABLE}]")
        @click.option(
            "--connect-timeout",
            type=click.FloatRange(0),
            default=CONNECT_S,
            show_default=True,
            metavar="SECONDS",
            help="How long to try to reach it.",
        )
        @functools.wraps(function)
        def run(url: str | None, connect_timeout: float, **options: Any) -> None:
            with _open(url, connect_timeout) as store:
                try:
                    function(store, **options)
                except rallypoint.RallypointError:
                    raise
                except ValueError as error:  # an argument that click cannot know to be wrong
                    raise click.UsageError(str(error)) from None

        command: click.Command = click.command(name, click.Command, short_help=COMMANDS[name], **settings)(run)
        return command

    return decorate


def _open(url: str | None, connect_s: float) -> rallypoint.Store:
    if not url:
        raise click.UsageError(f"no store: give --store URL or set {URL_VARIABLE}, as in tcp://head-node:29400")
    try:
        wait_s = parse_url(url).timeout_s
        store = rallypoint.connect(url, connect_s)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=f"--store or {URL_VARIABLE}") from None
    except rallypoint.RallypointError:
        raise
    except OSError as error:  # of a file, which is where a store is not reachable without a network
        raise rallypoint.NetworkError(f"cannot open {url}: {error}") from None
    store.set_timeout(wait_s)
    return store


def given(value: str) -> bytes:
    """Return the bytes that an argument stands for: its own, or all of standard input for `-`."""
    return sys.stdin.buffer.read() if value == "-" else os.fsencode(value)


def text(value: bytes) -> str | None:
    """Return a value as text, or None where it is none."""
    with suppress(UnicodeDecodeError):
        decoded = value.decode()
        if all(char.isprintable() or char in "\t\r\n" for char in decoded):
            return decoded
    return None


def line(value: bytes | str) -> str:
    """Return a value as one line for people; the newline at its end, if any, is left out."""
    decoded = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    shown = (
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in decoded.removesuffix("\n")
    )
    return "".join(shown)


def teller(verbose: bool) -> Callable[[Waiting], None] | None:
    """Return what says on standard error why a command waits, if anybody wants to know."""
    if not verbose and not sys.stderr.isatty():
        return None
    return lambda waiting: click.echo(f"waiting: {waiting.reason}", err=True)
