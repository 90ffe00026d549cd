"""Doors: ports of one gateway behind which there is a store of its own, for one round of one run.

PyTorch's workers use their store without a prefix, and cannot be told one: the workers of another job, or of the round
before, would find each other's keys. So every round of a run gets a door. Opening the door of a later round closes that
of the one before: whoever is still behind it is hung up on, and what was stored there is gone. A run's last door is
closed by whoever leaves it last; where all have died, it stays until the server has need of another.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint import net
from rallypoint.server.round_errors import TooLate, TooMany

if TYPE_CHECKING:
    from rallypoint.server.gateway import Gateway

__all__ = ["Doors"]

MAX_DOORS = 1024


class _Door(NamedTuple):
    """One door."""

    scope: int
    number: int | None
    """The number of the round, as agents tell it to people; None where nobody said."""

    port: int
    listening: int
    """How many sockets it listens on."""

    house: Gateway
    opening: asyncio.Task[None]


class Doors:
    """The doors of one server, by the name of a run."""

    def __init__(self, house: Gateway) -> None:
        self._house = house
        self._doors: dict[str, _Door] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """How many are connected behind all doors."""
        return sum(door.house.connections for door in self._doors.values())

    def open(self, name: str, scope: int, number: int | None = None) -> int:
        """Open the door of a round, whose number is for people, and return its port; it may be open already.

        Raises TooLate, TooMany, and AddressTaken where no port can be had.
        """
        door = self._doors.get(name)
        if door is not None and door.scope > scope:
            raise TooLate(f"a later round of {name!r} has begun, and this one is over")
        if door is not None and door.scope == scope:
            return door.port
        if door is None and len(self._doors) >= MAX_DOORS:
            self._close_an_empty_one()
        hosts = [sock.getsockname()[0] for sock in self._house.sockets]
        sockets = net.listen(hosts, 0)
        self.close(name)
        behind = self._house.behind(name, scope)
        opening = asyncio.get_running_loop().create_task(behind.open(sockets))
        port = int(sockets[0].getsockname()[1])
        self._doors[name] = _Door(scope, number, port, len(sockets), behind, opening)
        self._house.crowd += len(sockets)  # descriptors, too
        return port

    def close(self, name: str, scope: int | None = None) -> bool:
        """Close the door of a run, unless it is that of a round later than `scope`; say whether it was closed."""
        door = self._doors.get(name)
        if door is None or (scope is not None and door.scope > scope):
            return False
        del self._doors[name]
        self._house.crowd -= door.listening
        task = asyncio.get_running_loop().create_task(_close(door))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return True

    async def close_all(self) -> None:
        """Close all doors."""
        for name in list(self._doors):
            self.close(name)
        await asyncio.gather(*self._closing)

    def statistics(self) -> dict[str, Any]:
        """Say what is behind each door."""
        return {
            name: {
                "round": door.number,
                "scope": door.scope,
                "port": door.port,
                "connections": door.house.connections,
                **{name: count for name, count in door.house.holdings().items() if name == "keys"},
            }
            for name, door in self._doors.items()
        }

    def _close_an_empty_one(self) -> None:
        """Make room: close the oldest door that nobody is behind."""
        empty = (name for name, door in self._doors.items() if not door.house.connections)
        name = next(empty, None)
        if name is None:
            raise TooMany(f"there are {MAX_DOORS} doors, somebody is behind each, and no more are allowed")
        self.close(name)


async def _close(door: _Door) -> None:
    with contextlib.suppress(OSError):
        await door.opening
    await door.house.close()
