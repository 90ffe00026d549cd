"""The command `rallypoint`. Each subcommand is imported only when it is called.

An exception of a subcommand becomes an exit code and one line on standard error, so that shell scripts can react:

    0 success    1 RallypointError    2 misuse    3 timeout    4 store unreachable    130 Ctrl-C    143 SIGTERM
"""

from __future__ import annotations

import difflib
import importlib
import signal
from typing import TYPE_CHECKING, Any

import click

import rallypoint
from rallypoint.errors import NetworkError, RallypointError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["main"]

COMMANDS = {
    "run": "Run a script in several processes and restart them when one fails.",
    "stacks": "Print the Python stacks of running workers, equal ones folded.",
    "runs": "Kill, restart or drain a run, or one of its nodes.",
    "serve": "Serve a store that rallypoint and PyTorch programs can use.",
    "relay": "Relay a server to the processes of this node, over one connection.",
    "status": "Show what a server is doing, who waits for whom, and what has failed.",
    "top": "The same, live.",
    "get": "Print a value, waiting until the key exists.",
    "set": "Write a value. Also: put.",
    "add": "Add to a counter and print its new value. Also: incr.",
    "wait": "Wait until all of the keys exist.",
    "watch": "Print changes as they happen, one per line.",
    "ls": "List the keys. Also: keys.",
    "del": "Delete keys and print how many existed. Also: delete.",
    "push": "Append items to a queue.",
    "pop": "Print the first item of a queue and remove it.",
    "ping": "Measure a round trip to the store.",
    "barrier": "Wait until all members have arrived.",
    "exchange": "Contribute data and print the data of all ranks.",
    "lock": "Run a command while holding a lock.",
    "etcd": "Run a small local etcd cluster for experiments.",
    "token": "Make a token, which protects a store.",
    "tls": "Make certificates for trials and small sites.",
    "completion": "Print the script that completes commands in a shell.",
}
"""Every command and its line in `--help`, so that help imports none of them."""

ALIASES = {"put": "set", "incr": "add", "keys": "ls", "delete": "del"}
"""Other names of commands."""

FAILED, TIMED_OUT, UNREACHABLE, INTERRUPTED = 1, 3, 4, 130
_MODULES = {
    **dict.fromkeys(("get", "set", "add", "wait", "watch", "ls", "del", "ping"), "key_commands"),
    **dict.fromkeys(("push", "pop"), "queue_commands"),
    **dict.fromkeys(("status", "top"), "status"),
}
"""The modules of commands that share one; all others have a module of their own name."""


def _exit_code(error: RallypointError) -> int:
    if isinstance(error, NetworkError):  # first, because a connection timeout is also a TimeoutError
        return UNREACHABLE
    return TIMED_OUT if isinstance(error, TimeoutError) else FAILED


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rallypoint.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command = module.commands[cmd_name] if cmd_name in _MODULES else module.command
        assert isinstance(command, click.Command)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # __main__ sets it during imports
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ctx.call_on_close(lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # again for interpreter exit
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], [*COMMANDS, *ALIASES], n=3) if args else []
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise click.UsageError(error.format_message() + hint, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands; click would import them all for their help."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=words) for name, words in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

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
    """Coordinate the processes of a distributed job: rendezvous, a shared store, barriers and locks."""
