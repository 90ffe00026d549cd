"""The options that `rallypoint serve` and `rallypoint relay` share: listening addresses, and limits on clients.

Both commands take `hosts`, `port` and `fds` as parameters, and the limits under their names in `server/settings.py`.

Rejected: `relay` imports the options from `serve`. A change to `serve` would silently change `relay`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import click

from rallypoint.cli.json_log import JsonFormatter
from rallypoint.core.limits import LEAST_BYTES
from rallypoint.errors import RallypointError

__all__ = ["check_fds", "limit_options", "listen_options", "log_format_option", "run_server"]

Decorator = Callable[[Any], Any]

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Parse a number of bytes, such as 1500000, 512k, 64MiB or 4G."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", value.strip().lower())
    if not match or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a size: write a number of bytes, or a number with K, M, G or T")
    size = int(match[1]) * _UNITS[match[2]]
    least = LEAST_BYTES[str(param.name)]
    if size < least:
        raise click.BadParameter(f"{value!r} is too small: the largest valid requests need {least} bytes")
    if size >= 2**63:
        raise click.BadParameter(f"{value!r} does not fit in 64 bits")
    return size


def _size_option(name: str, default: str, words: str) -> Decorator:
    """Return an option for a limit in bytes, which may have a unit."""
    return click.option(name, callback=_size, default=default, show_default=True, help=words)


def _all(options: list[Decorator], function: Any) -> Any:
    for option in reversed(options):  # help shows the last decorator first
        function = option(function)
    return function


def listen_options(port_help: str) -> Decorator:
    """Return the options for listening addresses."""
    options = [
        click.option(
            "--host", "hosts", multiple=True, help="Address or name to listen on; may be repeated.  [127.0.0.1]"
        ),
        click.option("--port", type=click.IntRange(0, 65535), help=port_help),
        click.option(
            "--fd", "fds", type=click.IntRange(0), multiple=True, help="Descriptor of a bound socket to listen on."
        ),
        click.option("--url-file", type=click.Path(dir_okay=False), help="Write the URL to this file once listening."),
    ]
    return lambda function: _all(options, function)


def limit_options(function: Any) -> Any:
    """Add the options that limit what clients may use."""
    connections = click.option(
        "--max-connections",
        type=click.IntRange(1),
        help="Maximum number of connections.  [limit on open files]",
    )
    memory = _size_option("--max-memory", "4G", "Memory limit for everything held for clients, in all namespaces.")
    largest = _size_option("--max-connection-memory", "256M", "Maximum size of a request or reply.")
    return _all([memory, largest, connections], function)


def check_fds(fds: tuple[int, ...], **others: object) -> None:
    """Raise UsageError for bound sockets together with options that say where to bind, and for duplicates."""
    names = [f"--{name}" for name in others]
    if fds and any(value not in (None, ()) for value in others.values()):
        others_text = f"{', '.join(names[:-1])} and {names[-1]}"
        raise click.UsageError(f"--fd is a bound socket; it cannot be combined with {others_text}")
    if len(set(fds)) < len(fds):
        raise click.UsageError("--fd names the same descriptor more than once")


def log_format_option(function: Any) -> Any:
    """Add the option for the format of the log."""
    option = click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Format of the log on standard error; json: an object per line.",
    )
    return option(function)


def run_server(serve: Callable[[], None], log_format: str = "text") -> None:
    """Serve in the foreground, with a log on standard error; a failure to start is one line there."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    try:
        serve()
    except (RallypointError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
