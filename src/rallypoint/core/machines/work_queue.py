"""The work queue machine: items that are delivered until a taker acknowledges them, or too often.

An item is ready, taken or dead. `WorkTake` waits in line for the first ready item; its call holds the item until
`WorkDone` removes it, `WorkRelease` gives it back, or the session of the call ends. An item that comes back goes to the
end of the queue, so that one that fails, or kills its takers, does not keep the others waiting; after as many
deliveries as its putter allowed it becomes a dead letter. A take that is interrupted before its caller has the item
(`WorkAbandon`) is no delivery: the item returns to the front.

The id of an item is unique for ever: the stamp of the queue's first item, and a count. A queue without items remembers
how many were done, for a while. `ready` and `dead` are dicts by position; positions only grow at one end, so that the
first item is found by its position: a dict finds its first key only after all deleted ones.

A step costs what it moves, whatever the length of the queue.

Rejected: a time after which a taken item goes back. A long task would have to renew it; a session does that already.
Rejected: giving a lost item to the next taker at once. An item that kills its takers would kill them in a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from msgspec import field

from rallypoint.core.machines.machine import (
    SHOWN,
    WAIT,
    WAITS_STEP,
    Call,
    Done,
    Machine,
    Refused,
    Step,
    Undo,
    Waiting,
    list_names,
)
from rallypoint.core.machines.work_commands import (
    MAX_BATCH,
    TakenRecord,
    WorkAbandon,
    WorkDead,
    WorkDone,
    WorkJoin,
    WorkPut,
    WorkQuery,
    WorkRecord,
    WorkRelease,
    WorkRemoveDead,
    WorkTake,
    WorkWithdraw,
)

__all__ = [
    "MAX_BATCH",
    "PAGE_BYTES",
    "WorkAbandon",
    "WorkDead",
    "WorkDone",
    "WorkJoin",
    "WorkPut",
    "WorkQuery",
    "WorkQueueMachine",
    "WorkRelease",
    "WorkRemoveDead",
    "WorkTake",
    "WorkWithdraw",
]

PAGE_BYTES = 1024 * 1024
"""The size at which a page of dead letters ends."""

REMEMBERED_BYTES = 200
"""The cost of a queue without items."""


class WorkQueueMachine(Machine, kw_only=True):
    """The items, their holders, and the calls that wait."""

    kind = "work_queue"
    rejoins = True
    sections = ("ready", "taken", "dead")

    born: int = 0
    """The stamp of the first put."""

    made: int = 0
    done: int = 0
    head: int = 0
    """The position of the first ready item."""

    ready: dict[int, WorkRecord] = field(default_factory=dict)
    taken: dict[str, TakenRecord] = field(default_factory=dict)
    """By the id of the call that holds it."""

    dead: dict[int, WorkRecord] = field(default_factory=dict)
    last_dead: int = 0
    """The position of the last dead letter."""

    waiting: dict[str, Call] = field(default_factory=dict)
    joining: dict[str, Call] = field(default_factory=dict)

    def apply(self, call: Call, command: Any, stamp: int) -> Step:
        """Put, take, acknowledge, give back, wait, or query."""
        if isinstance(command, WorkTake):
            return self._take(call, command)
        if isinstance(command, (WorkDone, WorkRelease)):
            return self._settle(call, command)
        if isinstance(command, WorkPut):
            return self._put(command, stamp)
        if isinstance(command, WorkJoin):
            return self._join(call)
        if isinstance(command, Undo):
            return self._withdraw(f"{call.session}/{command.call}", isinstance(command, WorkAbandon))
        if isinstance(command, WorkQuery):
            return Step(Done(self._status()))
        return self._page(command.after) if isinstance(command, WorkDead) else self._remove_dead(command)

    def session_ended(self, session: str, stamp: int) -> Step:
        """Drop a session's waits; the items that it holds go back."""
        for line in self.waiting, self.joining:
            for call_id in [call_id for call_id, call in line.items() if call.session == session]:
                del line[call_id]
        held = [call_id for call_id, taken in self.taken.items() if taken.call.session == session]
        grown = sum(self._give_back(call_id, "the session of its taker ended") for call_id in held)
        return Step(Done(), True, self._hand_out(), grown=grown)

    def holds(self, call_id: str) -> bool:
        """Return whether a call waits, or has an item."""
        return call_id in self.taken or call_id in self.waiting or call_id in self.joining

    def sessions(self) -> set[str]:
        """Return the sessions of holders and of waiting calls."""
        waiting = {call.session for line in (self.waiting, self.joining) for call in line.values()}
        return waiting | {taken.call.session for taken in self.taken.values()}

    def explain(self, call: Call) -> Waiting:
        """Count the items, and name the holders."""
        holders = [str(taken.call) for taken in islice(self.taken.values(), SHOWN + 1)]
        held = f", held by {list_names(holders)}" if holders else ""
        dead = f", {len(self.dead)} dead letters" if self.dead else ""
        return Waiting(f"{len(self.ready)} items are ready, {len(self.taken)} taken{held}{dead}")

    @property
    def idle(self) -> bool:
        """Whether there are no items, and nobody waits."""
        return not (self.ready or self.taken or self.dead or self.waiting or self.joining)

    @property
    def persists_idle(self) -> bool:
        """Whether there were items."""
        return self.made > 0

    def trim(self, most: int) -> int:
        """Return the size of the counts; there is nothing to discard."""
        return REMEMBERED_BYTES

    def _put(self, command: WorkPut, stamp: int) -> Step:
        self.born = self.born or stamp
        first = self.head + len(self.ready)
        items = [
            WorkRecord(f"{self.born}-{number}", data, command.limit)
            for number, data in enumerate(command.items, self.made + 1)
        ]
        self.made += len(items)
        self.ready.update(zip(range(first, first + len(items)), items, strict=True))
        return Step(Done([item.id for item in items]), True, self._hand_out(), grown=_cost(items))

    def _take(self, call: Call, command: WorkTake) -> Step:
        taken = self.taken.get(call.id)
        if taken is not None:
            return Step(taken.outcome)
        if call.id in self.waiting:
            return Step(WAIT)
        if self.ready:
            return Step(self._deliver(call).outcome, True)
        if not command.wait:
            return Step(Done())
        self.waiting[call.id] = call
        return WAITS_STEP

    def _deliver(self, call: Call) -> TakenRecord:
        """Give the first item to a call."""
        item = self.ready.pop(self.head)
        self.head += 1
        item.deliveries += 1
        taken = self.taken[call.id] = TakenRecord(item, call)
        return taken

    def _hand_out(self) -> list[Call]:
        """Give ready items to waiting calls; return the calls whose wait is over, those for the end among them."""
        woken = list(islice(self.waiting.values(), len(self.ready)))
        for call in woken:
            del self.waiting[call.id]
            self._deliver(call)
        if self.joining and not self.ready and not self.taken:
            woken += self.joining.values()
            self.joining = {}
        return woken

    def _settle(self, call: Call, command: WorkDone | WorkRelease) -> Step:
        """Acknowledge an item, or give it back; a process may also do so for a session that it has lost."""
        for session in (call.session, *call.former):
            call_id = f"{session}/{command.call}"
            taken = self.taken.get(call_id)
            if taken is not None and taken.item.id == command.item:
                break
        else:
            return Step(self._lost(command.item))
        if isinstance(command, WorkDone):
            del self.taken[call_id]
            self.done += 1
            return Step(Done(), True, self._hand_out(), dropped=[taken.call], grown=-taken.item.cost)
        grown = self._give_back(call_id, command.why or "given back")
        dead = self.dead.get(self.last_dead) is taken.item
        return Step(Done(dead), True, self._hand_out(), dropped=[taken.call], grown=grown)

    def _lost(self, item: str) -> Refused:
        holder = next((str(taken.call) for taken in self.taken.values() if taken.item.id == item), "")
        return Refused("ItemLost", {"item": item, "holder": holder})

    def _give_back(self, call_id: str, why: str) -> int:
        """Put a taken item back, or among the dead letters; return by how many bytes it grew."""
        item, call = (taken := self.taken.pop(call_id)).item, taken.call
        before = item.cost
        item.why = f"{call}: {why}"
        if item.deliveries < item.limit:
            self.ready[self.head + len(self.ready)] = item
        else:
            self.last_dead += 1
            self.dead[self.last_dead] = item
        return item.cost - before

    def _withdraw(self, call_id: str, abandons: bool) -> Step:
        taken = self.taken.get(call_id)
        if taken is None:
            waited = self.waiting.pop(call_id, None) or self.joining.pop(call_id, None)
            return Step(Done(), waited is not None)
        if not abandons:
            return Step(Done([taken.outcome.answer]))
        del self.taken[call_id]
        taken.item.deliveries -= 1
        self.head -= 1
        self.ready[self.head] = taken.item
        return Step(Done(), True, self._hand_out())

    def _join(self, call: Call) -> Step:
        if not self.ready and not self.taken:
            return Step(Done())
        changed = call.id not in self.joining
        self.joining[call.id] = call
        return Step(WAIT, changed)

    def _status(self) -> dict[str, Any]:
        held = islice(self.taken.values(), SHOWN)
        holders = [[str(taken.call), taken.item.id, taken.item.deliveries] for taken in held]
        return {
            "ready": len(self.ready),
            "taken": len(self.taken),
            "dead": len(self.dead),
            "done": self.done,
            "waiting": len(self.waiting),
            "holders": holders,
        }

    def _page(self, after: int) -> Step:
        """Return the next dead letters, at most a page of them, after looking at a bounded number of positions."""
        rows: list[list[Any]] = []
        at, size = after, 0
        for at in range(after + 1, min(after + 10 * MAX_BATCH, self.last_dead) + 1):
            item = self.dead.get(at)
            if item is not None:
                rows.append([at, item.id, item.deliveries, item.why, item.data])
                size += item.cost
                if size >= PAGE_BYTES or len(rows) >= MAX_BATCH:
                    break
        return Step(Done([at, self.last_dead, rows]))

    def _remove_dead(self, command: WorkRemoveDead) -> Step:
        found = [self.dead.pop(at) for at in dict.fromkeys(command.positions) if at in self.dead]
        if not command.requeue:
            return Step(Done(len(found)), bool(found), grown=-_cost(found))
        before = _cost(found)
        for item in found:
            item.deliveries, item.why = 0, ""
            self.ready[self.head + len(self.ready)] = item
        return Step(Done(len(found)), bool(found), self._hand_out(), grown=_cost(found) - before)


def _cost(items: Iterable[WorkRecord]) -> int:
    return sum(item.cost for item in items)


for _command in (
    WorkPut, WorkTake, WorkWithdraw, WorkAbandon, WorkDone, WorkRelease, WorkJoin, WorkQuery, WorkDead, WorkRemoveDead
):  # fmt: skip
    _command.machine = WorkQueueMachine
