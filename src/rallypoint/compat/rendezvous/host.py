"""The rendezvous machine in what a backend keeps: one blob, which the nodes change by turns.

The blob is JSON, `["rallypoint.rendezvous", version, writer, ended, machine, pulses]`, and never a pickle: a state that
is not ours, as that of a node that uses PyTorch's own handler, is refused unread.

A blob rings no bell. Who waits looks again after a pause that grows from `LEAST_PAUSE_S` to `MOST_PAUSE_S`. And life
shows in the blob alone: each session has a counter there, which its keep-alive moves. No two hosts' clocks are ever
compared. An observer judges by its own how long a counter has not moved: that of a session that has missed all its
keep-alives is dead. An observer that could not look itself for a while begins anew, so that an outage of the backend,
in which nobody could move, buries nobody.

Rejected: a bell in the store that workers get. A backend may be anywhere, and that store is told to be another.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from rallypoint.compat.rendezvous import errors
from rallypoint.compat.rendezvous.backend import RendezvousBackend
from rallypoint.compat.rendezvous.errors import RendezvousError, RendezvousStateError, RendezvousTimeoutError
from rallypoint.compat.rendezvous.settings import RendezvousSettings
from rallypoint.compat.rendezvous.timer import _PeriodicTimer
from rallypoint.core.machine import Command, Done, Machine, Refused, Step, Waiting
from rallypoint.core.rendezvous import Join, Rendezvous
from rallypoint.deadline import Deadline
from rallypoint.recipes.blob import BlobHost, Felt, Found, State

__all__ = ["BackendHost", "Blob", "Pace"]

log = logging.getLogger("rallypoint.rendezvous")

LEAST_PAUSE_S, MOST_PAUSE_S = 0.01, 1.0
GROWTH = 1.5

LEAST_RETREAT_S, MOST_RETREAT_S = 0.000_01, 0.1
"""How long somebody who has lost a race for the blob stands back: at first hardly, then twice as long after each."""

MOST_OUTAGE_S = 1.0
"""How long to stand back, at most, from a backend that keeps nothing: one that answers None again and again."""

GAP = 2
"""For how many keep-alives an observer may be away."""


class Blob(State, tag="rallypoint.rendezvous"):
    """The state of a rendezvous; `pulses` has the counters by session."""

    pulses: dict[str, int]


class Pace:
    """The pauses between the looks of one who waits: longer and longer, and by chance, so that not all look at once.

    While others keep coming, the next look is when the last of them is expected.
    """

    def __init__(self) -> None:
        self._pause_s = LEAST_PAUSE_S
        self._missing = 0
        self._looked_at = 0.0

    def next_s(self, missing: int, now: float) -> float:
        """Return how long to wait, when so many are missing now."""
        came, took_s = self._missing - missing, now - self._looked_at
        pause_s = took_s * missing / came if came > 0 and self._looked_at else self._pause_s * GROWTH
        self._missing, self._looked_at = missing, now
        self._pause_s = min(max(pause_s, LEAST_PAUSE_S), MOST_PAUSE_S)
        return self._pause_s * random.uniform(0.5, 1.5)

    def pause(self, missing: int, within_s: float) -> None:
        """Sleep until the next look, or for so long at most."""
        time.sleep(min(within_s, self.next_s(missing, time.monotonic())))


class BackendHost(BlobHost[Blob]):
    """One run's rendezvous, as one node of it hosts it together with the others."""

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings) -> None:
        super().__init__(f"the {backend.name} backend", Blob, {})
        interval_s = settings.keep_alive_interval.total_seconds()
        self.stands_by = False
        """Whether the last look found this node in reserve."""

        self._backend = backend
        self._settings = settings
        self._grace_s = interval_s * settings.keep_alive_max_attempt
        self._session = secrets.token_hex(8)
        self._felt = Felt(GAP * interval_s)
        self._still: list[str] = []
        self._swap_s = 0.0
        self._gone = False
        """Whether the backend answered the last change by None."""

        self._stopped = threading.Event()
        self._pace = Pace()
        self._timer: _PeriodicTimer | None = None
        self._lock = threading.RLock()  # a backend of a user's own may not stand two calls at once

    @property
    def session(self) -> str:
        """That of this node, until others say that it is dead."""
        return self._session

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Carry out a command, or look at one that waits; return why it still does when `wait_s` have passed."""
        if isinstance(command, Join):
            self._keep_alive()
        return super().act(name, member, call, command, wait_s)

    def begin(self) -> None:
        """Look often, for a wait begins."""
        self._pace, self.stands_by = Pace(), False

    def stop(self) -> None:
        """Give no sign of life any more."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            self._stopped.set()  # a keep-alive that stands back ends now
            timer.cancel()

    # Life

    def _keep_alive(self) -> None:
        with self._lock:
            if self._timer is None:
                self._stopped.clear()
                self._timer = _PeriodicTimer(self._settings.keep_alive_interval, self._beat)
                self._timer.set_name(f"keep-alive of {self._settings.run_id}")
                self._timer.start()

    def _beat(self) -> None:
        """Move this node's counter, if it takes part, and see who else lives; what fails is tried again next time."""

        def beat(state: Blob, machine: Rendezvous) -> Step:
            self._must_live(state, self._session)
            return Step(Done(), changed=self._session in machine.sessions() and not self._stopped.is_set())

        try:
            state, machine, _ = self._change("", Rendezvous, beat, Deadline(self._settings.timeout.heartbeat))
            self._bury_the_dead("", state, machine)
        except Exception as error:
            log.warning("a keep-alive of %r failed: %s", self._settings.run_id, error)

    def _finish(self, state: Blob, machine: Machine, step: Step) -> None:
        """Whatever is written is a sign of life, too."""
        sessions = machine.sessions()
        state.pulses = {session: count for session, count in state.pulses.items() if session in sessions}
        if self._session in sessions:
            state.pulses[self._session] = state.pulses.get(self._session, 0) + 1

    def _dead(self, place: str, state: Blob, machine: Machine) -> Iterable[str]:
        sessions = machine.sessions()
        return [session for session in self._still if session in sessions]

    def _stirs(self, state: Blob, session: str) -> bool:
        return session not in self._still

    def _disown(self, session: str) -> str:
        self._session = secrets.token_hex(8)
        return f"its keep-alive stood still for {self._grace_s:g} s, and others went on"

    # The blob

    def _fetch(self, place: str) -> Found:
        return self._call("get_state") or (self._empty, None)

    def _swap(self, place: str, token: Any, blob: bytes) -> Found | None:
        began_at = time.monotonic()
        answer = self._call("set_state", blob, token)
        self._swap_s = time.monotonic() - began_at
        self._gone = answer is None
        if answer is None:  # the state is gone
            return self._fetch(place)
        state, token, won = answer
        return None if won else (state, token)

    def _call(self, operation: str, *arguments: Any) -> Any:
        """Ask the backend; an error of PyTorch's, if it is one of its backends, becomes ours of that name."""
        try:
            with self._lock:
                return getattr(self._backend, operation)(*arguments)
        except Exception as error:
            kind = getattr(errors, type(error).__name__, None)
            if isinstance(error, RendezvousError) or kind is None:
                raise
            raise kind(str(error)) from error

    def _open(self, blob: bytes, kind: type[Machine]) -> tuple[Blob, Any]:
        try:
            state, machine = super()._open(blob, kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            whose = "a pickle, as PyTorch's own handler writes" if blob[:1] == b"\x80" else f"{bytes(blob[:40])!r}"
            raise RendezvousStateError(
                f"the state of the rendezvous {self._settings.run_id!r} in {self.label} is not rallypoint's ({error}): "
                f"it is {whose}, and was not read. All nodes of a run must use the same handler"
            ) from error
        with self._lock:
            others = {session: count for session, count in state.pulses.items() if session != self._session}
            self._still = self._felt.still(others, time.monotonic(), self._grace_s)
        return state, machine

    def _hear(self, place: str, state: Blob, machine: Any, within_s: float) -> bool:
        self.stands_by = not machine.over
        self._pace.pause(_missing(machine), within_s)
        return False

    def _patience(self, command: Command) -> Deadline:
        timeout = self._settings.timeout
        return Deadline(timeout.join if isinstance(command, Join) else timeout.close)

    def _upkeep_patience(self) -> Deadline:
        return Deadline(self._settings.timeout.close)

    def _beaten(self, times: int, machine: Any, patience: Deadline) -> None:
        """Stand back: by chance, so long that all who may be after the same can have their turn."""
        if patience.expired():
            lost = f"it kept nothing, {times} times" if self._gone else f"others were faster {times} times"
            raise RendezvousTimeoutError(
                f"the state of the rendezvous {self._settings.run_id!r} in {self.label} could not be changed within "
                f"the timeout of {patience.timeout_s:g} s: {lost}"
            )
        rivals = min(2 ** min(times, 32), 1 + _missing(machine))
        most_s = MOST_OUTAGE_S if self._gone else MOST_RETREAT_S
        retreat_s = min(max(rivals * self._swap_s, LEAST_RETREAT_S * 2 ** min(times, 32)), most_s)
        pause_s = min(random.uniform(0, retreat_s), patience.remaining())
        if self._stopped.is_set():
            time.sleep(pause_s)
        else:
            self._stopped.wait(pause_s)


def _missing(machine: Rendezvous) -> int:
    return max(0, machine.limits.max_nodes - len(machine.waiting))
