"""The sign of life of a process on a store that only has bytes: a counter that moves, and the feeling of others'.

A session is one process on one store. While it takes part in something, a thread moves its counter, `pulse:SESSION`.
A counter that has not moved for `GRACE_S`, by the watcher's own clock, belongs to a dead session. One that is gone
belongs to a session that has ended: whoever stops deletes its own, at the end of the process too, and whoever buries a
dead one deletes that. What was felt is remembered for a store as a whole, for a session may be in several objects.

A forked child is a session of its own: it has no thread that beats, and what its parent has is not its.

Rejected: to let the thread die with the interpreter. It may be in a store's C++ then, which ends the process by abort.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.recipes.blob import Felt, Reading
from rallypoint.store.base import Store

__all__ = ["Pulse", "Told", "key_of", "pulse_of"]

BEAT_S = 0.5
GRACE_S = 4.0
"""How long a pulse may stand still."""

SLICE_S = 1.0
"""How long a member waits for the bell before it looks at the state again."""

FEELS = 3
"""How many times in a slice it feels pulses."""

NEIGHBOURS = 8
"""How many pulses one member feels."""

EXIT_S = 2.0
"""How long the end of a process may take for the sake of its pulses."""

Told = Mapping[str, tuple[int, int]]
"""Of sessions under suspicion: the count, and for how many milliseconds it was watched to stand there."""


def key_of(session: str) -> str:
    """Return the key of a session's counter."""
    return f"pulse:{session}"


class Pulse:
    """The session of this process on one store, and what it feels of others'; for many threads."""

    def __init__(self, store: Any) -> None:
        self._store = _hold(store)
        self.begin()
        if isinstance(store, Store):
            store._lodge(self)

    def begin(self) -> None:
        """Be a session that nobody has heard of: at first, and in a forked child."""
        self._lock, self._feeling = threading.Lock(), threading.Lock()
        self._felt = Felt(GRACE_S)
        self._renew()

    def _renew(self) -> None:
        self.session = secrets.token_hex(8)
        self._heart: _Heart | None = None

    def start(self) -> str:
        """Beat, in a daemon thread, until stopped or the store is gone; return the session."""
        with self._lock:
            if self._heart is None:
                self.beat(self.session)
                self._heart = _Heart(self, self.session, self._store)
                if not _ending:
                    _hearts.add(self._heart)
                    self._heart.start()
            return self.session

    def stop(self, session: str) -> None:
        """End a session, unless that was done; what comes after is another."""
        with self._lock:
            if self.session == session:
                if self._heart is not None:
                    self._heart.stop()
                self._renew()

    def end(self) -> None:
        """Stop beating, and wait until that is so, but not for ever."""
        if self._heart is not None:
            self._heart.stop()
            self._heart.join(EXIT_S)

    def beat(self, session: str) -> None:
        """Move a counter of ours."""
        self._here().add(key_of(session), 1)

    def _here(self) -> Any:
        store = self._store()
        if store is None:
            raise RuntimeError("the store is gone")
        return store

    # Others

    def neighbours(self, sessions: set[str]) -> list[str]:
        """Return whom this session watches among all that are in something: the next few in a ring."""
        ring = sorted(sessions - {self.session})
        after = [session for session in ring if session > self.session]
        return list(dict.fromkeys((after + ring)[:NEIGHBOURS]))

    def still(self, sessions: Iterable[str], told: Told) -> list[str]:
        """Feel these sessions, unless that was just done; return those that ended, or have stood still for the grace.

        What others tell of them counts as if it was felt here.
        """
        with self._feeling:
            self._felt.forget(time.monotonic())
        return [session for session in sessions if session != self.session and self._feel(session, told)]

    def _feel(self, session: str, told: Told) -> bool:
        asked_at = time.monotonic()
        with self._feeling:
            last = self._felt.last(session, asked_at)
        if last is not None and not _due(last, asked_at):
            return last.stands < 0
        count = _count(self._here(), session)
        count_told, still_ms = told.get(session, (0, 0))
        now_at = time.monotonic()
        grace_s = GRACE_S + now_at - asked_at  # the count may be as old as the question
        with self._feeling:
            dead = self._felt.feel(session, count, now_at, grace_s, still_ms / 1000 if count == count_told else 0.0)
        return dead or count < 0

    def rest_s(self, sessions: Iterable[str]) -> float:
        """Say when to feel these again: soon, and at the moment when one will have stood still for the grace."""
        now_at = time.monotonic()
        return max(0.01, min([SLICE_S / FEELS, *(one.since + GRACE_S - now_at for _, one in self._readings(sessions))]))

    def unsure_of(self, sessions: Iterable[str]) -> set[str]:
        """Return those of these sessions that were not seen to live within the grace."""
        now_at = time.monotonic()
        with self._feeling:
            return {one for one in sessions if one != self.session and not self._felt.moved(one, now_at, GRACE_S)}

    def suspects(self, sessions: Iterable[str]) -> Told:
        """Return what is to be told of these sessions: who has missed a beat."""
        return {
            session: (reading.stands, int(1000 * (reading.felt_at - reading.since)))
            for session, reading in self._readings(sessions)
            if reading.felt_at - reading.since > BEAT_S
        }

    def _readings(self, sessions: Iterable[str]) -> list[tuple[str, Reading]]:
        now_at = time.monotonic()
        with self._feeling:
            felt = [(session, self._felt.last(session, now_at)) for session in sessions]
        return [(session, reading) for session, reading in felt if reading is not None]


def _due(last: Reading, now_at: float) -> bool:
    return now_at - last.felt_at >= SLICE_S / FEELS / 2 or now_at - last.since >= GRACE_S


def _count(store: Any, session: str) -> int:
    """Return a session's count, or -1; a `get` would wait where the key was deleted just before."""
    count = bytes(store.compare_set(key_of(session), "-", "-"))
    return -1 if count == b"-" else int(count)


class _Heart(threading.Thread):
    """What moves the counter of one session, and deletes it when stopped."""

    def __init__(self, pulse: Pulse, session: str, store: Callable[[], Any]) -> None:
        super().__init__(name=f"pulse of {session}", daemon=True)
        self._stops = stops = queue.SimpleQueue[None]()  # which may be put to wherever garbage is collected
        self._pulse = weakref.ref(pulse, lambda _: stops.put(None))
        self._session = session
        self._hold = store

    def stop(self) -> None:
        """Have it end soon."""
        self._stops.put(None)

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is closed or lost: there is nobody to live for
            while self._rests(BEAT_S):
                pulse = self._pulse()
                if pulse is not None:
                    pulse.beat(self._session)
                del pulse
            store = self._hold()
            if store is not None:
                store.delete_key(key_of(self._session))
        del self._hold

    def _rests(self, for_s: float) -> bool:
        """Wait for so long; say whether that was all."""
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


_pulses: weakref.WeakKeyDictionary[Any, Pulse] = weakref.WeakKeyDictionary()
_pulses_lock = threading.Lock()
_hearts: weakref.WeakSet[_Heart] = weakref.WeakSet()
_ending = False


def pulse_of(store: Any) -> Pulse:
    """Return the pulse of this process on a store; there is one for all objects."""
    with _pulses_lock:
        if store not in _pulses:
            _pulses[store] = Pulse(store)
        return _pulses[store]


def _forked() -> None:
    global _pulses_lock
    _pulses_lock = threading.Lock()
    _hearts.clear()
    for pulse in list(_pulses.values()):
        pulse.begin()


def _end() -> None:
    """Stop all hearts, and wait for them, but not for ever."""
    global _ending
    _ending = True
    deadline, hearts = Deadline(EXIT_S), list(_hearts)
    for heart in hearts:
        heart.stop()
    for heart in hearts:
        heart.join(deadline.remaining())


os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
