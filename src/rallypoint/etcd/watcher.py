"""The watches of one client: one stream of changes, opened again elsewhere when it breaks, without a gap.

`Spot` is what many wait for: a key, or a range of keys, and the wish to know when it changes after some revision. Who
read a state as of revision R waits for a change after R, so nothing that happens in between is missed. All who wait
for the same share one watch. `Feed` delivers every change, in order.

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

import grpc

from rallypoint.core.records import Event
from rallypoint.errors import SessionLost, StoreClosed
from rallypoint.etcd import answers, messages
from rallypoint.etcd.answers import Change, WatchAnswer
from rallypoint.etcd.client import Client, stream_trouble
from rallypoint.etcd.messages import Method

__all__ = ["Feed", "Spot", "Watcher"]

SILENCE_S = 1.0
"""How long a stream may say nothing after it was asked to."""

PAUSE_S = 0.1
PLACES = 1 << 16
"""The revisions that a feed tells are this many times those of etcd, so that changes of one moment have an order."""

LINGER_S = 1.0
"""How long a watch stays when nobody waits at its spot, for the next may come soon."""


class _Interest:
    """One watch as we want it: from which revision on, and what is to be done with what comes."""

    def __init__(self, first: bytes, end: bytes, revision: int) -> None:
        self.first, self.end = first, end
        self.revision = revision
        """From which one on changes are still to come."""

    def came(self, answer: WatchAnswer) -> None:
        """Take changes."""
        raise NotImplementedError

    def gap(self, to: int) -> None:
        """Note that changes before a revision can no more be had."""
        raise NotImplementedError


class Spot(_Interest):
    """A key or a range of keys where some wait for a change."""

    def __init__(self, first: bytes, end: bytes, revision: int) -> None:
        super().__init__(first, end, revision)
        self.since = revision
        self.changed_at = 0
        self._last: Change | None = None
        self.waiting: dict[asyncio.Future[Change | None], int] = {}
        """Who waits, and for a change after which revision."""

    def came(self, answer: WatchAnswer) -> None:
        self._last = answer.changes[-1]
        self.changed_at = self._last.revision
        self.wake()

    def gap(self, to: int) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(None)

    def wake(self) -> None:
        """Tell of the last change, if it is known, whoever waits for one or may have missed one."""
        for future, revision in self.waiting.items():
            if (self.since > revision + 1 or self.changed_at > revision) and not future.done():
                future.set_result(self._last)


class Feed(_Interest):
    """Every change of the keys in a range, in order; `strip` bytes of their names are ours."""

    def __init__(self, watcher: Watcher, first: bytes, end: bytes, strip: int) -> None:
        super().__init__(first, end, 0)
        self._watcher = watcher
        self._strip = strip
        self._events: deque[Event] = deque()
        self._bell = asyncio.Event()
        self._over: Exception | None = None
        self._number = 0
        self._last = self._place = 0

    def start(self, revision: int) -> None:
        """Begin after a revision."""
        self.revision = revision + 1
        self._number = self._watcher.add(self)

    def came(self, answer: WatchAnswer) -> None:
        for key, value, revision in answer.changes:
            self._place = self._place + 1 if revision == self._last else 0
            self._last = revision
            self._events.append(Event(revision * PLACES + self._place, key[self._strip :], value))
        self._bell.set()

    def gap(self, to: int) -> None:
        why = f"etcd has compacted its history up to revision {to}, and changes before that were not yet delivered"
        self.end_with(SessionLost(peer=self._watcher.name, why=why, advice="begin the watch again"))

    def end_with(self, error: Exception) -> None:
        """Deliver what came, then an error."""
        self._over = self._over or error
        self._bell.set()

    def unread(self, event: Event) -> None:
        """Take a change back that could not be delivered."""
        self._events.appendleft(event)

    async def next(self) -> Event:
        """Return the next change, waiting for it."""
        while not self._events:
            if self._over is not None:
                raise self._over
            self._bell.clear()
            await self._bell.wait()
        return self._events.popleft()

    def close(self) -> None:
        """Stop, and wake who waits."""
        self.end_with(StoreClosed(store=self._watcher.name))
        self._watcher.remove(self._number)


class Watcher:
    """All watches of one client."""

    def __init__(self, client: Client) -> None:
        self.name = client.name
        self._client = client
        self._numbers = count(1)
        self._interests: dict[int, _Interest] = {}
        self._spots: dict[tuple[bytes, bytes], int] = {}
        self._wanted: deque[bytes] = deque()
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

    def add(self, interest: _Interest) -> int:
        """Begin to watch; return its number."""
        number = next(self._numbers)
        self._interests[number] = interest
        self._ask(messages.watch(number, interest.first, interest.end, interest.revision))
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

    def _ask(self, request: bytes) -> None:
        self._wanted.append(request)
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
            except Exception as error:  # whatever it was: without this task, all who wait would wait for ever
                why = stream_trouble(error)
            if self._mute_since is None:
                self._mute_since = time.monotonic()
            endpoint.failed(why, time.monotonic() - SILENCE_S)
            await asyncio.sleep(PAUSE_S)

    async def _one_stream(self, stream: Any) -> None:
        """Carry a stream until it breaks."""
        self._wanted.clear()
        for number, interest in self._interests.items():
            self._wanted.append(messages.watch(number, interest.first, interest.end, interest.revision))
        self._bell.set()
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
                await asyncio.wait_for(stream.write(self._wanted.popleft()), SILENCE_S)

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
        interest = self._interests.get(answer.watch)
        if interest is None:
            return
        if answer.cancelled:
            self._ended(answer.watch, interest, answer)
        elif answer.changes:
            interest.revision = answer.changes[-1].revision + 1
            interest.came(answer)
        elif not answer.created:  # progress: all before it has been delivered
            interest.revision = max(interest.revision, answer.revision + 1)

    def _ended(self, number: int, interest: _Interest, answer: WatchAnswer) -> None:
        """Etcd ended a watch: what waits at a spot reads again, hears there what is wrong, and may come back."""
        del self._interests[number]
        if isinstance(interest, Feed) and not answer.compacted:
            interest.end_with(SessionLost(peer=self.name, why=f"etcd ended the watch: {answer.why}"))
        else:
            interest.gap(answer.compacted)
        if isinstance(interest, Spot) and self._spots.get((interest.first, interest.end)) == number:
            del self._spots[interest.first, interest.end]
