"""Errors of entering a round of a run or opening a port for it; HTTP turns them into status codes."""

from __future__ import annotations

__all__ = ["TooLate", "TooMany"]


class TooLate(Exception):
    """A later round of the run has begun."""


class TooMany(Exception):
    """The limit of open rounds is reached, and all are in use."""
