"""What an asyncio session is made of: a connection, which hands it what comes, and the time limit of one call.

The answer to the preface is read here, for it is no frame; all else is the session's. A `CallLimit` is looked at again
whenever the server is found to be down, or says that it cannot answer: a call may then have to end sooner.

Rejected: `asyncio.wait_for` around each call. Its time is fixed when it starts.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, cast

from rallypoint import net
from rallypoint.protocol import BadMessage
from rallypoint.protocol.client import Reply
from rallypoint.protocol.native import ACCEPTED, STANDBY, read_standby
from rallypoint.store.outage import Patience
from rallypoint.store.search import StandsBy

if TYPE_CHECKING:
    from rallypoint.store.async_session import AsyncSession

__all__ = ["AsyncLink", "CallLimit", "why_failed"]


def why_failed(error: Exception) -> str:
    """Say why a connection failed; where a name has several addresses, asyncio joins their errors into one text."""
    numbers = set(re.findall(r"\[Errno (\d+)\]", str(error)))
    return net.why_failed(OSError(int(*numbers), str(error)) if len(numbers) == 1 else error) or "no answer"


class AsyncLink(asyncio.Protocol):
    """One connection: what comes is the session's, and so is its end."""

    def __init__(self, session: AsyncSession) -> None:
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


class CallLimit:
    """When a call gives up its wait for an answer, which an outage may make sooner."""

    def __init__(
        self, session: AsyncSession, future: asyncio.Future[Reply], operation: str, wait_s: float | None
    ) -> None:
        self._session, self._future, self._operation = session, future, operation
        self._patience = Patience(session.patience_s, wait_s)
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
