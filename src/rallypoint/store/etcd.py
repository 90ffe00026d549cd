"""EtcdStore: a store in etcd, which survives the loss of any machine as long as most of etcd's members live.

The operations are those of `etcd/space.py`, which are coroutines. They run in one thread of this process, and the
calling thread waits for the outcome: so all calls share a connection, and what many ask at once goes out together.
The store begins a session, that is a lease, with its first change. When that was lost (this process stood still for too
long, say), the next call begins another; but if leased keys went with it, it raises SessionLost first.

A child that is forked off a process with such a store cannot use etcd at all, for gRPC does not survive a fork.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec.structs import astuple

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.records import Event, TimedOut
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.errors import SessionLost, StoreClosed, Unsupported
from rallypoint.etcd import watcher
from rallypoint.etcd.address import DEFAULT_SPACE, Address, parse
from rallypoint.etcd.client import ATTEMPT_S
from rallypoint.etcd.executor import Executor
from rallypoint.etcd.session import Mark, Session
from rallypoint.etcd.space import Space
from rallypoint.etcd.thread import the_thread
from rallypoint.store.base import Backend, Feed, Store
from rallypoint.store.view import DEFAULT_TIMEOUT_S

__all__ = ["EtcdStore"]

CLOSE_S = 5.0
"""How long closing may take for the sake of a session that is to be ended."""

_T = TypeVar("_T")


class EtcdBackend(Backend):
    """One session on a store in etcd."""

    root = b"/"
    keeps_leases = True

    def __init__(self, space: Space, users: list[int]) -> None:
        self.name = space.name
        self._space = space
        self._users = users  # how many backends share the space, in a list of one
        self._users[0] += 1
        self._thread = the_thread()
        self._pid = os.getpid()
        self._session: Session | None = None
        self._executor: Executor | None = None
        self._opening = asyncio.Lock()
        self._leases: dict[bytes, Session] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._feeds: set[_EtcdFeed] = set()
        self._closed = False

    @classmethod
    def connect(cls, address: Address, timeout_s: float) -> EtcdBackend:
        """Find the cluster and return a backend of its own space."""
        return cls(the_thread().run(Space.connect(address, net.caller_name(), timeout_s)), [0])

    def execute(self, op: ops.Op) -> Any:
        arguments: tuple[Any, ...] = astuple(op)[1:]
        if hasattr(op, "timeout_s"):
            arguments = (*arguments[:-1], Deadline(op.timeout_s))
        if isinstance(op, ops.Lease):
            return self._run(self._lease(*arguments))
        if isinstance(op, ops.Unlease):
            return self._run(self._unlease(op.key))
        if isinstance(op, ops.Get):
            return self._get(*arguments)
        method = getattr(self._space, _METHODS.get(op.__class__, op.verb))
        if op.changes:
            return self._change(lambda mark: method(mark, *arguments))
        answer = self._run(method(*arguments))
        return sorted(answer) if isinstance(op, ops.List) else answer

    def _get(self, key: bytes, deadline: Deadline) -> list[bytes] | TimedOut:
        if deadline.remaining() >= ATTEMPT_S:
            self._must_be_open()
            value = self._space.get_directly(key)
            if value is not None:
                return [value]
        return self._run(self._space.wait_values([key], deadline))

    def watch(self, prefix: bytes) -> Feed:
        return self._run(self._watch(prefix))

    def clone(self) -> Backend:
        self._must_be_open()
        return EtcdBackend(self._space, self._users)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(self._close(), self._thread.loop).result(CLOSE_S)

    # Inside: what runs in the calling thread

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreClosed(store=self.name)
        self.must_be_here()

    def must_be_here(self) -> None:
        """Refuse to be used by a forked child."""
        if self._pid != os.getpid():
            why = "gRPC does not survive a fork: start the child by spawn, or by a fork server"
            raise Unsupported(operation="use in a forked child", store=self.name, why=why)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            self._must_be_open()
        except BaseException:
            work.close()
            raise
        return self._thread.run(self._tracked(work))

    def _change(self, change: Callable[[Mark], Coroutine[Any, Any, _T]]) -> _T:
        return self._run(self._changed(change))

    # Inside: what runs in the event loop

    async def _tracked(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do work that ends when the store is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._closed:
                work.close()
                raise StoreClosed(store=self.name)
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise StoreClosed(store=self.name) from None
            raise
        finally:
            self._tasks.discard(task)

    async def _changed(self, change: Callable[[Mark], Coroutine[Any, Any, _T]]) -> _T:
        """Make a change, in a new session if the last one was lost and nothing hung on it."""
        while True:
            session = await self._here()
            with session.own_mark() as mark:
                try:
                    return await change(mark)
                except SessionLost:
                    if not session.lost.is_set():  # what was lost is the run
                        raise
                    self._forget(session)
                    if mark.doubtful:
                        raise

    async def _here(self) -> Session:
        """Return the session, opened when first needed; raise SessionLost once if leases went with the last one."""
        session = self._session
        if session is not None and not session.lost.is_set():
            return session
        async with self._opening:
            if self._session is not None and self._session.lost.is_set():
                self._forget(self._session)
            if self._session is None:
                if self._executor is not None:
                    self._executor.stop()
                self._session = await self._space.open_session(net.caller_name())
                self._executor = Executor(self._space, self._session)
            return self._session

    def _forget(self, session: Session) -> None:
        """Have done with a session that was lost; raise if leased keys went with it."""
        if self._session is session:
            self._session = None
        lost = [key for key, owner in self._leases.items() if owner is session]
        for key in lost:
            del self._leases[key]
        if lost:
            raise session.end_of_it()

    async def _lease(self, key: bytes, value: bytes, ttl_s: float) -> None:
        session = await self._space.open_session(net.caller_name(), ttl_s) if ttl_s else await self._here()
        try:
            with session.own_mark() as mark:
                await self._space.lease_key(mark, key, value)
        except BaseException:
            if ttl_s:
                session.forget()  # it ends by itself
            raise
        former = self._leases.get(key)
        self._leases[key] = session
        await self._let_go(former)

    async def _unlease(self, key: bytes) -> bool:
        session = self._leases.pop(key, None)
        if session is None or session.lost.is_set():
            return False
        try:
            with session.own_mark() as mark:
                return await self._space.unlease(mark, key)
        except SessionLost:
            return False
        finally:
            await self._let_go(session)

    async def _let_go(self, session: Session | None) -> None:
        """End a session that was only for a lease, when that is no more."""
        if session is not None and session is not self._session and session not in self._leases.values():
            await session.end()

    async def _watch(self, prefix: bytes) -> Feed:
        feed = self._space.feed(prefix)
        feed.start(await self._space.revision())
        mine = _EtcdFeed(self, feed)
        self._feeds.add(mine)
        return mine

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for feed in list(self._feeds):
            feed.feed.close()
        if self._executor is not None:
            self._executor.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._space.settle()
        sessions = {session for session in (self._session, *self._leases.values()) if session is not None}
        for session in sessions:
            await session.end()
        self._users[0] -= 1
        if not self._users[0]:
            await self._space.close()


_METHODS: dict[type[ops.Op], str] = {ops.MultiGet: "wait_values", ops.Delete: "delete", ops.Take: "wait_item"}
"""The methods of a space whose name is not the operation's verb."""


class _EtcdFeed(Feed):
    """The changes of one watch."""

    def __init__(self, backend: EtcdBackend, feed: watcher.Feed) -> None:
        self._backend = backend
        self.feed = feed

    def next(self, deadline: Deadline) -> Event | TimedOut:
        self._backend.must_be_here()
        return self._backend._thread.run(self._next(deadline))

    def close(self) -> None:
        self._backend._feeds.discard(self)
        if not self._backend._closed:
            self._backend._thread.loop.call_soon_threadsafe(self.feed.close)

    async def _next(self, deadline: Deadline) -> Event | TimedOut:
        try:
            event = await asyncio.wait_for(self.feed.next(), min(deadline.remaining(), 1e8))
        except asyncio.TimeoutError:
            return TimedOut(())
        if event.value is None:
            return event
        try:
            whole = await self._backend._space.whole(event.key, event.value, event.revision // watcher.PLACES)
        except BaseException:
            self.feed.unread(event)
            raise
        return event._replace(value=whole)


class EtcdStore(Store):
    """A store in etcd, in one space (a prefix of its keys); `connect("etcd://a:2379,b:2379/space")` opens one too."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        space: str = DEFAULT_SPACE,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT_S,
        ca: str = "",
        cert: str = "",
        key: str = "",
        user: str = "",
        password: str = "",
        run: str = "",
    ) -> None:
        place = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
        options = {"ca": ca, "cert": cert, "key": key, "user": user, "password": password, "run": run}
        backend = EtcdBackend.connect(parse(place, space, options), seconds(timeout))
        super().__init__(backend, EtcdBackend.root, timeout)

    @classmethod
    def at(cls, address: Address, timeout: Timeout) -> EtcdStore:
        """Open the store at an address."""
        return cls(address.endpoints, address.space, timeout=timeout, run=address.run, **address.access._asdict())
