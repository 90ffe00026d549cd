"""The part of the status model (`model.py`) for shared objects: barriers, exchanges, locks, groups, work queues."""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "GroupStatus",
    "HeldItemStatus",
    "LockStatus",
    "MeetingStatus",
    "QueuedStatus",
    "WorkStatus",
]


class MeetingStatus(Struct, kw_only=True):
    """A barrier or an exchange that members wait at."""

    kind: str
    name: str
    run: str = ""
    """The run in whose round it is; empty if it is in the store that all clients see."""

    size: int
    arrived: int
    missing: list[str]
    more_missing: int = 0
    withdrawn: list[str] = []
    """Members that arrived and gave up."""

    waited_s: float
    """How long the first member has waited."""

    last_arrival_s: float
    """Time since the last member arrived."""

    reason: str = ""


class QueuedStatus(Struct, kw_only=True):
    """One process in the line for a lock."""

    name: str
    waited_s: float


class LockStatus(Struct, kw_only=True):
    """A lock, its holder, and the line."""

    name: str
    run: str = ""
    holder: str
    held_s: float
    fence: int
    queue: list[QueuedStatus] = []
    more_queued: int = 0


class GroupStatus(Struct, kw_only=True):
    """A group and its members."""

    name: str
    run: str = ""
    size: int
    epoch: int
    members: list[str] = []
    more_members: int = 0


class HeldItemStatus(Struct, kw_only=True):
    """An item of a work queue, and who has it; `held_s` is up to 10 s too long if its taker had waited for it."""

    holder: str
    item: str
    held_s: float


class WorkStatus(Struct, kw_only=True):
    """A work queue that has items, or takers that wait; `held` lists the items that were taken first."""

    name: str
    run: str = ""
    ready: int
    taken: int
    dead: int
    done: int
    waiting: int
    held: list[HeldItemStatus] = []
