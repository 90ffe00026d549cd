"""Late calls: calls on shared objects whose wait ended between two polls.

Their result stays until they poll: the machine is not dropped even if idle, and the round stays charged to the engine's
size, as it was during the wait. Both end when the last late call has polled, or its session has ended.

Rejected: keeping an answer for each late call. All ranks of an exchange get the same bytes, which the machine holds
once.
"""

from __future__ import annotations

from rallypoint.core.costs import LATE_BYTES
from rallypoint.core.engine import Engine
from rallypoint.core.machines.machine import Machine

__all__ = ["CallKey", "LateCount", "LateCalls", "ObjectKey"]

ObjectKey = tuple[type[Machine], bytes]
"""The key of a machine: its class and its name."""

CallKey = tuple[ObjectKey, str]
"""The key of a call whose data a machine may keep: the machine's key, and the call's id."""


class LateCount:
    """The late calls of one object, and the bytes charged for them."""

    __slots__ = ("calls", "round", "size")

    def __init__(self) -> None:
        self.calls: dict[str, None] = {}
        self.round = 0
        """The bytes kept for the largest of the rounds that have ended since the first late call."""

        self.size = 0


class LateCalls(dict[ObjectKey, LateCount]):
    """The late calls of one namespace, by object; a dict, because every call first checks whether it is empty."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self.by_session: dict[str, dict[CallKey, None]] = {}
        """The same calls, by session."""

    def add(self, held: CallKey, session: str) -> None:
        """Record that a call, which is not waiting now, has yet to poll for its result."""
        self.setdefault(held[0], LateCount()).calls[held[1]] = None
        self.by_session.setdefault(session, {})[held] = None

    def looked(self, held: CallKey) -> None:
        """Record that a call has polled; no effect if it was not late."""
        place, call_id = held
        late = self.get(place)
        if late is None or call_id not in late.calls:
            return
        del late.calls[call_id]
        session = call_id.rpartition("/")[0]
        del self.by_session[session][held]
        if not self.by_session[session]:
            del self.by_session[session]
        if not late.calls:
            self._engine.charge_held(-late.size)
            del self[place]

    def count(self, place: ObjectKey, freed: int) -> None:
        """Keep charging an ended round for the calls that have yet to poll."""
        late = self[place]
        late.round = max(late.round, freed)
        size = late.round + len(late.calls) * (len(place[1]) + LATE_BYTES)
        self._engine.charge_held(size - late.size)
        late.size = size

    def restore(self, place: ObjectKey, round_bytes: int, size: int) -> None:
        """Restore the charge for late calls from a snapshot, whose size already includes it."""
        late = self[place] = LateCount()
        late.round, late.size = round_bytes, size
