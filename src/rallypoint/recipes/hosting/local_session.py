"""The session of this process on a store whose members host the objects: its start, its heartbeat and its end.

A session is one process on one store. Its heartbeat is the key `pulse:SESSION`, a counter that a thread moves every
`BEAT_S`. The key exists before the session appears in any object's state. The thread deletes the key when the session
stops or the process exits, so that neither process exit nor garbage collection has to wait for a store.

A forked child starts a new session: it does not inherit the thread, and the parent's session is not its own.

Rejected: let the thread die with the interpreter. It may be inside a store's C++ code then, which aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.store.base import Store
from rallypoint.store.internal import end_before_close, same_session_view

__all__ = ["HeartbeatThread", "LocalSession", "heartbeat_key"]

BEAT_S = 0.5
"""How often a session moves its counter."""

EXIT_S = 2.0
"""How long process exit may wait for the heartbeat threads."""

FORMER = 4
"""How many lost sessions a process remembers."""

HEARTBEAT_PREFIX = "pulse:"


def heartbeat_key(session: str) -> str:
    """Return the key of a session's heartbeat."""
    return f"{HEARTBEAT_PREFIX}{session}"


class LocalSession:
    """The session of this process on one store, started on first use; thread-safe."""

    def __init__(self, store: Any) -> None:
        self._weak_store = _weak_store(store)
        self.reset()
        if isinstance(store, Store):
            end_before_close(store, self)

    def reset(self) -> None:
        """Start as a new session: at first, and in a forked child."""
        self._lock = threading.Lock()
        self.former: tuple[str, ...] = ()
        """The last few sessions of this process that other members ended."""

        self._renew()

    def _renew(self) -> None:
        self.session = secrets.token_hex(8)
        self._thread: HeartbeatThread | None = None

    @property
    def store(self) -> Any:
        """The store. Raises RuntimeError if it is another library's and was garbage-collected."""
        store = self._weak_store()
        if store is None:
            raise RuntimeError("the store is gone")
        return store

    def start(self) -> str:
        """Start the heartbeat, until it is stopped or the store is gone; return the session."""
        with self._lock:
            if self._thread is None:
                self.write_heartbeat(self.session)
                self._thread = HeartbeatThread(self, self.session, self._weak_store)
                if not _ending:
                    _threads.add(self._thread)
                    self._thread.start()
            return self.session

    def stop(self, session: str) -> None:
        """End this session if it is still the current one; the next `start` begins a new one."""
        with self._lock:
            if self.session == session:
                if self._thread is not None:
                    self._thread.stop()
                self.former = (*self.former, session)[-FORMER:]
                self._renew()

    def end(self) -> None:
        """Stop the heartbeat, and wait for the thread up to `EXIT_S`."""
        if self._thread is not None:
            self._thread.stop()
            self._thread.join(EXIT_S)

    def write_heartbeat(self, session: str) -> None:
        """Move the counter of a session of this process."""
        self.store.add(heartbeat_key(session), 1)


class HeartbeatThread(threading.Thread):
    """The thread that moves one session's counter, and deletes its key when stopped or when its owner is gone."""

    def __init__(self, owner: LocalSession, session: str, weak_store: Callable[[], Any]) -> None:
        super().__init__(name=f"pulse of {session}", daemon=True)
        self._stops = stops = queue.SimpleQueue[None]()  # its `put` is safe during garbage collection
        self._local_session = weakref.ref(owner, lambda _: stops.put(None))
        self._session = session
        self._weak_store = weak_store

    def stop(self) -> None:
        """Ask the thread to end; do not wait for it."""
        self._stops.put(None)

    def run(self) -> None:
        """Move the counter until stopped, then delete its key."""
        with contextlib.suppress(RuntimeError):  # the store is closed or lost: nothing to keep alive
            while self._sleep(BEAT_S):
                owner = self._local_session()
                if owner is not None:
                    owner.write_heartbeat(self._session)
                del owner
            store = self._weak_store()
            if store is not None:
                store.delete_key(heartbeat_key(self._session))
        del self._weak_store

    def _sleep(self, for_s: float) -> bool:
        """Sleep, at most until stopped; return False if stopped."""
        try:
            self._stops.get(timeout=for_s)
            return False
        except queue.Empty:
            return True


def _weak_store(store: Any) -> Callable[[], Any]:
    """Return a function that returns the store without keeping it alive.

    For a store of ours it is another view of the session, with which the key can be deleted after the store is gone.
    """
    if isinstance(store, Store):
        view = same_session_view(store)
        return lambda: view
    return weakref.ref(store)


_threads: weakref.WeakSet[HeartbeatThread] = weakref.WeakSet()
_ending = False


def _end() -> None:
    """Stop all heartbeat threads, and wait for them up to `EXIT_S`."""
    global _ending
    _ending = True
    deadline, threads = Deadline(EXIT_S), list(_threads)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(deadline.remaining())


os.register_at_fork(after_in_child=_threads.clear)
atexit.register(_end)
