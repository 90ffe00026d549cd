"""The session of this process on a store whose members host objects themselves: how it begins, and how it ends.

A session is one process on one store; its sign of life is the key `pulse:SESSION`, a counter that a thread moves
(`recipes/pulse.py`). The key is there before the session
is in any object's state, and whoever stops deletes its own, at the end of the process too. A thread, the keeper, does
that, so that neither the end of a process nor the collector of garbage has to wait for a store.

A forked child is a session of its own: it has no keeper, and what its parent has is not its.

Rejected: to let the thread die with the interpreter. It may be in a store's C++ then, which ends the process by abort.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from rallypoint.deadline import Deadline
from rallypoint.store.base import Store

__all__ = ["Keeper", "Life", "key_of", "life_of"]

EXIT_S = 2.0
"""How long the end of a process may take for the sake of its signs of life."""

FORMER = 4
"""How many lost sessions a process remembers."""

PULSES = "pulse:"


def key_of(session: str) -> str:
    """Return the key of a session's sign of life."""
    return f"{PULSES}{session}"


class Life:
    """The session of this process on one store, for many threads; it begins when it is first needed."""

    def __init__(self, store: Any) -> None:
        self._store = _hold(store)
        self.begin()
        if isinstance(store, Store):
            store._lodge(self)

    def begin(self) -> None:
        """Be a session that nobody has heard of: at first, and in a forked child."""
        self._lock = threading.Lock()
        self.former: tuple[str, ...] = ()
        """The sessions that were stopped here because others had ended them, the last ones."""

        self._renew()

    def _renew(self) -> None:
        self.session = secrets.token_hex(8)
        self._keeper: Keeper | None = None

    def start(self) -> str:
        """Show a sign of life until stopped or the store is gone; return the session."""
        with self._lock:
            if self._keeper is None:
                self.show(self.session)
                self._keeper = self._keep(self.session)
                if not _ending:
                    _keepers.add(self._keeper)
                    self._keeper.start()
            return self.session

    def stop(self, session: str) -> None:
        """End a session, unless that was done; what comes after is another."""
        with self._lock:
            if self.session == session:
                if self._keeper is not None:
                    self._keeper.stop()
                self.former = (*self.former, session)[-FORMER:]
                self._renew()

    def end(self) -> None:
        """Stop, and wait until that is so, but not for ever."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper.join(EXIT_S)

    def show(self, session: str) -> None:
        """Write the sign of life of a session of ours."""
        raise NotImplementedError

    def _keep(self, session: str) -> Keeper:
        """Return the thread that keeps it."""
        raise NotImplementedError

    def _here(self) -> Any:
        store = self._store()
        if store is None:
            raise RuntimeError("the store is gone")
        return store


class Keeper(threading.Thread):
    """What keeps the sign of life of one session, and deletes it when stopped, or when nobody has that life now."""

    def __init__(self, life: Life, session: str) -> None:
        super().__init__(name=f"pulse of {session}", daemon=True)
        self._stops = stops = queue.SimpleQueue[None]()  # which may be put to wherever garbage is collected
        self._life = weakref.ref(life, lambda _: stops.put(None))
        self._session = session
        self._hold = life._store

    def stop(self) -> None:
        """Have it end soon."""
        self._stops.put(None)

    def _rests(self, for_s: float | None = None) -> bool:
        """Wait to be stopped, for so long at most; say whether it was not."""
        try:
            self._stops.get(timeout=for_s)
            return False
        except queue.Empty:
            return True


def _hold(store: Any) -> Callable[[], Any]:
    """Return what gives a store, without keeping it: one of ours by another view, for one last word after its end."""
    if isinstance(store, Store):
        twin = store._twin()
        return lambda: twin
    return weakref.ref(store)


_L = TypeVar("_L", bound=Life)
_lives: weakref.WeakKeyDictionary[Any, Life] = weakref.WeakKeyDictionary()
_lives_lock = threading.Lock()
_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
_ending = False


def life_of(store: Any, kind: type[_L]) -> _L:
    """Return the life of this process on a store; there is one for all objects."""
    with _lives_lock:
        if store not in _lives:
            _lives[store] = kind(store)
        return cast(_L, _lives[store])


def _forked() -> None:
    global _lives_lock
    _lives_lock = threading.Lock()
    _keepers.clear()
    for life in list(_lives.values()):
        life.begin()


def _end() -> None:
    """Stop all keepers, and wait for them, but not for ever."""
    global _ending
    _ending = True
    deadline, keepers = Deadline(EXIT_S), list(_keepers)
    for keeper in keepers:
        keeper.stop()
    for keeper in keepers:
        keeper.join(deadline.remaining())


os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
