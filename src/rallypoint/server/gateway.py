"""A server whose state is in etcd: the same port, protocols and pages; any number of them are one store.

`Gateway` is a server with other handlers: `gateway_torch.py` for PyTorch's clients, `gateway_caller.py` for ours, whose
sessions are in etcd too (`gateway_session.py`), so that a client may go on at another gateway. A door's store is under
`doors/RUN/ROUND` of the gateway's: the doors of one round of one run are the same store at all gateways. Leased keys of
that name say at which of them it is open; who closes the last one empties it.

PyTorch's clients have no sessions. What they write is proved in the gateway's own (`Desk`), which is also ready to see
to what sessions that died have left (`etcd/executor.py`).

While etcd does not answer, requests wait and then fail, as `etcd/space.py` has them do; the gateway goes on, says so
once in its log, and on its page for as long as it is so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint import net
from rallypoint.core.session import ReplyBudget
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken, NetworkError, RallypointError, SessionLost
from rallypoint.etcd.executor import Executor
from rallypoint.server.base import RESERVE_BYTES, ServerBase
from rallypoint.server.connection import Connection, ProtocolHandler
from rallypoint.server.doors import Doors
from rallypoint.server.gateway_caller import GatewayCaller, GatewaySessions
from rallypoint.server.gateway_torch import GatewayConversation
from rallypoint.server.lines import Lines
from rallypoint.server.round_errors import TooLate, TooMany
from rallypoint.server.settings import Settings

if TYPE_CHECKING:
    from rallypoint.etcd.session import Mark, Session
    from rallypoint.etcd.space import Space

__all__ = ["Desk", "Gateway"]

log = logging.getLogger("rallypoint.server")

CLOSE_S = 2.0
"""How long a gateway that ends sees through what it was told."""

LOOK_S = 0.01
PAUSE_S = 1.0
OWN_LEASE_S = 3.0
"""How much longer than the grace the session of a gateway itself lives that has died."""

T = TypeVar("T")


class Desk:
    """The gateway's own session, which proves the changes of clients that have none."""

    def __init__(self, space: Space, execute: Callable[[Space, Session], Executor]) -> None:
        self._space = space
        self._execute = execute
        self._name = f"gateway {net.caller_name()}"
        self._session: Session | None = None
        self._executor: Executor | None = None
        self._opening = asyncio.Lock()

    async def keep(self) -> None:
        """Have a session at all times."""
        while True:
            try:
                session = await self.session()
            except RallypointError:
                await asyncio.sleep(PAUSE_S)
            else:
                await session.lost.wait()

    async def change(self, call: Callable[[Mark], Awaitable[T]]) -> T:
        """Make a change with a mark of its own.

        Where the session was found to have ended, and nothing can have happened, it is made again under a new one.
        """
        while True:
            session = await self.session()
            with session.own_mark() as mark:
                try:
                    return await call(mark)
                except SessionLost:
                    if mark.doubtful:
                        raise

    async def put_back(self, key: bytes, item: bytes) -> None:
        """Put an item to the front again, whose taker is gone."""
        await self._space.put_back(await self.session(), key, item)

    async def session(self) -> Session:
        """Return the session, opened if there is none."""
        if self._session is not None and not self._session.lost.is_set():
            return self._session
        async with self._opening:
            if self._session is None or self._session.lost.is_set():
                if self._executor is not None:
                    self._executor.stop()
                self._session = await self._space.open_session(self._name)
                self._executor = self._execute(self._space, self._session)
            return self._session

    async def close(self) -> None:
        """End the session."""
        if self._executor is not None:
            self._executor.stop()
        if self._session is not None:
            await self._session.end()


class Gateway(ServerBase):
    """Everything one gateway holds: who is connected, and what of theirs is under way."""

    space: Space
    desk: Desk
    lines: Lines

    def __init__(
        self,
        settings: Settings,
        connect: Callable[[], Awaitable[Space]],
        front: Gateway | None = None,
        execute: Callable[[Space, Session], Executor] = Executor,
        name: str = "",
    ) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        super().__init__(settings, front)
        budget = ReplyBudget(settings.max_connection_memory, max(settings.max_memory // 4, RESERVE_BYTES))
        self.guests = GatewaySessions(self, budget)
        self.guests.limit = settings.max_sessions
        self.doors = Doors(self)
        self._expiry: asyncio.TimerHandle | None = None
        self._connect = connect
        self._execute = execute
        self._name = name  # of the door
        self.lingering = 0
        """How many bytes are still to be written for those who have gone."""

        self.trouble = ""
        """Why etcd cannot be asked; empty while it answers."""

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Reach the store in etcd, then start to serve on bound, listening sockets."""
        self.space = await self._connect()
        self.desk = Desk(self.space, self._execute)
        self.lines = Lines(self.space)
        await self.ask(self.desk.session())
        self.spawn(self.desk.keep())
        front = self._front
        if front is not self:
            assert isinstance(front, Gateway)
            await front.desk.change(lambda mark: front.space.lease_key(mark, self._name.encode(), b""))
        await super().open(sockets)

    async def close(self) -> None:
        """Stop listening, hang up on all, see through what was begun, and leave the sessions to other gateways."""
        await self.doors.close_all()
        await super().close()
        deadline = Deadline(CLOSE_S)
        while (self.lingering or self._connections) and not deadline.expired():
            await asyncio.sleep(LOOK_S)
        self.guests.leave()
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        if hasattr(self, "desk"):
            with contextlib.suppress(RallypointError, asyncio.TimeoutError):
                await asyncio.wait_for(self._leave(), CLOSE_S)
            await self.desk.close()
            if self._front is self:
                await self.space.close()

    async def _leave(self) -> None:
        """Tidy up: what nobody waits for is done, and what is behind the last door of a round is gone."""
        await self.space.settle()
        front = self._front
        if front is not self:
            assert isinstance(front, Gateway)
            key = self._name.encode()
            await front.desk.change(lambda mark: front.space.delete(mark, key))
            if not await front.space.num_keys(key.rpartition(b"/")[0] + b"/"):
                await self.desk.change(lambda mark: self.space.delete_prefix(mark, b""))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let something go on beside; the log tells if it fails in a way that nobody thought of."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the gateway failed", exc_info=task.exception())

    async def ask(self, call: Awaitable[T]) -> T:
        """Return what etcd answers, and note whether it does."""
        try:
            answer = await call
        except SessionLost:
            raise
        except NetworkError as error:
            if not self.trouble:
                log.warning("etcd does not answer: %s", error)
            self.trouble = str(error)
            raise
        if self.trouble:
            log.warning("etcd answers again")
            self.trouble = ""
        return answer

    def linger(self, size: int) -> bool:
        """Count what is still to be written for one who has gone; say whether there is room for that."""
        self.lingering += size
        return self.lingering <= max(self.settings.max_memory // 4, RESERVE_BYTES)

    # What is other than in a house of its own

    def torch_handler(self, connection: Connection) -> ProtocolHandler:
        return GatewayConversation(self, connection, self.settings.max_connection_memory)

    def native_handler(self, connection: Connection) -> ProtocolHandler:
        return GatewayCaller(self, connection, self.settings.max_connection_memory)

    def behind(self, name: str, scope: int) -> Gateway:
        async def below() -> Space:
            return self.space.below(place)

        place = f"doors/{urllib.parse.quote(name, safe='')}/{scope}"
        return Gateway(self.settings, below, self, self._execute, f"{place}/{secrets.token_hex(4)}")

    def open_round(
        self,
        name: str,
        scope: int,
        number: int | None,
        done: Callable[[int | Exception], None],
        *,
        port: int = 0,
        everywhere: bool = False,
    ) -> None:
        try:
            done(self.doors.open(name, scope, number))
        except (TooLate, TooMany, AddressTaken) as error:
            done(error)

    def close_round(self, name: str, scope: int | None, done: Callable[[bool], None]) -> None:
        done(self.doors.close(name, scope))

    @property
    def in_rounds(self) -> int:
        return self.doors.connections

    def held_bytes(self) -> int:
        return self.guests.ledger.kept

    def describe_sessions(self) -> Sequence[Any]:
        return list(self.guests)

    def left(self, connection: Connection) -> None:
        super().left(connection)
        self._expire()

    def _expire(self) -> None:
        """End the sessions whose grace is over, and look again when the next one's is."""
        now = time.monotonic()
        self.guests.expire(now)
        if self._expiry is not None:
            self._expiry.cancel()
        ends_at = self.guests.next_end()
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(max(0.0, ends_at - now), self._expire) if ends_at < float("inf") else None

    def sweep(self) -> None:
        self.lines.sweep()
        self._expire()

    def holdings(self) -> dict[str, Any]:
        return {
            "engine": self.space.name if hasattr(self, "space") else "etcd",
            "trouble": self.trouble,
            "doors": self.doors.statistics(),
            "sessions_here": len(self.guests),
            "waiting": sum(getattr(connection.handler, "waiting", 0) for connection in self._connections),
            "under_way": len(self._tasks),
        }
