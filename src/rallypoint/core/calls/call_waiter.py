"""The record of a call on a shared object, and what it costs.

A call has one record: its session lists it among its waits, and `core/objects.py` holds it for as long as the machine
keeps any data of the call.

Rejected: an engine wait, a note of what it waits for and a byte count, each in a table of its own. Creating and
dropping them was half the cost of a call.
"""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct

from rallypoint.core.costs import CALL_BYTES, OBJECT_BYTES
from rallypoint.core.machines.machine import Call, Command
from rallypoint.core.records import WaitKind

__all__ = ["CallWaiter", "Woken", "call_bytes", "object_bytes"]


class CallWaiter(Struct, eq=False):
    """A call on a shared object, which may keep data of the call, and the request that waits for it.

    Its owner lists it like other waits, and `core/objects.py` holds it. `waits` is False between two polls, when the
    caller has received the reason why it waits and has not polled again; `size` is the number of bytes charged for it.
    """

    owner: Any
    number: int
    call: Call
    command: Command
    name: bytes
    size: int
    waits: bool = True

    reads: ClassVar[bool] = False
    want: ClassVar[WaitKind] = WaitKind.CALL

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The name of the object, for diagnostics."""
        return (self.name,)


class Woken:
    """Calls on a shared object that are over, all with the same answer."""

    __slots__ = ("waiters",)

    def __init__(self, waiters: list[CallWaiter]) -> None:
        self.waiters = waiters


def call_bytes(name: bytes, member: str, command: Command) -> int:
    """Return the cost of a call in bytes: its wait, and the data that the machine keeps for it."""
    return 2 * len(name) + CALL_BYTES + len(member) + command.weight


def object_bytes(name: bytes) -> int:
    """Return the cost of a machine in bytes, besides that of its calls."""
    return OBJECT_BYTES + 2 * len(name)
