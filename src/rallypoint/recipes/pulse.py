"""The sign of life of a process on a store that only has bytes: a counter that moves, and the feeling of others'.

While a session takes part in something, its keeper moves its counter, `pulse:SESSION`. A counter that has not moved for
`GRACE_S`, by the watcher's own clock, belongs to a dead session. One that is gone belongs to a session that has ended:
whoever stops deletes its own, and whoever buries a dead one deletes that. What was felt is remembered for a store as a
whole, for a session may be in several objects.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rallypoint.recipes.blob import Felt, Reading
from rallypoint.recipes.life import Keeper, Life, key_of, life_of

__all__ = ["Pulse", "Told", "pulse_of"]

BEAT_S = 0.5
GRACE_S = 4.0
"""How long a pulse may stand still."""

SLICE_S = 1.0
"""How long a member waits for the bell before it looks at the state again."""

FEELS = 3
"""How many times in a slice it feels pulses."""

NEIGHBOURS = 8
"""How many pulses one member feels."""

Told = Mapping[str, tuple[int, int]]
"""Of sessions under suspicion: the count, and for how many milliseconds it was watched to stand there."""


class Pulse(Life):
    """The session of this process on one store, and what it feels of others'; for many threads."""

    def begin(self) -> None:
        """Be a session that nobody has heard of, and that has felt nobody."""
        self._feeling = threading.Lock()
        self._felt = Felt(GRACE_S)
        super().begin()

    def show(self, session: str) -> None:
        """Move a counter of ours."""
        self._here().add(key_of(session), 1)

    def _keep(self, session: str) -> Keeper:
        return _Heart(self, session)

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


class _Heart(Keeper):
    """What moves the counter of one session."""

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is closed or lost: there is nobody to live for
            while self._rests(BEAT_S):
                life = self._life()
                if life is not None:
                    life.show(self._session)
                del life
            store = self._hold()
            if store is not None:
                store.delete_key(key_of(self._session))
        del self._hold


def pulse_of(store: Any) -> Pulse:
    """Return the pulse of this process on a store; there is one for all objects."""
    return life_of(store, Pulse)
