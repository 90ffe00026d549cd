"""The states of objects in a plain key-value store, changed by compare-and-set.

Keys, for an object of some KIND and NAME:

    KIND:NAME            the state, as JSON, with the wakeup number and the suspects (`ObjectState`)
    KIND:NAME:bell:N     wakeup key N; a waiting member waits for the next one. Only a few are kept

A change that other members wait for sets the next wakeup key.

A member that has lost a few compare-and-sets backs off for a random time, whose maximum doubles with each loss. The
unit is the measured duration of one attempt on this store. Of 64 simultaneous members, each makes about 5 attempts on
average; without backoff it would make 32.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any

import msgspec

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machines.machine import Command, Machine
from rallypoint.deadline import Deadline
from rallypoint.errors import LimitExceeded, StoreTimeout
from rallypoint.recipes.hosting.cas_host import HostedState, StoredState, decode_state
from rallypoint.store.base import Store

__all__ = ["ObjectState", "StoreCell"]

MIN_POLL_S, MAX_POLL_S = 0.001, 0.032
"""The shortest and the longest pause between two checks of the wakeup key, on a store where it must be polled."""

QUICK_TRIES, MOST_RIVALS = 2, 32
"""How many lost compare-and-sets cause no backoff, and the longest backoff in attempts of other members."""

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.001, 0.25
"""Bounds on the maximum of the random backoff: below the first there is no backoff, above the second it is cut."""

WAKEUPS_KEPT = 16
"""How many old wakeup keys are kept, for members that have not yet started to wait for them."""


class ObjectState(HostedState):
    """The state under an object's key."""

    wakeup: int
    suspects: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


_EMPTY = msgspec.json.encode(ObjectState(0, "", [], msgspec.Raw(b"{}"), 0)).decode()


class StoreCell:
    """The states of the objects of one store, ours or another library's."""

    def __init__(self, store: Any) -> None:
        self.label = repr(store) if isinstance(store, Store) else _label(store)
        self._store = store
        self._try_s = 0.0
        """How long the last attempt to write a state took."""

    def fetch(self, place: str) -> StoredState:
        """Return the stored state; if there is none, write an empty one."""
        data = bytes(self._store.compare_set(place, "", _EMPTY))
        return data, data

    def decode(self, data: bytes, kind: type[Machine]) -> tuple[ObjectState, Any]:
        """Return a state that was fetched, decoded, and its machine."""
        return decode_state(data, ObjectState, kind)

    def swap(self, place: str, token: Any, state: ObjectState, wakes: bool) -> StoredState | None:
        """Replace the state that was read; set the wakeup key if members wait for this change."""
        state.wakeup += wakes
        data = msgspec.json.encode(state)
        if len(data) > MAX_VALUE_BYTES:
            raise LimitExceeded(what="the state of", key=place, size=len(data), limit=MAX_VALUE_BYTES)
        began_at = time.monotonic()
        present = bytes(self._store.compare_set(place, token.decode(), data.decode()))
        self._try_s = time.monotonic() - began_at
        if present != data:  # a store replies with the token if the key is gone
            return (present, present) if present != token else self.fetch(place)
        if wakes:
            self._store.set(f"{place}:bell:{state.wakeup}", "")
            self._store.delete_key(f"{place}:bell:{state.wakeup - WAKEUPS_KEPT}")
        return None

    def patience(self, command: Command | None) -> Deadline:
        """Return no deadline: some member always proceeds."""
        return Deadline(float("inf"))

    def back_off(self, place: str, present: StoredState, machine: Any, lost: int, patience: Deadline) -> StoredState:
        """Pause, so that competing members can proceed; not if an attempt takes almost no time."""
        most_s = min(self._try_s * min(2**lost, MOST_RIVALS), MAX_BACKOFF_S)
        if lost <= QUICK_TRIES or most_s < MIN_BACKOFF_S:
            return present
        time.sleep(random.uniform(0, most_s))
        return self.fetch(place)

    def await_change(self, place: str, state: ObjectState, machine: Any, within_s: float) -> bool:
        """Wait for the next wakeup key; return whether it was set in time."""
        wakeup_key = f"{place}:bell:{state.wakeup + 1}"
        if not isinstance(self._store, Store):
            return self._poll(wakeup_key, within_s)
        try:
            self._store.wait([wakeup_key], timedelta(seconds=within_s))
            return True
        except StoreTimeout:
            return False

    def _poll(self, wakeup_key: str, within_s: float) -> bool:
        """Poll for the wakeup key. A torch client has one lock, so a blocking wait would keep all other threads,
        including the heartbeat, from using it; and it prints a warning for every wait that times out."""
        deadline, pause_s = Deadline(within_s), MIN_POLL_S
        while not self._store.check([wakeup_key]):
            if deadline.expired():
                return False
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, MAX_POLL_S)
        return True


def _label(store: Any) -> str:
    """Return a label for another library's store; torch's own repr resolves the peer's name, which may take seconds."""
    host, port = (getattr(store, name, None) for name in ("host", "port"))
    return f"<{type(store).__name__} of {type(store).__module__}{'' if host is None else f' at {host}:{port}'}>"
