"""The error of a node that gives up because its health check fails."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.errors import RallypointError, WithFields

__all__ = ["HealthCheckFailed"]

MAX_COMMAND = 200


class HealthCheckFailed(WithFields, RallypointError):
    """The health check of this node cannot be run, or has failed until the join timeout."""

    command: str
    why: str
    """How the last check ended, and what it printed last."""

    code: int | None
    """The exit code of the last check, negative for a signal; None if it took too long."""

    output: Sequence[str]
    failed: int
    """Failed checks in a row."""

    out_s: float
    """How long this node has been out of the run."""

    exit_code: int = 1
    """The exit code of the agent."""

    def _sentence(self) -> str:
        command = repr(self.command if len(self.command) <= MAX_COMMAND else f"{self.command[:MAX_COMMAND]}...")
        if self.exit_code != 1:
            return (
                f"the health check {command} cannot be run: {self.why}. "
                f"Is it spelled correctly, installed on this machine, and executable?"
            )
        times = f"{self.failed} times in {self.out_s:.0f} s" if self.failed > 1 else "once"
        return (
            f"this node gives up at its join timeout: the health check {command} failed {times}, the last time with "
            f"{self.why}"
        )
