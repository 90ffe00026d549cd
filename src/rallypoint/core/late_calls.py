"""Calls on shared objects that were between two looks when their wait ended, and have yet to look how.

What they look at stays until they do: the machine is not dropped, however idle, and the round goes on being counted in
the engine's bytes as it was while it was waited for. Both end when the last such call has looked, or its session ends.

Rejected: to keep an answer for each late call instead. All ranks of an exchange get the same bytes, which the machine
has once.
"""

from __future__ import annotations

from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.machine import Machine

__all__ = ["Held", "Late", "LateCalls", "Place"]

Place = tuple[type[Machine], bytes]
"""Where a machine is: its kind, and its name."""

Held = tuple[Place, str]
"""A call that a machine may keep something of: where, and the call's id."""


class Late:
    """The late calls at one place, and what is counted for them."""

    __slots__ = ("calls", "round", "size")

    def __init__(self) -> None:
        self.calls: dict[str, None] = {}
        self.round = 0
        """What the largest round that ended since made the machine keep."""

        self.size = 0


class LateCalls(dict[Place, Late]):
    """The late calls of one namespace, by place; a dict, for every call asks first whether there are any."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self.by_session: dict[str, dict[Held, None]] = {}
        """The same calls, by session."""

    def add(self, held: Held, session: str) -> None:
        """Note that a call, which does not wait at this moment, has yet to look how its wait ended."""
        self.setdefault(held[0], Late()).calls[held[1]] = None
        self.by_session.setdefault(session, {})[held] = None

    def looked(self, held: Held) -> None:
        """Note that a call, if it was late, is so no more."""
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
            self._engine.size -= late.size
            del self[place]

    def count(self, place: Place, freed: int) -> None:
        """Go on counting a round, of which nothing waits any more, for those who have yet to look how it ended."""
        late = self[place]
        late.round = max(late.round, freed)
        size = late.round + len(late.calls) * (len(place[1]) + ENTRY_BYTES)
        self._engine.size += size - late.size  # it is here, so it is too late to refuse it
        late.size = size

    def restore(self, place: Place, round_bytes: int, size: int) -> None:
        """Put back, from a snapshot, what is counted for calls that have yet to look; it is counted already."""
        late = self[place] = Late()
        late.round, late.size = round_bytes, size
