"""The record of a call on a shared object.

There is one record of a call: its session has it among its waits, and `core/objects.py` for as long as the machine
keeps something of it.

Rejected: a wait in the engine, a note of what it waits for, and a count of its bytes, each in a table of its own. To
make and to drop them was half of what a call cost.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from rallypoint.core.machine import Call, Command
from rallypoint.core.records import Want

__all__ = ["CallWaiter", "Woken"]


class CallWaiter(Struct, eq=False):
    """A call on a shared object of which the object may keep something, and the request that waits for it.

    It is its owner's as other waits are, and `core/objects.py` has it. `waits` is False between two looks, when its
    caller has heard why it waits and has not asked again; `size` is what is counted for it.
    """

    owner: Any
    number: int
    call: Call
    command: Command
    name: bytes
    size: int
    waits: bool = True

    reads: ClassVar[bool] = False
    want: ClassVar[Want] = Want.CALL

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The name of the object, for people."""
        return (self.name,)


class Woken:
    """Calls on a shared object that are over, all with the same answer."""

    __slots__ = ("waiters",)

    def __init__(self, waiters: list[CallWaiter]) -> None:
        self.waiters = waiters
