"""How values are kept in etcd: as they are, or in parts if they are too large for one request.

The parts are written first, and hang on the session's lease until the transaction that makes them visible takes them
off it: who dies half-way leaves nothing. Whoever writes or deletes a key removes all parts that it has, also those of
others who have not come to their transaction yet: they find that their parts are gone, and begin again.

A large value is read as of the revision at which it was seen. When etcd has compacted that (`Compacted`), it is read
anew.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

from rallypoint.core.records import show
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, SessionLost
from rallypoint.etcd import messages
from rallypoint.etcd.client import Compacted, Refusal
from rallypoint.etcd.ground import Ground, Seen, only
from rallypoint.etcd.layout import Parts, pack, unpack
from rallypoint.etcd.messages import Compare, Op, Txn
from rallypoint.etcd.session import Mark

__all__ = ["LEVEL", "PART_BYTES", "Values", "slices"]

PART_BYTES = 1024 * 1024
"""Above this, a value is stored in parts of so much; etcd takes 1.5 MiB a request, all told."""


LEVEL = 60
"""How many go into each of the nested transactions of one, and how many of these there may be."""

SET_BYTES = 1024 * 1024
"""How much one transaction of `multi_set` writes at most."""

T = TypeVar("T")


class Values(Ground):
    """The values of a store."""

    async def plainly(self, work: Awaitable[T]) -> T:
        """Do work that is not about a key; a refusal is told as users know it."""
        try:
            return await work
        except Refusal as error:
            raise EtcdRefused(store=self.name, key=show(self.layout.base), why=error.why) from None

    async def writing(
        self, mark: Mark, key: bytes, value: bytes, lease: int | None = None
    ) -> tuple[list[Compare], list[Op]]:
        """Return what must hold for a value to be written in the place of whatever the key had, and what writes it."""
        lease = self.lease if lease is None else lease
        identity, (first, end) = secrets.token_hex(8), self.layout.parts(False, key)
        stored, there, lasting = await self.stored(mark, False, key, value, identity, lease)
        write = messages.put(self.layout.value(key), stored, lease)
        if not lasting:
            return there, [write, messages.delete(first, end)]
        mine, next_one = self.layout.parts(False, key, identity)  # all parts go but these
        return there, [write, *lasting, messages.delete(first, mine), messages.delete(next_one, end)]

    async def stored(
        self, mark: Mark, of_item: bool, key: bytes, value: bytes, identity: str, lease: int
    ) -> tuple[bytes, list[Compare], list[Op]]:
        """Write the parts of a large value; return what is stored for it, what must hold then, and what makes it last.

        A part is written only where it is not yet: an attempt that arrives late must not put it on the session's lease
        again. What must hold is that they are still there, for whoever writes or deletes this key removes all.
        """
        if len(value) <= PART_BYTES:
            return pack(value), [], []
        session, names = mark.session, []
        for number, at in enumerate(range(0, len(value), PART_BYTES)):
            names.append(self.layout.part(of_item, key, identity, number))
            write = messages.put(names[-1], value[at : at + PART_BYTES], session.lease)
            txn = Txn([session.ours(), messages.version_is(names[-1], 0)], [write])
            try:
                await self.ties.writes.commit(txn, Deadline(self.patience_s))
            except Refusal as error:
                raise await self.refused(session, key, error) from None
        lasting = [messages.put(name, b"", lease, keep_value=True) for name in names]
        return pack(Parts(identity, len(names), len(value))), [messages.exists(name) for name in names], lasting

    def leftovers(self, key: bytes, seen: Seen) -> list[Op]:
        """Return what removes the parts of a value that was seen, and is replaced by a small one."""
        kv = only(seen[0])
        in_parts = kv is not None and isinstance(unpack(kv.value), Parts)
        return [messages.delete(*self.layout.parts(False, key))] if in_parts else []

    async def values(self, seen: Seen) -> list[bytes | None]:
        """Return the values of single keys from what was read."""
        values: list[bytes | None] = []
        for found in seen:
            kv = only(found)
            values.append(None if kv is None else await self._whole(self.layout.key(kv.key), kv.value, found.revision))
        return values

    async def valued(self, ops: Sequence[Op], within: Deadline | None = None) -> tuple[list[bytes | None], int]:
        """Read the values of single keys as of one moment; return them, and the revision."""
        while True:
            with contextlib.suppress(Compacted):
                seen = await self.look(ops, within)
                return await self.values(seen), seen[0].revision if seen else 0

    async def gather(self, of_item: bool, key: bytes, parts: Parts, revision: int) -> bytes:
        """Return a large value from its parts, as of a revision at which it was there."""
        found = [(await self.read([messages.as_of(op, revision)]))[0] for op in self._reads(of_item, key, parts)]
        return b"".join(one.kvs[0].value for one in found)

    async def regained(self, mark: Mark, key: bytes, parts: Parts, revision: int) -> bytes:
        """Return a large item that was taken, as of a revision at which it was there, when the answer was lost."""
        found = [(await self.past(mark, [op], revision))[0] for op in self._reads(True, key, parts)]
        return b"".join(one.kvs[0].value for one in found)

    def _reads(self, of_item: bool, key: bytes, parts: Parts) -> list[Op]:
        return [messages.get(self.layout.part(of_item, key, parts.id, number)) for number in range(parts.count)]

    async def _whole(self, key: bytes, stored: bytes, revision: int) -> bytes:
        value = unpack(stored)
        return value if isinstance(value, bytes) else await self.gather(False, key, value, revision)

    async def whole(self, key: bytes, stored: bytes, revision: int) -> bytes:
        """Return a value from what a feed told of it, as of a revision; SessionLost if etcd has compacted that."""
        try:
            return await self._whole(key, stored, revision)
        except Compacted as error:
            raise SessionLost(peer=self.name, why=error.why, advice="begin the watch again") from None


def slices(pairs: list[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Cut pairs into as few lists as fit into one transaction each."""
    some: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in pairs:
        if some and (len(some) == LEVEL * LEVEL // 2 or size + len(key) + len(value) > SET_BYTES):
            yield some
            some, size = [], 0
        some.append((key, value))
        size += len(key) + len(value)
    if some:
        yield some
