"""The parts of an asyncio session: its connection, which passes received data on, and the time limit of one call.

The greeting is handled here, because it has no frames; after a server has accepted it, all data goes to the session:
anything else may come from an impostor, who must not answer calls that wait. A `CallLimit` is checked again whenever
the server is found to be down, or reports that it cannot reply: a call may then end sooner.

Rejected: `asyncio.wait_for` around each call. Its timeout is fixed when it starts.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, cast

from rallypoint import net
from rallypoint.client.outage import CallDeadline
from rallypoint.client.routing.server_replies import IsStandby
from rallypoint.protocol import BadMessage
from rallypoint.protocol.challenge import ClientGreeting, Denied
from rallypoint.protocol.native import ACCEPTED
from rallypoint.protocol.native_client import Reply

if TYPE_CHECKING:
    from rallypoint.client.async_session import AsyncSession

__all__ = ["AsyncConnection", "CallLimit", "why_failed"]


def why_failed(error: Exception) -> str:
    """Return why a connection failed; if a name has several addresses, asyncio joins their errors into one text."""
    numbers = set(re.findall(r"\[Errno (\d+)\]", str(error)))
    return net.why_failed(OSError(int(*numbers), str(error)) if len(numbers) == 1 else error) or "no answer"


class AsyncConnection(asyncio.Protocol):
    """One connection: passes received data, and the loss of the connection, to the session."""

    def __init__(self, session: AsyncSession, greeting: ClientGreeting) -> None:
        self._session = session
        self._greeting = greeting
        self.greeting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The server's answer to the preface."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._watch = net.watch(asyncio.get_running_loop(), transport, lambda silent_s: self._transport.abort())
        self._transport.write(self._greeting.preface)

    def data_received(self, data: bytes) -> None:
        greeting = self._greeting
        if self.greeting.done():
            if greeting.answer == ACCEPTED:
                self._session.received(data)
            return
        try:
            self._transport.write(greeting.feed(data))
        except (BadMessage, Denied) as error:
            self.greeting.set_exception(error)
            return
        if greeting.standby is not None:
            self.greeting.set_exception(IsStandby(greeting.standby))
        elif greeting.answer:
            self.greeting.set_result(greeting.answer)
            if greeting.rest and greeting.answer == ACCEPTED:
                self._session.received(greeting.rest)

    def connection_lost(self, error: Exception | None) -> None:
        if self._watch is not None:
            self._watch.stop()
        if not self.greeting.done():
            self.greeting.set_exception(error or ConnectionError("the server closed it"))
        self._session.connection_lost(self)


class CallLimit:
    """When a call stops waiting for its reply; an outage may make that sooner."""

    def __init__(
        self, session: AsyncSession, future: asyncio.Future[Reply], operation: str, wait_s: float | None
    ) -> None:
        self._session, self._future, self._operation = session, future, operation
        self._patience = CallDeadline(session.patience_s, wait_s)
        self._timer: asyncio.TimerHandle | None = None
        self.look()

    def look(self) -> None:
        """End the call if its time is up, else check again then."""
        self.lift()
        session = self._session
        left_s = self._patience.until(session.outage, session.trouble) - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self.look)
        elif not self._future.done():
            error = self._patience.ended(session.peer, self._operation, session.outage, session.trouble)
            self._future.set_exception(error)

    def lift(self) -> None:
        """Remove the limit."""
        if self._timer is not None:
            self._timer.cancel()
