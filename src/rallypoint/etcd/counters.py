"""Counters in etcd, and the barrier that is one."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

from rallypoint.core.engine import number_in
from rallypoint.core.records import TimedOut
from rallypoint.deadline import Deadline
from rallypoint.etcd import messages
from rallypoint.etcd.additions import Additions, wrapped
from rallypoint.etcd.answers import KV, Found
from rallypoint.etcd.ground import Decision, Seen, Ties, as_seen, dated
from rallypoint.etcd.messages import Op, Txn
from rallypoint.etcd.session import Mark, Session

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
        if self.crowded(key) or mark.doubtful:
            self._guesses.pop(name, None)
            return await self.post(mark, key, amount)
        guess = self._guesses.pop(name, None)
        seen = [guess] if guess else await self.look([messages.get(name)])
        for _ in range(2 if guess else 1):  # a guess may be wrong without others being in a hurry
            decision = await self._decide(key, amount, seen)
            txn = Txn(
                [*mark.guards(), *decision.compares],
                [*decision.ops, mark.proof(decision.answer)],
                [*mark.look(), messages.get(name)],
            )
            result = await self.commit(mark, key, txn, Deadline(self.patience_s))
            if result.succeeded:
                self._guess(name, decision.answer, result.revision)
                return int(decision.answer)
            record, lane, *seen = dated(result.answers, result.revision)
            if mark.took_effect(record.kvs, lane.kvs):
                return int(mark.answer)
        self.lost_race(key)
        return await self.post(mark, key, amount)

    async def _decide(self, key: bytes, amount: int, seen: Seen, more: Sequence[Op] = ()) -> Decision:
        """Add to a counter, and do more in the same moment."""
        name = self.layout.value(key)
        value = (await self.values(seen))[0]
        total = wrapped(amount + (0 if value is None else number_in(key, value)))
        return Decision(total, [as_seen(name, seen)], [messages.put(name, b"%d" % total, self.lease), *more])

    async def barrier(self, mark: Mark, key: bytes, size: int, deadline: Deadline) -> TimedOut | None:
        """Count one arrival on an ordinary key and return when it has reached `size`; who gives up is taken back.

        So is who dies: until it is let through, a will says so (`etcd/executor.py`).
        """
        name, will = self.layout.value(key), self.layout.will(mark.session.id, str(mark.number))

        async def decide(seen: Seen) -> Decision:
            return await self._decide(key, 1, seen, [messages.put(will, key)])

        if (await self.change(mark, key, decide, [messages.get(name)]))[0] >= size:
            await self.undo(mark.session, will, key, size)
            return None
        try:
            while True:
                seen = await self.look([messages.get(name)])
                value = (await self.values(seen))[0]
                if value is not None and number_in(key, value) >= size:
                    break
                if not await self.change_of(((name, b""),), seen[0].revision, deadline):
                    break
        except BaseException:
            self.loosely(self.undo(mark.session, will, key, size))
            raise
        return None if await self.undo(mark.session, will, key, size) else TimedOut((key,))

    async def undo(self, session: Session, will: bytes, key: bytes, size: int = sys.maxsize) -> bool:
        """Take an arrival back, unless that was done, or enough have come meanwhile: say whether they have."""
        name, gone = self.layout.value(key), messages.delete(will)

        async def decide(seen: Seen) -> Decision:
            value = (await self.values(seen[:1]))[0]
            count = 0 if value is None else number_in(key, value)
            if not seen[1].kvs:
                return Decision(count >= size)
            conditions = [as_seen(name, seen), messages.exists(will)]
            if count >= size or count <= 0:
                return Decision(count >= size, conditions, [gone])
            return Decision(False, conditions, [gone, messages.put(name, b"%d" % (count - 1), self.lease)])

        with session.own_mark() as mark:
            looks = [messages.get(name), messages.get(will)]
            return bool((await self.change(mark, key, decide, looks))[0])

    def _guess(self, name: bytes, total: int, revision: int) -> None:
        """Remember what a counter was when we wrote it last."""
        self._guesses[name] = Found([KV(name, b"%d" % total, 0, revision, self.lease)], 1, revision)
        if len(self._guesses) > GUESSES:
            self._guesses.popitem(last=False)
