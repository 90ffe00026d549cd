"""The commands of a work queue (`core/machines/work_queue.py`), and the records of its items.

Items belong to no call, so a put asks for room by its weight, and `Step.grown` charges for them. A put must also leave
some room, so that a store that is full of items has room for the calls that take them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from rallypoint.core.costs import WORK_ITEM_BYTES
from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machines.machine import Call, Command, Done, Name, Undo

__all__ = [
    "HEADROOM_BYTES",
    "MAX_BATCH",
    "MAX_DELIVERIES",
    "TakenRecord",
    "WorkAbandon",
    "WorkDead",
    "WorkDone",
    "WorkJoin",
    "WorkPut",
    "WorkQuery",
    "WorkRecord",
    "WorkRelease",
    "WorkRemoveDead",
    "WorkTake",
    "WorkWithdraw",
]

MAX_BATCH = 1000
"""The most items of one command."""

MAX_DELIVERIES = 1_000_000
"""The highest limit of deliveries."""

HEADROOM_BYTES = 256 * 1024
"""Room that a put must leave for takes."""


class WorkPut(Command, tag="work.put"):
    """Add items, each with that limit of deliveries; answered by their ids."""

    items: Annotated[list[Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]], Meta(min_length=1, max_length=MAX_BATCH)]
    limit: Annotated[int, Meta(ge=1, le=MAX_DELIVERIES)]

    @property
    def weight(self) -> int:
        """The bytes of its items, and the room that must be left."""
        return HEADROOM_BYTES + WORK_ITEM_BYTES * len(self.items) + sum(map(len, self.items))


class WorkWithdraw(Undo, tag="work.withdraw"):
    """Stop waiting for an item, or for the queue to be done; an item that was taken stays so."""


class WorkAbandon(Undo, tag="work.abandon"):
    """Stop waiting for an item; one that was taken returns to the front, and does not count as delivered."""


class WorkTake(Command, tag="work.take"):
    """Take the first item; answered by `[id, deliveries, data]`, or by nil if there is none and `wait` is not set."""

    suspended_by = WorkWithdraw

    wait: bool = True


class WorkDone(Undo, tag="work.done"):
    """Acknowledge the item of a take."""

    item: Name


class WorkRelease(Undo, tag="work.release"):
    """Give the item of a take back, and say why; answered by whether it is a dead letter now."""

    item: Name
    why: Name = ""


class WorkJoin(Command, tag="work.join"):
    """Wait until no item is ready or taken."""


class WorkQuery(Command, tag="work.look"):
    """Answered by the counts, and the first holders."""


class WorkDead(Command, tag="work.dead"):
    """Answered by `[last position looked at, end, dead letters]`, of the positions after the given one."""

    after: Annotated[int, Meta(ge=0)] = 0


class WorkRemoveDead(Command, tag="work.revive"):
    """Discard dead letters, given by their positions, or put them back into the queue; answered by how many."""

    positions: Annotated[list[int], Meta(min_length=1, max_length=MAX_BATCH)]
    requeue: bool


class WorkRecord(Struct, array_like=True):
    """One item."""

    id: str
    data: bytes
    limit: int
    deliveries: int = 0
    why: str = ""
    """How its last delivery ended."""

    @property
    def cost(self) -> int:
        """The bytes charged for it."""
        return WORK_ITEM_BYTES + len(self.data) + len(self.why)


class TakenRecord(Struct, frozen=True, array_like=True):
    """An item and the call that holds it."""

    item: WorkRecord
    call: Call

    @property
    def outcome(self) -> Done:
        return Done([self.item.id, self.item.deliveries, self.item.data])
