"""A world without I/O for the real client of etcd: a loop whose time is made up, and a network of seeded accidents.

`World` runs coroutines on a `FakeEtcd`. Every attempt at a call may be lost before it arrives; arrive, and its answer
be lost; arrive *late*, after its caller has given up on it and made others; or be answered. Nothing that was sent is
ever taken back: whoever is cancelled may still have its request carried out. Watch streams break, hang and lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import secrets
import selectors
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

import grpc
import grpc.aio
from tests.etcd.fake import FakeEtcd, Refused, within

from rallypoint.etcd.client import Client, Endpoint
from rallypoint.etcd.messages import Method
from rallypoint.etcd.protobuf import fields
from rallypoint.etcd.space import Space
from rallypoint.etcd.ties import Ties

TTL_S, LONG_TTL_S = 5.0, 1000.0


class Clock(selectors.SelectSelector):
    """A selector that never waits: time goes on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all wait, and nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class Loop(asyncio.SelectorEventLoop):
    """An event loop in made-up time."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class World:
    """One cluster, its network, and the dice that all is decided by."""

    def __init__(self, seed: int, trouble: float = 0.3) -> None:
        self.dice = random.Random(seed)
        self.trouble = trouble
        """How much goes wrong, from 0 to 1."""

        self.etcd = FakeEtcd()
        self.loop = Loop()
        self.late = 0
        self.kept_at: dict[int, float] = {}

    @contextlib.contextmanager
    def made_up(self) -> Iterator[None]:
        """Have the clock and all names made up."""
        with (
            mock.patch.object(time, "monotonic", self.loop.time),
            mock.patch.object(secrets, "token_bytes", self.dice.randbytes),
            mock.patch.object(secrets, "token_hex", lambda size: self.dice.randbytes(size).hex()),
        ):
            yield

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something to its end, and end all that is left then."""
        with self.made_up():
            try:
                return self.loop.run_until_complete(self._with_leases(work))
            finally:
                while left := asyncio.all_tasks(self.loop):
                    for task in left:
                        task.cancel()
                    self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))
                self.loop.close()

    async def _with_leases(self, work: Awaitable[Any]) -> Any:
        expiring = asyncio.ensure_future(self._expire())
        try:
            return await work
        finally:
            expiring.cancel()

    async def _expire(self) -> None:
        while True:
            await self.passes(0.5)
            for lease, ttl_s in list(self.etcd.leases.items()):
                if self.kept_at.setdefault(lease, self.loop.time()) + ttl_s < self.loop.time():
                    self.etcd.expire(lease)

    def machine(self, name: str, patience_s: float = 1e6, ttl_s: float = LONG_TTL_S) -> Space:
        """Return a store as one process has it."""
        ties = Ties(FakeClient(self), 7, name, ttl_s, patience_s)
        return Space(ties, "sim")

    async def passes(self, duration_s: float) -> None:
        """Let made-up time go by."""
        over = self.loop.create_future()
        self.loop.call_later(duration_s, lambda: over.done() or over.set_result(None))
        await over

    def chance(self, likely: float) -> bool:
        return self.dice.random() < likely * self.trouble

    def delay_s(self) -> float:
        """Return how long a message is under way: mostly little, at times longer than anybody waits."""
        return self.dice.uniform(0, 12) if self.chance(0.3) else self.dice.expovariate(200)


class FakeClient(Client):
    """The real client, on endpoints that are not."""

    def __init__(self, world: World) -> None:
        self.name = "etcd://sim"
        self.endpoints = [FakeEndpoint(world, self, f"member{at}") for at in range(3)]
        self._current = self.endpoints[0]
        self._token = ""
        self._closed = False
        self._access = mock.Mock(user="")
        self.dead = False
        """Whether its machine is dead: then nothing comes of anything any more."""

        self._world = world

    def stream(self, method: str, endpoint: Endpoint, timeout_s: float | None = None) -> Any:
        return (FakeWatch if method == Method.WATCH else FakeBeats)(self._world, self)

    async def close(self) -> None:
        self._closed = True


class FakeEndpoint(Endpoint):
    """An endpoint without a channel."""

    def __init__(self, world: World, client: FakeClient, address: str) -> None:
        self.address, self.trouble, self._failures = address, "", 0
        self._aside_until = self.heard_at = float("-inf")
        self._world, self._client = world, client

    def unary(self, method: str) -> Any:
        return lambda request, timeout, metadata: self._attempt(method, request, timeout)

    async def _attempt(self, method: str, request: bytes, timeout_s: float) -> bytes:
        world, loop = self._world, self._world.loop
        if self._client.dead:
            await asyncio.Event().wait()
        answer: asyncio.Future[bytes] = loop.create_future()
        if not world.chance(0.2):  # else it never arrives
            loop.call_later(world.delay_s(), self._arrive, method, request, answer)
        if world.chance(0.2):  # the connection breaks at once: it may still arrive
            raise broken("UNAVAILABLE", "connection reset")
        done, _ = await asyncio.wait((answer,), timeout=timeout_s)
        if self._client.dead:
            await asyncio.Event().wait()
        if not done:
            answer.cancel()
            raise broken("DEADLINE_EXCEEDED", "deadline exceeded")
        try:
            return answer.result()
        except Refused as refused:
            raise broken(refused.code, refused.why) from None

    def _arrive(self, method: str, request: bytes, answer: asyncio.Future[bytes]) -> None:
        world = self._world
        world.late += answer.done()
        try:
            data = world.etcd.call(method, request)
        except Refused as error:
            self._back(answer, functools.partial(answer.set_exception, error))
        else:
            self._back(answer, functools.partial(answer.set_result, data))

    def _back(self, answer: asyncio.Future[bytes], tell: Callable[[], None]) -> None:
        if not self._world.chance(0.2):  # else the answer is lost
            self._world.loop.call_later(self._world.delay_s(), lambda: None if answer.done() else tell())
            answer.add_done_callback(lambda _: answer.cancelled() or answer.exception())


class FakeWatch:
    """A watch stream: what it tells comes in order, late, and up to some moment."""

    def __init__(self, world: World, client: FakeClient) -> None:
        self._world, self._client = world, client
        self._watches: dict[int, tuple[bytes, bytes]] = {}
        self._told: deque[bytes] = deque()
        self._bell = asyncio.Event()
        self._broken = self._mute = False
        world.etcd.listeners.append(self._heard)

    async def write(self, request: bytes) -> None:
        await self._world.passes(self._world.dice.expovariate(500))
        ((kind, body),) = fields(request)
        wanted, etcd = dict(fields(body)), self._world.etcd
        if kind == 1:
            self._begin(wanted.get(7, 0), wanted[1], wanted.get(2, b""), wanted[3])
        elif kind == 2:
            self._watches.pop(wanted[1], None)
        else:
            self._tell(etcd.watch_answer(-1, []))

    async def read(self) -> Any:
        while not self._told or self._mute or self._client.dead:
            await self._bell.wait()
            self._bell.clear()
            if self._broken:
                raise broken("UNAVAILABLE", "stream broken")
        await self._world.passes(self._world.dice.expovariate(100))
        if self._broken:
            raise broken("UNAVAILABLE", "stream broken")
        return self._told.popleft()

    def cancel(self) -> None:
        if self._heard in self._world.etcd.listeners:
            self._world.etcd.listeners.remove(self._heard)

    def _begin(self, watch: int, first: bytes, end: bytes, revision: int) -> None:
        etcd = self._world.etcd
        assert watch not in self._watches, "etcd refuses two watches of one number"
        self._tell(etcd.watch_answer(watch, [], created=True))
        if revision < etcd.compacted:
            self._tell(etcd.watch_answer(watch, [], compacted=etcd.compacted))
            self._watches[watch] = (b"", b"")  # etcd does not give its number free
            return
        self._watches[watch] = (first, end)
        past = etcd.since(revision, first, end)
        if past:
            self._tell(etcd.watch_answer(watch, past))

    def _heard(self, entries: list[Any]) -> None:
        for watch, (first, end) in self._watches.items():
            mine = [entry for entry in entries if first and within(entry.key, first, end)]
            if mine:
                self._tell(self._world.etcd.watch_answer(watch, mine))

    def _tell(self, data: bytes) -> None:
        self._told.append(data)
        self._broken = self._broken or self._world.chance(0.1)
        self._mute = self._mute or self._world.chance(0.05)
        self._bell.set()


class FakeBeats:
    """A stream of keep-alives."""

    def __init__(self, world: World, client: FakeClient) -> None:
        self._world, self._client = world, client
        self._asked: deque[bytes] = deque()

    async def write(self, request: bytes) -> None:
        self._asked.append(request)

    async def done_writing(self) -> None:
        await self._world.passes(self._world.dice.expovariate(100))

    async def read(self) -> Any:
        if self._client.dead:
            await asyncio.Event().wait()
        if self._world.chance(0.2):
            await self._world.passes(1.0)
            raise broken("DEADLINE_EXCEEDED", "deadline exceeded")
        if not self._asked:
            return grpc.aio.EOF
        request = self._asked.popleft()
        self._world.kept_at[int(dict(fields(request)).get(1, 0))] = self._world.loop.time()
        return self._world.etcd.keep_alive(request)

    def cancel(self) -> None:
        self._asked.clear()


def broken(code: str, why: str) -> grpc.aio.AioRpcError:
    """Return the error of a call."""
    return grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), why)
