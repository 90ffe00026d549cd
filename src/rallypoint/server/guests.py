"""Sessions as the server sees them, wherever they are: here (`core/caller.py`) or in etcd (`gateway_caller.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from rallypoint.core.ledger import Ledger
from rallypoint.core.records import show

__all__ = ["Guests", "describe"]

SHOWN = 100
"""How many keys of one client the statistics name."""


class Guests(Protocol):
    """The sessions of a server, wherever their state is."""

    ledger: Ledger
    limit: int
    refused: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def expire(self, now: float) -> object:
        """End what is due."""

    def next_end(self) -> float:
        """Return when `expire` has something to do next."""


def describe(session: Any) -> dict[str, Any]:
    """Return what the statistics say of a session."""
    return {
        "name": session.name,
        "here": session.link is not None,
        "waits_for": [show(key) for key in session.waits_for[:SHOWN]],
        "leases": [show(key) for key in session.leases[:SHOWN]],
    }
