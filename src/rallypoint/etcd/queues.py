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
from rallypoint.etcd.ground import Decision, Seen
from rallypoint.etcd.layout import Parts, unpack
from rallypoint.etcd.mark import Mark
from rallypoint.etcd.session import Session
from rallypoint.etcd.ties import Ties, one_of
from rallypoint.etcd.values import Values

__all__ = ["Queues"]


class Queues(Values):
    """The queues of a store."""

    def __init__(self, ties: Ties, prefix: str) -> None:
        super().__init__(ties, prefix)
        self._lines: dict[bytes, _Line] = {}

    async def queue_len(self, key: bytes) -> int:
        """Count the items of a queue."""
        return (await self.look([messages.tally(*self.layout.queue(key))]))[0].total

    async def queue_push(self, mark: Mark, key: bytes, value: bytes) -> None:
        """Put an item at the end of a queue."""

        async def decide(_: Seen) -> Decision:
            identity = secrets.token_hex(8)
            stored, there, lasting = await self.stored(mark, True, key, value, identity, self.lease)
            return Decision(None, there, [messages.put(self.layout.item(key, identity), stored, self.lease), *lasting])

        await self.change(mark, key, decide, (), [])

    async def queue_pop(self, mark: Mark, key: bytes) -> bytes | None:
        """Take the first item of a queue, or return None where it is empty."""
        return (await self._take(mark, key))[0]

    async def put_back(self, session: Session, key: bytes, value: bytes) -> None:
        """Put an item to the front again, whose taker is gone."""
        with session.own_mark() as mark:
            await self._put_back(mark, key, value)

    async def _put_back(self, mark: Mark, key: bytes, value: bytes) -> None:
        fronts = messages.get(*self.layout.fronts(key), limit=1, names_only=True)

        async def decide(seen: Seen) -> Decision:
            stored, there, lasting = await self.stored(mark, True, key, value, secrets.token_hex(8), self.lease)
            number = int(seen[0].kvs[0].key[-20:]) - 1 if seen[0].kvs else 10**19
            name = self.layout.front(key, number)
            first = messages.none_in(self.layout.fronts(key)[0], name + b"\0")
            return Decision(True, [first, *there], [messages.put(name, stored, self.lease), *lasting])

        await self.change(mark, key, decide, [fronts])

    async def wait_item(self, mark: Mark, key: bytes, deadline: Deadline) -> bytes | TimedOut:
        """Take the first item of a queue once there is one, after those who came to wait here before."""
        line = self._lines.setdefault(key, _Line())
        if not await line.enter(deadline):
            return TimedOut((key,))
        try:
            while True:
                item, revision = await self._take(mark, key, deadline)
                if item is not None:
                    return item
                if mark.proven:  # that there was none, at some time: no attempt of before can take one now
                    mark.advance()
                    continue
                if not await self.change_of((self.layout.queue(key),), revision, deadline):
                    return TimedOut((key,))
        finally:
            line.leave()
            if not line.waiting and not line.busy:
                self._lines.pop(key, None)

    async def _take(self, mark: Mark, key: bytes, within: Deadline | None = None) -> tuple[bytes | None, int]:
        """Take the first item of a queue; return it, or None, and the revision at which it was looked for.

        It is not to be interrupted half-way: who gives up meanwhile has the item put back, and so has who is told that
        etcd does not answer.
        """
        await self.settled(mark)
        return await self.unbroken(
            mark,
            self._take_now(mark, key, within),
            lambda taken: self._give_back(mark, key, taken[0]),
            lambda: self._recover(mark, key),
        )

    async def _recover(self, mark: Mark, key: bytes) -> None:
        """Put back what was taken, if anything was."""
        stored, at, _ = await self.resolve(mark, key)
        item = unpack(stored) if isinstance(stored, bytes) else None
        if isinstance(item, Parts):
            item = await self.regained(mark, key, item, at - 1)
        await self._give_back(mark, key, item)

    async def _take_now(self, mark: Mark, key: bytes, within: Deadline | None) -> tuple[bytes | None, int]:
        fronts, items = self.layout.fronts(key), self.layout.items(key)
        looks = [messages.get(*fronts, limit=1), messages.get(*items, limit=1, oldest_first=True)]
        wholes: dict[bytes, bytes] = {}
        revision = 0

        async def decide(seen: Seen) -> Decision:
            nonlocal revision
            revision = seen[0].revision
            kv = next((kv for found in seen for kv in found.kvs), None)
            if kv is None:
                return Decision(None)
            value = unpack(kv.value)
            first = messages.none_in(fronts[0], min(kv.key, fronts[1]))
            ops = [messages.delete(kv.key)]
            if isinstance(value, Parts):  # read before it is taken: etcd may be compacted at any time
                wholes[kv.value] = await self.gather(True, key, value, revision)
                ops.append(messages.delete(*self.layout.parts(True, key, value.id)))
            return Decision(kv.value, [messages.modified_at(kv.key, kv.modified), first], ops)

        if mark.proven and isinstance(mark.answer, bool):  # what it took was put back, or it took nothing: no answer
            mark.advance()
        stored, at, _ = await self.change(mark, key, decide, looks, within=within)
        if stored is None:
            return None, revision
        item = unpack(stored)
        if isinstance(item, Parts):
            item = wholes[stored] if stored in wholes else await self.regained(mark, key, item, at - 1)
        return item, revision

    async def _give_back(self, mark: Mark, key: bytes, item: bytes | None) -> None:
        """Put an item back for one who gave up, in a stage of its own: if it asks again, it takes one anew."""
        if item is not None:
            mark.advance()
            await self._put_back(mark, key, item)
        if mark.proven:
            mark.advance()


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
