"""The options of `rallypoint run` about the health of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rallypoint.cli.option_groups import OptionGroup, parsed
from rallypoint.core.policy.health_policy import HealthRules

if TYPE_CHECKING:
    from rallypoint.cli.run_options import RunOptions

__all__ = ["health_group", "health_rules"]

PREFIX = "RALLYPOINT_HEALTH"
"""The variables of these options, which a machine's image can set, begin with this."""

LEAST_COOLDOWN_S = 0.1
"""A shorter one would start checks without end."""


def health_group() -> OptionGroup:
    """Return the options."""
    group = OptionGroup("Health of the node")
    group.add("health-check", ours=True, metavar="COMMAND", envvar=f"{PREFIX}_CHECK", callback=parsed(_command),
              help="Shell command that checks this node before it joins and after a failure here; until it exits with "
                   "0, the node stays out of the run.")  # fmt: skip
    group.add_seconds("health-timeout", ours=True, default="60", envvar=f"{PREFIX}_TIMEOUT",
                      help="Time after which a check is killed, and has failed.")  # fmt: skip
    group.add_seconds("health-cooldown", ours=True, default="60", envvar=f"{PREFIX}_COOLDOWN",
                      help="Time out of the run after a failed check, before the next one; doubles with each failed "
                           "check in a row, up to 600 s.")  # fmt: skip
    return group


def _command(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a null character")
    return text.strip()


def health_rules(options: RunOptions) -> HealthRules:
    """Return the rules in these options; raise UsageError if they make no sense."""
    if options.health_check and not options.health_timeout:
        raise click.UsageError("--health-timeout must be more than 0: every check would fail")
    if options.health_cooldown < LEAST_COOLDOWN_S:
        raise click.UsageError(f"--health-cooldown must be at least {LEAST_COOLDOWN_S:g} s")
    return HealthRules(
        command=options.health_check or "", timeout_s=options.health_timeout, cooldown_s=options.health_cooldown
    )
