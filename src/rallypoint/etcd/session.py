"""A session in etcd: who writes, and the proof of what it has written.

A session is a lease, and under it a record and *lanes*. Every change is one transaction that also writes the number of
its request, and the answer, to a lane; and it happens only if the record is the one we know, and the lane's number is
lower. So an attempt whose fate is unknown can be made again: it takes effect once, and the lane says with what answer.
A lane is used again when its answer was seen. Attempts that arrive late find a higher number, and do nothing; more of
that in `etcd/mark.py`.

A session may move: whoever resumes it writes a new record, and from then on what the former one still had under way
does nothing. When the lease ends, because nobody keeps it alive, the record, the lanes and all leased keys are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Iterable, Iterator

import msgspec

from rallypoint.deadline import Deadline
from rallypoint.errors import SessionLost
from rallypoint.etcd import answers, messages
from rallypoint.etcd.answers import KV
from rallypoint.etcd.client import Client, LeaseGone, Refusal
from rallypoint.etcd.keeper import Keeper
from rallypoint.etcd.layout import Layout
from rallypoint.etcd.mark import Lanes, Mark, read_lane
from rallypoint.etcd.messages import Compare, Method, Txn

__all__ = ["Mark", "Session"]

LEAST_TTL_S = 2
"""The shortest time to live that etcd grants, with its usual election time-out."""


class _Record(msgspec.Struct, frozen=True):
    """What is known of a session in etcd."""

    name: str
    serial: str
    lease: int
    epoch: int
    by: str


class Session:
    """One writer, kept alive by this process."""

    def __init__(self, client: Client, keeper: Keeper, layout: Layout, identity: bytes, record: _Record) -> None:
        self.id = identity
        self.name = record.name
        self.serial = record.serial
        self.lease = record.lease
        self.place = _place(layout, identity)
        self.record = msgspec.json.encode(record)
        self.lost = asyncio.Event()
        self._client = client
        self._keeper = keeper
        self._why = ""
        self._marks: dict[int, Mark] = {}
        self._road = layout.lanes + identity.hex().encode() + b"/"
        self._lanes = Lanes(self._road + b"%d-" % record.epoch)
        self._own_lanes = Lanes(self._road + b"own-%d-" % record.epoch)
        self._own = 0
        keeper.add(self)

    @classmethod
    async def open(cls, client: Client, keeper: Keeper, layout: Layout, name: str, ttl_s: float) -> Session:
        """Begin a session."""
        identity = secrets.token_bytes(16)
        deadline = Deadline(keeper.patience_s)
        ttl_s = max(LEAST_TTL_S, math.ceil(ttl_s))
        while True:
            data = (await client.call(Method.LEASE_GRANT, messages.lease(0, ttl_s), deadline)).data
            lease, _ = answers.read_lease(data)
            record = _Record(name, secrets.token_hex(4), lease, 1, keeper.name)
            with contextlib.suppress(LeaseGone):  # it took longer than the lease lives
                await _write_record(client, _place(layout, identity), None, record, deadline)
                break
        keeper.hurry(ttl_s)
        return cls(client, keeper, layout, identity, record)

    @classmethod
    async def resume(cls, client: Client, keeper: Keeper, layout: Layout, identity: bytes) -> Session | None:
        """Take a session over from whoever has it; None where there is no such session."""
        place = _place(layout, identity)
        deadline = Deadline(keeper.patience_s)
        while True:
            found = answers.read_range((await client.call(Method.RANGE, messages.get(place).body, deadline)).data)
            if not found.kvs:
                return None
            old = msgspec.json.decode(found.kvs[0].value, type=_Record)
            record = msgspec.structs.replace(old, epoch=old.epoch + 1, by=f"{keeper.name} {secrets.token_hex(4)}")
            try:
                if await _write_record(client, place, found.kvs[0].value, record, deadline):
                    break
            except LeaseGone:
                return None
        session = cls(client, keeper, layout, identity, record)
        try:
            await session._find_lanes(deadline)
        except BaseException:
            session.forget()
            raise
        return session

    def mark(self, number: int) -> Mark:
        """Return the mark of a request of its client; the same one again for the same request."""
        mark = self._marks.get(number)
        if mark is None:
            mark = self._marks[number] = self._lanes.mark(self, number)
        return mark

    def confirm(self, numbers: Iterable[int]) -> None:
        """Note that these were answered, so that their lanes may be used again."""
        for number in numbers:
            mark = self._marks.pop(number, None)
            if mark is not None:
                self._lanes.free(mark)

    @contextlib.contextmanager
    def own_mark(self) -> Iterator[Mark]:
        """Lend the mark of a request that nobody else numbers."""
        self._own += 1
        mark = self._own_lanes.mark(self, self._own)
        try:
            yield mark
        finally:
            self._own_lanes.free(mark)

    async def end(self) -> None:
        """Give up all that hangs on it, unless another has taken it over."""
        self.forget()
        self.lost.set()
        with contextlib.suppress(Refusal, ConnectionError):
            deadline = Deadline(self._keeper.patience_s)
            txn = Txn([messages.value_is(self.place, self.record)], [messages.delete(self.place)])
            answer = await self._client.call(Method.TXN, txn.encode(), deadline)
            if answers.read_txn(answer.data).succeeded or answer.repeated:
                found = await self._client.call(Method.RANGE, messages.get(self.place).body, deadline)
                if not answers.read_range(found.data).kvs:
                    await self._client.call(Method.LEASE_REVOKE, messages.lease(self.lease), deadline)

    def ours(self) -> Compare:
        """Compare: it is alive, and nobody else has taken it over."""
        return messages.value_is(self.place, self.record)

    def forget(self) -> None:
        """Keep it alive no longer, without ending it."""
        self._keeper.remove(self)

    def end_of_it(self, record: list[KV] | None = None) -> SessionLost:
        """Note that it is over here, and return the error that says why."""
        if not self._why:
            self._why = "another gateway carries it now" if record else "its lease has ended in etcd"
        self.forget()
        self.lost.set()
        return SessionLost(
            peer=self._client.name, why=self._why, advice="make the call again to go on as a new session"
        )

    async def _find_lanes(self, deadline: Deadline) -> None:
        """Learn which requests took effect, from the lanes that the former one has left."""
        op = messages.get(self._road, messages.next_after(self._road))
        own = self._road + b"own-"
        for kv in answers.read_range((await self._client.call(Method.RANGE, op.body, deadline)).data).kvs:
            if kv.key.startswith(own):
                continue
            number, stage, _ = read_lane(kv.value)
            mark = self._marks[number] = Mark(self, number, kv.key, False)
            mark.stage = stage
            mark.doubtful = not mark.proved(kv.value, kv.modified)


def _place(layout: Layout, identity: bytes) -> bytes:
    return layout.sessions + identity.hex().encode()


async def _write_record(
    client: Client, place: bytes, former: bytes | None, record: _Record, deadline: Deadline
) -> bool:
    """Write a session's record in the place of a former one, and say whether that was still there."""
    data = msgspec.json.encode(record)
    condition = messages.version_is(place, 0) if former is None else messages.value_is(place, former)
    txn = Txn([condition], [messages.put(place, data, record.lease)], [messages.get(place)])
    result = answers.read_txn((await client.call(Method.TXN, txn.encode(), deadline)).data)
    return result.succeeded or any(kv.value == data for found in result.answers for kv in found.kvs)
