"""Who of those that are here waits for which key of a store in etcd, and whose turn it is to pop an item.

PyTorch's clients pop in two steps: they wait for the queue, then pop. Of many that wait here, one is told for each
item, in the order in which they came, and nobody else is told of that item until it has popped, moved on, ended, or sat
still for two sweeps. Poppers at other gateways are not seen from here: one of them may be faster, and then a client
finds the queue empty, as it may with PyTorch's own server. No item is lost or taken twice by that.

Rejected: to take the item for whoever waits first, and hand it over when it pops. It is lost if the gateway dies then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import TYPE_CHECKING

from rallypoint.core.records import Turn
from rallypoint.deadline import Deadline

if TYPE_CHECKING:
    from rallypoint.etcd.space import Space

__all__ = ["Lines"]

FOREVER = float("inf")


class _Line:
    """Those who wait for one key, the first first, and the turns that were given."""

    def __init__(self) -> None:
        self.tickets: dict[object, None] = {}
        self.turns: dict[Turn, None] = {}
        self.bell = asyncio.Event()

    def ring(self) -> None:
        """Let all look again."""
        self.bell.set()
        self.bell = asyncio.Event()


class Lines:
    """All lines of one gateway."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._lines: dict[bytes, _Line] = {}

    async def wait_turn(self, key: bytes, owner: Hashable) -> Turn | None:
        """Wait until a key exists (None), or in line for the right to pop an item of that queue (a `Turn`)."""
        line = self._lines.setdefault(key, _Line())
        ticket = object()
        line.tickets[ticket] = None
        try:
            while True:
                bell = line.bell
                present, length = await asyncio.gather(self._space.check((key,)), self._space.queue_len(key))
                if present and not length:
                    return None
                if not length:
                    await self._space.wait((key,), Deadline(FOREVER))
                elif length > len(line.turns) + list(line.tickets).index(ticket):
                    turn = Turn(key, owner, 0)
                    line.turns[turn] = None
                    return turn
                else:
                    await bell.wait()
        finally:
            del line.tickets[ticket]
            self._changed(key, line)

    def end(self, turn: Turn) -> None:
        """Take a turn back: it was used, or is not wanted."""
        line = self._lines.get(turn.key)
        if line is not None and line.turns.pop(turn, turn) is None:
            self._changed(turn.key, line)

    def sweep(self) -> None:
        """Take back the turns that were already there at the last sweep."""
        for turn in [turn for line in self._lines.values() for turn in line.turns]:
            if turn.aged:
                self.end(turn)
            turn.aged = True

    def _changed(self, key: bytes, line: _Line) -> None:
        line.ring()
        if not line.tickets and not line.turns and self._lines.get(key) is line:
            del self._lines[key]
