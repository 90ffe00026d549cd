"""Queues in etcd: items in the order of their creation, each for one taker, and a line of those who wait.

An item is a key of its own, so no push gets in another's way. Who takes the first one deletes it, if it is still there;
else another was faster, and there is another first one. Those who wait in one process stand in line.
"""

from __future__ import annotations

import asyncio
import secrets

from rallypoint.core.records import TimedOut
from rallypoint.deadline import Deadline
from rallypoint.etcd import messages
from rallypoint.etcd.ground import Decision, Ground, Seen, Ties, one_of
from rallypoint.etcd.layout import Parts, unpack
from rallypoint.etcd.session import Mark, Session

__all__ = ["Queues"]


class Queues(Ground):
    """The queues of a store."""

    def __init__(self, ties: Ties, prefix: str) -> None:
        super().__init__(ties, prefix)
        self._lines: dict[bytes, _Line] = {}

    async def queue_len(self, key: bytes) -> int:
        """Count the items of a queue."""
        return (await self.look([messages.tally(*self.layout.queue(key))]))[0].total

    async def queue_push(self, mark: Mark, key: bytes, value: bytes) -> None:
        """Put an item at the end of a queue."""
        identity = secrets.token_hex(8)
        stored, ops = await self.stored(mark, True, key, value, identity, self.lease)
        await self.blindly(mark, key, [messages.put(self.layout.item(key, identity), stored, self.lease), *ops])

    async def queue_pop(self, mark: Mark, key: bytes) -> bytes | None:
        """Take the first item of a queue, or return None where it is empty."""
        return (await self._take(mark, key))[0]

    async def put_back(self, session: Session, key: bytes, value: bytes) -> None:
        """Put an item to the front again, whose taker is gone."""
        fronts = messages.get(*self.layout.fronts(key), limit=1, names_only=True)
        with session.own_mark() as mark:
            stored, ops = await self.stored(mark, True, key, value, secrets.token_hex(8), self.lease)

            async def decide(seen: Seen) -> Decision:
                number = int(seen[0].kvs[0].key[-20:]) - 1 if seen[0].kvs else 10**19
                name = self.layout.front(key, number)
                item = messages.put(name, stored, self.lease)
                return Decision(None, [messages.version_is(name, 0)], [item, *ops])

            await self.change(mark, key, decide, [fronts])

    async def wait_item(self, mark: Mark, key: bytes, deadline: Deadline) -> bytes | TimedOut:
        """Take the first item of a queue once there is one, after those who came to wait here before."""
        line = self._lines.setdefault(key, _Line())
        if not await line.enter(deadline):
            return TimedOut((key,))
        try:
            while True:
                item, revision = await self._take(mark, key)
                if item is not None:
                    return item
                if not await self.change_of((self.layout.queue(key),), revision, deadline):
                    return TimedOut((key,))
        finally:
            line.leave()
            if not line.waiting and not line.busy:
                self._lines.pop(key, None)

    async def _take(self, mark: Mark, key: bytes) -> tuple[bytes | None, int]:
        """Take the first item of a queue; return it, or None, and the revision at which it was looked for.

        It is not to be interrupted half-way: who gives up meanwhile has the item put back.
        """
        taking = asyncio.ensure_future(self._take_now(mark, key))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            self.loosely(self._give_back(taking, mark.session, key))
            raise

    async def _take_now(self, mark: Mark, key: bytes) -> tuple[bytes | None, int]:
        looks = [
            messages.get(*self.layout.fronts(key), limit=1),
            messages.get(*self.layout.items(key), limit=1, oldest_first=True),
        ]
        revision = 0

        async def decide(seen: Seen) -> Decision:
            nonlocal revision
            revision = seen[0].revision
            kv = next((kv for found in seen for kv in found.kvs), None)
            if kv is None:
                return Decision(None)
            value = unpack(kv.value)
            ops = [messages.delete(kv.key)]
            if isinstance(value, Parts):
                ops.append(messages.delete(*self.layout.parts(True, key, value.id)))
            return Decision(kv.value, [messages.modified_at(kv.key, kv.modified)], ops)

        stored, at = await self.change(mark, key, decide, looks)
        if stored is None:
            return None, revision
        item = unpack(stored)
        if isinstance(item, Parts):
            item = await self.gather(True, key, item, (at or revision) - 1)
        return item, revision

    async def _give_back(self, taking: asyncio.Future[tuple[bytes | None, int]], session: Session, key: bytes) -> None:
        item, _ = await taking
        if item is not None:
            await self.put_back(session, key, item)


class _Line:
    """Who waits for items of one queue, first come, first served."""

    def __init__(self) -> None:
        self.busy = False
        self.waiting: list[asyncio.Future[None]] = []

    async def enter(self, deadline: Deadline) -> bool:
        """Wait for one's turn; say whether it came in time."""
        if not self.busy and not self.waiting:
            self.busy = True
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            await one_of([turn], deadline)
        except BaseException:
            if turn.done():
                self.leave()
            raise
        finally:
            if turn in self.waiting:
                self.waiting.remove(turn)
        return turn.done()

    def leave(self) -> None:
        """Let the next one go ahead."""
        self.busy = bool(self.waiting)
        if self.waiting:
            self.waiting.pop(0).set_result(None)
