"""The command `rallypoint`: one file a command, imported only when it is called."""

from __future__ import annotations

import importlib

import click

import rallypoint

__all__ = ["main"]

COMMANDS = {"serve": "Serve a store that rallypoint and PyTorch programs can use."}
"""Every command and what `--help` says of it, so that help imports none of them."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"rallypoint.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rallypoint.__version__)
def main() -> None:
    """Let the processes of a distributed job find each other and wait for each other."""
