"""Few round trips for many: what is asked while others are under way goes out together.

`Reads`: ranges that wait become one transaction of ranges, and who asks for the same key shares one of them. Nobody
gets an answer to what was sent before it asked, so reads stay linearizable.

`Writes`: transactions that wait become nested transactions of one, each with comparisons of its own, as long as no two
write the same key, which etcd refuses. One request, one entry of etcd's log, one sync of its disk.

A lone caller never waits: it goes out at once, as what it is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

from rallypoint.deadline import Deadline
from rallypoint.etcd import answers
from rallypoint.etcd.answers import Found, Result
from rallypoint.etcd.client import Client, Refusal
from rallypoint.etcd.messages import Method, Op, Txn

__all__ = ["Committed", "Reads", "Writes"]

UNDER_WAY = 4
"""How many requests of a kind are under way at once; what comes then is put together."""

TOGETHER = 48
"""How many go out as one: all levels of a transaction may have 128 requests together."""

TOGETHER_BYTES = 256 * 1024


class Committed(NamedTuple):
    """What a transaction came to, and whether an earlier attempt at it may have been carried out too."""

    result: Result
    repeated: bool


class _Write(NamedTuple):
    txn: Txn
    data: bytes
    done: asyncio.Future[Committed]
    deadline: Deadline


class Writes:
    """The transactions of one client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._queue: deque[_Write] = deque()
        self._under_way = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def commit(self, txn: Txn, deadline: Deadline) -> Committed:
        """Carry out a transaction, with others if there are any."""
        if self._under_way < UNDER_WAY and not self._queue:
            self._under_way += 1
            try:
                return await self._alone(txn.encode(), deadline)
            finally:
                self._under_way -= 1
                self._go_on()
        write = _Write(txn, txn.encode(), asyncio.get_running_loop().create_future(), deadline)
        self._queue.append(write)
        return await write.done

    async def _alone(self, data: bytes, deadline: Deadline) -> Committed:
        answer = await self._client.call(Method.TXN, data, deadline)
        return Committed(answers.read_txn(answer.data), answer.repeated)

    def _go_on(self) -> None:
        while self._queue and self._under_way < UNDER_WAY:
            batch = self._next_batch()
            if batch:
                self._under_way += 1
                task = asyncio.ensure_future(self._send(batch))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[_Write]:
        """Take from the queue, in order, what can go out together."""
        batch: list[_Write] = []
        left: list[_Write] = []
        taken: list[tuple[bytes, bytes]] = []
        size = 0
        while self._queue and len(batch) < TOGETHER and len(left) < TOGETHER:
            write = self._queue.popleft()
            if write.done.cancelled():
                continue
            spans = list(write.txn.writes())
            if batch and (size + len(write.data) > TOGETHER_BYTES or _overlap(spans, taken)):
                left.append(write)
            else:
                batch.append(write)
                size += len(write.data)
            taken += spans  # whoever comes after one that has to wait for the same key waits too
        self._queue.extendleft(reversed(left))
        return batch

    async def _send(self, batch: list[_Write]) -> None:
        try:
            if len(batch) > 1:
                await self._send_together(batch)
            else:
                _settle(batch[0].done, await self._alone(batch[0].data, batch[0].deadline))
        except BaseException as error:  # each waits for its own answer
            for write in batch:
                _fail(write.done, error)
        finally:
            self._under_way -= 1
            self._go_on()

    async def _send_together(self, batch: list[_Write]) -> None:
        whole = Txn((), [write.txn.as_op() for write in batch])
        deadline = max((write.deadline for write in batch), key=lambda one: one.at)
        try:
            result, repeated = await self._alone(whole.encode(), deadline)
        except Refusal as refused:  # of one of them: each hears what is meant for it
            for write in batch:
                try:
                    result, repeated = await self._alone(write.data, write.deadline)
                    _settle(write.done, Committed(result, repeated or refused.repeated))
                except Exception as error:
                    if isinstance(error, Refusal):
                        error.repeated = error.repeated or refused.repeated
                    _fail(write.done, error)
            return
        for write, answer in zip(batch, result.answers, strict=True):
            _settle(write.done, Committed(answer._replace(revision=result.revision), repeated))


def _settle(done: asyncio.Future[Committed], committed: Committed) -> None:
    if not done.done():
        done.set_result(committed)


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done() and isinstance(error, Exception):
        done.set_exception(error)
        done.exception()  # it may be that nobody waits any more
    else:
        done.cancel()


def _overlap(spans: list[tuple[bytes, bytes]], taken: list[tuple[bytes, bytes]]) -> bool:
    return any(first < end and start < last for first, last in spans for start, end in taken)


class Reads:
    """The reads of one client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._queue: dict[Op, asyncio.Future[Found]] = {}
        self._deadline: Deadline | None = None
        self._under_way = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def range(self, op: Op, deadline: Deadline) -> Found:
        """Read a range, with others if there are any."""
        if self._under_way < UNDER_WAY and not self._queue:
            self._under_way += 1
            try:
                answer = await self._client.call(Method.RANGE, op.body, deadline)
                return answers.read_range(answer.data)
            finally:
                self._under_way -= 1
                self._go_on()
        if op not in self._queue:
            self._queue[op] = asyncio.get_running_loop().create_future()
        if self._deadline is None or deadline.at > self._deadline.at:
            self._deadline = deadline
        return await asyncio.shield(self._queue[op])

    async def ranges(self, ops: list[Op], deadline: Deadline) -> list[Found]:
        """Read ranges as of one moment; not more than a transaction holds."""
        if len(ops) == 1:
            return [await self.range(ops[0], deadline)]
        return await self._together(ops, deadline)

    def _go_on(self) -> None:
        while self._queue and self._under_way < UNDER_WAY:
            batch = [(op, self._queue.pop(op)) for op in list(self._queue)[:TOGETHER]]
            assert self._deadline is not None
            self._under_way += 1
            task = asyncio.ensure_future(self._send(batch, self._deadline))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, batch: list[tuple[Op, asyncio.Future[Found]]], deadline: Deadline) -> None:
        try:
            answers = await self._together([op for op, _ in batch], deadline)
            for (_, done), found in zip(batch, answers, strict=True):
                if not done.done():
                    done.set_result(found)
        except BaseException as error:  # each waits for its own answer
            for _, done in batch:
                _fail(done, error)
        finally:
            self._under_way -= 1
            self._go_on()

    async def _together(self, ops: list[Op], deadline: Deadline) -> list[Found]:
        answer = await self._client.call(Method.TXN, Txn((), ops).encode(), deadline)
        result = answers.read_txn(answer.data)
        return [found._replace(revision=result.revision) for found in result.answers]
