"""How much the answers and pushes take that are kept until their clients confirm them, over all sessions of a server.

What the ranks of an exchange get is one copy, kept by all of their sessions: it is counted with the first that keeps
it, and until the last lets it go.

Rejected: to count it for each session. A thousand ranks would be charged a thousand times for the same bytes.
"""

from __future__ import annotations

from typing import Any

from rallypoint.core.machine import Done
from rallypoint.core.records import Shared

__all__ = ["ReplyBudget"]


class ReplyBudget:
    """What all sessions of a server make it keep, in bytes, and how much that may be: in one answer, and in all."""

    __slots__ = ("answer_limit", "kept", "limit")

    def __init__(self, answer_limit: int = 1 << 62, limit: int = 1 << 62) -> None:
        self.answer_limit = answer_limit
        self.limit = limit
        self.kept = 0

    def hold(self, answer: Any, size: int) -> None:
        """Count an answer that is kept. A shared one is counted when the first session keeps it."""
        shared = _shared_in(answer)
        if shared is not None:
            shared.holders += 1
        self.kept += size if shared is None or shared.holders == 1 else size - len(shared.data)

    def release(self, answer: Any, size: int) -> None:
        """Count an answer no more that was kept."""
        shared = _shared_in(answer)
        if shared is not None:
            shared.holders -= 1
        self.kept -= size if shared is None or not shared.holders else size - len(shared.data)


def _shared_in(answer: Any) -> Shared | None:
    if answer.__class__ is Done and answer.answer.__class__ is Shared:
        shared: Shared = answer.answer
        return shared
    return None
