"""Why a round of a run cannot be entered, or have a port; HTTP turns it into status codes."""

from __future__ import annotations

__all__ = ["NoPorts", "TooLate", "TooMany"]


class TooLate(Exception):
    """A later round of the run has begun."""


class TooMany(Exception):
    """There are as many rounds as may be, and all are in use."""


class NoPorts(Exception):
    """This server has no ports for rounds: a relay has."""
