"""The options that `rallypoint serve` and `rallypoint relay` share: where to listen, and how much clients may use.

Both commands take `hosts`, `port` and `fds` by these names, and the limits by those of `server/settings.py`.

Rejected: to have `relay` import them from `serve`. Whoever changes an option there would not know of the other command.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import click

from rallypoint.core.limits import LEAST_BYTES
from rallypoint.errors import RallypointError

__all__ = ["check_fds", "limit_options", "listen_options", "run_server"]

Decorator = Callable[[Any], Any]

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Read a number of bytes, as 1500000, 512k, 64MiB or 4G."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", value.strip().lower())
    if not match or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a size; write bytes, or a number with K, M, G or T")
    size = int(match[1]) * _UNITS[match[2]]
    least = LEAST_BYTES[str(param.name)]
    if size < least:
        raise click.BadParameter(f"{value!r} is too little: requests that are allowed need {least} bytes")
    if size >= 2**63:
        raise click.BadParameter(f"{value!r} is more than fits in 64 bits")
    return size


def _size_option(name: str, default: str, words: str) -> Decorator:
    """Return an option that is a limit in bytes, written as people do."""
    return click.option(name, callback=_size, default=default, show_default=True, help=words)


def _all(options: list[Decorator], function: Any) -> Any:
    for option in reversed(options):  # the last decorator is the first that help shows
        function = option(function)
    return function


def listen_options(port_help: str) -> Decorator:
    """Return the options that say where to listen."""
    options = [
        click.option(
            "--host", "hosts", multiple=True, help="Address or name to listen on; may be repeated.  [127.0.0.1]"
        ),
        click.option("--port", type=click.IntRange(0, 65535), help=port_help),
        click.option(
            "--fd", "fds", type=click.IntRange(0), multiple=True, help="Descriptor of a bound socket to listen on."
        ),
        click.option("--url-file", type=click.Path(dir_okay=False), help="Write its URL to this file once it listens."),
    ]
    return lambda function: _all(options, function)


def limit_options(function: Any) -> Any:
    """Add the options that bound what clients may use."""
    connections = click.option(
        "--max-connections",
        type=click.IntRange(1),
        help="How many may be connected at once.  [what the limit on open files allows]",
    )
    memory = _size_option("--max-memory", "4G", "All that clients may make it hold.")
    largest = _size_option("--max-connection-memory", "256M", "The largest request and answer.")
    return _all([memory, largest, connections], function)


def check_fds(fds: tuple[int, ...], **others: object) -> None:
    """Refuse sockets that are bound already beside options that say where to bind one, or the same one twice."""
    names = [f"--{name}" for name in others]
    if fds and any(value not in (None, ()) for value in others.values()):
        without = f"{', '.join(names[:-1])} and {names[-1]}"
        raise click.UsageError(f"--fd is a socket that is bound already; it goes without {without}")
    if len(set(fds)) < len(fds):
        raise click.UsageError("--fd has the same descriptor more than once")


def run_server(serve: Callable[[], None]) -> None:
    """Serve in the foreground, with a log on standard error; what makes that impossible is one line there."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        serve()
    except (RallypointError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
