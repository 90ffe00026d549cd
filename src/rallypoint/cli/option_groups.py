"""Options in groups with headings, as `rallypoint run --help` shows them, and their parsers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from rallypoint.cli.rdzv_conf import read_seconds

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["ELSEWHERE", "GroupedOption", "OptionGroup", "checked", "parsed"]

SECONDS = "SECONDS"

ELSEWHERE = f"{__name__}.elsewhere"
"""The key in click's context that is set if the agents run on other machines, which parse their own options."""

Decorator = Callable[[Any], Any]
Reader = Callable[[str], Any]


class GroupedOption(click.Option):
    """An option that `--help` shows in a group."""

    def __init__(self, *arguments: Any, group: str = "", **facts: Any) -> None:
        super().__init__(*arguments, **facts)
        self.group = group

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete files and directories."""
        from click.shell_completion import CompletionItem

        kind = {"FILE": "file", "DIRECTORY": "dir"}.get(self.metavar or "")
        return [CompletionItem(incomplete, type=kind)] if kind else super().shell_complete(ctx, incomplete)


def parsed(read: Reader, machine: bool = False) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that parses an option's text; a ValueError becomes a usage error that names the option.

    If the result depends on the agent's `machine`, it is None where the agents are elsewhere.
    """

    def callback(context: click.Context, _: click.Parameter, value: str | None) -> Any:
        if value is None or (machine and ELSEWHERE in context.meta):
            return None
        try:
            return read(value)
        except (ValueError, OSError) as error:
            raise click.BadParameter(str(error)) from None

    return callback


def checked(read: Reader) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that rejects text that does not parse, and returns the text unparsed."""

    def check(text: str) -> str:
        if text:
            read(text)
        return text

    return parsed(check)


class OptionGroup:
    """Options under one heading."""

    def __init__(self, heading: str) -> None:
        self._heading = heading
        self.options: list[Decorator] = []

    def add(self, name: str, *short: str, ours: bool = False, default_text: str = "", **facts: Any) -> None:
        """Add an option; unless it is `ours`, torchrun has it too."""
        plain = name.replace("-", "_")
        names = [*short, f"--{name}"] if ours else [*short, *dict.fromkeys((f"--{name}", f"--{plain}"))]
        if not ours:
            facts["envvar"] = f"PET_{plain.upper()}"
        if default_text:
            facts["help"] += f"  [default: {default_text}]"
        self.options.append(click.option(*names, plain, cls=GroupedOption, group=self._heading, **facts))

    def add_seconds(self, name: str, default: str | None = None, default_text: str = "", **facts: Any) -> None:
        """Add an option whose value is a number of seconds."""
        read = parsed(lambda text: read_seconds(name, text))
        shown = default_text or (f"{default} s" if default else "")
        self.add(name, metavar=SECONDS, default=default, default_text=shown, callback=read, **facts)
