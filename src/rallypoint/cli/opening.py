"""What the commands that use a store have in common: how it is named and opened, how values are read and shown, how
they end.

A value that is text goes out with a newline, as scripts expect; any other as it is. Where one line must hold it, what
is not printable is shown as an escape, for people; programs ask for --json, which has the exact bytes as base64.

SIGTERM and SIGHUP end a command as Ctrl-C does: what waits is taken back first, so that others do not count on it.

When the server is down for more than a moment, that is said once on standard error, and once when it is back.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

import rallypoint
from rallypoint.cli import COMMANDS
from rallypoint.store import outage
from rallypoint.store.relay_address import VARIABLE
from rallypoint.store.url import parse_url
from rallypoint.text import printable

if TYPE_CHECKING:
    from rallypoint.core.machine import Waiting

__all__ = [
    "BY_SIGNAL",
    "URL_VARIABLE",
    "given",
    "line",
    "put",
    "store_command",
    "teller",
    "text",
    "timeout_option",
    "verbose_option",
]

URL_VARIABLE = "RALLYPOINT_URL"
"""The environment variable that names the store where `--store` does not."""

BY_SIGNAL = 128
"""What shells add to the number of the signal that ended a command."""

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


def store_command(name: str, dashed: bool = False) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that takes an open store, and what its options say.

    Arguments of one that is `dashed` may start with a dash.
    """

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
            with _signals(), outage.shown_by(_say), _open(url, connect_timeout) as store:
                try:
                    function(store, **options)
                except rallypoint.RallypointError:
                    raise
                except ValueError as error:  # an argument that click cannot know to be wrong
                    raise click.UsageError(str(error)) from None
                except BrokenPipeError:  # whoever read the output went away, which click ends in silence
                    raise
                except OSError as error:
                    raise click.ClickException(str(error)) from None

        kind = _DashedCommand if dashed else click.Command
        command: click.Command = click.command(name, kind, short_help=COMMANDS[name])(run)
        return command

    return decorate


class _DashedCommand(click.Command):
    """A command of which an argument may start with a dash, as -5 does: only its own options are options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Sort the options from the arguments first. What starts with two dashes is an option, known or not."""
        own = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        takes_value = {name: not param.is_flag for param in own for name in param.opts}
        options: list[str] = []
        arguments: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                arguments += words
            elif word in takes_value or word.startswith("--"):
                options.append(word)
                if takes_value.get(word):
                    options += itertools.islice(words, 1)
            else:
                arguments.append(word)
        return super().parse_args(ctx, [*options, "--", *arguments])


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, once: a second one is not waited for."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(BY_SIGNAL + number)

    ours = threading.current_thread() is threading.main_thread()
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers if ours else ():
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers if ours else ():
            signal.signal(number, signal.SIG_DFL)


def _open(url: str | None, connect_s: float) -> rallypoint.Store:
    if not url:
        raise click.UsageError(f"no store: give --store URL or set {URL_VARIABLE}, as in tcp://head-node:29400")
    try:
        wait_s = parse_url(url).timeout_s
        store = rallypoint.connect(url, connect_s)
    except ValueError as error:
        if str(error).startswith(VARIABLE):
            raise click.UsageError(str(error)) from None
        raise click.BadParameter(str(error), param_hint=f"--store or {URL_VARIABLE}") from None
    except rallypoint.RallypointError:
        raise
    except OSError as error:  # of a file, which is where a store is not reachable without a network
        raise rallypoint.NetworkError(f"cannot open {url}: {error}") from None
    store.set_timeout(wait_s)
    return store


def _say(words: str) -> None:
    click.echo(printable(words), err=True)


def given(value: str) -> bytes:
    """Return the bytes that an argument stands for: its own, or all of standard input for `-`."""
    return sys.stdin.buffer.read() if value == "-" else os.fsencode(value)


def put(value: object, nl: bool = True) -> None:
    """Print a value, at once."""
    try:
        click.echo(value, nl=nl)
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError, ValueError):  # else Python tries to write the rest once more at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.ClickException(f"cannot write the output: {error.strerror or error}") from None


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
    return printable(decoded.removesuffix("\n"))


def teller(verbose: bool) -> Callable[[Waiting], None] | None:
    """Return what says on standard error why a command waits, if anybody wants to know."""
    if not verbose and not sys.stderr.isatty():
        return None
    return lambda waiting: click.echo(f"waiting: {printable(waiting.reason)}", err=True)
