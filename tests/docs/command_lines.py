"""Checks the command lines of a page that cannot be run: their commands and options must exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from rallypoint.cli import main

__all__ = ["check_commands", "commands_in"]


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each `rallypoint` command in a shell script, unless it is the value of another's option."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#"):
            continue
        words = shlex.split(line.replace("…", "..."), comments=True)
        while "rallypoint" in words:
            at = words.index("rallypoint")
            before, words = words[:at], words[at + 1 :]
            if before and before[-1].startswith(("--", "generic")):
                continue
            end = next((at for at, word in enumerate(words) if re.fullmatch(r"[|&;]+|\|\||2?>.*|\)", word)), len(words))
            yield words[:end]


def check_commands(text: str) -> list[str]:
    """Return what is wrong with the `rallypoint` commands in a shell script, by click's own words."""
    wrong = []
    for words in commands_in(text):
        try:
            _parse(main, click.Context(main, info_name="rallypoint"), words)
        except click.UsageError as error:
            wrong.append(f"rallypoint {shlex.join(words)}: {error.format_message()}")
    return wrong


def _parse(command: click.Command, context: click.Context, words: list[str]) -> None:
    """Parse the words as the command does, without reading what they mean."""
    if isinstance(command, click.Group):
        name, below, rest = command.resolve_command(context, words)
        assert below is not None
        _parse(below, click.Context(below, context, name, **below.context_settings), rest)
    else:
        command.make_parser(context).parse_args(list(words))
