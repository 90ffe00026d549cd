"""The backend of our own server: every operation as one request of our protocol on a `Wire`.

In an outage, a wait whose time is over is `TimedOut`, or `Disconnected` for a call on a shared object. Such a call may
come again, to wait on, or be undone. Its request is not taken back meanwhile, for the server may have answered it, and
would not answer another one so. An undo is left for the server to find when it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.core import barrier, exchange, lock, ops, records, rendezvous, roster
from rallypoint.core.machine import Disconnected, Done, Refused, Undo, Waiting
from rallypoint.core.records import Event, Swap, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.store.base import Backend, Feed
from rallypoint.store.outage import ServerDown, WithoutQuorum
from rallypoint.store.route import Route
from rallypoint.store.wire import UNHEARD, Wire

__all__ = ["SessionBackend"]

LEAST_TTL_S = 1.0
"""The fastest heartbeat that can be kept."""

WINDOW = 512
"""How many requests of a pipeline are under way at once."""

_OUTCOMES: dict[int, type[Done] | type[Refused] | type[Waiting]] = {
    records.DONE: Done,
    records.REFUSED: Refused,
    records.WAITING: Waiting,
}


_WAITING = (
    barrier.Arrive, barrier.Leave, exchange.Give, lock.Acquire, roster.Join, roster.Watch, rendezvous.Join,
    rendezvous.Watch,
)  # fmt: skip
"""Commands that may wait, also if they are given no time for it."""


class SessionBackend(Backend):
    """A session with one of our servers; raises `NotOurs` where PyTorch's answers."""

    root = b"/"
    hosts_objects = True

    def __init__(self, route: Route, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._route = route
        self._wire = Wire(route, timeout_s)
        self.name = self._wire.label
        self._calls: dict[int, bool] = {}
        """The calls on shared objects that wait, and whether the server may know of each."""

    @property
    def host(self) -> str:
        """The host that the session is at now."""
        return self._route.at.host

    @property
    def port(self) -> int:
        """That server's port."""
        return self._route.at.port

    def be_patient(self, patience_s: float) -> None:
        """Give the server so long for every answer, whatever it took to connect."""
        self.timeout_s = patience_s
        self._wire.patience_s = patience_s

    @property
    def server_id(self) -> bytes:
        """The identity of the server: one that was restarted and has forgotten everything has another."""
        return self._wire.server

    @property
    def servers(self) -> Sequence[str]:
        """The URLs of all servers of a store in etcd, as one of them said last; none of any other store."""
        return self._wire.servers

    @property
    def recovers(self) -> bool:
        """Whether the server comes back with its sessions when it is restarted."""
        return self._wire.recovers

    def execute(self, op: ops.Op) -> Any:
        special = _SPECIAL.get(op.__class__)
        return self._wire.ask(op, _wait_s(op)) if special is None else special(self, op)

    def _wait(self, op: ops.Wait | ops.MultiGet) -> Any:
        outcome = self._wire.ask(op, _wait_s(op))
        if isinstance(outcome, TimedOut) and outcome.down:  # nobody says which keys are there
            return TimedOut(tuple(op.keys), outcome.down)
        return outcome

    def _swap(self, op: ops.Swap) -> Swap:
        return Swap(*self._wire.ask(op))

    def _take(self, op: ops.Pop | ops.Take) -> Any:
        item = self._wire.ask(op, _wait_s(op))
        self._wire.confirm()
        return item

    def _act(self, op: ops.Act) -> Done | Refused | Waiting:
        command, call = op.command, op.call
        if isinstance(command, Undo) and command.call in self._calls:
            return self._undo(op, command)
        if not op.timeout_s and not isinstance(command, _WAITING):
            return self._outcome(self._wire.ask(op))
        known, self._calls[call] = self._calls.get(call, False), True
        try:
            outcome = self._outcome(self._wire.act(op))
        except ServerDown as down:
            if call in self._calls:  # it may have been undone by another thread
                self._calls[call] = known or down.sent
            return _disconnected(down)
        if not isinstance(outcome, Waiting):
            self._calls.pop(call, None)
        return outcome

    def _undo(self, op: ops.Act, command: Undo) -> Done | Refused | Waiting:
        """Take back a call that waits. In an outage that is left for later, and one never sent is no call."""
        self._wire.unpark(command.call)
        if not self._calls.pop(command.call, True):
            return Done()
        told = self._wire.ask(op, 0.0, UNHEARD)
        return Disconnected(told.down) if isinstance(told, TimedOut) else self._outcome(told)

    def _outcome(self, told: Any) -> Done | Refused | Waiting:
        self._wire.confirm()
        kind, *facts = told
        return _OUTCOMES[kind](*facts)

    def _lease(self, op: ops.Lease) -> None:
        if 0 < op.ttl_s < LEAST_TTL_S:
            raise ValueError(f"a heartbeat of {op.ttl_s:g} s is too fast to be kept; {LEAST_TTL_S:g} s is the least")
        self._wire.ask(op)
        if op.ttl_s:
            self._wire.beat_s = min(self._wire.beat_s, op.ttl_s / 3)

    def watch(self, prefix: bytes) -> Feed:
        return _SessionFeed(self._wire, prefix)

    def pipeline(self, batch: Sequence[ops.Op]) -> list[Any]:
        starts = range(0, len(batch), WINDOW)
        return [answer for start in starts for answer in self._wire.ask_all(batch[start : start + WINDOW])]

    def clone(self) -> SessionBackend:
        return SessionBackend(self._route.copy(), self.timeout_s)

    def close(self) -> None:
        self._wire.close()


def _disconnected(down: ServerDown) -> Disconnected:
    """Return why a call on a shared object waits while the server is down."""
    if not down.no_quorum:
        return Disconnected(str(down))
    waiting = WithoutQuorum(str(down))
    waiting.no_quorum = down.no_quorum
    return waiting


def _wait_s(op: Any) -> float | None:
    """Return how long an operation may wait; None where it asks what is true now, which no outage may decide."""
    return getattr(op, "timeout_s", None) or None


_SPECIAL: dict[type[ops.Op], Callable[[SessionBackend, Any], Any]] = {
    ops.Wait: SessionBackend._wait,
    ops.MultiGet: SessionBackend._wait,
    ops.Swap: SessionBackend._swap,
    ops.Pop: SessionBackend._take,
    ops.Take: SessionBackend._take,
    ops.Act: SessionBackend._act,
    ops.Lease: SessionBackend._lease,
}


class _SessionFeed(Feed):
    def __init__(self, wire: Wire, prefix: bytes) -> None:
        self._wire = wire
        self._slot = wire.watch(prefix)

    def next(self, deadline: Deadline) -> Event | TimedOut:
        return self._wire.event(self._slot, deadline)

    def close(self) -> None:
        self._wire.unwatch(self._slot)
