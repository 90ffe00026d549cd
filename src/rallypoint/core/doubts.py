"""Refusals that may be wrong, for those whom they protect may be dead: such calls wait instead of being refused.

A process that is killed and restarted at once finds its old session in its grace: its name in a group is taken, or the
settings of the dead are not its own. Whether the old process comes back is known when the grace ends, so a call that
would be refused because of another member waits while a session in that object has lost its connection. Then it
looks again. A call that asks not to wait gets the refusal at once.

Rejected: to leave it to the refused to try again. It cannot know for how long that is worth while.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rallypoint.core.machine import Machine, Outcome, Refused, Waiting

__all__ = ["BECAUSE_OF_OTHERS", "Doubts"]

BECAUSE_OF_OTHERS = frozenset(("Disagreement", "NameTaken", "RankTaken"))
"""What a call is refused for because another member is there."""


class Doubts:
    """Which sessions have lost their connection, and the calls that wait for their end or their return."""

    def __init__(self) -> None:
        self._away: dict[str, None] = {}
        self._calls: dict[Any, Refused] = {}

    def __bool__(self) -> bool:
        """Return whether there are such calls."""
        return bool(self._calls)

    def __iter__(self) -> Iterator[Any]:
        """Return those calls, in the order of their coming."""
        return iter(list(self._calls))

    def away(self, session: str) -> None:
        """Note that a session has lost its connection."""
        self._away[session] = None

    def over(self, session: str) -> None:
        """Note that a session has a connection again, or has ended."""
        self._away.pop(session, None)

    def of(self, held: Any, outcome: Outcome, machine: Machine) -> bool:
        """Say whether a call has to wait, because what it is refused for is in doubt; remember it."""
        self._calls.pop(held, None)
        if not self._away or not isinstance(outcome, Refused) or outcome.error not in BECAUSE_OF_OTHERS:
            return False
        if machine.sessions().isdisjoint(self._away):
            return False
        self._calls[held] = outcome
        return True

    def settle(self, held: Any) -> Waiting | None:
        """Forget a call; say why it waited, if it did because of a doubt."""
        refusal = self._calls.pop(held, None)
        if refusal is None:
            return None
        other = refusal.fields.get("other", "another member")
        return Waiting(f"{other} is in the way; it, or another member here, has lost its connection and may be dead")
