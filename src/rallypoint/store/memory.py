"""HashStore: the engine behind a lock, for the threads of one process.

A `Hub` is the shared part; every handle (a clone) is a session of its own on it, so leases belong to a handle. A call
that must wait sleeps on a `_Seat`, kept by its operation's number, until another thread's call wakes it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Any

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import Answer, Event, Statistics, TimedOut, Waiter
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import StoreClosed
from rallypoint.store.base import Backend, Feed, Store
from rallypoint.store.view import DEFAULT_TIMEOUT_S

__all__ = ["HashStore", "Hub", "MemoryBackend"]


class _Seat:
    """Where one thread waits for answers: a queue of them, and a lock that is open when there may be one."""

    def __init__(self) -> None:
        self.answers: deque[Answer | StoreClosed] = deque()
        self._bell = threading.Semaphore(0)

    def give(self, answer: Answer | StoreClosed) -> None:
        self.answers.append(answer)
        self._bell.release()

    def wait(self, deadline: Deadline) -> bool:
        return self._bell.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX))


class Hub:
    """An engine shared by the threads of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine = Engine()

    def deliver(self) -> None:
        """Hand out what the engine has for others; the lock is held."""
        for handle, answer in self.engine.take():
            assert isinstance(handle.owner, MemoryBackend)
            handle.owner._seats[handle.number].give(answer)


class MemoryBackend(Backend):
    """One session on a hub."""

    def __init__(self, hub: Hub) -> None:
        self.name = f"memory://{id(hub):x}"
        self.hub = hub
        self._numbers = itertools.count(1)
        self._seats: dict[int, _Seat] = {}
        self._closed = False

    def execute(self, op: ops.Op) -> Any:
        with self.hub.lock:
            self._check_open()
            op.number = next(self._numbers)
            answer = self.hub.engine.execute(op, self)
            self.hub.deliver()
            if not isinstance(answer, Waiter):
                return answer
            self._seats[op.number] = _Seat()
        return self._wait(answer, Deadline(getattr(op, "timeout_s", 0.0)))

    def watch(self, prefix: bytes) -> Feed:
        return _MemoryFeed(self, prefix)

    def clone(self) -> MemoryBackend:
        return MemoryBackend(self.hub)

    def close(self) -> None:
        with self.hub.lock:
            self._closed = True
            self.hub.engine.end(self)
            self.hub.deliver()
            for seat in self._seats.values():
                seat.give(StoreClosed(store=self.name))

    # Inside

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(store=self.name)

    def _wait(self, waiter: Waiter, deadline: Deadline) -> Any:
        hub, seat = self.hub, self._seats[waiter.number]
        try:
            if not seat.wait(deadline):
                with hub.lock:
                    timed_out = hub.engine.expire(waiter)
                    hub.deliver()
                if timed_out is not None:
                    return timed_out
            answer = seat.answers[0]
        except BaseException:  # Ctrl-C: nobody takes the answer any more
            with hub.lock:
                hub.engine.drop(waiter)
                if seat.answers and isinstance(seat.answers[0], bytes):
                    hub.engine.push(waiter.keys[0], seat.answers[0], front=True)
                hub.deliver()
            raise
        finally:
            with hub.lock:
                del self._seats[waiter.number]
        if isinstance(answer, StoreClosed):
            raise answer
        return answer


class _MemoryFeed(Feed):
    def __init__(self, backend: MemoryBackend, prefix: bytes) -> None:
        self._backend = backend
        self._seat = _Seat()
        with backend.hub.lock:
            backend._check_open()
            self._watch = backend.hub.engine.watch(prefix, backend, next(backend._numbers))
            backend._seats[self._watch.number] = self._seat

    def next(self, deadline: Deadline) -> Event | TimedOut:
        if not self._seat.wait(deadline):
            return TimedOut(())
        answer = self._seat.answers.popleft()
        if isinstance(answer, StoreClosed):
            self._seat.give(answer)  # for whoever asks next
            raise answer
        assert isinstance(answer, Event)
        return answer

    def close(self) -> None:
        with self._backend.hub.lock:
            self._backend.hub.engine.drop(self._watch)
            self._backend._seats.pop(self._watch.number, None)
        self._seat.give(StoreClosed(store=self._backend.name))


class HashStore(Store):
    """A store in this process, shared by its threads; every HashStore() is a new, empty one."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(MemoryBackend(Hub()), b"", timeout)

    def statistics(self) -> Statistics:
        """Count what the store holds now."""
        assert isinstance(self._backend, MemoryBackend)
        with self._backend.hub.lock:
            return self._backend.hub.engine.statistics()
