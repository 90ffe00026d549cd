"""rallypoint for asyncio: the same store on the same protocol core, awaited.

    async with await rallypoint.aio.connect("tcp://head-node:29400") as store:
        await store.set("ready", "1")

One connection and one session a store. Any number of tasks may use it; requests are answered as they are ready, and a
cancelled call leaves nothing behind on the server. A cut is mended as in the blocking client: the session is resumed
for as long as its server's welcome says, what was not answered is repeated, and `store/outage.py` says how long calls
wait meanwhile. A server that is there and does not answer, for longer than it was asked to wait and the store's
timeout, is `ConnectionLost`. One of several that hangs is left for another, and a relay that does for the store itself,
as `store/peer_check.py` has it.
"""

from __future__ import annotations

import asyncio
import copy
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar, cast

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.records import Event, Status, Swap, TimedOut
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import (
    ConnectFailed,
    ConnectionLost,
    NoQuorum,
    QueueEmpty,
    RallypointError,
    ServerRestarted,
    SessionLost,
    StoreClosed,
    Unsupported,
)
from rallypoint.protocol import BadMessage
from rallypoint.protocol.client import Client, Reply
from rallypoint.protocol.native import ACCEPTED, PREFACE, STANDBY, read_standby
from rallypoint.protocol.reported_errors import error_of
from rallypoint.store import outage, peer_check
from rallypoint.store.base import Change
from rallypoint.store.outage import Outage, Patience, ServerDown
from rallypoint.store.route import Address, Cuts, Route
from rallypoint.store.search import NO_GATEWAY, Search, StandsBy, Unwelcome
from rallypoint.store.url import StoreURL, parse_url
from rallypoint.store.view import View, whole_amount

__all__ = ["AsyncStore", "connect"]

TICK_S = 0.01
"""How late an outage is looked at: a loop may be early by the resolution of its clock."""

LEAST_PATIENCE_S = 10.0
"""How long a server may take to answer, beyond what it was asked to wait, however short the store's timeout is."""

_Self = TypeVar("_Self", bound="AsyncStore")


async def connect(url: str, timeout: Timeout | None = None) -> AsyncStore:
    """Open a session with the server that a tcp:// URL names, or with the first of several that answers.

    An etcd:// URL names a store in etcd, whose servers are found there, as `EtcdStore` does it. Raises ConnectFailed
    when nobody answers in time, NoQuorum when etcd does not, Unsupported when a plain PyTorch server does.
    """
    parsed = parse_url(url, timeout)
    session = _Session(_route(parsed), parsed.timeout_s)
    await session.open(Deadline(parsed.timeout_s))
    session.doubt()
    return AsyncStore(session, b"/" + (f"{parsed.prefix}/".encode() if parsed.prefix else b""), parsed.timeout_s)


def _route(parsed: StoreURL) -> Route:
    if parsed.scheme == "etcd":
        from rallypoint.store.etcd import route_to

        return route_to(parsed.etcd())
    if parsed.scheme != "tcp":
        raise ValueError(f"store URL {str(parsed)!r}: asyncio is for tcp:// and etcd://; use rallypoint.connect")
    return Route.of(parsed.endpoints())


def _why_failed(error: Exception) -> str:
    """Say why a connection failed; where a name has several addresses, asyncio joins their errors into one text."""
    numbers = set(re.findall(r"\[Errno (\d+)\]", str(error)))
    return net.why_failed(OSError(int(*numbers), str(error)) if len(numbers) == 1 else error) or "no answer"


class _Link(asyncio.Protocol):
    """One connection: what comes is the session's, and so is its end."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self.greeting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cut = cast(asyncio.Transport, transport).abort
        self._watch = net.watch(asyncio.get_running_loop(), transport, lambda silent_s: cut())

    def data_received(self, data: bytes) -> None:
        if self.greeting.done():
            self._session.received(data)
            return
        self._early += data
        if self._early.startswith(STANDBY):
            self._stands_by()
        elif len(self._early) >= len(ACCEPTED):
            self.greeting.set_result(self._early[: len(ACCEPTED)])
            if rest := self._early[len(ACCEPTED) :]:
                self._session.received(rest)

    def _stands_by(self) -> None:
        """Read which server leads, once that is whole."""
        try:
            answer = read_standby(self._early)
        except BadMessage as error:
            self.greeting.set_exception(error)
        else:
            if answer is not None:
                self.greeting.set_exception(StandsBy(answer))

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.stop()
        if not self.greeting.done():
            self.greeting.set_exception(ConnectionError("the server closed it"))
        self._session.cut(self)


class _Limit:
    """When a call gives up its wait for an answer, which an outage may make sooner."""

    def __init__(self, session: _Session, future: asyncio.Future[Reply], operation: str, wait_s: float | None) -> None:
        self._session, self._future, self._operation = session, future, operation
        self._patience = Patience(session._patience_s, wait_s)
        self._timer: asyncio.TimerHandle | None = None
        self.look()

    def look(self) -> None:
        """End the call if it is time, or look again when it will be."""
        self.lift()
        session = self._session
        left_s = self._patience.until(session.outage, session.trouble) - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self.look)
        elif not self._future.done():
            error = self._patience.ended(session.peer, self._operation, session.outage, session.trouble)
            self._future.set_exception(error)

    def lift(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()


class _Session:
    """A session with one of our servers, and the connection that carries it now."""

    def __init__(self, route: Route, timeout_s: float) -> None:
        self.peer, self.label = route.name, route.label
        self._patience_s = max(timeout_s, LEAST_PATIENCE_S)
        self._route = route
        self._core = Client(net.caller_name())
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._limits: dict[int, _Limit] = {}
        self._watches: dict[int, asyncio.Queue[Event | None]] = {}
        self._transport: asyncio.Transport | None = None
        self._link: _Link | None = None
        self._welcome: asyncio.Future[Reply] | None = None
        self._mending: asyncio.Task[None] | None = None
        self._doubting: asyncio.Task[None] | None = None
        self.outage: Outage | None = None
        """Since when there is no connection."""

        self._noticing: asyncio.TimerHandle | None = None
        self._heard = False
        self._away_s, self._cuts = 0.0, Cuts(route)
        self.over: RallypointError | None = None

    async def open(self, deadline: Deadline) -> None:
        """Connect, say hello, and repeat what a cut left open; raise what ends the session for good."""
        search = Search(self._route, deadline, resumes=bool(self._core.session))
        while True:
            for endpoint, turn in search.round():
                try:
                    with self._route.expecting(endpoint, self._core):
                        await asyncio.wait_for(self._greet(endpoint), max(turn.remaining(), 0.1))
                    return
                except (OSError, BadMessage, ValueError, asyncio.TimeoutError) as error:
                    if search.ends(endpoint, error):
                        raise
                    if self.over is not None:  # an attempt that fails at the moment of its cancellation hides that
                        raise asyncio.CancelledError from None
                    self._failed(search, endpoint, error)
            if search.wants_look:
                await asyncio.get_running_loop().run_in_executor(None, search.look)
            if self.outage is not None:
                self.outage.why, self.outage.no_quorum = search.why, search.no_quorum
            await asyncio.sleep(search.pause_s())

    def _failed(self, search: Search, endpoint: Address, error: Exception) -> None:
        """Note what an attempt met."""
        if isinstance(error, StandsBy):
            search.stands_by(endpoint, error.answer)
            return
        trouble, useless = self._core.trouble, isinstance(error, (BadMessage, ValueError))
        why, unwelcome = trouble or _why_failed(error), isinstance(error, Unwelcome)
        search.failed(endpoint, why, useless, unwelcome, no_quorum=bool(trouble))

    async def _greet(self, endpoint: Address) -> None:
        self._core.trouble = ""  # what an earlier one said
        transport, link = await self._route.open(endpoint, lambda: _Link(self))
        try:
            transport.write(PREFACE)
            answer = await link.greeting
            if answer == PREFACE[-len(ACCEPTED) :]:
                if self._route.several or endpoint is self._route.relay:
                    raise BadMessage(NO_GATEWAY)
                why = "a plain PyTorch server answers there; use rallypoint.connect"
                raise Unsupported(operation="asyncio", store=self.peer, why=why)
            if answer != ACCEPTED:
                raise BadMessage(f"not a store: it answered {answer!r}")
            self._welcome = asyncio.get_running_loop().create_future()
            transport.write(self._core.greet())
            self._away_s = self._core.welcome(await self._welcome, self._route.peer(endpoint))
            if transport.is_closing():  # it was lost before it could be ours to mend
                raise ConnectionError("the server closed it")
            if self.over is not None:  # the store was closed meanwhile, and the cancellation came too late
                raise asyncio.CancelledError
        except BaseException:
            transport.abort()
            raise
        self._route.arrived(endpoint, self._core)
        self._transport, self._link = transport, link
        transport.write(self._core.repeat(time.monotonic()))
        if self.outage is not None:
            self.outage.over()
            self._end_outage()

    def received(self, data: bytes) -> None:
        """Hand out what came."""
        self._heard = True
        servers, trouble = self._core.servers, self._core.trouble
        try:
            for reply in self._core.receive(data):
                self._deliver(reply)
            if self._core.servers is not servers or self._core.trouble != trouble:
                self._noticed()
            if self._transport is not None and self.over is None:
                self._transport.write(self._core.confirm())
        except BadMessage as error:
            self.end(ConnectionLost(peer=self.peer, operation="reading", why=str(error)))

    @property
    def trouble(self) -> str:
        """Why the server cannot answer, as it said."""
        return self._core.trouble

    def _noticed(self) -> None:
        """Take in what the server has said of itself: calls may have to end sooner than it can answer."""
        if self._core.servers:
            self._route.learn(self._core.servers)
        for limit in list(self._limits.values()):
            limit.look()
        if self._doubting is None and self._link is not None:
            self.doubt()

    def _deliver(self, reply: Reply) -> None:
        """Hand out one reply. That of a call is settled by who awaits it, who may be cancelled before it can."""
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(reply)
        elif self._core.expects(reply):
            self._cuts.in_a_row = 0
            future = self._waiting.get(reply.number)
            if future is None:
                self._core.settle(reply)
            elif not future.done():
                future.set_result(reply)
            if not reply.number:
                number, event = reply.event()
                if number in self._watches:
                    self._watches[number].put_nowait(event)

    def cut(self, link: _Link) -> None:
        """Mend a lost connection, unless it was let go."""
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(Unwelcome("the server closed it"))
        if link is self._link and self.over is None:
            self._transport = self._link = None
            self.outage = Outage(self.peer, self._away_s, self._core.number, self._core.trouble)
            self._notice()
            self._mending = asyncio.ensure_future(self._mend(self.outage.deadline))

    def _notice(self) -> None:
        """Find the server down when it has been away for long enough, and end those calls whose time is over."""
        if self.outage is None:
            return
        if self.outage.look():
            for limit in list(self._limits.values()):
                limit.look()
        elif not self.outage.down:
            self._noticing = asyncio.get_running_loop().call_later(outage.DOWN_S + TICK_S, self._notice)

    def _end_outage(self) -> None:
        self.outage = None
        if self._noticing is not None:
            self._noticing.cancel()

    async def _mend(self, deadline: Deadline) -> None:
        try:
            await asyncio.sleep(self._cuts.count(self._core.recovers))
            await self.open(deadline)
        except ConnectFailed as error:
            self.end(SessionLost(peer=self.peer, why=f"cut for {self._away_s:g} s; {error}"))
        except Unsupported:
            self.end(ServerRestarted(peer=self.peer, why="a PyTorch server answers there now"))
        except RallypointError as error:
            self.end(error)

    def doubt(self) -> None:
        """Where there is a relay, or several servers, see to it from now on that one that hangs is left."""
        if self._route.doubted:
            self._doubting = asyncio.ensure_future(self._doubt())

    async def _doubt(self) -> None:
        while self._route.doubted:
            self._heard, relayed = False, self._route.relayed
            await asyncio.sleep(peer_check.silence_s(self._route))
            link, transport = self._link, self._transport
            if self._heard or transport is None or relayed is not self._route.relayed:
                continue
            if not relayed:
                self.send(ops.Ping(0))
                await asyncio.sleep(peer_check.PING_S)
            if self._heard or link is not self._link:
                continue
            hangs = await asyncio.get_running_loop().run_in_executor(None, peer_check.hangs, self._route)
            if hangs and not self._heard and link is self._link:
                self._route.leave()
                transport.abort()

    async def ask(self, op: ops.Op, wait_s: float | None = None) -> Reply:
        """Send a request and wait for its answer: at once (`wait_s` None), or once so long has passed.

        Cancelled, take it back. Raises ServerDown where its time was over while the server was down.
        """
        until = time.monotonic() + wait_s if wait_s else None
        return await self.answer(self.send(op, until), op.verb, wait_s)

    def send(self, op: ops.Op, until: float | None = None) -> int:
        """Send a request, now or once a cut is mended, and return its number; one that waits does so `until` then."""
        if self.over is not None:
            raise copy.copy(self.over)
        number = self._core.number
        request = self._core.ask(op, until)
        if self._transport is not None:
            self._transport.write(request)
        return number

    async def answer(self, number: int, operation: str, wait_s: float | None) -> Reply:
        """Wait for the answer to a request that was just sent, which is owed once `wait_s` have passed.

        Cancelled, or out of patience with the server (ConnectionLost, ServerDown), take the request back; of one that
        was made in an outage the server knows nothing.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        limit = self._limits[number] = _Limit(self, future, operation, wait_s)
        try:
            reply = await future
        except (asyncio.CancelledError, RallypointError):
            self._core.forget(number)
            if self.over is None and (self.outage is None or number < self.outage.unsent_from):
                self.send(ops.Drop(0, number))
            raise
        finally:
            limit.lift()
            del self._waiting[number], self._limits[number]
        self._core.settle(reply)
        if self._transport is not None and self.over is None:
            self._transport.write(self._core.confirm())  # an item that was taken is this client's at once
        return reply

    def end(self, reason: RallypointError) -> None:
        """Refuse every further call, and end those under way."""
        self.over = self.over or reason
        self._end_outage()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(copy.copy(self.over))
        for queue in self._watches.values():
            queue.put_nowait(None)
        if self._transport is not None:
            self._transport.close()
        for task in (self._mending, self._doubting):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def close(self) -> None:
        """Say goodbye and end."""
        if self.over is None and self._transport is not None:
            self._transport.write(self._core.ask(ops.Bye(0)))
        self.end(StoreClosed(store=self.label))


class AsyncStore(View):
    """A store whose calls are awaited; names and meaning are those of `Store`."""

    def __init__(self, session: _Session, prefix: bytes, timeout_s: float) -> None:
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
        """Write if the value is the expected one; return the value after the call, as PyTorch does."""
        expected, desired = self._value(key, expected_value), self._value(key, desired_value)
        return bytes(await self._ask(ops.CompareSet(0, self._name(key), expected, desired)))

    async def swap(self, key: str, expected: str | bytes | None, desired: str | bytes) -> Swap:
        """Write if the value is the expected one (None: if there is no such key); return (won, value now)."""
        wanted = None if expected is None else self._value(key, expected)
        return Swap(*await self._ask(ops.Swap(0, self._name(key), wanted, self._value(key, desired))))

    async def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to the end of a value."""
        await self._ask(ops.Append(0, self._name(key), self._value(key, value)))

    async def check(self, keys: Sequence[str]) -> bool:
        """Say whether all of the keys exist now."""
        return bool(await self._ask(ops.Check(0, self._names(keys))))

    async def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Return when all of the keys exist at once."""
        await self._wait(keys, timeout, ops.Wait, self._names(keys))

    async def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all the keys as of one moment, waiting until all exist."""
        return list(await self._wait(keys, timeout, ops.MultiGet, self._names(keys)))

    async def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write all the pairs as one change."""
        await self._ask(ops.MultiSet(0, self._pairs(keys, values)))

    async def delete_key(self, key: str) -> bool:
        """Delete a key, and say whether it was there."""
        return bool(await self._ask(ops.Delete(0, self._name(key))))

    async def delete_prefix(self, prefix: str) -> int:
        """Delete every key and queue whose name starts with `prefix`; return how many there were."""
        return int(await self._ask(ops.DeletePrefix(0, self._name(prefix))))

    async def num_keys(self) -> int:
        """Count the keys; through a prefix, those under it."""
        return int(await self._ask(ops.Count(0, self._prefix if self._prefix != self._root else b"")))

    async def list_keys(self) -> list[str]:
        """List the keys; through a prefix, those under it, without it."""
        return [name[len(self._prefix) :].decode() for name in await self._ask(ops.List(0, self._prefix))]

    async def queue_push(self, key: str, value: str | bytes) -> None:
        """Put an item at the end of a queue."""
        await self._ask(ops.Push(0, self._name(key), self._value(key, value)))

    async def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Take the first item of a queue, waiting in line for it, or (not `block`) raise QueueEmpty."""
        if block:
            return bytes(await self._wait([key], timeout, ops.Take, self._name(key)))
        item = await self._ask(ops.Pop(0, self._name(key)))
        if item is None:
            raise QueueEmpty(key=key, store=self._label)
        return bytes(item)

    async def queue_len(self, key: str) -> int:
        """Count the items of a queue."""
        return int(await self._ask(ops.QueueLen(0, self._name(key))))

    async def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Return when `world_size` callers have come to this key."""
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"the world size of barrier {key!r} must be an int, not {world_size!r}")
        size = max(-(2**63), min(world_size, 2**63 - 1))
        await self._wait([key], timeout, ops.Arrive, self._name(key), size)

    async def lease(self, key: str, value: str | bytes) -> None:
        """Write a key that vanishes with this store's session."""
        await self._ask(ops.Lease(0, self._name(key), self._value(key, value), 0.0))

    async def watch(self, prefix: str = "") -> AsyncIterator[Change]:
        """Yield every change of a key that starts with `prefix`, from the first `anext` on, until closed."""
        session, queue = self._session, asyncio.Queue()  # type: tuple[_Session, asyncio.Queue[Event | None]]
        number = session.send(ops.Watch(0, self._name(prefix)))
        session._watches[number] = queue
        try:
            self._result(await session.answer(number, "watch", None))
            while (event := await queue.get()) is not None:
                yield Change(self._unname(event.key), event.value, event.revision)
            raise copy.copy(cast(RallypointError, session.over))
        finally:
            session._watches.pop(number, None)
            if session.over is None:
                await self._unwatch(number)

    async def _unwatch(self, number: int) -> None:
        """Give up a watch; in an outage, leave that for the server to find when it is back."""
        try:
            await self._session.ask(ops.Drop(0, number), 0.0)
        except ServerDown:
            self._session.send(ops.Drop(0, number))
        except RallypointError:
            pass

    async def close(self) -> None:
        """End the session: leases are given up, waiting calls raise StoreClosed."""
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
        if reply.status == Status.OK:
            return reply.result
        if reply.status == Status.TIMED_OUT:
            return TimedOut(tuple(reply.result))
        raise error_of(reply, self._label)
