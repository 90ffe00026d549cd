"""The memory of a server's state: one count and one limit for all namespaces, sessions and shared objects.

Rules
- `size` counts everything that entries made the state hold, except kept answers. It decides whether a change is refused
  (StoreFull), so it depends on the entries alone. `core/costs.py` has the cost of each thing besides its own bytes.
- `kept` counts answers and pushes until clients confirm them. They cannot be refused, because the change has happened:
  over `reserve`, the sessions that keep the most are evicted.
- `parked` counts waiting reads. The log does not contain them, so they must not decide about changes; they share the
  reserve with kept answers.
- All ranks of an exchange receive one copy, which all of their sessions keep: it is counted when the first session
  keeps it, until the last one releases it.

Rejected: a limit for each namespace. Twenty rounds held twenty times the limit.
Rejected: counting a shared answer once per session. A thousand ranks would be charged a thousand times for the same
bytes.
"""

from __future__ import annotations

from typing import Any

from rallypoint.core.machines.machine import Done
from rallypoint.core.records import SharedAnswer

__all__ = ["UNLIMITED", "MemoryBudget"]

UNLIMITED = (1 << 63) - 1
"""The limit where there is none."""


class MemoryBudget:
    """The bytes that a state holds, and their limits."""

    __slots__ = ("answer_limit", "kept", "limit", "parked", "reserve", "size")

    def __init__(self) -> None:
        self.limit = UNLIMITED
        """Of `size`."""

        self.reserve = UNLIMITED
        """Of `kept` and `parked`, however full the store is."""

        self.answer_limit = UNLIMITED
        """Of a single answer, and of a value that `Append` grows."""

        self.size = self.kept = self.parked = 0

    @property
    def total(self) -> int:
        """All bytes held."""
        return self.size + self.kept + self.parked

    def hold(self, answer: Any, size: int) -> None:
        """Count a kept answer. A shared answer is counted when the first session keeps it."""
        shared = _shared_in(answer)
        if shared is not None:
            shared.holders += 1
        self.kept += size if shared is None or shared.holders == 1 else size - len(shared.data)

    def release(self, answer: Any, size: int) -> None:
        """Stop counting a kept answer."""
        shared = _shared_in(answer)
        if shared is not None:
            shared.holders -= 1
        self.kept -= size if shared is None or not shared.holders else size - len(shared.data)


def _shared_in(answer: Any) -> SharedAnswer | None:
    if answer.__class__ is Done and answer.answer.__class__ is SharedAnswer:
        shared: SharedAnswer = answer.answer
        return shared
    return None
