"""AsyncWorkQueue: a work queue for asyncio, hosted by our server.

It is made by `AsyncStore.work_queue`, which passes it the way to make calls. A cancelled take leaves nothing behind: an
item that it got meanwhile returns to the front of the queue.

Rejected: one implementation for both clients, as a generator of calls. The waits are the only part with logic, and they
differ: a thread is interrupted, a task is cancelled.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from rallypoint.client.outage import WithoutQuorum
from rallypoint.core.machines.machine import MAX_NAME, Command, Disconnected, Done, Refused, Undo, Waiting
from rallypoint.core.machines.work_queue import (
    WorkAbandon,
    WorkDone,
    WorkJoin,
    WorkPut,
    WorkQuery,
    WorkRelease,
    WorkTake,
    WorkWithdraw,
)
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import ItemLost, MeetingError, NoQuorum, SessionLost, StoreTimeout
from rallypoint.recipes.arguments import name_of
from rallypoint.recipes.work_queue import DEFAULT_DELIVERIES, WorkQueueStatus, batches_of, status_of

__all__ = ["AsyncWorkItem", "AsyncWorkQueue", "ObjectCalls"]

PROGRESS_S = 10.0
"""How long a call waits before it is made again."""


class ObjectCalls(NamedTuple):
    """How to call a shared object of an asyncio store."""

    label: str
    timeout_s: float
    ask: Callable[[str, int, Command, float], Awaitable[Done | Refused | Waiting]]
    """Make a call of a member, with its number and the longest wait; return its outcome."""

    tell: Callable[[str, int, Command], None]
    """Make a call and ignore its outcome; never raises."""

    deadline: Callable[[Timeout], Deadline] = Deadline
    """How the deadline of a call is made."""


class AsyncWorkItem:
    """An item that this task has taken; an async context manager, as `WorkItem` is a context manager."""

    def __init__(self, queue: AsyncWorkQueue, call: int, answer: list[Any]) -> None:
        self.id: str = answer[0]
        self.deliveries: int = answer[1]
        """How often it was delivered, this time included."""

        self.data: bytes = answer[2]
        self._queue = queue
        self._call = call
        self._settled = False

    def __repr__(self) -> str:
        return f"<item {self.id} of {self._queue.title}, {len(self.data)} bytes, delivery {self.deliveries}>"

    async def done(self) -> None:
        """Acknowledge the item: it leaves the queue for good. Raises ItemLost if it is no longer this process's."""
        await self._settle(WorkDone(self._call, self.id))

    async def release(self, why: str = "") -> bool:
        """Give the item back to the end of the queue; return whether it became a dead letter."""
        return bool(await self._settle(WorkRelease(self._call, self.id, why[:MAX_NAME])))

    async def __aenter__(self) -> AsyncWorkItem:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Acknowledge the item, or give it back if the block raised; no effect if the block did either."""
        if self._settled:
            return
        if kind is None:
            await self.done()
            return
        self._settled = True  # without waiting: the task may be cancelled
        self._queue.tell(WorkRelease(self._call, self.id, f"{kind.__name__}: {error}"[:MAX_NAME]))

    async def _settle(self, command: WorkDone | WorkRelease) -> Any:
        if self._settled:
            raise RuntimeError(f"{self!r} was already acknowledged or given back")
        try:
            answer = await self._queue.ask(command)
        except SessionLost as error:
            self._settled = True
            raise ItemLost(thing=self._queue.thing, item=self.id, why=error.why) from error
        except ItemLost:
            self._settled = True
            raise
        self._settled = True
        return answer


class AsyncWorkQueue:
    """A queue of work shared by the processes of a job; names and semantics are those of `WorkQueue`."""

    _numbers = itertools.count(1)

    def __init__(self, calls: ObjectCalls, name: str, member: int | str) -> None:
        self.title = f"work queue {name!r}"
        self.thing = f"{self.title} in {calls.label}"
        self._calls = calls
        self._name = name
        self._member = name_of(member)

    def __repr__(self) -> str:
        return f"<{self.thing}>"

    async def put(self, data: str | bytes, max_deliveries: int = DEFAULT_DELIVERIES) -> str:
        """Add an item, and return its id; after `max_deliveries` without `done()` it becomes a dead letter."""
        return (await self.put_many([data], max_deliveries))[0]

    async def put_many(self, items: Iterable[str | bytes], max_deliveries: int = DEFAULT_DELIVERIES) -> list[str]:
        """Add items in order, and return their ids. Items are sent in batches; each batch is added as a whole."""
        ids: list[str] = []
        for batch in batches_of(self._name, items, max_deliveries):
            ids += await self.ask(WorkPut(batch, max_deliveries))
        return ids

    async def take(self, timeout: Timeout | None = None) -> AsyncWorkItem:
        """Take the first item, waiting in line for one; at the timeout, raise StoreTimeout, which names the holders."""
        call = next(self._numbers)
        return AsyncWorkItem(self, call, await self._wait("take", call, WorkTake(), timeout))

    async def try_take(self) -> AsyncWorkItem | None:
        """Take the first item, or return None if there is none."""
        call = next(self._numbers)
        try:
            answer = await self.ask(WorkTake(wait=False), call)
        except BaseException:
            self.tell(WorkAbandon(call))
            raise
        return None if answer is None else AsyncWorkItem(self, call, answer)

    async def join(self, timeout: Timeout | None = None) -> None:
        """Return when no item is ready or taken. Raises StoreTimeout at the timeout."""
        await self._wait("join", next(self._numbers), WorkJoin(), timeout)

    async def status(self) -> WorkQueueStatus:
        """Return how many items are in each state, and who has them."""
        return status_of(await self.ask(WorkQuery()))

    async def ask(self, command: Command, call: int = 0) -> Any:
        """Make a call that does not wait; return its answer."""
        return self._answer(await self._calls.ask(self._member, call or next(self._numbers), command, 0.0)).answer

    def tell(self, command: Undo) -> None:
        """Make a call and ignore its outcome."""
        self._calls.tell(self._member, next(self._numbers), command)

    async def _wait(self, verb: str, call: int, command: Command, timeout: Timeout | None) -> Any:
        """Make a call that waits, again and again until it is over; take it back at the deadline, or if cancelled."""
        deadline = self._calls.deadline(self._calls.timeout_s if timeout is None else timeout)
        try:
            while True:
                wait_s = min(deadline.remaining(), PROGRESS_S)
                outcome = await self._calls.ask(self._member, call, command, wait_s)
                if not isinstance(outcome, Waiting):
                    return self._answer(outcome).answer
                if deadline.expired():
                    break
            late = None if isinstance(outcome, Disconnected) else await self.ask(WorkWithdraw(call))
        except BaseException:
            self.tell(WorkAbandon(call))
            raise
        if late:
            return late[0]
        if isinstance(outcome, Disconnected):
            self.tell(WorkAbandon(call))
        if isinstance(outcome, WithoutQuorum):
            raise NoQuorum(store=self._calls.label, timeout_s=deadline.timeout_s, tried=outcome.no_quorum)
        name, what = (self._name,), f"{self.title}: {outcome.reason},"
        raise StoreTimeout(
            operation=verb,
            keys=name,
            missing=name,
            timeout_s=deadline.timeout_s,
            store=self._calls.label,
            what=what,
        )

    def _answer(self, outcome: Done | Refused | Waiting) -> Done:
        if isinstance(outcome, Done):
            return outcome
        if isinstance(outcome, Refused) and outcome.error == "ItemLost":
            raise ItemLost(thing=self.thing, **outcome.fields)
        raise MeetingError(f"{self.thing} refused: {outcome}")
