"""The common part of the commands that use a store: opening it, reading and printing values, signals.

A text value is printed with a newline, as scripts expect; binary data is written unchanged. Output of one line per
value shows unprintable characters as escapes, for people; for programs, --json has the exact bytes as base64.

SIGTERM and SIGHUP end a command as Ctrl-C does: pending requests are cancelled first, so that other members do not
count on them.

A server outage of more than a moment is reported once on standard error, and so is its end.
"""

from __future__ import annotations

import contextlib
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
from rallypoint.cli.credential_options import credential_options
from rallypoint.client import outage
from rallypoint.client.routing.relay_address import VARIABLE
from rallypoint.security.credentials import Credentials
from rallypoint.store.url import parse_url, shown_url
from rallypoint.text import printable

if TYPE_CHECKING:
    from rallypoint.core.machines.machine import Waiting

__all__ = [
    "BY_SIGNAL",
    "URL_VARIABLE",
    "read_value",
    "one_line",
    "print_value",
    "store_command",
    "progress_printer",
    "as_text",
    "timeout_option",
    "verbose_option",
]

URL_VARIABLE = "RALLYPOINT_URL"
"""The environment variable with the URL of the store if `--store` is not given."""

BY_SIGNAL = 128
"""Exit code of a command that a signal ended, less the signal's number, as in shells."""

PATIENT_S = 2.0
"""After this time without a reply, a command says that it is still trying."""

CONNECT_S = 30.0
"""Default of --connect-timeout."""

timeout_option = click.option(
    "--timeout", type=click.FloatRange(0), metavar="SECONDS", help="How long to wait.  [the URL's ?timeout=, else 300]"
)
"""For commands that wait."""

verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print to standard error what the command waits for (default on a terminal).",
)
"""For commands that report progress."""


StoreFinder = Callable[[dict[str, Any], Credentials], tuple[str, Credentials]]
"""Finds the URL of a store, and the credentials for it, by the options of a command and the credentials given."""


def store_command(
    name: str, dashed: bool = False, optional: bool = False, otherwise: StoreFinder | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that makes a command of a function; the function takes an open store and its options.

    With `dashed`, arguments may start with a dash. If no store is given, `otherwise` finds one; with `optional`, the
    store is None then.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.option("--store", "url", envvar=URL_VARIABLE, metavar="URL", help=f"URL of the store.  [{URL_VARIABLE}]")
        @click.option(
            "--connect-timeout",
            type=click.FloatRange(0),
            default=CONNECT_S,
            show_default=True,
            metavar="SECONDS",
            help="Time to try to reach the store.",
        )
        @credential_options(serves=False)
        @functools.wraps(function)
        def run(url: str | None, connect_timeout: float, credentials: Credentials, **options: Any) -> None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_signals())
                stack.enter_context(outage.shown_by(_report))
                if not url and otherwise is not None:
                    url, credentials = otherwise(options, credentials)
                absent = optional and not url
                store = None if absent else stack.enter_context(_open(url, connect_timeout, credentials))
                try:
                    function(store, **options)
                except rallypoint.RallypointError:
                    raise
                except ValueError as error:  # an invalid argument that click cannot detect
                    raise click.UsageError(str(error)) from None
                except BrokenPipeError:  # the reader of the output is gone; click exits silently
                    raise
                except OSError as error:
                    raise click.ClickException(str(error)) from None

        kind = _DashedCommand if dashed else click.Command
        command: click.Command = click.command(name, kind, short_help=COMMANDS.get(name))(run)
        return command

    return decorate


class _DashedCommand(click.Command):
    """A command whose arguments may start with a dash, such as -5: only declared options are options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Separate options from arguments first. A word with two leading dashes is an option, known or not."""
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
    """Make SIGTERM and SIGHUP raise SystemExit; a second signal kills the process at once."""

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


def _open(url: str | None, connect_s: float, credentials: Credentials) -> rallypoint.Store:
    if not url:
        raise click.UsageError(f"no store: pass --store URL or set {URL_VARIABLE}, for example tcp://head-node:29400")
    try:
        wait_s = parse_url(url).timeout_s
        with _reported_patience(url, connect_s):
            store = rallypoint.connect(url, connect_s, credentials=credentials)
    except ValueError as error:
        if str(error).startswith(VARIABLE):
            raise click.UsageError(str(error)) from None
        raise click.BadParameter(str(error), param_hint=f"--store or {URL_VARIABLE}") from None
    except rallypoint.RallypointError:
        raise
    except OSError as error:  # only a file:// store raises a plain OSError
        raise rallypoint.NetworkError(f"cannot open {shown_url(url)}: {error}") from None
    store.set_timeout(wait_s)
    return store


@contextmanager
def _reported_patience(url: str, timeout_s: float) -> Iterator[None]:
    """Say on standard error that a server does not reply, if the block takes long."""
    still = f"no reply from {shown_url(url)} yet; trying for {max(0.0, timeout_s - PATIENT_S):g} s more"
    timer = threading.Timer(PATIENT_S, _report, [still])
    timer.daemon = True
    if timeout_s > PATIENT_S:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(message: str) -> None:
    click.echo(printable(message), err=True)


def read_value(value: str) -> bytes:
    """Return the bytes of an argument, or all of standard input for `-`."""
    return sys.stdin.buffer.read() if value == "-" else os.fsencode(value)


def print_value(value: object, nl: bool = True) -> None:
    """Print a value and flush the output."""
    try:
        click.echo(value, nl=nl)
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError, ValueError):  # or Python retries the write at exit, and prints a second error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.ClickException(f"cannot write the output: {error.strerror or error}") from None


def as_text(value: bytes) -> str | None:
    """Return a value as text, or None if it is binary."""
    with suppress(UnicodeDecodeError):
        decoded = value.decode()
        if all(char.isprintable() or char in "\t\r\n" for char in decoded):
            return decoded
    return None


def one_line(value: bytes | str) -> str:
    """Return a value as one printable line, without its final newline."""
    decoded = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    return printable(decoded.removesuffix("\n"))


def progress_printer(verbose: bool) -> Callable[[Waiting], None] | None:
    """Return a callback that prints to standard error why a command waits; None unless verbose or on a terminal."""
    if not verbose and not sys.stderr.isatty():
        return None
    return lambda waiting: click.echo(f"waiting: {printable(waiting.reason)}", err=True)
