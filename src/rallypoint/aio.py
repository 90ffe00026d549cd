"""rallypoint for asyncio: the same store and the same protocol core, with awaitable calls.

    async with await rallypoint.aio.connect("tcp://head-node:29400") as store:
        await store.set("ready", "1")

Each store has one connection and one session (`client/async_session.py`). Any number of tasks may share it; replies
arrive in any order, and a cancelled call leaves nothing behind on the server. The session reconnects as in the blocking
client.

Rejected: the blocking store on executor threads. A cancelled task could not withdraw its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar, cast

from rallypoint.client.async_session import AsyncSession
from rallypoint.client.outage import ServerDown, disconnected
from rallypoint.client.routing.route import Route
from rallypoint.core import ops
from rallypoint.core.machines.machine import Done, Refused, Waiting
from rallypoint.core.records import OUTCOMES, Event, ReplyStatus, Swap, TimedOut
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import NoQuorum, QueueEmpty, RallypointError
from rallypoint.protocol.native_client import Reply
from rallypoint.protocol.reported_errors import error_of
from rallypoint.recipes.async_work_queue import AsyncWorkItem, AsyncWorkQueue, ObjectCalls
from rallypoint.security.credentials import Credentials
from rallypoint.store.base import Change
from rallypoint.store.url import StoreURL, parse_url
from rallypoint.store.view import StoreView, whole_amount

__all__ = ["AsyncStore", "AsyncWorkItem", "AsyncWorkQueue", "connect"]

_Self = TypeVar("_Self", bound="AsyncStore")


async def connect(url: str, timeout: Timeout | None = None, *, credentials: Credentials | None = None) -> AsyncStore:
    """Open a session with the server of a tcp:// URL, or with the first of several servers that replies.

    An etcd:// URL names a store whose servers are registered in etcd (see `EtcdStore`). Raises ConnectFailed when no
    server replies in time, NoQuorum when etcd does not, AuthenticationFailed when one side does not accept the
    credentials of the other (by default those of the environment), Unsupported when the server is PyTorch's.
    """
    parsed = parse_url(url, timeout)
    session = AsyncSession(_route(parsed, credentials), parsed.timeout_s)
    await session.open(Deadline(parsed.timeout_s))
    session.check_hang()
    return AsyncStore(session, b"/" + (f"{parsed.prefix}/".encode() if parsed.prefix else b""), parsed.timeout_s)


def _route(parsed: StoreURL, credentials: Credentials | None) -> Route:
    if parsed.scheme == "etcd":
        from rallypoint.store.etcd import route_to

        return route_to(parsed.etcd(), credentials)
    if parsed.scheme not in ("tcp", "tcps"):
        raise ValueError(
            f"store URL {str(parsed)!r}: asyncio is for tcp://, tcps:// and etcd://; use rallypoint.connect"
        )
    return Route.of(parsed.endpoints(), parsed.security(credentials))


class AsyncStore(StoreView):
    """A store with awaitable calls; names and semantics are those of `Store`."""

    def __init__(self, session: AsyncSession, prefix: bytes, timeout_s: float) -> None:
        super().__init__(session.label, b"/", prefix, timeout_s)
        self._session = session

    async def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        await self._ask(ops.Set(0, self._name(key), self._value(key, value)))

    async def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return a value, waiting until the key exists."""
        return bytes((await self._wait([key], timeout, ops.Get, self._name(key)))[0])

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(await self._ask(ops.Add(0, self._name(key), whole_amount(key, amount))))

    async def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write if the value equals the expected one; return the value after the call, as PyTorch does."""
        expected, desired = self._value(key, expected_value), self._value(key, desired_value)
        return bytes(await self._ask(ops.CompareSet(0, self._name(key), expected, desired)))

    async def swap(self, key: str, expected: str | bytes | None, desired: str | bytes) -> Swap:
        """Write if the value equals the expected one (None: the key is missing); return (won, current value)."""
        wanted = None if expected is None else self._value(key, expected)
        return Swap(*await self._ask(ops.CompareSwap(0, self._name(key), wanted, self._value(key, desired))))

    async def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value."""
        await self._ask(ops.Append(0, self._name(key), self._value(key, value)))

    async def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of the keys exist now."""
        return bool(await self._ask(ops.Check(0, self._names(keys))))

    async def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Return when all of the keys exist at the same time."""
        await self._wait(keys, timeout, ops.Wait, self._names(keys))

    async def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all the keys at one revision, waiting until all exist."""
        return list(await self._wait(keys, timeout, ops.MultiGet, self._names(keys)))

    async def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write all the pairs atomically."""
        await self._ask(ops.MultiSet(0, self._pairs(keys, values)))

    async def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(await self._ask(ops.Delete(0, self._name(key))))

    async def delete_prefix(self, prefix: str) -> int:
        """Delete every key and queue whose name starts with `prefix`; return their number."""
        return int(await self._ask(ops.DeletePrefix(0, self._name(prefix))))

    async def num_keys(self) -> int:
        """Return the number of keys; in a prefixed view, of those under the prefix."""
        return int(await self._ask(ops.Count(0, self._prefix if self._prefix != self._root else b"")))

    async def list_keys(self) -> list[str]:
        """List the keys; in a prefixed view, those under the prefix, which is removed."""
        return [name[len(self._prefix) :].decode() for name in await self._ask(ops.List(0, self._prefix))]

    async def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to a queue."""
        await self._ask(ops.Push(0, self._name(key), self._value(key, value)))

    async def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Pop the first item of a queue, waiting in FIFO order; without `block`, raise QueueEmpty if there is none."""
        if block:
            return bytes(await self._wait([key], timeout, ops.BlockingPop, self._name(key)))
        item = await self._ask(ops.Pop(0, self._name(key)))
        if item is None:
            raise QueueEmpty(key=key, store=self._label)
        return bytes(item)

    async def queue_len(self, key: str) -> int:
        """Return the number of items in a queue."""
        return int(await self._ask(ops.QueueLen(0, self._name(key))))

    async def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Return when `world_size` callers have arrived at this key."""
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"the world size of barrier {key!r} must be an int, not {world_size!r}")
        size = max(-(2**63), min(world_size, 2**63 - 1))
        await self._wait([key], timeout, ops.Arrive, self._name(key), size)

    async def lease(self, key: str, value: str | bytes) -> None:
        """Write a key that is deleted when this store's session ends."""
        await self._ask(ops.SetLease(0, self._name(key), self._value(key, value), 0.0))

    async def watch(self, prefix: str = "") -> AsyncGenerator[Change, None]:
        """Yield every change of keys that start with `prefix`, from the first `anext` until closed."""
        session = self._session
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        number = session.send(ops.WatchPrefix(0, self._name(prefix)))
        session.watches[number] = queue
        try:
            self._result(await session.answer(number, "watch", None))
            while (event := await queue.get()) is not None:
                yield Change(self._unname(event.key), event.value, event.revision)
            raise copy.copy(cast(RallypointError, session.over))
        finally:
            session.watches.pop(number, None)
            if session.over is None:
                await self._unwatch(number)

    async def _unwatch(self, number: int) -> None:
        """Cancel a watch; in an outage, queue the cancellation for when the server is back."""
        try:
            await self._session.ask(ops.Drop(0, number), 0.0)
        except ServerDown:
            self._session.send(ops.Drop(0, number))
        except RallypointError:
            pass

    def work_queue(self, name: str, member: int | str = "worker") -> AsyncWorkQueue:
        """Return the work queue of that name; `member` names this process in its status."""
        key = self._name(name)
        if not name:
            raise ValueError("the name of a work queue must not be empty")

        async def ask(member: str, call: int, command: Any, wait_s: float) -> Done | Refused | Waiting:
            try:
                kind, *facts = await self._ask_for(ops.Act(0, key, member, call, command, wait_s), wait_s)
            except ServerDown as down:
                return disconnected(down)
            return OUTCOMES[kind](*facts)

        def tell(member: str, call: int, command: Any) -> None:
            with contextlib.suppress(RallypointError):
                self._session.send(ops.Act(0, key, member, call, command, 0.0))

        calls = ObjectCalls(self._label, self._timeout_s, ask, tell, self._session.deadline)
        return AsyncWorkQueue(calls, name, member)

    async def _ask_for(self, op: ops.Op, wait_s: float) -> Any:
        return self._result(await self._session.ask(op, wait_s or None))

    async def close(self) -> None:
        """End the session: leases are released, waiting calls raise StoreClosed."""
        self._session.close()

    async def __aenter__(self: _Self) -> _Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, op: ops.Op) -> Any:
        return self._result(await self._session.ask(op))

    async def _wait(self, keys: Sequence[str], timeout: Timeout | None, kind: Any, *arguments: Any) -> Any:
        wait_s = self._wait_s(timeout)
        try:
            outcome = self._result(await self._session.ask(kind(0, *arguments, wait_s), wait_s or None))
        except ServerDown as down:
            if down.no_quorum:
                raise NoQuorum(store=self._label, timeout_s=wait_s, tried=down.no_quorum) from None
            raise self._timed_out(kind.verb, keys, keys, wait_s, down=str(down)) from None
        if isinstance(outcome, TimedOut):
            raise self._timed_out(kind.verb, keys, self._unnamed(outcome.missing), wait_s)
        return outcome

    def _result(self, reply: Reply) -> Any:
        if reply.status == ReplyStatus.OK:
            return reply.result
        if reply.status == ReplyStatus.TIMED_OUT:
            return TimedOut(tuple(reply.result))
        raise error_of(reply, self._label)
