"""A store in etcd, without etcd: what `rallypoint.etcd` promises a gateway, on one engine in memory.

A `FakeEtcd` is the cluster. Each gateway has a `FakeSpace` of its own on it, and sessions that move between them. What
happens there happens in steps: `FakeEtcd.step` is awaited before and after each operation takes effect, and a test may
put anything in its place. A space that is `dead` never returns from a step, as that of a process that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from tests.etcd.named_engine import NamedEngine

from rallypoint.core.records import Event, Swap, TimedOut, Watch
from rallypoint.deadline import Deadline
from rallypoint.errors import SessionLost, StoreClosed
from rallypoint.etcd.watcher import PLACES


class Record:
    """What the cluster knows of a session."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.answers: dict[object, Any] = {}


class FakeEtcd:
    """The cluster."""

    def __init__(self) -> None:
        self.engines: dict[str, NamedEngine] = {}
        self.histories: dict[str, History] = {}
        self.records: dict[bytes, Record] = {}
        self.bell = asyncio.Event()
        self.log: list[tuple[str, str]] = []
        """Every operation that took effect, in order: who, and what."""

    def space(self, prefix: str = "p", by: str = "a") -> FakeSpace:
        return FakeSpace(self, prefix, by)

    async def step(self, space: FakeSpace, operation: str, after: bool) -> None:
        await asyncio.sleep(0)

    def ring(self) -> None:
        """Deliver events, and let all who wait look again."""
        for engine in self.engines.values():
            for watch, event in engine.take():
                assert isinstance(watch, Watch)
                watch.owner.came(event)  # type: ignore[attr-defined]
        self.bell.set()
        self.bell = asyncio.Event()

    def end(self, identity: bytes) -> None:
        """Let the lease of a session end."""
        if self.records.pop(identity, None) is not None:
            for engine in self.engines.values():
                engine.end(identity)
            self.ring()


class History:
    """All that ever changed."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def came(self, event: Event) -> None:
        self.events.append(event)


class FakeMark:
    def __init__(self, session: FakeSession, number: object) -> None:
        self.session, self.number = session, number
        self.doubtful = False


class FakeSession:
    """A session, as one gateway has it."""

    def __init__(self, etcd: FakeEtcd, identity: bytes) -> None:
        self.etcd = etcd
        self.id = identity
        self.record = etcd.records[identity]
        self.name = self.record.name
        self.epoch = self.record.epoch
        self.lost = asyncio.Event()
        self.forgotten = False

    def ours(self) -> bool:
        return self.etcd.records.get(self.id) is self.record and self.record.epoch == self.epoch

    def check(self) -> None:
        if not self.ours():
            self.lost.set()
            raise SessionLost(peer="fake", why="it is over, or another's")

    def mark(self, number: int) -> FakeMark:
        return FakeMark(self, number)

    @contextlib.contextmanager
    def own_mark(self) -> Iterator[FakeMark]:
        yield FakeMark(self, object())

    def confirm(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.record.answers.pop(number, None)

    def forget(self) -> None:
        self.forgotten = True

    async def end(self) -> None:
        self.forget()
        self.lost.set()
        await asyncio.sleep(0)
        if self.ours():
            self.etcd.end(self.id)


class FakeFeed:
    def __init__(self, space: FakeSpace, prefix: bytes) -> None:
        self._space, self._prefix = space, prefix
        self._events: deque[Event] = deque()
        self._over: Exception | None = None
        self._bell = asyncio.Event()

    def start(self, revision: int) -> None:
        self._space.etcd.ring()
        for event in self._space.etcd.histories[self._space.prefix].events:
            if event.revision > revision and event.key.startswith(self._prefix):
                self.came(event)
        self._watch = self._space.engine.watch(self._prefix, self, 0)

    def came(self, event: Event) -> None:
        self._events.append(event._replace(revision=event.revision * PLACES))
        self._bell.set()

    def fail(self, error: Exception) -> None:
        self._over = error
        self._bell.set()

    async def next(self) -> Event:
        while not self._events:
            if self._over is not None:
                raise self._over
            self._bell.clear()
            await self._bell.wait()
        return self._events.popleft()

    def close(self) -> None:
        self._space.engine.drop(self._watch)
        self.fail(StoreClosed(store="fake"))


class FakeSpace:
    """One gateway's way to the cluster."""

    def __init__(self, etcd: FakeEtcd, prefix: str, by: str) -> None:
        self.etcd, self.prefix, self.by = etcd, prefix, by
        if prefix not in etcd.engines:
            etcd.engines[prefix] = NamedEngine()
            etcd.histories[prefix] = History()
            etcd.engines[prefix].watch(b"", etcd.histories[prefix], 0)
        self.engine = etcd.engines[prefix]
        self.name = f"fake://{prefix}"
        self.identity = prefix.encode()
        self.dead = False
        self.feeds: list[FakeFeed] = []

    def below(self, prefix: str) -> FakeSpace:
        return FakeSpace(self.etcd, f"{self.prefix}/{prefix}", self.by)

    async def close(self) -> None:
        pass

    async def settle(self) -> None:
        pass

    async def open_session(self, name: str, ttl_s: float | None = None) -> FakeSession:
        await self._step("open_session")
        identity = secrets.token_bytes(16)
        self.etcd.records[identity] = Record(name)
        return FakeSession(self.etcd, identity)

    async def resume_session(self, identity: bytes) -> FakeSession | None:
        await self._step("resume_session")
        record = self.etcd.records.get(identity)
        if record is None:
            return None
        record.epoch += 1
        return FakeSession(self.etcd, identity)

    async def _step(self, operation: str, after: bool = False) -> None:
        if self.dead:
            await asyncio.Event().wait()
        await self.etcd.step(self, operation, after)
        if self.dead:
            await asyncio.Event().wait()

    async def _change(self, mark: FakeMark, operation: str, call: Callable[[], Any]) -> Any:
        """Carry out a change, once; the answer of one that was carried out before is the same."""
        await self._step(operation)
        mark.session.check()
        answers = mark.session.record.answers
        if mark.number not in answers:
            answers[mark.number] = call()
            self.etcd.log.append((self.by, operation))
            self.etcd.ring()
        answer = answers[mark.number]
        await self._step(operation, after=True)
        return answer

    async def _read(self, operation: str, call: Callable[[], Any]) -> Any:
        await self._step(operation)
        return call()

    async def _until(self, true: Callable[[], bool], deadline: Deadline) -> bool:
        while not true():
            bell = asyncio.ensure_future(self.etcd.bell.wait())
            try:
                done, _ = await asyncio.wait((bell,), timeout=min(deadline.remaining(), 1e8))
            finally:
                bell.cancel()
            if self.dead:
                await asyncio.Event().wait()
            if not done:
                return false_unless(true)
        return True

    # Reads and waits

    async def get(self, key: bytes) -> bytes | None:
        return await self._read("get", lambda: self.engine.get(key))

    async def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._read("multi_get", lambda: self.engine.multi_get(keys))

    async def check(self, keys: Sequence[bytes]) -> bool:
        return await self._read("check", lambda: self.engine.check(keys))

    async def num_keys(self, prefix: bytes) -> int:
        return await self._read("num_keys", lambda: self.engine.num_keys(prefix))

    async def list_keys(self, prefix: bytes) -> list[bytes]:
        return await self._read("list_keys", lambda: self.engine.list_keys(prefix))

    async def queue_len(self, key: bytes) -> int:
        return await self._read("queue_len", lambda: self.engine.queue_len(key))

    async def revision(self) -> int:
        return await self._read("revision", lambda: self.engine.revision)

    async def wait(self, keys: Sequence[bytes], deadline: Deadline) -> TimedOut | None:
        await self._step("wait")
        if await self._until(lambda: self.engine.check(keys), deadline):
            return None
        return TimedOut(tuple(key for key in keys if not self.engine.check((key,))))

    async def wait_values(self, keys: Sequence[bytes], deadline: Deadline) -> list[bytes] | TimedOut:
        await self._step("wait_values")
        if await self._until(lambda: None not in self.engine.multi_get(keys), deadline):
            return [value for value in self.engine.multi_get(keys) if value is not None]
        return TimedOut(tuple(key for key in keys if self.engine.get(key) is None))

    async def wait_item(self, mark: FakeMark, key: bytes, deadline: Deadline) -> bytes | TimedOut:
        await self._step("wait_item")
        answers = mark.session.record.answers
        while mark.number not in answers:
            if not await self._until(lambda: self.engine.queue_len(key) > 0, deadline):
                return TimedOut((key,))
            mark.session.check()
            answers[mark.number] = self.engine.queue_pop(key)
            self.etcd.log.append((self.by, "wait_item"))
        item: bytes = answers[mark.number]
        try:
            await self._step("wait_item", after=True)
        except asyncio.CancelledError:
            self.engine.queue_push(key, item, front=True)
            del answers[mark.number]
            self.etcd.ring()
            raise
        return item

    async def barrier(self, mark: FakeMark, key: bytes, size: int, deadline: Deadline) -> TimedOut | None:
        await self._change(mark, "barrier", lambda: self.engine.add(key, 1))

        def full() -> bool:
            return int(self.engine.get(key) or 0) >= size

        try:
            if await self._until(full, deadline):
                return None
        except asyncio.CancelledError:
            self.engine.add(key, -1)
            raise
        self.engine.add(key, -1)
        return TimedOut((key,))

    def feed(self, prefix: bytes) -> FakeFeed:
        self.feeds.append(FakeFeed(self, prefix))
        return self.feeds[-1]

    async def whole(self, key: bytes, stored: bytes, revision: int) -> bytes:
        return stored

    # Changes

    def set(self, mark: FakeMark, key: bytes, value: bytes) -> Awaitable[None]:
        return self._change(mark, f"set {key.decode()}", lambda: self.engine.set(key, value))

    def multi_set(self, mark: FakeMark, pairs: Sequence[tuple[bytes, bytes]]) -> Awaitable[None]:
        named = " ".join(key.decode() for key, _ in pairs)
        return self._change(mark, f"set {named}", lambda: self.engine.multi_set(pairs))

    def add(self, mark: FakeMark, key: bytes, amount: int) -> Awaitable[int]:
        return self._change(mark, f"add {key.decode()}", lambda: self.engine.add(key, amount))

    def append(self, mark: FakeMark, key: bytes, value: bytes) -> Awaitable[None]:
        return self._change(mark, f"append {key.decode()}", lambda: self.engine.append(key, value))

    def compare_set(self, mark: FakeMark, key: bytes, expected: bytes, desired: bytes) -> Awaitable[bytes]:
        return self._change(mark, "compare_set", lambda: self.engine.compare_set(key, expected, desired))

    def swap(self, mark: FakeMark, key: bytes, expected: bytes | None, desired: bytes) -> Awaitable[Swap]:
        return self._change(mark, "swap", lambda: self.engine.swap(key, expected, desired))

    def delete(self, mark: FakeMark, key: bytes) -> Awaitable[bool]:
        return self._change(mark, f"delete {key.decode()}", lambda: self.engine.delete(key))

    def delete_prefix(self, mark: FakeMark, prefix: bytes) -> Awaitable[int]:
        return self._change(mark, "delete_prefix", lambda: self.engine.delete_prefix(prefix))

    def queue_push(self, mark: FakeMark, key: bytes, value: bytes) -> Awaitable[None]:
        return self._change(mark, "queue_push", lambda: self.engine.queue_push(key, value))

    def queue_pop(self, mark: FakeMark, key: bytes) -> Awaitable[bytes | None]:
        return self._change(mark, "queue_pop", lambda: self.engine.queue_pop(key))

    def put_back(self, session: FakeSession, key: bytes, value: bytes) -> Awaitable[None]:
        mark = FakeMark(session, object())
        return self._change(mark, "put_back", lambda: self.engine.queue_push(key, value, front=True))

    def lease_key(self, mark: FakeMark, key: bytes, value: bytes) -> Awaitable[None]:
        return self._change(mark, "lease_key", lambda: self.engine.set(key, value, mark.session.id))

    def unlease(self, mark: FakeMark, key: bytes) -> Awaitable[bool]:
        return self._change(mark, "unlease", lambda: self.engine.unlease(key, mark.session.id))


def false_unless(true: Callable[[], bool]) -> bool:
    """When time is up: look once more."""
    return true()
