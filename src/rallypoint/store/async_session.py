"""The session of an asyncio store: one connection at a time, any number of tasks.

A cut is mended as in the blocking client (`store/wire.py`), by a task: the session is resumed for as long as the
welcome said, what was not answered is repeated, and `store/outage.py` says how long calls wait meanwhile. A server that
is there and does not answer, for longer than it was asked to wait and the store's timeout, is `ConnectionLost`. One of
several that hangs is left for another, and a relay that does for the store itself, as `store/peer_check.py` has it.

Rejected: to mend a cut in the call that finds it. That call may be cancelled, and the others wait for the same.
"""

from __future__ import annotations

import asyncio
import copy
import time

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.records import Event
from rallypoint.deadline import Deadline
from rallypoint.errors import (
    ConnectFailed,
    ConnectionLost,
    RallypointError,
    ServerRestarted,
    SessionLost,
    StoreClosed,
    Unsupported,
)
from rallypoint.protocol import BadMessage
from rallypoint.protocol.client import Client, Reply
from rallypoint.protocol.native import ACCEPTED, PREFACE
from rallypoint.store import outage, peer_check
from rallypoint.store.async_link import AsyncLink, CallLimit, why_failed
from rallypoint.store.outage import Outage
from rallypoint.store.route import Address, Cuts, Route
from rallypoint.store.search import NOT_OF_SEVERAL, Search, StandsBy, Unwelcome
from rallypoint.within import within

__all__ = ["LEAST_PATIENCE_S", "AsyncSession"]

TICK_S = 0.01
"""How late an outage is looked at: a loop may be early by the resolution of its clock."""

LEAST_PATIENCE_S = 10.0
"""How long a server may take to answer, beyond what it was asked to wait, however short the store's timeout is."""


class AsyncSession:
    """A session with one of our servers, and the connection that carries it now."""

    def __init__(self, route: Route, timeout_s: float) -> None:
        self.peer, self.label = route.name, route.label
        self.patience_s = max(timeout_s, LEAST_PATIENCE_S)
        """How long the server may take to answer, beyond what it was asked to wait."""

        self._route = route
        self._core = Client(net.caller_name())
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._limits: dict[int, CallLimit] = {}
        self.watches: dict[int, asyncio.Queue[Event | None]] = {}
        """Where the events of each watch go, by the number of its request; None is their end."""

        self._transport: asyncio.Transport | None = None
        self._link: AsyncLink | None = None
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
                        await within(max(turn.remaining(), 0.1), self._greet(endpoint))
                    return
                except (OSError, BadMessage, ValueError, asyncio.TimeoutError) as error:
                    if search.ends(endpoint, error):
                        raise
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
        why, unwelcome = trouble or why_failed(error), isinstance(error, Unwelcome)
        search.failed(endpoint, why, useless, unwelcome, no_quorum=bool(trouble))

    async def _greet(self, endpoint: Address) -> None:
        self._core.trouble = ""  # what an earlier one said
        transport, link = await self._route.open(endpoint, lambda: AsyncLink(self))
        try:
            transport.write(PREFACE)
            answer = await link.greeting
            if answer == PREFACE[-len(ACCEPTED) :]:
                if self._route.several or endpoint is self._route.relay:
                    raise BadMessage(NOT_OF_SEVERAL)
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
                if number in self.watches:
                    self.watches[number].put_nowait(event)

    def cut(self, link: AsyncLink) -> None:
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
        limit = self._limits[number] = CallLimit(self, future, operation, wait_s)
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
        for queue in self.watches.values():
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
