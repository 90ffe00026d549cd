"""HashStore: the engine behind a lock, for the threads of one process.

A `Hub` is the shared part; every handle (a clone) is a session of its own on it, so leases belong to a handle. A call
that must wait parks a waiter whose tag is a `_Seat`, on which its thread sleeps until another thread's call wakes it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from rallypoint.core.engine import Engine
from rallypoint.core.records import Answer, Event, Statistics, Swap, TimedOut, Waiter
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import StoreClosed
from rallypoint.store.base import Backend, Feed, Store
from rallypoint.store.view import DEFAULT_TIMEOUT_S

__all__ = ["HashStore", "Hub", "MemoryBackend"]

_T = TypeVar("_T")


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
            assert isinstance(handle.tag, _Seat)
            handle.tag.give(answer)


class MemoryBackend(Backend):
    """One session on a hub."""

    def __init__(self, hub: Hub) -> None:
        self.name = f"memory://{id(hub):x}"
        self.hub = hub
        self._seats: set[_Seat] = set()
        self._closed = False

    # Calls that answer at once

    def set(self, key: bytes, value: bytes) -> None:
        self._call(self.hub.engine.set, key, value)

    def add(self, key: bytes, amount: int) -> int:
        return self._call(self.hub.engine.add, key, amount)

    def append(self, key: bytes, value: bytes) -> None:
        self._call(self.hub.engine.append, key, value)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return self._call(self.hub.engine.compare_set, key, expected, desired)

    def swap(self, key: bytes, expected: bytes | None, desired: bytes) -> Swap:
        return self._call(self.hub.engine.swap, key, expected, desired)

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._call(self.hub.engine.multi_set, pairs)

    def check(self, keys: Sequence[bytes]) -> bool:
        return self._call(self.hub.engine.check, keys)

    def delete(self, key: bytes) -> bool:
        return self._call(self.hub.engine.delete, key)

    def delete_prefix(self, prefix: bytes) -> int:
        return self._call(self.hub.engine.delete_prefix, prefix)

    def num_keys(self, prefix: bytes) -> int:
        return self._call(self.hub.engine.num_keys, prefix)

    def list_keys(self, prefix: bytes) -> list[bytes]:
        return self._call(self.hub.engine.list_keys, prefix)

    def queue_push(self, key: bytes, value: bytes) -> None:
        self._call(self.hub.engine.queue_push, key, value)

    def queue_pop(self, key: bytes) -> bytes | None:
        return self._call(self.hub.engine.queue_pop, key)

    def queue_len(self, key: bytes) -> int:
        return self._call(self.hub.engine.queue_len, key)

    def lease(self, key: bytes, value: bytes, ttl_s: float) -> None:  # who reads it stops together with who holds it
        self._call(self.hub.engine.set, key, value, self)

    def unlease(self, key: bytes) -> bool:
        return self._call(self.hub.engine.unlease, key, self)

    # Calls that may wait

    def wait(self, keys: Sequence[bytes], deadline: Deadline) -> TimedOut | None:
        return self._wait(self.hub.engine.wait, deadline, keys)

    def wait_values(self, keys: Sequence[bytes], deadline: Deadline) -> list[bytes] | TimedOut:
        return self._wait(self.hub.engine.wait_values, deadline, keys)

    def wait_item(self, key: bytes, deadline: Deadline) -> bytes | TimedOut:
        return self._wait(self.hub.engine.wait_item, deadline, key)

    def barrier(self, key: bytes, size: int, deadline: Deadline) -> TimedOut | None:
        return self._wait(self.hub.engine.barrier, deadline, key, size)

    def watch(self, prefix: bytes) -> Feed:
        return _MemoryFeed(self, prefix)

    def clone(self) -> MemoryBackend:
        return MemoryBackend(self.hub)

    def close(self) -> None:
        with self.hub.lock:
            self._closed = True
            self.hub.engine.end(self)
            self.hub.deliver()
            for seat in self._seats:
                seat.give(StoreClosed(store=self.name))

    # Inside

    def _open(self) -> None:
        if self._closed:
            raise StoreClosed(store=self.name)

    def _call(self, operation: Callable[..., _T], *arguments: Any) -> _T:
        with self.hub.lock:
            self._open()
            result = operation(*arguments)
            self.hub.deliver()
            return result

    def _wait(self, operation: Callable[..., Waiter | _T], deadline: Deadline, *arguments: Any) -> _T | TimedOut:
        engine, seat = self.hub.engine, _Seat()
        with self.hub.lock:
            self._open()
            outcome = operation(*arguments, self, deadline.at, seat)
            self.hub.deliver()
            if not isinstance(outcome, Waiter):
                return outcome
            self._seats.add(seat)
        try:
            while not seat.wait(deadline):
                with self.hub.lock:
                    engine.tick(deadline.at)
                    self.hub.deliver()
        except BaseException:  # Ctrl-C: nobody takes the answer any more
            self._give_up(outcome, seat)
            raise
        with self.hub.lock:
            self._seats.discard(seat)
        answer = seat.answers.popleft()
        if isinstance(answer, StoreClosed):
            raise answer
        return cast(_T, answer)

    def _give_up(self, waiter: Waiter, seat: _Seat) -> None:
        with self.hub.lock:
            self._seats.discard(seat)
            self.hub.engine.drop(waiter)
            if seat.answers and isinstance(seat.answers[0], bytes):
                self.hub.engine.queue_push(waiter.keys[0], seat.answers[0], front=True)
            self.hub.deliver()


class _MemoryFeed(Feed):
    def __init__(self, backend: MemoryBackend, prefix: bytes) -> None:
        self._backend = backend
        self._seat = _Seat()
        with backend.hub.lock:
            backend._open()
            self._watch = backend.hub.engine.watch(prefix, backend, self._seat)
            backend._seats.add(self._seat)

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
            self._backend._seats.discard(self._seat)
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
