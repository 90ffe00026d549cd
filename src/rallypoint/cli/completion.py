"""`rallypoint completion`: the script by which a shell completes commands, options and files.

The scripts are click's. At each Tab the shell runs `rallypoint` with the words so far in variables, and click completes
them: the names of commands without importing them (`cli/__init__.py`), options by importing their command alone.
Completion asks no store: a Tab must not wait for a network.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from rallypoint.cli import COMMANDS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["command", "complete_files"]

SHELLS = ("bash", "zsh", "fish")
PROGRAM, VARIABLE = "rallypoint", "_RALLYPOINT_COMPLETE"


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


@click.command(short_help=COMMANDS["completion"])
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def command(shell: str | None) -> None:
    """Print the script that completes commands and options in a shell, by default that of $SHELL.

    \b
    bash: rallypoint completion bash > ~/.local/share/bash-completion/completions/rallypoint
    zsh:  rallypoint completion zsh > DIRECTORY/_rallypoint, where DIRECTORY is in $fpath
    fish: rallypoint completion fish > ~/.config/fish/completions/rallypoint.fish

    Or, in the start-up file of bash or zsh: eval "$(rallypoint completion)".
    """
    from click.shell_completion import get_completion_class

    from rallypoint.cli import main

    shell = shell or os.path.basename(os.environ.get("SHELL", ""))
    script = get_completion_class(shell) if shell in SHELLS else None
    if script is None:
        raise click.UsageError(f"$SHELL is {shell!r}: name one of {', '.join(SHELLS)}")
    click.echo(script(main, {}, PROGRAM, VARIABLE).source(), nl=False)
