"""The session of an asyncio store: one connection at a time, any number of tasks.

It reconnects as the blocking client does (`client/blocking/`), in a task: it tries to resume the session for the grace
period of the server's welcome, then repeats unanswered requests; `client/outage.py` limits how long calls wait
meanwhile. If a server is reachable but does not reply within the requested wait plus the store's timeout, the call
raises `ConnectionLost`. The session leaves a hung server for another one, and a hung relay for the store itself, by the
rules of `client/hang_check.py`.

Rejected: reconnecting in the call that notices the cut. That call may be cancelled, while others wait for it.
"""

from __future__ import annotations

import asyncio
import copy
import time

from rallypoint import net
from rallypoint.client import hang_check, outage
from rallypoint.client.async_connection import AsyncConnection, CallLimit, why_failed
from rallypoint.client.outage import Outage
from rallypoint.client.routing.route import Address, CutCounter, Route
from rallypoint.client.routing.search import Search
from rallypoint.client.routing.server_replies import SessionRefused, accepts
from rallypoint.core import ops
from rallypoint.core.records import Event
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost, RallypointError, StoreClosed, Unsupported
from rallypoint.in_thread import in_thread
from rallypoint.protocol import BadMessage
from rallypoint.protocol.challenge import Denied
from rallypoint.protocol.native import PREFACE
from rallypoint.protocol.native_client import ClientProtocol, Reply
from rallypoint.within import within

__all__ = ["AsyncSession"]

TICK_S = 0.01
"""Added to the delay of the outage check: an event loop may fire a timer early, by the resolution of its clock."""


class AsyncSession:
    """A session with a rallypoint server, and its current connection."""

    deadline = Deadline
    """How the deadline of a call is made: in real time."""

    def __init__(self, route: Route, timeout_s: float) -> None:
        self.peer, self.label = route.name, route.label
        self.patience_s = outage.patience_s(timeout_s)
        """How long the server may take to reply, beyond the requested wait."""

        self._route = route
        self._core = ClientProtocol(net.caller_name())
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._limits: dict[int, CallLimit] = {}
        self.watches: dict[int, asyncio.Queue[Event | None]] = {}
        """The event queue of each watch, by the number of its request; None ends it."""

        self._transport: asyncio.Transport | None = None
        self._connection: AsyncConnection | None = None
        self._welcome: asyncio.Future[Reply] | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._checking_hang: asyncio.Task[None] | None = None
        self.outage: Outage | None = None
        """The current outage; None while connected."""

        self._noticing: asyncio.TimerHandle | None = None
        self._received_any = False
        self._away_s, self._cut_counter = 0.0, CutCounter(route)
        self.over: RallypointError | None = None

    async def open(self, deadline: Deadline) -> None:
        """Connect, open or resume the session, and repeat unanswered requests; raise the error that ends it."""
        search = Search(self._route, deadline, resumes=bool(self._core.session), recovers=self._core.recovers)
        while True:
            for endpoint, turn in search.round():
                try:
                    with self._route.expecting_identity(endpoint, self._core):
                        await within(max(turn.remaining(), 0.1), self._greet(endpoint))
                    return
                except (OSError, BadMessage, Denied, ValueError, asyncio.TimeoutError) as raised:
                    error = self._route.security.failure(raised, self._route.peer(endpoint)) or raised
                    if search.ends(endpoint, error):
                        raise error from None
                    search.attempt_failed(endpoint, error, why_failed(error), self._core.trouble)
            if search.wants_look:
                await in_thread(search.look)
            if self.outage is not None:
                self.outage.note_attempt(search.explain_failure, search.no_quorum)
            await asyncio.sleep(search.pause_s())

    async def _greet(self, endpoint: Address) -> None:
        self._core.trouble = ""  # reported by an earlier server
        greeting = self._route.security.new_greeting(PREFACE)
        transport, connection = await self._route.open(endpoint, lambda: AsyncConnection(self, greeting))
        try:
            if not accepts(await connection.greeting, self._route, endpoint):
                why = "the server there is PyTorch's; use rallypoint.connect"
                raise Unsupported(operation="asyncio", store=self.peer, why=why)
            self._welcome = asyncio.get_running_loop().create_future()
            transport.write(self._core.greet())
            self._away_s = self._core.welcome(await self._welcome, self._route.peer(endpoint))
            if transport.is_closing():  # lost before `connection_lost` could recognize it
                raise ConnectionError("the server closed it")
            if self.over is not None:  # the store was closed meanwhile; the cancellation came too late
                raise asyncio.CancelledError
        except BaseException:
            transport.abort()
            raise
        self._route.arrived(endpoint, self._core)
        self._transport, self._connection = transport, connection
        transport.write(self._core.repeat(time.monotonic()))
        if self.outage is not None:
            self.outage.end()
            self._end_outage()

    def received(self, data: bytes) -> None:
        """Deliver received data."""
        self._received_any = True
        servers, trouble = self._core.servers, self._core.trouble
        try:
            for reply in self._core.receive(data):
                self._deliver(reply)
            outage.report_denied(self.peer, self._core)
            if self._core.servers is not servers or self._core.trouble != trouble:
                self._noticed()
            if self._transport is not None and self.over is None:
                self._transport.write(self._core.confirm())
        except BadMessage as error:
            self.end(ConnectionLost(peer=self.peer, operation="reading", why=str(error)))

    @property
    def trouble(self) -> str:
        """The reason that the server gave for not replying; empty if it can reply."""
        return self._core.trouble

    def _noticed(self) -> None:
        """Handle a notice of the server: if it cannot reply in time, calls may have to end before it does."""
        self._route.learn_servers(self._core)
        for limit in list(self._limits.values()):
            limit.look()
        if self._connection is not None and (self._checking_hang is None or self._checking_hang.done()):
            self.check_hang()

    def _deliver(self, reply: Reply) -> None:
        """Deliver one reply. A call settles its own reply when it resumes, because it may be cancelled before that."""
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(reply)
        elif self._core.expects(reply):
            self._cut_counter.in_a_row = 0
            future = self._waiting.get(reply.number)
            if future is None:
                self._core.settle(reply)
            elif not future.done():
                future.set_result(reply)
            if not reply.number:
                number, event = reply.event()
                if number in self.watches:
                    self.watches[number].put_nowait(event)

    def connection_lost(self, connection: AsyncConnection) -> None:
        """Reconnect after a lost connection, unless it was closed on purpose."""
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(SessionRefused("the server closed it"))
        if connection is self._connection and self.over is None:
            self._transport = self._connection = None
            self.outage = Outage(self.peer, self._away_s, self._core.number, self._core.trouble)
            self._notice()
            self._reconnecting = asyncio.ensure_future(self._reconnect(self.outage.deadline))

    def _notice(self) -> None:
        """Mark the server as down after `DOWN_S`, and end the calls that have timed out."""
        if self.outage is None:
            return
        if self.outage.check_down():
            for limit in list(self._limits.values()):
                limit.look()
        elif not self.outage.down:
            self._noticing = asyncio.get_running_loop().call_later(outage.DOWN_S + TICK_S, self._notice)

    def _end_outage(self) -> None:
        self.outage = None
        if self._noticing is not None:
            self._noticing.cancel()

    async def _reconnect(self, deadline: Deadline) -> None:
        try:
            await asyncio.sleep(self._cut_counter.count(self._core.recovers))
            await self.open(deadline)
        except Exception as error:  # even a bug: nothing else would ever release the callers
            self.end(outage.session_error(error, self.peer, self._away_s))

    def check_hang(self) -> None:
        """If there is a relay or several servers, start to check for a hang, and leave a hung one for another."""
        if self._route.has_alternative:
            self._checking_hang = asyncio.ensure_future(self._check_hang())

    async def _check_hang(self) -> None:
        while self._route.has_alternative:
            self._received_any, relayed = False, self._route.relayed
            await asyncio.sleep(hang_check.silence_s(self._route))
            connection, transport = self._connection, self._transport
            if self._received_any or transport is None or relayed is not self._route.relayed:
                continue
            if not relayed:
                self.send(ops.Ping(0))
                await asyncio.sleep(hang_check.PING_S)
            if self._received_any or connection is not self._connection:
                continue
            hangs = await in_thread(lambda: hang_check.is_hung(self._route))
            if hangs and not self._received_any and connection is self._connection:
                self._route.leave(hangs=True)
                transport.abort()

    async def ask(self, op: ops.Op, wait_s: float | None = None) -> Reply:
        """Send a request and wait for its reply, due at once (`wait_s` None) or after at most `wait_s`.

        If cancelled, withdraw the request. Raises ServerDown if the wait times out while the server is down.
        """
        until = time.monotonic() + wait_s if wait_s else None
        return await self.answer(self.send(op, until), op.verb, wait_s)

    def send(self, op: ops.Op, until: float | None = None) -> int:
        """Send a request, now or after reconnecting, and return its number; a waiting request expires at `until`."""
        if self.over is not None:
            raise copy.copy(self.over)
        number = self._core.number
        request = self._core.ask(op, until)
        if self._transport is not None:
            self._transport.write(request)
        return number

    async def answer(self, number: int, operation: str, wait_s: float | None) -> Reply:
        """Wait for the reply to a request that was just sent, due after at most `wait_s`.

        If cancelled, or if the server takes too long (ConnectionLost, ServerDown), withdraw the request, unless it was
        made in an outage: the server never received such a request.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        limit = self._limits[number] = CallLimit(self, future, operation, wait_s)
        try:
            reply = await future
        except (asyncio.CancelledError, RallypointError):
            self._core.forget(number)
            if self.over is None and (self.outage is None or self.outage.was_sent(number)):
                self.send(ops.Drop(0, number))
            raise
        finally:
            limit.lift()
            del self._waiting[number], self._limits[number]
        self._core.settle(reply)
        if self._transport is not None and self.over is None:
            self._transport.write(self._core.confirm())  # a popped item belongs to this client at once
        return reply

    def end(self, reason: RallypointError) -> None:
        """Refuse further calls, and end those in progress."""
        self.over = self.over or reason
        self._end_outage()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(copy.copy(self.over))
        for queue in self.watches.values():
            queue.put_nowait(None)
        if self._transport is not None:
            self._transport.close()
        for task in (self._reconnecting, self._checking_hang):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def close(self) -> None:
        """Send Bye and end the session."""
        if self.over is None and self._transport is not None:
            self._transport.write(self._core.ask(ops.Bye(0)))
        self.end(StoreClosed(store=self.label))
