"""What the rendezvous machine answers to a node that joined, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Round"]


class Round(NamedTuple):
    """A node's view of its round."""

    run: int
    number: int
    scope: int
    rank: int
    size: int
    first: Any
    before: int
    reason: str
