"""Additions to a counter that many add to at once: they are put in a list, and one of those who add carries all out.

Whoever reads a counter and writes it back loses when another was faster, so of many only one wins at a time. Who has
lost once therefore *posts* its addition instead, which cannot fail. If nothing else is posted, it carries it out, with
all that others have posted meanwhile, in one transaction: the counter, and to each lane its answer. Then it looks for
more, until there is none. The others wait for their lanes to change; if that takes too long, for whoever was about to
do it may be dead, they do it themselves. A posted addition goes with its session's lease, and so does its lane; until
it is carried out, that lane serves nothing else, for whoever carries it out writes the answer there.
"""

from __future__ import annotations

import time

import msgspec

from rallypoint.core.engine import number_in
from rallypoint.deadline import Deadline
from rallypoint.errors import NotAnInteger
from rallypoint.etcd import messages
from rallypoint.etcd.client import Compacted, Refusal
from rallypoint.etcd.ground import Seen, as_seen, dated
from rallypoint.etcd.mark import Mark, answered
from rallypoint.etcd.messages import Op, Txn
from rallypoint.etcd.ties import Ties, one_of
from rallypoint.etcd.values import Values

__all__ = ["Additions", "number_or_not", "read_total", "wrapped"]

TOGETHER = 60
"""How many are carried out in one transaction: each takes two requests, of 128."""

WAIT_S = 0.5
"""How long to wait for others to carry it out."""

CROWDED_S = 1.0
"""For how long a counter counts as crowded after somebody lost a race for it."""

_INT64 = 1 << 63


class _Addition(msgspec.Struct, array_like=True):
    """What is posted."""

    amount: int
    lane: bytes
    number: int


class Additions(Values):
    """The additions to the counters of a store that are not made directly."""

    def __init__(self, ties: Ties, prefix: str) -> None:
        super().__init__(ties, prefix)
        self._crowded: dict[bytes, float] = {}
        self._at_work: set[bytes] = set()

    def crowded(self, key: bytes) -> bool:
        """Say whether many add to a counter."""
        until = self._crowded.get(key)
        if until is None:
            return False
        if until < time.monotonic():
            del self._crowded[key]
            return False
        return True

    def lost_race(self, key: bytes) -> None:
        """Note that another was faster."""
        self._crowded[key] = time.monotonic() + CROWDED_S

    async def post(self, mark: Mark, key: bytes, amount: int) -> int:
        """Post an addition, have it carried out, and return what the counter became."""
        if mark.proven:
            return read_total(key, mark.answer)
        deadline = Deadline(self.patience_s)
        addition = msgspec.msgpack.encode(_Addition(amount, mark.lane, mark.number))
        post = messages.put(self.layout.addition(key, mark.lane), addition, mark.session.lease)
        looks = self._looks(key)
        txn = Txn(mark.guards(), [mark.begin(), post, *looks], [*mark.look(), *looks])
        result = await self.commit(mark, key, txn, deadline)
        if result.succeeded:
            mark.handed_over()
        elif mark.took_effect(*(found.kvs for found in result.answers[:2])):
            return read_total(key, mark.answer)
        seen = dated(result.answers[-2:], result.revision)
        if len(seen[0].kvs) > 1:
            self.lost_race(key)
        try:
            return read_total(key, await self._carried_out(mark, key, seen, deadline))
        except Refusal as error:
            raise await self.refused(mark.session, key, error) from None

    async def _carried_out(self, mark: Mark, key: bytes, seen: Seen, deadline: Deadline) -> int | bytes:
        """Return what a posted addition came to, once somebody has carried it out."""
        patient = True
        while not deadline.expired():
            if key not in self._at_work and (len(seen[0].kvs) == 1 or not patient):
                await self._carry_out(mark, key, seen, deadline)
            else:
                async with self.ties.watcher.waiting(mark.lane, b"", seen[0].revision) as changed:
                    patient = await one_of([changed], Deadline(WAIT_S))
                if patient and (change := changed.result()) is not None and change.value is not None:
                    mark.proved(change.value, change.revision)
            if not mark.proven:
                record, lane, *seen = await self.look([*mark.look(), *self._looks(key)])
                mark.took_effect(record.kvs, lane.kvs)
            if mark.proven:
                answer: int | bytes = mark.answer
                return answer
        raise self.ties.client.no_quorum(deadline)

    async def _carry_out(self, mark: Mark, key: bytes, seen: Seen, deadline: Deadline) -> None:
        """Carry out what is posted, and see to what will be by then."""
        self._at_work.add(key)
        try:
            totals, seen = await self._some(key, seen, deadline)
            if mark.lane in totals:
                mark.wrote(totals[mark.lane], seen[0].revision)
        except BaseException:
            self._at_work.discard(key)
            raise
        self.loosely(self._the_rest(key, seen, deadline))

    async def _the_rest(self, key: bytes, seen: Seen, deadline: Deadline) -> None:
        try:
            while seen[0].kvs and not deadline.expired():
                _, seen = await self._some(key, seen, deadline)
        finally:
            self._at_work.discard(key)

    async def _some(self, key: bytes, seen: Seen, deadline: Deadline) -> tuple[dict[bytes, int | bytes], Seen]:
        """Try to carry out the oldest that are posted; return what they came to, by lane, and what is there now."""
        name, looks = self.layout.value(key), self._looks(key)
        totals: dict[bytes, int | bytes] = {}
        compares, ops = [as_seen(name, seen[1:])], []
        try:
            value = (await self.values(seen[1:]))[0]
        except Compacted:
            return {}, await self.look(looks)
        total = value if value is None else number_or_not(key, value)
        for kv in seen[0].kvs[:TOGETHER]:
            addition = msgspec.msgpack.decode(kv.value, type=_Addition)
            if not isinstance(total, bytes):
                total = wrapped((total or 0) + addition.amount)
            totals[addition.lane] = total
            compares.append(messages.modified_at(kv.key, kv.modified))
            proof = answered(addition.number, total)
            ops += [messages.delete(kv.key), messages.put(addition.lane, proof, keep_lease=True)]
        if isinstance(total, int):
            ops.append(messages.put(name, b"%d" % total, self.lease))
            ops += self.leftovers(key, seen[1:])
        result, _ = await self.ties.writes.commit(Txn(compares, [*ops, *looks], looks), deadline)
        return totals if result.succeeded else {}, dated(result.answers[-2:], result.revision)

    def _looks(self, key: bytes) -> list[Op]:
        posted = messages.get(*self.layout.additions(key), limit=TOGETHER, oldest_first=True)
        return [posted, messages.get(self.layout.value(key))]


def wrapped(total: int) -> int:
    """Return a number as 64 bits hold it."""
    return (total + _INT64) % (2 * _INT64) - _INT64


def number_or_not(key: bytes, value: bytes) -> int | bytes:
    """Read a counter; return the value itself where it is none, so that all who add to it can be told."""
    try:
        return number_in(key, value)
    except NotAnInteger:
        return value


def read_total(key: bytes, answer: int | bytes) -> int:
    """Return what a counter came to; raise NotAnInteger for a value that is none."""
    return answer if isinstance(answer, int) else number_in(key, answer)
