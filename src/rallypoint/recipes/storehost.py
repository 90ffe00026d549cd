"""Shared objects on a store that only has bytes: the members host the machine themselves, by compare-and-set.

Keys, for an object of some KIND and NAME:

    KIND:NAME            the state, as JSON (`recipes/blob.py`), with the number of the bell, and who is under suspicion
    KIND:NAME:bell:N     set when the bell rings the Nth time; a waiting member waits for the next. Only a few are kept
    pulse:SESSION        the sign of life of a session

A change that others wait for rings the bell. How members know who lives is the part of `PulseHost`
(`recipes/pulsehost.py`).

Whoever has lost a few races for the state stands back: for a time by chance, of up to twice as many tries of others
after each loss. How long a try takes on this store is measured. Of 64 who come at once, each would else try 32 times on
average, and with this tries about 5 times.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any

import msgspec

from rallypoint.core.doubts import BECAUSE_OF_OTHERS
from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machine import Command, Done, Machine, Refused, Step, Undo, Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import LimitExceeded, StoreTimeout
from rallypoint.recipes.blob import BlobHost, Found, State
from rallypoint.store.base import Store

__all__ = ["ObjectState", "StoreHost"]

LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.032
"""How long it pauses between two looks for the bell, on a store where it cannot wait for it."""

QUICK_TRIES, MOST_RIVALS = 2, 32
"""How many lost races for a state mean nothing, and how many rivals' tries are waited for after many, at most."""

LEAST_RETREAT_S, MOST_RETREAT_S = 0.001, 0.25
"""How long whoever has lost too many stands back, at most: below the one not at all, never above the other."""

BELLS = 16
"""How many rings back a bell is kept, for members that have not yet begun to wait for it."""


class ObjectState(State):
    """What is written under an object's key."""

    bell: int
    suspects: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class StoreHost(BlobHost[ObjectState]):
    """The objects of one store, hosted by their members."""

    def __init__(self, store: Any) -> None:
        super().__init__(repr(store) if isinstance(store, Store) else _label(store), ObjectState, 0)
        self._store = store
        self._try_s = 0.0
        """How long the last try to write a state took."""

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""
        try:
            outcome = super().act(name, member, call, command, wait_s)
            if not isinstance(outcome, Refused) or outcome.error not in BECAUSE_OF_OTHERS:
                return outcome
        except LimitExceeded:  # those who have come again need room beside what their dead processes gave
            if isinstance(command, Undo):
                raise
        self.make_sure(name, command.machine)  # those who are in the way may be dead
        return super().act(name, member, call, command, wait_s)

    def _fetch(self, place: str) -> Found:
        blob = bytes(self._store.compare_set(place, "", self._empty.decode()))
        return blob, blob

    def _swap(self, place: str, token: Any, blob: bytes) -> Found | None:
        if len(blob) > MAX_VALUE_BYTES:
            raise LimitExceeded(what="the state of", key=place, size=len(blob), limit=MAX_VALUE_BYTES)
        began_at = time.monotonic()
        present = bytes(self._store.compare_set(place, token.decode(), blob.decode()))
        self._try_s = time.monotonic() - began_at
        if present == blob:
            return None
        return (present, present) if present != token else self._fetch(place)  # stores answer so where the key is gone

    def _again(self, place: str, present: Found, times: int) -> Found:
        """Stand back, so that others who are after the same can have their turn; not where a try takes no time."""
        most_s = min(self._try_s * min(2**times, MOST_RIVALS), MOST_RETREAT_S)
        if times <= QUICK_TRIES or most_s < LEAST_RETREAT_S:
            return present
        time.sleep(random.uniform(0, most_s))
        return self._fetch(place)

    def _finish(self, state: ObjectState, machine: Machine, step: Step) -> None:
        state.bell += bool(list(step.woken))

    def _won(self, place: str, state: ObjectState, step: Step) -> None:
        """Ring the bell if somebody waits for it."""
        if list(step.woken):
            self._store.set(f"{place}:bell:{state.bell}", "")
            self._store.delete_key(f"{place}:bell:{state.bell - BELLS}")

    def _rings(self, bell: str, within_s: float) -> bool:
        """Wait for one ring."""
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
