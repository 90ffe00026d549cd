"""Reads the heartbeats on a store that detects no dead clients: each session increments a counter, and others read it.

While a session takes part in an object, a thread increments its counter, the key `pulse:SESSION`
(`local_session.py`). If a counter has not moved for `GRACE_S`, by the observer's own clock, its session is dead. If the
key is gone, its session has ended: a session that stops deletes its own key, and the member that evicts a dead session
deletes that session's. Readings are kept per store, because a session may take part in several objects.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from rallypoint.recipes.hosting import local_session
from rallypoint.recipes.hosting.local_session import LocalSession, heartbeat_key
from rallypoint.recipes.hosting.stall_detector import CounterReading, StallDetector

__all__ = ["HeartbeatReader", "Suspicions", "heartbeat_reader_of"]

GRACE_S = 4.0
"""The grace period: how long a counter may stall."""

SLICE_S = 1.0
"""How long a member waits for a wakeup before it reads the state again."""

READS_PER_SLICE = 3
"""How many times per slice a waiting member reads the counters of its neighbours."""

NEIGHBOURS = 8
"""How many other sessions one member observes."""

Suspicions = Mapping[str, tuple[int, int]]
"""For each suspected session: its count, and for how many milliseconds it was observed at that count."""


class HeartbeatReader:
    """Reads the heartbeats of other sessions on the store of this process's `local` session; thread-safe."""

    def __init__(self, local: LocalSession) -> None:
        self.local = local
        self._lock = threading.Lock()
        self._stalls = StallDetector(GRACE_S)

    def reset(self) -> None:
        """In a forked child, start a new session, without readings."""
        self._lock = threading.Lock()
        self._stalls = StallDetector(GRACE_S)
        self.local.reset()

    def neighbours(self, sessions: set[str]) -> list[str]:
        """Return the sessions that this session observes: the next few in a ring of all."""
        ring = sorted(sessions - {self.local.session})
        after = [session for session in ring if session > self.local.session]
        return list(dict.fromkeys((after + ring)[:NEIGHBOURS]))

    def dead_among(self, sessions: Iterable[str], suspicions: Suspicions) -> list[str]:
        """Read the counters of these sessions, unless that was just done; return the sessions that ended or are dead.

        The suspicions of other members count like this member's own readings.
        """
        with self._lock:
            self._stalls.forget(time.monotonic())
        return [session for session in sessions if session != self.local.session and self._is_dead(session, suspicions)]

    def _is_dead(self, session: str, suspicions: Suspicions) -> bool:
        asked_at = time.monotonic()
        with self._lock:
            last = self._stalls.last(session, asked_at)
        if last is not None and not _due(last, asked_at):
            return last.value < 0
        count = _count(self.local.store, session)
        suspected_count, still_ms = suspicions.get(session, (0, 0))
        now_at = time.monotonic()
        grace_s = GRACE_S + now_at - asked_at  # the count may be as old as the request
        with self._lock:
            dead = self._stalls.read(
                session, count, now_at, grace_s, still_ms / 1000 if count == suspected_count else 0.0
            )
        return dead or count < 0

    def next_read_s(self, sessions: Iterable[str]) -> float:
        """Return the time until the next reading: a fraction of a slice, or less if a grace period ends before."""
        now_at = time.monotonic()
        return max(
            0.01,
            min([SLICE_S / READS_PER_SLICE, *(one.since + GRACE_S - now_at for _, one in self._readings(sessions))]),
        )

    def unconfirmed(self, sessions: Iterable[str]) -> set[str]:
        """Return the sessions whose counter was not seen to move within the grace period."""
        now_at = time.monotonic()
        others = [session for session in sessions if session != self.local.session]
        with self._lock:
            return {session for session in others if not self._stalls.moved(session, now_at, GRACE_S)}

    def suspicions(self, sessions: Iterable[str]) -> Suspicions:
        """Return the suspicions to record: the sessions that have missed a heartbeat."""
        return {
            session: (reading.value, int(1000 * (reading.read_at - reading.since)))
            for session, reading in self._readings(sessions)
            if reading.read_at - reading.since > local_session.BEAT_S
        }

    def _readings(self, sessions: Iterable[str]) -> list[tuple[str, CounterReading]]:
        now_at = time.monotonic()
        with self._lock:
            readings = [(session, self._stalls.last(session, now_at)) for session in sessions]
        return [(session, reading) for session, reading in readings if reading is not None]


def _due(last: CounterReading, now_at: float) -> bool:
    return now_at - last.read_at >= SLICE_S / READS_PER_SLICE / 2 or now_at - last.since >= GRACE_S


def _count(store: Any, session: str) -> int:
    """Return a session's count, or -1 if the key is gone; a `get` would wait for a key just deleted."""
    count = bytes(store.compare_set(heartbeat_key(session), "-", "-"))
    return -1 if count == b"-" else int(count)


_readers: weakref.WeakKeyDictionary[Any, HeartbeatReader] = weakref.WeakKeyDictionary()
_readers_lock = threading.Lock()


def heartbeat_reader_of(store: Any) -> HeartbeatReader:
    """Return the reader of this process on a store, with its session there; all objects share them."""
    with _readers_lock:
        if store not in _readers:
            _readers[store] = HeartbeatReader(LocalSession(store))
        return _readers[store]


def _forked() -> None:
    global _readers_lock
    _readers_lock = threading.Lock()
    for reader in list(_readers.values()):
        reader.reset()


os.register_at_fork(after_in_child=_forked)
