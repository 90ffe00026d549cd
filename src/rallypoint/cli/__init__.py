"""The command `rallypoint`: its commands are imported only when they are called.

What a command raises becomes an exit code here, and one line on standard error, so that shell scripts can choose:

    0 done    1 a RallypointError    2 misuse    3 time-out    4 the store is not reachable    130 Ctrl-C    143 SIGTERM
"""

from __future__ import annotations

import importlib
import signal
from typing import Any

import click

import rallypoint
from rallypoint.errors import NetworkError, RallypointError

__all__ = ["main"]

COMMANDS = {
    "run": "Run a script in several processes, and start them again when one dies.",
    "serve": "Serve a store that rallypoint and PyTorch programs can use.",
    "relay": "Relay a server to the processes of this node, over one connection.",
    "get": "Print a value, waiting until the key exists.",
    "set": "Write a value.",
    "add": "Add to a counter, and print its new value.",
    "wait": "Wait until all of the keys exist.",
    "watch": "Print changes as they happen, one a line.",
    "ls": "List the keys.",
    "del": "Delete keys, and print how many there were.",
    "barrier": "Wait until all members have come.",
    "exchange": "Give data, and print what all ranks gave.",
    "lock": "Run a command while holding a lock.",
    "etcd": "Run a small etcd cluster on this machine, for trying.",
}
"""Every command and what `--help` says of it, so that help imports none of them."""

FAILED, TIMED_OUT, UNREACHABLE, INTERRUPTED = 1, 3, 4, 130
_TOGETHER = dict.fromkeys(("get", "set", "add", "wait", "watch", "ls", "del"), "keys")
"""The module of commands that do not have one of their own name."""


def _exit_code(error: RallypointError) -> int:
    if isinstance(error, NetworkError):  # first: nobody there in time is also a TimeoutError
        return UNREACHABLE
    return TIMED_OUT if isinstance(error, TimeoutError) else FAILED


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rallypoint.cli.{_TOGETHER.get(cmd_name, cmd_name)}")
        command = module.commands[cmd_name] if cmd_name in _TOGETHER else module.command
        assert isinstance(command, click.Command)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # so it was while we were imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ctx.call_on_close(lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # and is while Python ends
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RallypointError as error:
            click.echo("Error: " + " ".join(str(error).splitlines()), err=True)
            ctx.exit(_exit_code(error))
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rallypoint.__version__)
def main() -> None:
    """Let the processes of a distributed job find each other and wait for each other."""
