"""Counters in etcd, and the barrier that is one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from rallypoint.core.records import TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import SessionLost
from rallypoint.etcd import messages
from rallypoint.etcd.additions import Additions, number_or_not, read_total, wrapped
from rallypoint.etcd.answers import KV, Found
from rallypoint.etcd.client import Compacted
from rallypoint.etcd.ground import Decision, Done, Seen, as_seen, dated, only
from rallypoint.etcd.mark import Mark
from rallypoint.etcd.messages import Op, Txn
from rallypoint.etcd.session import Session
from rallypoint.etcd.ties import Ties
from rallypoint.etcd.watcher import Feed

__all__ = ["Counters"]

GUESSES = 1024
"""How many counters are remembered as we wrote them."""


class Counters(Additions):
    """The counters of a store."""

    def __init__(self, ties: Ties, prefix: str) -> None:
        super().__init__(ties, prefix)
        self._guesses: OrderedDict[bytes, Found] = OrderedDict()

    async def add(self, mark: Mark, key: bytes, amount: int) -> int:
        """Add to a counter and return its new value."""
        name = self.layout.value(key)
        guess = self._guesses.pop(name, None)
        if self.crowded(key) or mark.doubtful or mark.proven:
            return await self.post(mark, key, amount)
        seen = [guess] if guess else await self.look([messages.get(name)])
        for _ in range(2 if guess else 1):  # a guess may be wrong without others being in a hurry
            try:
                decision = await self._sum(key, amount, seen)
            except Compacted:
                break
            if not decision.ops:
                if mark.doubtful:
                    break
                return read_total(key, decision.answer)
            txn = Txn(
                [*mark.guards(), *decision.compares],
                [*decision.ops, mark.proof(decision.answer)],
                [*mark.look(), messages.get(name)],
            )
            result = await self.commit(mark, key, txn, Deadline(self.patience_s))
            if result.succeeded:
                mark.wrote(decision.answer, result.revision)
                self._guess(name, decision.answer, result.revision)
                return int(decision.answer)
            record, lane, *seen = dated(result.answers, result.revision)
            if mark.took_effect(record.kvs, lane.kvs):
                return int(mark.answer)
        self.lost_race(key)
        return await self.post(mark, key, amount)

    async def _sum(self, key: bytes, amount: int, seen: Seen, more: Sequence[Op] = ()) -> Decision:
        """Add to a counter, and do more in the same moment; the answer to what is no number is the value itself."""
        name = self.layout.value(key)
        total = await self._count(key, seen)
        if isinstance(total, bytes):
            return Decision(total)
        total = wrapped(total + amount)
        ops = [messages.put(name, b"%d" % total, self.lease), *self.leftovers(key, seen), *more]
        return Decision(total, [as_seen(name, seen)], ops)

    async def _count(self, key: bytes, seen: Seen) -> int | bytes:
        value = (await self.values(seen[:1]))[0]
        return 0 if value is None else number_or_not(key, value)

    # Barriers. Even stages of the mark are arrivals, their answer the count; odd ones say whether it was let through.

    async def barrier(self, mark: Mark, key: bytes, size: int, deadline: Deadline) -> TimedOut | None:
        """Count one arrival on an ordinary key and return when it has reached `size`; who gives up is taken back.

        So is who dies: until it is let through, a will says so (`etcd/executor.py`).
        """
        await self.settled(mark)
        through = False
        if mark.stage % 2 == 0 and mark.proven and mark.answer is False:  # it was given up before it had arrived
            mark.advance()
            mark.advance()
        if mark.stage % 2 == 0:
            done = await self.unbroken(
                mark,
                self._arrive(mark, key, size, deadline),
                lambda done: self._give_up(mark, key, size, done.answer),
                lambda: self._recover_arrival(mark, key, size),
            )
            if read_total(key, done.answer) >= size:
                return None
            mark.advance()
            mark.doubtful = True  # it has been counted, whatever comes now
            try:
                through = await self._reached(mark.session, key, size, done.revision, deadline)
            except BaseException:
                mark.settling = self.loosely(self._leave(mark, key, size))
                raise
        leaving = asyncio.ensure_future(self._leave(mark, key, size, through))
        try:
            return None if await asyncio.shield(leaving) else TimedOut((key,))
        except asyncio.CancelledError:
            mark.settling = self.loosely(asyncio.wait((leaving,)))
            raise

    async def _arrive(self, mark: Mark, key: bytes, size: int, deadline: Deadline) -> Done:
        """Count an arrival, with a will unless it is the last one."""
        will = messages.put(self._will(mark), b"%d " % size + key, self.lease)

        async def decide(seen: Seen) -> Decision:
            count = await self._count(key, seen)
            last = isinstance(count, bytes) or count + 1 >= size
            return await self._sum(key, 1, seen, () if last else [will])

        return await self.change(mark, key, decide, [messages.get(self.layout.value(key))], within=deadline)

    async def _reached(self, session: Session, key: bytes, size: int, since: int, deadline: Deadline) -> bool:
        """Say whether a count was reached at any moment after a revision, until time is up.

        SessionLost as soon as the arrival does not count any more.
        """
        name = self.layout.value(key)
        while True:
            feed = Feed(self.ties.watcher, name, b"", 0)
            feed.start(since)
            try:
                while (event := await self.next_of(feed, deadline, session.lost)) is not None:
                    count = number_or_not(key, event.value or b"0")
                    if isinstance(count, int) and count >= size:
                        return True
                if not session.lost.is_set():
                    return False
                raise session.end_of_it()
            except SessionLost:
                if session.lost.is_set():
                    raise
                (value,), since = await self.valued([messages.get(name)], deadline)  # the history is gone
                count = number_or_not(key, value or b"0")
                if isinstance(count, int) and count >= size:
                    return True
            finally:
                feed.close()

    async def _recover_arrival(self, mark: Mark, key: bytes, size: int) -> None:
        await self._give_up(mark, key, size, (await self.resolve(mark, key)).answer)

    async def _give_up(self, mark: Mark, key: bytes, size: int, count: int | bytes | None) -> None:
        """Take an arrival back that was made for one who gave up meanwhile."""
        if isinstance(count, int) and count is not False and count < size:
            mark.advance()
            await self._leave(mark, key, size)

    async def _leave(self, mark: Mark, key: bytes, size: int, through: bool = False) -> bool:
        """Take an arrival back, unless enough have come meanwhile: say whether they have."""
        mark.doubtful = True
        name, will = self.layout.value(key), self._will(mark)

        async def decide(seen: Seen) -> Decision:
            if through:
                return Decision(True, (), [messages.delete(will)])
            reached, ops = await self._taking_back(key, will, size, seen)
            return Decision(reached, [as_seen(name, seen)], ops)

        looks = [messages.get(name), messages.get(will)]
        return bool((await self.change(mark, key, decide, looks, [] if through else None)).answer)

    async def undo(self, session: Session, will: bytes, wish: bytes) -> None:
        """Take an arrival back whose session has died, unless that was done."""
        size, _, key = wish.partition(b" ")
        name = self.layout.value(key)

        async def decide(seen: Seen) -> Decision:
            if not seen[1].kvs:
                return Decision(None)
            _, ops = await self._taking_back(key, will, int(size), seen)
            return Decision(None, [as_seen(name, seen), messages.exists(will)], ops)

        with session.own_mark() as mark:
            await self.change(mark, key, decide, [messages.get(name), messages.get(will)])

    async def _taking_back(self, key: bytes, will: bytes, size: int, seen: Seen) -> tuple[bool, list[Op]]:
        """Return whether enough have come, and what strikes a will out, and counts one less if not.

        It counts only if the counter is still the one that was counted on: whoever deletes it begins from zero.
        """
        ops = [messages.delete(will)]
        count, counter, willed = await self._count(key, seen), only(seen[0]), only(seen[1])
        if counter is None or willed is None or isinstance(count, bytes):
            return False, ops
        if 0 < count < size and counter.created <= willed.created:
            ops.append(messages.put(self.layout.value(key), b"%d" % (count - 1), self.lease))
        return count >= size, ops

    def _will(self, mark: Mark) -> bytes:
        return self.layout.will(mark.session.id, f"{mark.lane.rpartition(b'/')[2].decode()}.{mark.number}")

    def _guess(self, name: bytes, total: int, revision: int) -> None:
        """Remember what a counter was when we wrote it last."""
        self._guesses[name] = Found([KV(name, b"%d" % total, 0, revision, self.lease)], 1, revision)
        if len(self._guesses) > GUESSES:
            self._guesses.popitem(last=False)
