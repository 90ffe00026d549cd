"""HashStore: an engine behind a lock, for the threads of one process.

The handles (clones) of a store share a `SharedEngine`; each is its own session there, so leases belong to a handle. A
call that must wait sleeps on a `_Waiter`, stored by the number of its operation, until another thread's call wakes it.
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

__all__ = ["HashStore", "SharedEngine", "MemoryBackend"]


class _Waiter:
    """A queue of answers for one waiting thread, and a semaphore that counts them."""

    def __init__(self) -> None:
        self.answers: deque[Answer | StoreClosed] = deque()
        self._wakeup = threading.Semaphore(0)

    def deliver(self, answer: Answer | StoreClosed) -> None:
        self.answers.append(answer)
        self._wakeup.release()

    def wait(self, deadline: Deadline) -> bool:
        return self._wakeup.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX))


class SharedEngine:
    """An engine shared by the threads of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine = Engine()

    def deliver(self) -> None:
        """Deliver the engine's pending answers; the lock is held."""
        for handle, answer in self.engine.take():
            assert isinstance(handle.owner, MemoryBackend)
            handle.owner._waiters[handle.number].deliver(answer)


class MemoryBackend(Backend):
    """One session on a shared engine."""

    def __init__(self, hub: SharedEngine) -> None:
        self.name = f"memory://{id(hub):x}"
        self.hub = hub
        self._numbers = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._closed = False

    def execute(self, op: ops.Op) -> Any:
        with self.hub.lock:
            self._check_open()
            op.number = next(self._numbers)
            answer = self.hub.engine.execute(op, self)
            self.hub.deliver()
            if not isinstance(answer, Waiter):
                return answer
            self._waiters[op.number] = _Waiter()
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
            for own_waiter in self._waiters.values():
                own_waiter.deliver(StoreClosed(store=self.name))

    # Inside

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(store=self.name)

    def _wait(self, waiter: Waiter, deadline: Deadline) -> Any:
        hub, own_waiter = self.hub, self._waiters[waiter.number]
        try:
            if not own_waiter.wait(deadline):
                with hub.lock:
                    timed_out = hub.engine.expire(waiter)
                    hub.deliver()
                if timed_out is not None:
                    return timed_out
            answer = own_waiter.answers[0]
        except BaseException:  # Ctrl-C: no caller is left for the answer
            with hub.lock:
                hub.engine.drop(waiter)
                if own_waiter.answers and isinstance(own_waiter.answers[0], bytes):
                    hub.engine.push(waiter.keys[0], own_waiter.answers[0], front=True)
                hub.deliver()
            raise
        finally:
            with hub.lock:
                del self._waiters[waiter.number]
        if isinstance(answer, StoreClosed):
            raise answer
        return answer


class _MemoryFeed(Feed):
    def __init__(self, backend: MemoryBackend, prefix: bytes) -> None:
        self._backend = backend
        self._waiter = _Waiter()
        with backend.hub.lock:
            backend._check_open()
            self._watch = backend.hub.engine.watch(prefix, backend, next(backend._numbers))
            backend._waiters[self._watch.number] = self._waiter

    def next(self, deadline: Deadline) -> Event | TimedOut:
        if not self._waiter.wait(deadline):
            return TimedOut(())
        answer = self._waiter.answers.popleft()
        if isinstance(answer, StoreClosed):
            self._waiter.deliver(answer)  # for the next call
            raise answer
        assert isinstance(answer, Event)
        return answer

    def close(self) -> None:
        with self._backend.hub.lock:
            self._backend.hub.engine.drop(self._watch)
            self._backend._waiters.pop(self._watch.number, None)
        self._waiter.deliver(StoreClosed(store=self._backend.name))


class HashStore(Store):
    """A store in this process, shared by its threads; every HashStore() is new and empty."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(MemoryBackend(SharedEngine()), b"", timeout)

    def statistics(self) -> Statistics:
        """Count what the store holds now."""
        assert isinstance(self._backend, MemoryBackend)
        with self._backend.hub.lock:
            return self._backend.hub.engine.statistics()
