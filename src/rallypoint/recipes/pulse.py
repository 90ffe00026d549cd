"""Shared objects on a store that only has bytes: the members host the machine themselves, by compare-and-set.

Keys, for an object of some KIND and NAME:

    KIND:NAME            the state, as JSON (`recipes/blob.py`), with the number of the bell
    KIND:NAME:bell:N     set when the bell rings the Nth time; a waiting member waits for the next. Only a few are kept
    pulse:SESSION        a counter that moves while a session lives and takes part in something

A change that others wait for rings the bell. Who waits also feels the pulse of the next few sessions in a ring of all
that the machine has to hear of: a counter that has not moved for `GRACE_S`, by the watcher's own clock, belongs to a
dead session, which is then taken out of the machine.

Rejected: to feel everybody's pulse. A thousand members would read a million counters a second.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rallypoint.core.machine import Command, Done, Machine, Refused, Step, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import StoreTimeout
from rallypoint.recipes.blob import BlobHost, Felt, Found, State
from rallypoint.store.base import Store

__all__ = ["StoreHost"]

BEAT_S = 0.5
GRACE_S = 4.0
"""How long a pulse may stand still."""

SLICE_S = 1.0
"""How long a member waits for the bell before it feels pulses."""

LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.032
"""How long it pauses between two looks for the bell, on a store where it cannot wait for it."""

NEIGHBOURS = 8
"""How many pulses one member feels."""

BELLS = 16
"""How many rings back a bell is kept, for members that have not yet begun to wait for it."""


class _State(State):
    """What is written under an object's key."""

    bell: int


class StoreHost(BlobHost[_State]):
    """The objects of one store, hosted by their members."""

    def __init__(self, store: Any) -> None:
        super().__init__(repr(store) if isinstance(store, Store) else _label(store), _State, 0)
        self._store = store
        self._pulse = _pulse_of(store)
        self._felt_at: dict[str, float] = {}

    @property
    def session(self) -> str:
        """That of this process on this store."""
        return self._pulse.session

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""
        self._pulse.start()
        return super().act(name, member, call, command, wait_s)

    def _fetch(self, place: str) -> Found:
        blob = bytes(self._store.compare_set(place, "", self._empty.decode()))
        return blob, blob

    def _swap(self, place: str, token: Any, blob: bytes) -> Found | None:
        present = bytes(self._store.compare_set(place, token.decode(), blob.decode()))
        if present == blob:
            return None
        return (present, present) if present != token else self._fetch(place)  # stores answer so where the key is gone

    def _finish(self, state: _State, machine: Machine, step: Step) -> None:
        state.bell += bool(list(step.woken))

    def _won(self, place: str, state: _State, step: Step) -> None:
        """Ring the bell if somebody waits for it."""
        if list(step.woken):
            self._store.set(f"{place}:bell:{state.bell}", "")
            self._store.delete_key(f"{place}:bell:{state.bell - BELLS}")

    def _disown(self) -> str:
        self._pulse.stop()
        return f"its pulse stood still for {GRACE_S:g} s, and others went on"

    def _dead(self, place: str, state: _State, machine: Machine) -> Iterable[str]:
        """Return whose pulse stands still; it is felt once in a while, however often this is called."""
        felt_at, now_at = self._felt_at.get(place, float("-inf")), time.monotonic()
        if now_at < felt_at + SLICE_S / 2:
            return ()
        self._felt_at[place] = now_at
        return self._pulse.still(self._store, machine.sessions())

    def _hear(self, place: str, state: _State, machine: Machine, within_s: float) -> bool:
        """Wait for the bell."""
        bell, within_s = f"{place}:bell:{state.bell + 1}", min(within_s, SLICE_S)
        if not isinstance(self._store, Store):
            return self._listen(bell, within_s)
        try:
            self._store.wait([bell], timedelta(seconds=within_s))
            return True
        except StoreTimeout:
            return False

    def _listen(self, bell: str, within_s: float) -> bool:
        """Look for the bell again and again. A client of torch's has one lock, so nobody else of this process could
        use it during a wait, the pulse included; and it prints a warning for every wait that ends by its time-out."""
        deadline, pause_s = Deadline(within_s), LEAST_PAUSE_S
        while not self._store.check([bell]):
            if deadline.expired():
                return False
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
        return True


def _label(store: Any) -> str:
    """Name a store of another kind; torch's own repr asks the resolver for its peer's name, which may take seconds."""
    host, port = (getattr(store, name, None) for name in ("host", "port"))
    return f"<{type(store).__name__} of {type(store).__module__}{'' if host is None else f' at {host}:{port}'}>"


class Pulse:
    """The sign of life of one process on one store, and the feeling of others'."""

    def __init__(self, store: Any) -> None:
        self.session = secrets.token_hex(8)
        self._store = weakref.ref(store)
        self._felt = Felt()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Beat, in a daemon thread, until stopped or the store is gone."""
        with self._lock:
            if self._thread is None:
                self.beat()
                name, stopped = f"pulse of {self.session}", self._stopped
                self._thread = threading.Thread(target=_beat, args=[weakref.ref(self), stopped], name=name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop beating; what comes after is another session."""
        with self._lock:
            self._stopped.set()
            self._stopped, self._thread = threading.Event(), None
            self.session = secrets.token_hex(8)

    def beat(self) -> None:
        """Move the counter."""
        store = self._store()
        if store is None:
            raise RuntimeError("the store is gone")
        store.add(f"pulse:{self.session}", 1)

    def still(self, store: Any, sessions: set[str]) -> list[str]:
        """Return those of our neighbours, among these sessions, whose pulse has stood still for the grace."""
        ring = sorted(sessions - {self.session})
        after = [session for session in ring if session > self.session]
        neighbours = dict.fromkeys((after + ring)[:NEIGHBOURS])
        counts = {}
        for session in neighbours:
            key = f"pulse:{session}"
            counts[session] = int(store.get(key)) if store.check([key]) else -1
        return self._felt.still(counts, time.monotonic(), GRACE_S)


def _beat(reference: weakref.ref[Pulse], stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_S):
        pulse = reference()
        if pulse is None:
            return
        try:
            pulse.beat()
        except RuntimeError:  # the store is closed or lost: there is nobody to live for
            return
        del pulse


_pulses: weakref.WeakKeyDictionary[Any, Pulse] = weakref.WeakKeyDictionary()
_pulses_lock = threading.Lock()


def _pulse_of(store: Any) -> Pulse:
    """Return the pulse of this process on a store; there is one for all objects."""
    with _pulses_lock:
        if store not in _pulses:
            _pulses[store] = Pulse(store)
        return _pulses[store]
