"""PyTorch's protocol on a store in etcd: one connection's messages, carried out in the order in which they came.

Each waits for the one before, but for two things. Writes that are not answered (SET and MULTI_SET in a row; APPEND to
one key in a row) go to etcd together, as one change: so a client that sets much waits for few round trips, and nobody
sees the second of its writes without the first. And a wait does not hold up what comes behind it: a client cancels a
wait by a message, and a second wait takes the place of the first, as in `core/c10d.Conversation`.

What has come whole is carried out even if its sender has gone: nobody confirmed it, but it was sent. Waits, reads and
pops of one that has gone are not; an item that was popped for one that went meanwhile goes back to the front.

Not as in `Conversation`: where a client's own write ends a wait of its own, the answer of that wait may come after
those of requests that follow. No client of PyTorch's asks anything but a cancellation while it waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.core.records import Turn
from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import FIELD_BYTES, MAGIC, Opcode, Partial

if TYPE_CHECKING:
    from rallypoint.etcd.session import Mark
    from rallypoint.server.connection import Connection
    from rallypoint.server.gateway import Gateway

__all__ = ["GatewayConversation"]

WINDOW_BYTES = 1024 * 1024
"""How much may wait to be carried out for one connection; past that it is not read from."""

TOGETHER, TOGETHER_BYTES = 64, 512 * 1024
"""How many keys are written as one change, and how many bytes, where a client writes without waiting."""

_WAITED, _CANCELLED = b"\0", b"\1"
_FOREVER = float("inf")


class _Message(NamedTuple):
    op: int
    fields: list[Any]
    size: int


class GatewayConversation:
    """Our end of one PyTorch client's connection; `limit` bounds one request and one answer in bytes."""

    def __init__(self, gateway: Gateway, connection: Connection, limit: int) -> None:
        self._gateway = gateway
        self._space = gateway.space
        self._connection = connection
        self._limit = limit
        self._partial: Partial | None = None
        self._queue: deque[_Message] = deque()
        self._queued = 0
        self._worker: asyncio.Task[None] | None = None
        self._wait: asyncio.Task[None] | None = None
        self._turn: Turn | None = None
        self._over = False
        self.greeted = False
        self.waits_for: tuple[bytes, ...] = ()

    @property
    def held(self) -> int:
        """How many bytes of requests are held that could not be carried out yet."""
        return self._queued + (self._partial.held if self._partial is not None else 0)

    @property
    def blocked(self) -> bool:
        """Whether requests wait until the answers so far have been sent."""
        return bool(self._queue) and self._worker is None

    @property
    def waiting(self) -> int:
        """How many of its requests wait for something to come true."""
        return int(bool(self.waits_for))

    def receive(self, data: bytes) -> bytes:
        """Take what came; its answers are sent when they are known. Raises BadMessage, and is of no use after."""
        try:
            self._collect(data)
        finally:
            self._start()
            if self._queued > WINDOW_BYTES:
                self._connection.stall()
        return b""

    def end(self) -> None:
        """Note that the connection is gone: give up its wait and its turn, and see through what it has written."""
        self._over = True
        if self._wait is not None:
            self._wait.cancel()
        self._end_turn()
        if self._queue:
            if not self._gateway.linger(self._queued):
                self._forget_all()
            self._start()

    # What came, and what is done about it

    def _collect(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._partial is None:
                self._partial = Partial(data[at], self._limit)
                at += 1
                if (self._partial.op == Opcode.VALIDATE) == self.greeted:
                    raise BadMessage("a second greeting" if self.greeted else "no greeting")
            at, whole = self._partial.feed(data, at)
            if whole:
                partial, self._partial = self._partial, None
                if partial.op == Opcode.VALIDATE:
                    self._greet(partial.fields[0])
                else:
                    message = _Message(partial.op, partial.fields, partial.held + FIELD_BYTES)
                    self._queue.append(message)
                    self._queued += message.size

    def _greet(self, magic: int) -> None:
        if magic != MAGIC:
            raise BadMessage(f"greeting {magic:#x}, not {MAGIC:#x}")
        self.greeted = True

    def _start(self) -> None:
        if self._queue and self._worker is None and (self._over or not self._connection.paused):
            self._worker = self._gateway.spawn(self._work())

    async def _work(self) -> None:
        """Carry out what came, until all is done or the peer has to read first."""
        try:
            while self._queue and (self._over or not self._connection.paused):
                await self._step()
        except (RallypointError, BadMessage) as error:
            self._fail(str(error))
        finally:
            self._worker = None

    async def _step(self) -> None:
        """Carry out the next message, or the next few that can be one change."""
        first = self._queue[0]
        if self._turn is not None and first.op != Opcode.QUEUE_POP:
            self._end_turn()
        if first.op in (Opcode.SET, Opcode.MULTI_SET):
            pairs, count = self._sets()
            await self._change(lambda mark: self._space.multi_set(mark, pairs))
            self._done(count)
        elif first.op == Opcode.APPEND:
            key, value, count = self._appends()
            await self._change(lambda mark: self._space.append(mark, key, value))
            self._done(count)
        else:
            if not self._over or first.op in _SEEN_THROUGH:
                arguments = [first.fields] if first.op in _LISTS else first.fields
                self._send(await _DO[first.op](self, *arguments))
            self._done(1)

    def _sets(self) -> tuple[list[tuple[bytes, bytes]], int]:
        """Return what the messages at the front write, as many as go together, and how many those are."""
        pairs: list[tuple[bytes, bytes]] = []
        size = count = 0
        for message in self._queue:
            if message.op not in (Opcode.SET, Opcode.MULTI_SET):
                break
            size += message.size
            if count and (len(pairs) + len(message.fields) // 2 > TOGETHER or size > TOGETHER_BYTES):
                break
            pairs += zip(message.fields[::2], message.fields[1::2], strict=True)
            count += 1
        return pairs, count

    def _appends(self) -> tuple[bytes, bytes, int]:
        key = self._queue[0].fields[0]
        parts: list[bytes] = []
        size = 0
        for message in self._queue:
            size += message.size
            if message.op != Opcode.APPEND or message.fields[0] != key or (parts and size > TOGETHER_BYTES):
                break
            parts.append(message.fields[1])
        return key, b"".join(parts), len(parts)

    def _done(self, count: int) -> None:
        """Forget messages that were carried out, and read on if there is room."""
        freed = 0
        for _ in range(min(count, len(self._queue))):
            freed += self._queue.popleft().size
        self._queued -= freed
        if self._over:
            self._gateway.lingering -= freed
            return
        self._connection.recount()
        if self._queued <= WINDOW_BYTES // 2:
            self._connection.read_on()

    def _forget_all(self) -> None:
        if self._over:
            self._gateway.lingering -= self._queued
        self._queue.clear()
        self._queued = 0

    def _fail(self, why: str) -> None:
        """Hang up, which is how this protocol says no; nothing that came later is carried out."""
        self._forget_all()
        if not self._over:
            self._connection.drop(why)

    def _send(self, reply: bytes) -> None:
        if reply and not self._over:
            self._connection.send(reply)

    async def _change(self, call: Callable[[Mark], Awaitable[Any]]) -> Any:
        return await self._gateway.ask(self._gateway.desk.change(call))

    # Operations: each returns its reply

    async def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return self._strings([await self._change(lambda mark: self._space.compare_set(mark, key, expected, desired))])

    async def _get(self, key: bytes) -> bytes:
        value = await self._gateway.ask(self._space.get(key))
        return self._strings([value or b""])

    async def _add(self, key: bytes, amount: int) -> bytes:
        return _number(await self._change(lambda mark: self._space.add(mark, key, amount)))

    async def _check(self, keys: list[bytes]) -> bytes:
        return b"\0" if await self._gateway.ask(self._space.check(keys)) else b"\1"

    async def _await_keys(self, keys: list[bytes]) -> bytes:
        await self._forget_wait()
        return self._begin_wait(tuple(keys), lambda: self._until_there(keys))

    async def _barrier(self, key: bytes, size: int) -> bytes:
        await self._forget_wait()
        return self._begin_wait((key,), lambda: self._until_all_came(key, size))

    def _begin_wait(self, keys: tuple[bytes, ...], wait: Callable[[], Awaitable[None]]) -> bytes:
        self.waits_for = keys
        self._wait = self._gateway.spawn(self._see_through(wait))
        return b""

    async def _until_there(self, keys: list[bytes]) -> None:
        if len(keys) == 1:
            self._turn = await self._gateway.ask(self._gateway.lines.wait_turn(keys[0], self))
        else:
            await self._gateway.ask(self._space.wait(keys, Deadline(_FOREVER)))

    async def _until_all_came(self, key: bytes, size: int) -> None:
        await self._change(lambda mark: self._space.barrier(mark, key, size, Deadline(_FOREVER)))

    async def _see_through(self, wait: Callable[[], Awaitable[None]]) -> None:
        try:
            await wait()
        except RallypointError as error:
            self._fail(str(error))
        else:
            self._send(_WAITED)
        finally:
            self.waits_for = ()

    async def _forget_wait(self) -> None:
        """Withdraw the wait under way; a client has one at most, so a new one takes the place of the old."""
        wait, self._wait = self._wait, None
        if wait is not None and not wait.done():
            wait.cancel()
            await asyncio.wait((wait,))
            self._end_turn()

    async def _cancel_wait(self) -> bytes:
        await self._forget_wait()
        return _CANCELLED

    async def _num_keys(self) -> bytes:
        return _number(await self._gateway.ask(self._space.num_keys(b"")))

    async def _delete(self, key: bytes) -> bytes:
        return _number(await self._change(lambda mark: self._space.delete(mark, key)))

    async def _multi_get(self, keys: list[bytes]) -> bytes:
        return self._strings([value or b"" for value in await self._gateway.ask(self._space.multi_get(keys))])

    async def _ping(self, nonce: int) -> bytes:
        return nonce.to_bytes(4, "little")

    async def _queue_push(self, key: bytes, value: bytes) -> bytes:
        await self._change(lambda mark: self._space.queue_push(mark, key, value))
        return b""

    async def _queue_pop(self, key: bytes) -> bytes:
        length = await self._gateway.ask(self._space.queue_len(key))
        item = await self._change(lambda mark: self._space.queue_pop(mark, key))
        self._end_turn()
        if item is None:
            return _number(0)
        if self._over or self._connection.closing:
            await self._gateway.ask(self._gateway.desk.put_back(key, item))
            return b""
        return _number(max(1, length)) + self._strings([item])

    async def _queue_len(self, key: bytes) -> bytes:
        return _number(await self._gateway.ask(self._space.queue_len(key)))

    async def _list_keys(self) -> bytes:
        keys = await self._gateway.ask(self._space.list_keys(b""))
        return _number(len(keys)) + self._strings(keys)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._gateway.lines.end(turn)

    def _strings(self, values: list[bytes]) -> bytes:
        size = sum(map(len, values)) + 8 * len(values)
        if size > self._limit + 8:
            raise BadMessage(f"an answer of {size} bytes, the limit is {self._limit}")
        return b"".join([part for value in values for part in (len(value).to_bytes(8, "little"), value)])


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


_DO: dict[int, Callable[..., Awaitable[bytes]]] = {
    Opcode.COMPARE_SET: GatewayConversation._compare_set,
    Opcode.GET: GatewayConversation._get,
    Opcode.ADD: GatewayConversation._add,
    Opcode.GETNUMKEYS: GatewayConversation._num_keys,
    Opcode.DELETE_KEY: GatewayConversation._delete,
    Opcode.CANCEL_WAIT: GatewayConversation._cancel_wait,
    Opcode.PING: GatewayConversation._ping,
    Opcode.QUEUE_PUSH: GatewayConversation._queue_push,
    Opcode.QUEUE_POP: GatewayConversation._queue_pop,
    Opcode.QUEUE_LEN: GatewayConversation._queue_len,
    Opcode.LIST_KEYS: GatewayConversation._list_keys,
    Opcode.BARRIER: GatewayConversation._barrier,
    Opcode.CHECK: GatewayConversation._check,
    Opcode.WAIT: GatewayConversation._await_keys,
    Opcode.MULTI_GET: GatewayConversation._multi_get,
}
_LISTS = (Opcode.CHECK, Opcode.WAIT, Opcode.MULTI_GET)
_SEEN_THROUGH = (Opcode.ADD, Opcode.COMPARE_SET, Opcode.DELETE_KEY, Opcode.QUEUE_PUSH)
