"""How a change is made in etcd, and how values are kept there: what all operations of `etcd/space.py` rest on.

A change is one transaction: *read, decide, write if nobody was faster*. What a decision rests on, the transaction
compares again, so it holds at the moment of the change; when it does not, the answer brings what is there now, and the
decision is made anew. Where a guess is likely to be right (a blind write; an expected value; a counter that only we
change), the first transaction is sent without reading. Each carries its `Mark` (`etcd/session.py`), so that an attempt
whose fate is unknown is made again and takes effect once.

A value that is too large for one request is written in parts first, which hang on the session's lease until the
transaction that makes them visible takes them off it: who dies half-way leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from rallypoint.core.records import show
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, SessionLost
from rallypoint.etcd import messages
from rallypoint.etcd.answers import KV, Found, Result
from rallypoint.etcd.batch import Reads, Writes
from rallypoint.etcd.client import Client, LeaseGone, Refusal
from rallypoint.etcd.keeper import Keeper
from rallypoint.etcd.layout import Layout, Parts, pack, unpack
from rallypoint.etcd.messages import Compare, Op, Txn
from rallypoint.etcd.run import RunLease
from rallypoint.etcd.session import Mark, Session
from rallypoint.etcd.watcher import Watcher

__all__ = ["PART_BYTES", "Decision", "Ground", "Seen", "Ties", "as_seen", "dated", "one_of", "only"]

PART_BYTES = 1024 * 1024
"""Above this, a value is stored in parts of so much; etcd takes 1.5 MiB a request, all told."""

MANY = 100
"""How many requests go into one transaction: etcd takes 128."""

AT_ONCE = 8
"""How many transactions read at once what one does not hold."""

LONGEST_S = 1e6
"""How long one timer runs."""


class Decision(NamedTuple):
    """What is to be done about a request: its answer, what must hold for that, and what is written."""

    answer: Any
    compares: Sequence[Compare] = ()
    ops: Sequence[Op] = ()


Seen = list[Found]
"""What was read, to decide on."""

Decide = Callable[[Seen], Awaitable[Decision]]


class Ties:
    """What a process has with one cluster, and all its stores there share."""

    def __init__(self, client: Client, cluster: int, by: str, ttl_s: float, patience_s: float) -> None:
        self.client = client
        self.cluster = cluster
        self.ttl_s, self.patience_s = ttl_s, patience_s
        self.reads = Reads(client)
        self.writes = Writes(client)
        self.watcher = Watcher(client)
        self.keeper = Keeper(client, by, ttl_s, patience_s)
        self.run: RunLease | None = None

    async def close(self) -> None:
        """Let go of everything; sessions are not ended by this."""
        self.watcher.close()
        self.keeper.close()
        await self.client.close()


class Ground:
    """The ground that a store in etcd stands on: the keys under one prefix; for the tasks of one event loop."""

    def __init__(self, ties: Ties, prefix: str) -> None:
        self.ties = ties
        self.name = ties.client.name
        self.layout = Layout(prefix)
        self.patience_s = ties.patience_s
        self._loose: set[asyncio.Future[Any]] = set()

    @property
    def lease(self) -> int:
        """The lease that all values are written under: 0, or that of a run."""
        return 0 if self.ties.run is None else self.ties.run.lease

    # Changes

    async def change(
        self, mark: Mark, key: bytes, decide: Decide, looks: Sequence[Op] = (), seen: Seen | None = None
    ) -> tuple[Any, int | None]:
        """Make the change that is decided on what was seen, as often as it takes.

        Return its answer, and the revision of the change, or None where nothing was changed just now. What is `seen`
        may be a guess, or nothing at all, where the decision can be made without.
        """
        deadline = Deadline(self.patience_s)
        if seen is None:
            found = await self.look([*looks, *(mark.look() if mark.doubtful else ())])
            if mark.doubtful and mark.took_effect(found[-2].kvs, found[-1].kvs):
                return mark.answer, None
            seen = found[: len(looks)]
        while True:
            decision = await decide(seen)
            if not decision.ops and not mark.doubtful:
                return decision.answer, None
            success = [*decision.ops, mark.proof(decision.answer)]
            txn = Txn([*mark.guards(), *decision.compares], success, [*mark.look(), *looks])
            result = await self.commit(mark, key, txn, deadline)
            if result.succeeded:
                return decision.answer, result.revision
            record, lane, *seen = dated(result.answers, result.revision)
            if mark.took_effect(record.kvs, lane.kvs):
                return mark.answer, None

    async def blindly(self, mark: Mark, key: bytes, ops: Sequence[Op]) -> None:
        """Write without looking."""
        decision = Decision(None, (), ops)

        async def decide(_: Seen) -> Decision:
            return decision

        await self.change(mark, key, decide, (), [])

    async def commit(self, mark: Mark, key: bytes, txn: Txn, deadline: Deadline) -> Result:
        """Make one attempt at a transaction that the mark guards."""
        try:
            result, repeated = await self.ties.writes.commit(txn, deadline)
        except LeaseGone:
            raise await self._lease_gone(mark.session) from None
        except Refusal as error:
            raise EtcdRefused(store=self.name, key=show(key), why=error.why) from None
        except BaseException:
            mark.doubtful = True
            raise
        if result.succeeded:
            mark.wrote()
        elif repeated:
            mark.doubtful = True
        return result

    async def _lease_gone(self, session: Session) -> SessionLost:
        """Return the error for a change whose lease has ended: that of the session, or that of the run."""
        if self.ties.run is not None and (await self.look([messages.get(session.place)]))[0].kvs:
            return self.ties.run.end_of_it()
        return session.end_of_it()

    def loosely(self, work: Awaitable[Any]) -> None:
        """See work through that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._loose.add(task)
        task.add_done_callback(self._loosened)

    def _loosened(self, task: asyncio.Future[Any]) -> None:
        self._loose.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()

    async def settle(self) -> None:
        """Return when all is done that nobody waits for."""
        while self._loose:
            await asyncio.wait(self._loose)

    # Values

    async def writing(self, mark: Mark, key: bytes, value: bytes, lease: int | None = None) -> list[Op]:
        """Return what writes a value, in the place of whatever the key had."""
        lease = self.lease if lease is None else lease
        stored, ops = await self.stored(mark, False, key, value, secrets.token_hex(8), lease)
        write = messages.put(self.layout.value(key), stored, lease)
        return [write, *ops] if ops else [write, messages.delete(*self.layout.parts(False, key))]

    async def stored(
        self, mark: Mark, of_item: bool, key: bytes, value: bytes, identity: str, lease: int
    ) -> tuple[bytes, list[Op]]:
        """Return what is stored for a value, and what makes its parts last; the parts themselves are written here."""
        if len(value) <= PART_BYTES:
            return pack(value), []
        session, names = mark.session, []
        for number, at in enumerate(range(0, len(value), PART_BYTES)):
            names.append(self.layout.part(of_item, key, identity, number))
            write = messages.put(names[-1], value[at : at + PART_BYTES], session.lease)
            try:
                await self.ties.writes.commit(Txn([session.ours()], [write]), Deadline(self.patience_s))
            except LeaseGone:
                raise await self._lease_gone(session) from None
            except Refusal as error:
                raise EtcdRefused(store=self.name, key=show(key), why=error.why) from None
        last = [messages.put(name, b"", lease, keep_value=True) for name in names]
        return pack(Parts(identity, len(names), len(value))), last

    async def values(self, seen: Seen) -> list[bytes | None]:
        """Return the values of single keys from what was read."""
        values: list[bytes | None] = []
        for found in seen:
            kv = only(found)
            values.append(None if kv is None else await self.whole(self.layout.key(kv.key), kv.value, found.revision))
        return values

    async def gather(self, of_item: bool, key: bytes, parts: Parts, revision: int) -> bytes:
        names = [self.layout.part(of_item, key, parts.id, number) for number in range(parts.count)]
        found = [(await self.look([messages.as_of(messages.get(name), revision)]))[0] for name in names]
        return b"".join(one.kvs[0].value for one in found)

    async def whole(self, key: bytes, stored: bytes, revision: int) -> bytes:
        """Return a value from what is stored for it, as of a revision."""
        value = unpack(stored)
        return value if isinstance(value, bytes) else await self.gather(False, key, value, revision)

    # Reading

    async def look(self, ops: Sequence[Op]) -> Seen:
        """Read as of one moment."""
        deadline = Deadline(self.patience_s)
        unique = list(dict.fromkeys(ops))
        try:
            seen = await self.ties.reads.ranges(unique[:MANY], deadline)
            later = [messages.as_of(op, seen[0].revision) for op in unique[MANY:]]
            for at in range(0, len(later), MANY * AT_ONCE):
                some = [later[here : here + MANY] for here in range(at, min(len(later), at + MANY * AT_ONCE), MANY)]
                for found in await asyncio.gather(*(self.ties.reads.ranges(part, deadline) for part in some)):
                    seen += found
        except Refusal as error:
            raise EtcdRefused(store=self.name, key=show(self.layout.base), why=error.why) from None
        if len(unique) == len(ops):
            return seen
        known = dict(zip(unique, seen, strict=True))
        return [known[op] for op in ops]

    async def change_of(self, spans: Sequence[tuple[bytes, bytes]], revision: int, deadline: Deadline) -> bool:
        """Wait until something in these ranges may have changed after a revision; say whether, or time is up."""
        if deadline.expired():
            return False
        async with contextlib.AsyncExitStack() as stack:
            futures = [await stack.enter_async_context(self.ties.watcher.waiting(*span, revision)) for span in spans]
            return await one_of(futures, deadline)


async def one_of(futures: Sequence[asyncio.Future[Any]], deadline: Deadline) -> bool:
    """Wait for one of these; say whether it came in time. Timers of event loops may go off a little early."""
    while True:
        left_s = min(deadline.remaining(), LONGEST_S)
        done, _ = await asyncio.wait(futures, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if done or deadline.expired():
            return bool(done)


def only(found: Found) -> KV | None:
    """Return the one key that was asked for, if it is there."""
    return found.kvs[0] if found.kvs else None


def dated(answers: list[Any], revision: int) -> Seen:
    """Return what a transaction read, as of its revision."""
    return [found._replace(revision=revision) for found in answers]


def as_seen(name: bytes, seen: Seen) -> Compare:
    """Compare: a key is as it was seen."""
    kv = only(seen[0])
    return messages.modified_at(name, kv.modified if kv else 0)
