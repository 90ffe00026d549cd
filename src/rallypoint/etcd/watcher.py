"""The watches of one client: one stream of changes, opened again elsewhere when it breaks, without a gap.

Who read a state as of revision R waits for a change after R, so nothing that happens in between is missed. All who wait
at the same `Spot` share one watch.

A stream that says nothing may have nothing to say, or hang. While somebody waits, it is asked once a second to say
something; when it does not, another endpoint has its turn. It asks for a member that has a leader, so that one
that is cut off from the others ends the stream instead of going silent.

A compacted history never breaks a wait: who waits at a spot is woken, and reads again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError, SessionLost, StoreClosed
from rallypoint.etcd import answers, messages
from rallypoint.etcd.answers import Change, WatchAnswer
from rallypoint.etcd.client import Client, stream_trouble
from rallypoint.etcd.interests import PLACES, Feed, Interest, Spot
from rallypoint.etcd.messages import Method
from rallypoint.etcd.rpc import grpc

__all__ = ["PLACES", "Feed", "Spot", "Watcher"]

SILENCE_S = 1.0
"""How long a stream may say nothing after it was asked to."""

PAUSE_S = 0.1
LOG_IN_S = 5.0
LINGER_S = 1.0
"""How long a watch stays when nobody waits at its spot, for the next may come soon."""


class _NoToken(Exception):
    """The token that a stream was opened with is not known to etcd any more."""


class Watcher:
    """All watches of one client."""

    def __init__(self, client: Client) -> None:
        self.name = client.name
        self._client = client
        self._numbers = count(1)
        self._interests: dict[int, Interest] = {}
        self._spots: dict[tuple[bytes, bytes], int] = {}
        self._wanted: deque[tuple[int, bytes]] = deque()  # requests; and of which watch they are the beginning, or 0
        self._begun: deque[int] = deque()  # the watches whose beginning was asked for and not yet answered, in order
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._mute_since: float | None = None

    @contextlib.asynccontextmanager
    async def waiting(self, first: bytes, end: bytes, revision: int) -> AsyncIterator[asyncio.Future[Change | None]]:
        """Yield what is done when something in a range changed after a revision, or may have: the last change then."""
        future: asyncio.Future[Change | None] = asyncio.get_running_loop().create_future()
        number = self._spots.get((first, end))
        if number is None:
            spot = Spot(first, end, revision + 1)
            number = self._spots[first, end] = self.add(spot)
        else:
            spot = self._interests[number]  # type: ignore[assignment]
        spot.waiting[future] = revision
        spot.wake()
        try:
            yield future
        finally:
            del spot.waiting[future]
            if not spot.waiting:
                asyncio.get_running_loop().call_later(LINGER_S, self._leave, spot, number)

    def add(self, interest: Interest) -> int:
        """Begin to watch; return its number."""
        number = next(self._numbers)
        self._interests[number] = interest
        self._ask(messages.watch(number, interest.first, interest.end, interest.revision), number)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        return number

    def remove(self, number: int) -> None:
        """Stop watching."""
        if self._interests.pop(number, None) is not None:
            self._ask(messages.cancel_watch(number))

    def mute_s(self) -> float:
        """Return how long ago the stream broke, if none has said anything since."""
        return 0.0 if self._mute_since is None else time.monotonic() - self._mute_since

    def close(self) -> None:
        """Stop all; feeds end."""
        if self._task is not None:
            self._task.cancel()
        for interest in list(self._interests.values()):
            if isinstance(interest, Feed):
                interest.end_with(StoreClosed(store=self.name))

    # Inside

    def _leave(self, spot: Spot, number: int) -> None:
        if not spot.waiting and self._spots.get((spot.first, spot.end)) == number:
            del self._spots[spot.first, spot.end]
            self.remove(number)

    def _ask(self, request: bytes, begins: int = 0) -> None:
        self._wanted.append((begins, request))
        self._bell.set()

    async def _run(self) -> None:
        while True:
            while not self._interests:
                self._mute_since = None
                self._bell.clear()
                await self._bell.wait()
            endpoint = self._client.some_endpoint()
            why = "its watch stream ended"
            try:
                await self._one_stream(self._client.stream(Method.WATCH, endpoint))
            except asyncio.TimeoutError:
                why = f"its watch stream was silent for {SILENCE_S:g} s"
            except _NoToken:
                with contextlib.suppress(RallypointError):
                    await self._client.log_in(Deadline(LOG_IN_S))
                continue
            except Exception as error:  # whatever it was: without this task, all who wait would wait for ever
                why = stream_trouble(error)
            if self._mute_since is None:
                self._mute_since = time.monotonic()
            endpoint.failed(why, time.monotonic() - SILENCE_S)
            await asyncio.sleep(PAUSE_S)

    async def _one_stream(self, stream: Any) -> None:
        """Carry a stream until it breaks."""
        self._wanted.clear()
        self._begun.clear()
        for number, interest in self._interests.items():
            self._ask(messages.watch(number, interest.first, interest.end, interest.revision), number)
        writer = asyncio.ensure_future(self._write(stream))
        reader = asyncio.ensure_future(self._read(stream))
        try:
            done, _ = await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (writer, reader):
                task.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)
            stream.cancel()

    async def _write(self, stream: Any) -> None:
        while True:
            await self._bell.wait()
            self._bell.clear()
            while self._wanted:
                begins, request = self._wanted.popleft()
                if begins:
                    self._begun.append(begins)
                await asyncio.wait_for(stream.write(request), SILENCE_S)

    async def _read(self, stream: Any) -> None:
        asked = False
        reading: asyncio.Future[Any] | None = None
        try:
            while True:
                reading = reading or asyncio.ensure_future(stream.read())
                done, _ = await asyncio.wait((reading,), timeout=SILENCE_S)
                if done:
                    data, reading, asked = reading.result(), None, False
                    if data is grpc.aio.EOF:
                        return
                    self._mute_since = None
                    self._take(answers.read_watch(data))
                elif asked and self._interests:
                    raise asyncio.TimeoutError
                elif self._interests:
                    asked = True
                    self._ask(messages.progress())
        finally:
            if reading is not None:
                reading.cancel()

    def _take(self, answer: WatchAnswer) -> None:
        number = answer.watch
        if answer.created and self._begun:  # they are answered in order, and a refusal does not say of which it is
            number = self._begun.popleft()
        interest = self._interests.get(number)
        if answer.cancelled and "auth token" in answer.why:
            raise _NoToken(answer.why)
        if interest is None:
            return
        if answer.cancelled:
            self._ended(number, interest, answer)
        elif answer.changes:
            interest.revision = answer.changes[-1].revision + 1
            interest.came(answer)
        elif not answer.created:  # progress: all before it has been delivered
            interest.revision = max(interest.revision, answer.revision + 1)

    def _ended(self, number: int, interest: Interest, answer: WatchAnswer) -> None:
        """Etcd ended a watch: what waits at a spot reads again, hears there what is wrong, and may come back."""
        del self._interests[number]
        if isinstance(interest, Feed) and not answer.compacted:
            interest.end_with(SessionLost(peer=self.name, why=f"etcd ended the watch: {answer.why}"))
        else:
            interest.gap(answer.compacted)
        if isinstance(interest, Spot) and self._spots.get((interest.first, interest.end)) == number:
            del self._spots[interest.first, interest.end]
