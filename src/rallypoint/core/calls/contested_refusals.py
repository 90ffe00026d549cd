"""Refusals that may be wrong because the member they protect may be dead: such calls wait instead.

A process that is killed and restarted at once finds its old session in its grace period: its name in a group is taken,
or its settings differ from those of the dead process. Only the end of the grace period tells whether the old process
comes back. So a call that would be refused because of another member waits while any session in that object is without
a connection, and is then decided again. A call with timeout 0 is refused at once.

Rejected: leaving the retry to the refused caller. It cannot know how long retrying is worthwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rallypoint.core.machines.machine import Machine, Outcome, Refused, Waiting

__all__ = ["CONTESTABLE", "ContestedRefusals"]

CONTESTABLE = frozenset(("Disagreement", "NameTaken", "RankTaken"))
"""The errors that refuse a call because of another member."""


class ContestedRefusals:
    """The sessions that have lost their connection, and the calls that wait for them to end or return."""

    def __init__(self) -> None:
        self._detached: dict[str, None] = {}
        self._calls: dict[Any, Refused] = {}

    def __bool__(self) -> bool:
        """Return whether any call is contested."""
        return bool(self._calls)

    def __iter__(self) -> Iterator[Any]:
        """Return the contested calls, in order of arrival."""
        return iter(list(self._calls))

    def session_detached(self, session: str) -> None:
        """Record that a session has lost its connection."""
        self._detached[session] = None

    def session_settled(self, session: str) -> None:
        """Record that a session has reconnected or ended."""
        self._detached.pop(session, None)

    def contests(self, held: Any, outcome: Outcome, machine: Machine) -> bool:
        """Return whether a call must wait because its refusal is contested; if so, remember it."""
        self._calls.pop(held, None)
        if not self._detached or not isinstance(outcome, Refused) or outcome.error not in CONTESTABLE:
            return False
        if machine.sessions().isdisjoint(self._detached):
            return False
        self._calls[held] = outcome
        return True

    def resolve(self, held: Any) -> Waiting | None:
        """Forget a call; return why it waited if its refusal was contested."""
        refusal = self._calls.pop(held, None)
        if refusal is None:
            return None
        other = refusal.fields.get("other", "another member")
        return Waiting(f"blocked by {other}: it, or another member, has lost its connection and may be dead")
