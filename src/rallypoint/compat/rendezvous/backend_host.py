"""Hosts the rendezvous machine in a backend: one value, which the nodes change by compare-and-set.

The value is JSON, `["rallypoint.rendezvous", version, writer, ended, machine, heartbeats]`, and never a pickle: a state
of another format, for example that of a node with PyTorch's own handler, is refused without decoding it.

A backend cannot notify. A waiting node polls, with a pause that grows from `MIN_POLL_S` to `MAX_POLL_S`. Heartbeats are
in the value too: each session has a counter there, which its keep-alive moves. Clocks of different hosts are never
compared. Each observer measures with its own clock how long a counter has not moved; a session that has missed all its
keep-alives is dead. An observer that could not read for a while starts its measurement again, so that an outage of the
backend, in which no counter can move, evicts no node.

Rejected: a wakeup key in the workers' store. The backend may be anywhere, and that store may be a different one.
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
from rallypoint.core.machines.machine import Command, Done, Machine, Refused, Step, Waiting
from rallypoint.core.machines.rendezvous import RendezvousJoin, RendezvousMachine
from rallypoint.deadline import Deadline
from rallypoint.recipes.hosting.cas_host import CasHost, HostedState, StoredState, decode_state
from rallypoint.recipes.hosting.stall_detector import StallDetector

__all__ = ["BackendCell", "BackendHost", "BackendState", "KeepAliveLiveness", "PollBackoff"]

log = logging.getLogger("rallypoint.rendezvous")

MIN_POLL_S, MAX_POLL_S = 0.01, 1.0
GROWTH = 1.5

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.000_01, 0.1
"""The first and the longest backoff after a lost compare-and-set; it doubles with each loss."""

MOST_OUTAGE_S = 1.0
"""The longest backoff from a backend that stores nothing: one that keeps replying None."""

GAP = 2
"""For how many keep-alive intervals an observer may miss readings before it starts again."""


class BackendState(HostedState, tag="rallypoint.rendezvous"):
    """The state of a rendezvous; `heartbeats` maps sessions to their counters."""

    heartbeats: dict[str, int]


_EMPTY = msgspec.json.encode(BackendState(0, "", [], msgspec.Raw(b"{}"), {}))


class PollBackoff:
    """The pauses between the polls of a waiting node: growing, and random, so that nodes do not poll in step.

    While nodes keep joining, the next poll is when the last of them is expected.
    """

    def __init__(self) -> None:
        self._pause_s = MIN_POLL_S
        self._missing = 0
        self._looked_at = 0.0

    def next_s(self, missing: int, now: float) -> float:
        """Return the next pause, given how many nodes are still missing."""
        came, took_s = self._missing - missing, now - self._looked_at
        pause_s = took_s * missing / came if came > 0 and self._looked_at else self._pause_s * GROWTH
        self._missing, self._looked_at = missing, now
        self._pause_s = min(max(pause_s, MIN_POLL_S), MAX_POLL_S)
        return self._pause_s * random.uniform(0.5, 1.5)

    def pause(self, missing: int, within_s: float) -> None:
        """Sleep until the next poll, at most `within_s`."""
        time.sleep(min(within_s, self.next_s(missing, time.monotonic())))


class BackendCell:
    """The state of one rendezvous in a backend; of one node, whose waits `stopped` cuts short."""

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings, stopped: threading.Event) -> None:
        self.label = f"the {backend.name} backend"
        self.is_spare = False
        """Whether this node was a spare at the last poll."""

        self._backend = backend
        self._settings = settings
        self._stopped = stopped
        self._poll_backoff = PollBackoff()
        self._swap_s = 0.0
        self._state_lost = False
        """Whether the backend replied None to the last change: it lost the state."""

        self._lock = threading.RLock()  # a user's backend may not be thread-safe

    def begin(self) -> None:
        """Reset the poll interval at the start of a wait."""
        self._poll_backoff, self.is_spare = PollBackoff(), False

    def fetch(self, place: str) -> StoredState:
        """Return the stored state; if there is none, an empty one."""
        return self._call("get_state") or (_EMPTY, None)

    def decode(self, data: bytes, kind: type[Machine]) -> tuple[BackendState, Any]:
        """Return a state that was fetched, decoded, and its machine; raise RendezvousStateError if it is not ours."""
        try:
            return decode_state(data, BackendState, kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            found = "a pickle, as PyTorch's own handler writes" if data[:1] == b"\x80" else f"{bytes(data[:40])!r}"
            raise RendezvousStateError(
                f"the state of the rendezvous {self._settings.run_id!r} in {self.label} is not rallypoint's ({error}): "
                f"found {found}, not decoded. All nodes of a run must use the same handler"
            ) from error

    def swap(self, place: str, token: Any, state: BackendState, wakes: bool) -> StoredState | None:
        """Replace the state of that token; waiting nodes find the change when they poll."""
        data = msgspec.json.encode(state)
        began_at = time.monotonic()
        answer = self._call("set_state", data, token)
        self._swap_s = time.monotonic() - began_at
        self._state_lost = answer is None
        if answer is None:  # the state is gone
            return self.fetch(place)
        present, token, won = answer
        return None if won else (present, token)

    def patience(self, command: Command | None) -> Deadline:
        """Return the deadline for retries: the join timeout of a join, else the close timeout."""
        timeout = self._settings.timeout
        return Deadline(timeout.join if isinstance(command, RendezvousJoin) else timeout.close)

    def back_off(self, place: str, present: StoredState, machine: Any, lost: int, patience: Deadline) -> StoredState:
        """Pause for a random time, long enough for all competing nodes to proceed."""
        if patience.expired():
            why = f"the backend lost it {lost} times" if self._state_lost else f"other nodes were faster {lost} times"
            raise RendezvousTimeoutError(
                f"the state of the rendezvous {self._settings.run_id!r} in {self.label} could not be changed within "
                f"the timeout of {patience.timeout_s:g} s: {why}"
            )
        rivals = min(2 ** min(lost, 32), 1 + _missing(machine))
        most_s = MOST_OUTAGE_S if self._state_lost else MAX_BACKOFF_S
        retreat_s = min(max(rivals * self._swap_s, MIN_BACKOFF_S * 2 ** min(lost, 32)), most_s)
        pause_s = min(random.uniform(0, retreat_s), patience.remaining())
        if self._stopped.is_set():
            time.sleep(pause_s)
        else:
            self._stopped.wait(pause_s)
        return present

    def await_change(self, place: str, state: BackendState, machine: Any, within_s: float) -> bool:
        """Pause until the next poll; a backend cannot notify."""
        self.is_spare = not machine.over
        self._poll_backoff.pause(_missing(machine), within_s)
        return False

    def _call(self, operation: str, *arguments: Any) -> Any:
        """Call the backend; convert an error of one of PyTorch's backends to ours of the same name."""
        try:
            with self._lock:
                return getattr(self._backend, operation)(*arguments)
        except Exception as error:
            kind = getattr(errors, type(error).__name__, None)
            if isinstance(error, RendezvousError) or kind is None:
                raise
            raise kind(str(error)) from error


class KeepAliveLiveness:
    """The session of this node, and the keep-alives of the others, which are counters in the state."""

    former: tuple[str, ...] = ()

    def __init__(self, interval_s: float, grace_s: float) -> None:
        self.session = secrets.token_hex(8)
        self._grace_s = grace_s
        self._stalls = StallDetector(GAP * interval_s)
        self._stalled: list[str] = []
        self._lock = threading.RLock()

    def replace_session(self, session: str) -> str:
        """Start a new session because the others have ended this one; return why they did."""
        self.session = secrets.token_hex(8)
        return f"its keep-alive stalled for {self._grace_s:g} s, and other nodes evicted it"

    def observe(self, state: BackendState) -> None:
        """Read the counters of the other nodes."""
        with self._lock:
            others = {session: count for session, count in state.heartbeats.items() if session != self.session}
            self._stalled = self._stalls.stalled(others, time.monotonic(), self._grace_s)

    def record(self, state: BackendState, machine: Machine) -> None:
        """Move this node's counter with every write."""
        sessions = machine.sessions()
        state.heartbeats = {session: count for session, count in state.heartbeats.items() if session in sessions}
        if self.session in sessions:
            state.heartbeats[self.session] = state.heartbeats.get(self.session, 0) + 1

    def pauses(self, state: BackendState, machine: Machine, within_s: float) -> Iterable[float]:
        """Return one pause: there is no reading without a state."""
        return (within_s,)

    def dead_in(self, state: BackendState, machine: Machine) -> Iterable[str]:
        """Return the machine's sessions that have missed all their keep-alives."""
        sessions = machine.sessions()
        return [session for session in self._stalled if session in sessions]

    def is_alive_in(self, state: BackendState, session: str) -> bool:
        """Return whether the counter of a session has moved in the state that was observed last."""
        return session not in self._stalled

    def forget(self, session: str) -> None:
        """Do nothing: the counter of an evicted session is removed by the write that evicts it."""


class BackendHost:
    """Hosts the rendezvous of one run on its nodes; this is one node's part."""

    hosted_by = "members"

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings) -> None:
        interval_s = settings.keep_alive_interval.total_seconds()
        self._settings = settings
        self._stopped = threading.Event()
        self._cell = BackendCell(backend, settings, self._stopped)
        self._liveness = KeepAliveLiveness(interval_s, interval_s * settings.keep_alive_max_attempt)
        self._objects = CasHost(self._cell, self._liveness)
        self.label = self._cell.label
        self._timer: _PeriodicTimer | None = None
        self._lock = threading.RLock()

    @property
    def is_spare(self) -> bool:
        """Whether this node was a spare at the last poll."""
        return self._cell.is_spare

    def act(self, name: str, member: str, call: int, command: Command, wait_s: float) -> Done | Refused | Waiting:
        """Apply a command, or check a pending one; return why it still waits after `wait_s`."""
        if isinstance(command, RendezvousJoin):
            self._keep_alive()
        return self._objects.act(name, member, call, command, wait_s)

    def evict_dead(self, name: str, kind: type[Machine]) -> None:
        """Do nothing: every node with a keep-alive evicts dead ones."""

    def begin(self) -> None:
        """Reset the poll interval at the start of a wait."""
        self._cell.begin()

    def stop(self) -> None:
        """Stop the keep-alive."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            self._stopped.set()  # ends the backoff of a running keep-alive
            timer.cancel()

    def _keep_alive(self) -> None:
        with self._lock:
            if self._timer is None:
                self._stopped.clear()
                self._timer = _PeriodicTimer(self._settings.keep_alive_interval, self._write_heartbeat)
                self._timer.set_name(f"keep-alive of {self._settings.run_id}")
                self._timer.start()

    def _write_heartbeat(self) -> None:
        """Move this node's counter, if it takes part, and evict dead nodes; retry a failure at the next interval."""

        def beat(state: BackendState, machine: RendezvousMachine) -> Step:
            session = self._liveness.session
            self._objects.require_session(state, session)
            return Step(Done(), changed=session in machine.sessions() and not self._stopped.is_set())

        patience = Deadline(self._settings.timeout.heartbeat)
        try:
            state, machine, _ = self._objects.change("", RendezvousMachine, beat, patience)
            self._objects.evict_stalled("", state, machine)
        except Exception as error:
            log.warning("a keep-alive of %r failed: %s", self._settings.run_id, error)


def _missing(machine: RendezvousMachine) -> int:
    return max(0, machine.limits.max_nodes - len(machine.waiting))
