"""WorkQueue: items that are delivered again until a taker acknowledges them.

On our server it leaves nothing behind once all items are done. On any other store the whole queue is one value,
`work_queue:NAME`, which every call reads and rewrites: good for hundreds of small items, not for many thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machines.machine import MAX_NAME, Command, Undo
from rallypoint.core.machines.work_commands import MAX_DELIVERIES
from rallypoint.core.machines.work_queue import (
    MAX_BATCH,
    WorkAbandon,
    WorkDead,
    WorkDone,
    WorkJoin,
    WorkPut,
    WorkQuery,
    WorkRelease,
    WorkRemoveDead,
    WorkTake,
    WorkWithdraw,
)
from rallypoint.deadline import Timeout
from rallypoint.errors import ItemLost, LimitExceeded, MembersMissing, RallypointError, SessionLost, StoreTimeout
from rallypoint.recipes.arguments import name_of
from rallypoint.recipes.hosting.shared_object import Progress, Recipe, SharedObject

__all__ = [
    "DEFAULT_DELIVERIES",
    "DeadLetter",
    "ItemHolder",
    "WorkItem",
    "WorkQueue",
    "WorkQueueStatus",
    "batches_of",
    "status_of",
]

DEFAULT_DELIVERIES = 5
"""How often an item is delivered before it becomes a dead letter, unless `put` says otherwise."""

BATCH_BYTES = 512 * 1024
"""The size at which `put_many` begins another request."""


class ItemHolder(NamedTuple):
    """A taker that has an item: its name and location, the item's id, and how often that was delivered."""

    holder: str
    item: str
    deliveries: int


class WorkQueueStatus(NamedTuple):
    """The number of items in each state, and of waiting takers; the first hundred holders."""

    ready: int
    taken: int
    dead: int
    done: int
    """Acknowledged so far. A queue that has had no items for a while is forgotten, and counts from 0 again."""

    waiting: int
    holders: tuple[ItemHolder, ...]


class DeadLetter(NamedTuple):
    """An item that was delivered as often as allowed; `why` says how its last delivery ended."""

    id: str
    data: bytes
    deliveries: int
    why: str
    position: int


class WorkItem:
    """An item that this process has taken; a context manager, at whose end it is done, or given back if it failed."""

    def __init__(self, queue: SharedObject, member: str, call: int, answer: list[Any]) -> None:
        self.id: str
        self.deliveries: int
        """How often it was delivered, this time included."""

        self.data: bytes
        self.id, self.deliveries, self.data = answer
        self._queue = queue
        self._member = member
        self._call = call
        self._settled = False

    def __repr__(self) -> str:
        return f"<item {self.id} of {self._queue.title}, {len(self.data)} bytes, delivery {self.deliveries}>"

    def done(self) -> None:
        """Acknowledge the item: it leaves the queue for good.

        Raises ItemLost if it is no longer this process's, because its session had ended.
        """
        self._settle(WorkDone(self._call, self.id))

    def release(self, why: str = "") -> bool:
        """Give the item back to the end of the queue; return whether it became a dead letter, for which `why` is kept.

        Raises ItemLost if it is no longer this process's.
        """
        if not isinstance(why, str):
            raise TypeError(f"why must be a string, not {why!r}")
        return bool(self._settle(WorkRelease(self._call, self.id, why[:MAX_NAME])))

    def __enter__(self) -> WorkItem:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Acknowledge the item, or give it back if the block raised; no effect if the block did either."""
        if self._settled:
            return
        if kind is None:
            self.done()
            return
        try:
            self.release(f"{kind.__name__}: {error}")
        except RallypointError:
            pass  # the error of the block is the one to report

    def _settle(self, command: WorkDone | WorkRelease) -> Any:
        if self._settled:
            raise RuntimeError(f"{self!r} was already acknowledged or given back")
        try:
            answer = self._send(command)
        except ItemLost:
            self._settled = True
            raise
        self._settled = True
        return answer

    def _send(self, command: WorkDone | WorkRelease) -> Any:
        queue = self._queue
        try:
            return queue.act(self._member, queue.next_call(), command, 0.0)[0]
        except SessionLost:  # where the members host the queue, a new session can say who has it now
            try:
                return queue.act(self._member, queue.next_call(), command, 0.0)[0]
            except SessionLost as error:
                thing = f"{queue.title} in {queue.label}"
                raise ItemLost(thing=thing, item=self.id, why=error.why) from error


class WorkQueue(Recipe):
    """A queue of work shared by the processes of a job: an item is delivered until it is done, or too often.

    An item goes to one taker at a time. If the session of the taker ends before `done()` (the process dies, closes its
    store, or is cut off for longer than the grace period), another gets it. `member` names this process in the status.
    """

    def __init__(self, store: Any, name: str, member: int | str = "worker", progress: Progress | None = None) -> None:
        self._object = SharedObject("work queue", store, name)
        self._member = name_of(member)
        self._progress = progress

    def put(self, data: str | bytes, max_deliveries: int = DEFAULT_DELIVERIES) -> str:
        """Add an item, and return its id; after `max_deliveries` without `done()` it becomes a dead letter."""
        return self.put_many([data], max_deliveries)[0]

    def put_many(self, items: Iterable[str | bytes], max_deliveries: int = DEFAULT_DELIVERIES) -> list[str]:
        """Add items in order, and return their ids. Items are sent in batches; each batch is added as a whole."""
        ids: list[str] = []
        for batch in batches_of(self._object.name, items, max_deliveries):
            ids += self._ask(WorkPut(batch, max_deliveries))
        return ids

    def take(self, timeout: Timeout | None = None) -> WorkItem:
        """Take the first item, waiting in line for one; at the timeout, raise StoreTimeout, which names the holders."""
        call, answer = self._wait("take", WorkTake(), timeout, WorkAbandon)
        return WorkItem(self._object, self._member, call, answer)

    def try_take(self) -> WorkItem | None:
        """Take the first item, or return None if there is none."""
        call = self._object.next_call()
        answer: Any = self._object.act(self._member, call, WorkTake(wait=False), 0.0)[0]
        return None if answer is None else WorkItem(self._object, self._member, call, answer)

    def join(self, timeout: Timeout | None = None) -> None:
        """Return when no item is ready or taken: all are done, or dead letters. Raises StoreTimeout at the timeout."""
        self._wait("join", WorkJoin(), timeout)

    def status(self) -> WorkQueueStatus:
        """Return how many items are in each state, and who has them."""
        return status_of(self._ask(WorkQuery()))

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Yield the items that were delivered too often, oldest first; those that die meanwhile are left out."""
        at, end, rows = self._ask(WorkDead())
        while True:
            for position, item, deliveries, why, data in rows:
                if position <= end:
                    yield DeadLetter(item, data, deliveries, why, position)
            if at >= end:
                return
            at, _, rows = self._ask(WorkDead(at))

    def requeue(self, letters: Iterable[DeadLetter] | None = None) -> int:
        """Put dead letters back into the queue, by default all; return how many. Their deliveries count from 0."""
        return self._remove_dead(letters, requeue=True)

    def discard(self, letters: Iterable[DeadLetter] | None = None) -> int:
        """Delete dead letters, by default all; return how many."""
        return self._remove_dead(letters, requeue=False)

    def _remove_dead(self, letters: Iterable[DeadLetter] | None, requeue: bool) -> int:
        positions = [letter.position for letter in (self.dead_letters() if letters is None else letters)]
        batches = (positions[at : at + MAX_BATCH] for at in range(0, len(positions), MAX_BATCH))
        return sum(self._ask(WorkRemoveDead(batch, requeue)) for batch in batches)

    def _ask(self, command: Command) -> Any:
        return self._object.act(self._member, self._object.next_call(), command, 0.0)[0]

    def _wait(
        self, verb: str, command: Command, timeout: Timeout | None, abandon: type[Undo] | None = None
    ) -> tuple[int, Any]:
        deadline = self._object.deadline(timeout)
        try:
            return self._object.perform(self._member, command, WorkWithdraw, deadline, self._progress, abandon=abandon)
        except MembersMissing as error:
            self._timed_out(verb, error)

    def _timed_out(self, verb: str, error: MembersMissing) -> NoReturn:
        name = (self._object.name,)
        what = f"{self._object.title}: {error.reason},"
        raise StoreTimeout(
            operation=verb, keys=name, missing=name, timeout_s=error.timeout_s, store=self._object.label, what=what
        ) from None


def status_of(answer: Mapping[str, Any]) -> WorkQueueStatus:
    """Return the status that a `WorkQuery` was answered with."""
    return WorkQueueStatus(**{**answer, "holders": tuple(ItemHolder(*holder) for holder in answer["holders"])})


def batches_of(queue: str, items: Iterable[str | bytes], max_deliveries: int) -> Iterator[list[bytes]]:
    """Yield items in batches that fit into a request; raise TypeError, ValueError or LimitExceeded."""
    if isinstance(items, (str, bytes, bytearray, memoryview)):
        raise TypeError("put_many takes a list of items; for a single one, use put")
    if isinstance(max_deliveries, bool) or not isinstance(max_deliveries, int):
        raise TypeError(f"max_deliveries must be a whole number, not {max_deliveries!r}")
    if not 1 <= max_deliveries <= MAX_DELIVERIES:
        raise ValueError(f"max_deliveries must be 1 to {MAX_DELIVERIES:,}, not {max_deliveries:,}")
    batch: list[bytes] = []
    size = 0
    for item in items:
        data = _data_of(queue, item)
        if batch and (len(batch) >= MAX_BATCH or size + len(data) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(data)
        size += len(data)
    if batch:
        yield batch


def _data_of(queue: str, item: object) -> bytes:
    if isinstance(item, str):
        item = item.encode()
    if not isinstance(item, (bytes, bytearray, memoryview)):
        raise TypeError(f"an item must be a string or bytes, not {item!r}")
    data = bytes(item)
    if len(data) > MAX_VALUE_BYTES:
        raise LimitExceeded(what="an item of work queue", key=queue, size=len(data), limit=MAX_VALUE_BYTES)
    return data
