"""Options abbreviated to an unambiguous prefix, as argparse, and so torchrun, accepts them: `--redirect 3`.

An exact name always wins. A prefix of one option selects it. A prefix of several options selects the only one of them
that torchrun has too, so that abbreviations for torchrun work here. Any other prefix is a usage error that lists the
candidates. Words after the first argument that is not an option are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["WORDS", "PrefixCommand"]

WORDS = f"{__name__}.words"
"""The key in click's context for the words of the command line, with the full names of options."""


class PrefixCommand(click.Command):
    """A command whose long options may be abbreviated."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Expand abbreviated options, and parse."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        named = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
        words, at = list(args), 0
        while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
            name, equals, value = words[at].partition("=")
            if name.startswith("--"):
                name = _full_name(ctx, name, named)
                words[at] = name + equals + value
                takes_next = not equals and name in named and not named[name].is_flag
            else:
                takes_next = _last_takes_value(name, named)
            at += 1 + takes_next
        ctx.meta[WORDS] = list(words)
        return super().parse_args(ctx, words)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options; torchrun's second spelling only once it is being typed."""
        found = super().shell_complete(ctx, incomplete)
        return found if "_" in incomplete else [item for item in found if "_" not in item.value]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show options under the heading of their group, each by its first spelling."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                heading = getattr(param, "group", "") or "Other options"
                groups.setdefault(heading, []).append((_one_spelling(record[0]), record[1]))
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _full_name(ctx: click.Context, name: str, named: Mapping[str, click.Option]) -> str:
    """Return the full name of an option; return an unknown name as it is, for click to reject."""
    if name in named:
        return name
    found: dict[click.Option, str] = {}
    for full, option in named.items():
        if full.startswith(name):
            found.setdefault(option, full)
    theirs = {option: full for option, full in found.items() if option.envvar}
    meant = found if len(found) == 1 else theirs
    if len(meant) == 1:
        return next(iter(meant.values()))
    if found:
        each = ", ".join(sorted(found.values()))
        raise click.UsageError(f"{name} is ambiguous: could be {each}", ctx)
    return name


def _last_takes_value(word: str, named: Mapping[str, click.Option]) -> bool:
    """Return whether the last short option takes the next word as its value: true for `-mr`, false for `-r3`."""
    for at, letter in enumerate(word[1:], 2):
        option = named.get(f"-{letter}")
        if option is not None and not option.is_flag:
            return at == len(word)
    return False


def _one_spelling(names: str) -> str:
    """Return the names of an option without torchrun's second spelling, `--rdzv_id` beside `--rdzv-id`."""
    spellings, space, value = names.partition(" ") if ", " not in names else _split_value(names)
    kept = [name for name in spellings.split(", ") if not (name.startswith("--") and "_" in name)]
    return ", ".join(kept) + space + value


def _split_value(names: str) -> tuple[str, str, str]:
    """Split `-r, --redirects STREAMS` after the last name."""
    head, comma, last = names.rpartition(", ")
    name, space, value = last.partition(" ")
    return head + comma + name, space, value
