"""Errors of a run in words for its users."""

from __future__ import annotations

from rallypoint.errors import Disagreement, NetworkError, RallypointError, SessionLost

__all__ = ["describe_end", "describe_loss"]


def describe_end(error: RallypointError, has_joined: bool) -> str:
    """Return the reason a run ends; an error's advice to reopen the store is for scripts, and left out."""
    if isinstance(error, Disagreement):
        return f"{error} For a separate job on the same server, set --rdzv-id."
    if not isinstance(error, NetworkError):
        return str(error)
    return f"the run cannot {'continue' if has_joined else 'start'} without its server: {describe_loss(error)}"


def describe_loss(error: NetworkError) -> str:
    """Return why the server cannot be reached, without advice for scripts."""
    return f"the session with {error.peer} is lost: {error.why}" if isinstance(error, SessionLost) else str(error)
