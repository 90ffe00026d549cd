"""Options by an unambiguous beginning of their names, as argparse, and so torchrun, takes them: `--redirect 3`.

An exact name always wins. A beginning that only one option has means that one; of several, the one that torchrun has
too, if there is only one such: what torchrun understands is understood here. Anything else is a usage error, which
lists the candidates. What follows the first argument that is no option is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

__all__ = ["PrefixCommand"]


class PrefixCommand(click.Command):
    """A command whose long options may be abbreviated."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write out abbreviated options, and parse."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        named = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
        words, at = list(args), 0
        while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
            name, equals, value = words[at].partition("=")
            if name.startswith("--"):
                name = _whole(ctx, name, named)
                words[at] = name + equals + value
                takes_next = not equals and name in named and not named[name].is_flag
            else:
                takes_next = _last_takes_value(name, named)
            at += 1 + takes_next
        return super().parse_args(ctx, words)


def _whole(ctx: click.Context, name: str, named: Mapping[str, click.Option]) -> str:
    """Return the name that is meant; one that nothing begins with stays, for click to complain of."""
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
        raise click.UsageError(f"{name} could be any of {each}: write more of it", ctx)
    return name


def _last_takes_value(word: str, named: Mapping[str, click.Option]) -> bool:
    """Say whether the value of the last short option in `-mr` is the next word; in `-r3` it is not."""
    for at, letter in enumerate(word[1:], 2):
        option = named.get(f"-{letter}")
        if option is not None and not option.is_flag:
            return at == len(word)
    return False
