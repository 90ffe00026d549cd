"""The page of all commands and options, made from click's declarations, which `--help` shows too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import click

from rallypoint.cli import ALIASES, main

HEAD = """# Commands and options

Every command and option of `rallypoint`, as `--help` has them. This page is made from the code when the site is built.
[The command line](../cli.md) explains the store commands, [The launcher](../run.md) explains `rallypoint run`.
"""


def render() -> str:
    """Return the page."""
    context = click.Context(main, info_name="rallypoint")
    sections = (section for name, command in subcommands(main, context) for section in describe(name, command, context))
    return "\n".join([HEAD, *sections])


def subcommands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command


def describe(name: str, command: click.Command, parent: click.Context, level: int = 2) -> Iterator[str]:
    """Yield the lines about one command, and about those below it."""
    context = click.Context(command, info_name=name, parent=parent)
    yield f"{'#' * level} {context.command_path}\n"
    yield f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```\n"
    yield as_markdown(inspect.cleandoc(command.help or "")) + "\n"
    if others := [alias for alias, of in ALIASES.items() if level == 2 and of == name]:
        yield f"Also: {', '.join(f'`{other}`' for other in others)}.\n"
    yield from options(command, context)
    if isinstance(command, click.Group):
        for below, one in subcommands(command, context):
            yield from describe(below, one, context, level + 1)


def options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the tables of a command's options, one for each group of them."""
    heading = None
    for option in command.get_params(context):
        if not isinstance(option, click.Option) or option.hidden or "--help" in option.opts:
            continue
        group = getattr(option, "group", "")
        if heading is None or group != heading:
            heading = group
            yield f"\n| {group or 'option'} | meaning |\n|---|---|"
        yield f"| {spelled(option, context)} | {meaning(option)} |"
    yield ""


def spelled(option: click.Option, context: click.Context) -> str:
    names = [name for name in [*option.opts, *option.secondary_opts] if "_" not in name]
    metavar = "" if option.is_flag else f" {option.make_metavar(context)}"
    return ", ".join(f"`{name}`" for name in names[:-1]) + ", " * (len(names) > 1) + cell(f"`{names[-1]}{metavar}`")


def meaning(option: click.Option) -> str:
    words = [as_markdown(option.help or "").replace("\n", " ")]
    shown: Any = option.default
    if option.show_default and shown not in (None, False, ()) and "[default" not in words[0] and not callable(shown):
        words.append(f"Default: `{shown}`.")
    variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    if variables:
        words.append("Variable: " + ", ".join(f"`{name}`" for name in variables) + ".")
    return cell(" ".join(words))


def as_markdown(text: str) -> str:
    """Return a help text with the signs that Markdown would read as markup kept as they are."""
    text = text.replace("\b", "").replace("\f", "").strip()
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s*\[default: (.*)\]$", r" Default: `\1`.", text))
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", part) for part in parts)


def cell(text: str) -> str:
    return text.replace("|", r"\|")
