"""A store in etcd: every operation, as transactions; the meaning is that of `core/engine.py`.

How a change is made is in `etcd/ground.py`, where things are in `etcd/layout.py`. A wait reads, and if what it waits
for is not there, waits for a change after the revision that it read.
"""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Callable, Sequence

from rallypoint.core.records import Swap, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused
from rallypoint.etcd import answers, messages
from rallypoint.etcd.address import Address
from rallypoint.etcd.answers import KV
from rallypoint.etcd.client import Client, Refusal
from rallypoint.etcd.counters import Counters
from rallypoint.etcd.ground import Decision, Seen, as_seen, only
from rallypoint.etcd.layout import pack, unpack
from rallypoint.etcd.messages import Compare, Method, Txn
from rallypoint.etcd.queues import Queues
from rallypoint.etcd.run import RunLease
from rallypoint.etcd.session import Mark, Session
from rallypoint.etcd.ties import Ties
from rallypoint.etcd.values import LEVEL, PART_BYTES, slices
from rallypoint.etcd.watcher import Feed

__all__ = ["Space"]

TTL_S = 10.0
"""How long a session lives on when nobody keeps it alive."""

PATIENCE_S = 30.0
"""How long a call that does not wait for anybody may take, at most, while etcd does not answer."""


class Space(Queues, Counters):
    """One store in etcd."""

    @classmethod
    async def connect(cls, address: Address, by: str, timeout_s: float, ttl_s: float = TTL_S) -> Space:
        """Find a cluster; raise NoQuorum where it does not answer in time."""
        client = Client(address.endpoints, address.access, address.name)
        deadline = Deadline(timeout_s)
        try:
            cluster = await client.prefer_leader(deadline)
            name = urllib.parse.quote(address.space, safe="")  # else one store would be among the keys of another
            space = cls(Ties(client, cluster, by, ttl_s, min(timeout_s, PATIENCE_S)), name)
            await client.call(Method.RANGE, messages.get(space.layout.executor).body, deadline)  # a majority answers
            if address.run:
                place = space.layout.run(address.run)
                space.ties.run = await RunLease.join(client, space.ties.keeper, place, address.run, deadline)
        except BaseException as error:
            await client.close()
            if isinstance(error, Refusal):
                raise EtcdRefused(store=address.name, key=address.space, why=error.why) from None
            raise
        return space

    def below(self, prefix: str) -> Space:
        """Return the store under a further prefix."""
        return Space(self.ties, self.layout.base.decode() + prefix)

    @property
    def identity(self) -> bytes:
        """What is the same for all who use this store, and no other."""
        return hashlib.blake2b(b"%d/%s" % (self.ties.cluster, self.layout.base), digest_size=16).digest()

    async def open_session(self, name: str, ttl_s: float | None = None) -> Session:
        """Begin a session."""
        ties = self.ties
        return await self.plainly(Session.open(ties.client, ties.keeper, self.layout, name, ttl_s or ties.ttl_s))

    async def resume_session(self, identity: bytes) -> Session | None:
        """Take over a session; None where there is no such one."""
        return await self.plainly(Session.resume(self.ties.client, self.ties.keeper, self.layout, identity))

    async def close(self) -> None:
        """Let go of the cluster; sessions are not ended by this."""
        await self.ties.close()

    # Reads

    async def get(self, key: bytes) -> bytes | None:
        """Return a value, or None where there is no such key."""
        return (await self.multi_get((key,)))[0]

    def get_directly(self, key: bytes) -> bytes | None:
        """Return a value that is there and small, in any thread; None where it is not, or nobody answered."""
        data = self.ties.client.ask_directly(Method.RANGE, messages.get(self.layout.value(key)).body)
        found = None if data is None else only(answers.read_range(data))
        value = None if found is None else unpack(found.value)
        return value if isinstance(value, bytes) else None

    async def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values as of one moment, None where there is no such key."""
        return (await self.valued([messages.get(self.layout.value(key)) for key in keys]))[0]

    async def check(self, keys: Sequence[bytes]) -> bool:
        """Say whether all the keys exist now, as keys or as queues."""
        return not (await self._missing(keys))[0]

    async def num_keys(self, prefix: bytes) -> int:
        """Count the keys that start with a prefix."""
        first, end = self.layout.values(prefix)
        return (await self.look([messages.tally(first, end)]))[0].total

    async def list_keys(self, prefix: bytes) -> list[bytes]:
        """List the keys that start with a prefix, oldest first."""
        first, end = self.layout.values(prefix)
        found = (await self.look([messages.get(first, end, names_only=True, oldest_first=True)]))[0]
        return [self.layout.key(kv.key) for kv in found.kvs]

    # Waits

    async def wait(self, keys: Sequence[bytes], deadline: Deadline) -> TimedOut | None:
        """Return when all the keys exist at once."""
        while True:
            missing, revision = await self._missing(keys, deadline)
            if not missing:
                return None
            value = self.layout.value(missing[0])
            if not await self.change_of(((value, b""), self.layout.queue(missing[0])), revision, deadline):
                return TimedOut(tuple(missing))

    async def wait_values(self, keys: Sequence[bytes], deadline: Deadline) -> list[bytes] | TimedOut:
        """Return the values of the keys once all exist."""
        ops = [messages.get(self.layout.value(key)) for key in keys]
        while True:
            values, revision = await self.valued(ops, deadline)
            missing = [key for key, value in zip(keys, values, strict=True) if value is None]
            if not missing:
                return [value for value in values if value is not None]
            where = (self.layout.value(missing[0]), b"")
            if not await self.change_of((where,), revision, deadline):
                return TimedOut(tuple(dict.fromkeys(missing)))

    def feed(self, prefix: bytes) -> Feed:
        """Return what will deliver every change of keys that start with a prefix, once started at a revision."""
        first, end = self.layout.values(prefix)
        return Feed(self.ties.watcher, first, end, self.layout.strip)

    # Changes

    async def set(self, mark: Mark, key: bytes, value: bytes) -> None:
        """Write a value."""
        await self._write(mark, key, value)

    async def lease_key(self, mark: Mark, key: bytes, value: bytes) -> None:
        """Write a key that goes with the session of the mark."""
        await self._write(mark, key, value, mark.session.lease)

    async def _write(self, mark: Mark, key: bytes, value: bytes, lease: int | None = None) -> None:
        async def decide(_: Seen) -> Decision:
            return Decision(None, *await self.writing(mark, key, value, lease))

        await self.change(mark, key, decide, (), [])

    async def multi_set(self, mark: Mark, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Write all pairs: as one change as far as etcd can (`LEVEL`, `SET_BYTES`), else as several, stage by stage."""
        for stage, some in enumerate(slices(list(dict(pairs).items()))):
            if stage > mark.stage:
                mark.advance()
            if stage == mark.stage and not mark.proven:
                mark.doubtful = mark.doubtful or stage > 0
                await self._set_some(mark, some)

    async def _set_some(self, mark: Mark, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Write pairs as one change; as a rule none of the keys had a value in parts, and then that is all."""
        spans = [self.layout.parts(False, key) for key, _ in pairs]
        no_parts = messages.none_in(min(spans)[0], max(spans)[1])

        async def decide(seen: Seen) -> Decision:
            writes = [await self.writing(mark, key, value) for key, value in pairs]
            small = not seen and all(len(ops) == 2 for _, ops in writes)
            ops = [ops[0] for _, ops in writes] if small else [op for _, ops in writes for op in ops]
            there = [compare for compares, _ in writes for compare in compares]
            nested = [Txn((), ops[at : at + LEVEL]).as_op() for at in range(0, len(ops), LEVEL)]
            return Decision(None, [no_parts] if small else there, nested)

        look = messages.get(self.layout.executor, names_only=True)  # anything: to tell a second attempt from the first
        await self.change(mark, pairs[0][0], decide, [look], [])

    async def append(self, mark: Mark, key: bytes, value: bytes) -> None:
        """Add bytes to the end of a value."""
        name = self.layout.value(key)

        async def decide(seen: Seen) -> Decision:
            old = (await self.values(seen))[0] or b""
            there, ops = await self.writing(mark, key, old + value)
            return Decision(None, [as_seen(name, seen), *there], ops)

        await self.change(mark, key, decide, [messages.get(name)])

    async def compare_set(self, mark: Mark, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Do as PyTorch does: an empty expectation may create; on a missing key any other is returned."""
        won, value = await self._exchange(mark, key, expected, desired, creates=not expected)
        return desired if won else expected if value is None else value

    async def swap(self, mark: Mark, key: bytes, expected: bytes | None, desired: bytes) -> Swap:
        """Write if the value is the expected one (None: if there is no such key); say whether it was."""
        won, value = await self._exchange(mark, key, expected, desired, creates=expected is None)
        return Swap(won, desired if won else value)

    async def delete(self, mark: Mark, key: bytes) -> bool:
        """Delete a key, and say whether it was there."""
        return await self._delete_if(mark, key, messages.exists, lambda kv: True)

    async def unlease(self, mark: Mark, key: bytes) -> bool:
        """Delete a key if the session of the mark still leases it."""
        lease = mark.session.lease
        return await self._delete_if(
            mark, key, lambda name: messages.lease_is(name, lease), lambda kv: kv.lease == lease
        )

    async def delete_prefix(self, mark: Mark, prefix: bytes) -> int:
        """Delete every key and queue whose name starts with a prefix, and return how many there were.

        What there was is read in the same transaction, or, when its answer was lost, as of the revision before it.
        """
        layout = self.layout
        spans = [layout.values(prefix), layout.queues(prefix)]
        looks = [messages.get(*span, names_only=True) for span in spans]
        spans += [layout.all_parts(False, prefix), layout.all_parts(True, prefix)]

        async def decide(_: Seen) -> Decision:
            return Decision(None, (), [*looks, *(messages.delete(*span) for span in spans)])

        _, at, there = await self.change(mark, prefix, decide, (), [])
        values, items, *_ = there or await self.past(mark, looks, at - 1)
        return len(values.kvs) + len({layout.queue_name(kv.key) for kv in items.kvs})

    async def revision(self) -> int:
        """Return the revision that etcd is at now."""
        return (await self.look([messages.get(self.layout.sessions)]))[0].revision

    async def _missing(self, keys: Sequence[bytes], within: Deadline | None = None) -> tuple[list[bytes], int]:
        """Return which of the keys exist neither as a key nor as a queue, and as of which revision."""
        if not keys:
            return [], 0
        ops = []
        for key in keys:
            ops += [messages.get(self.layout.value(key), names_only=True)]
            ops += [messages.get(*self.layout.queue(key), limit=1, names_only=True)]
        seen = await self.look(ops, within)
        missing = [key for at, key in enumerate(keys) if not seen[2 * at].kvs and not seen[2 * at + 1].kvs]
        return list(dict.fromkeys(missing)), seen[0].revision

    async def _exchange(
        self, mark: Mark, key: bytes, expected: bytes | None, desired: bytes, creates: bool
    ) -> tuple[bool, bytes | None]:
        """Write if the value is the expected one, or if there is none and it `creates`; return whether, and what is."""
        name = self.layout.value(key)
        small = len(expected or b"") <= PART_BYTES
        known: dict[bytes, bytes | None] = {}

        async def decide(seen: Seen) -> Decision:
            if seen:
                kv, value = only(seen[0]), (await self.values(seen))[0]
                if not (creates if value is None else value == expected):
                    if kv is not None:
                        known[kv.value] = value
                    return Decision((False, kv and kv.value), [as_seen(name, seen)])
                condition = as_seen(name, seen)
            else:  # it will be as expected
                condition = messages.version_is(name, 0) if creates else messages.value_is(name, pack(expected or b""))
            there, ops = await self.writing(mark, key, desired)
            return Decision((True, None), [condition, *there], ops)

        (won, stored), at, _ = await self.change(mark, key, decide, [messages.get(name)], [] if small else None)
        if stored is None or stored in known:
            return won, known.get(stored)
        return won, await self.whole(key, stored, at)

    async def _delete_if(
        self, mark: Mark, key: bytes, condition: Callable[[bytes], Compare], holds: Callable[[KV], bool]
    ) -> bool:
        """Delete a key if a condition holds, and say whether it did."""
        name = self.layout.value(key)
        yes = Decision(
            True, [condition(name)], [messages.delete(name), messages.delete(*self.layout.parts(False, key))]
        )

        async def decide(seen: Seen) -> Decision:
            return yes if not seen or (seen[0].kvs and holds(seen[0].kvs[0])) else Decision(False)

        return bool((await self.change(mark, key, decide, [messages.get(name, names_only=True)], [])).answer)
