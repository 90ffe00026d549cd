"""The backend of a rallypoint server: every operation is one request of the native protocol on a `ClientSession`.

In an outage, a wait that exceeds its timeout returns `TimedOut`, or `Disconnected` for a call on a shared object. Such
a call may be repeated, to go on waiting, or undone. Its request is not withdrawn meanwhile: the server may already have
replied, and would reply differently to a second request. An undo is queued for when the server is back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.client.blocking.pending_call import IGNORE_ANSWER
from rallypoint.client.blocking.session import ClientSession
from rallypoint.client.blocking.session_watch import SessionWatch
from rallypoint.client.outage import ServerDown, disconnected
from rallypoint.client.routing.route import Route
from rallypoint.core import ops
from rallypoint.core.machines import barrier, exchange, lock, membership, rendezvous, work_queue
from rallypoint.core.machines.machine import Disconnected, Done, Refused, Undo, Waiting
from rallypoint.core.records import OUTCOMES, Event, Swap, TimedOut
from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.store.base import Backend, Feed

__all__ = ["NativeBackend"]

LEAST_TTL_S = 1.0
"""The shortest heartbeat that this client can keep."""

WINDOW = 512
"""How many requests of a pipeline are in flight at once."""

_WAITING = (
    barrier.BarrierArrive, barrier.BarrierLeave, exchange.ExchangeGive, lock.LockAcquire, membership.MembershipJoin,
    membership.MembershipWatch, rendezvous.RendezvousJoin, rendezvous.RendezvousWatch,
    work_queue.WorkTake, work_queue.WorkJoin,
)  # fmt: skip
"""Commands that may wait, even with a timeout of 0."""


class NativeBackend(Backend):
    """A session with a rallypoint server; raises `ForeignServer` if the server is PyTorch's."""

    root = b"/"
    hosts_objects = True

    def __init__(self, route: Route, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._route = route
        self._session = ClientSession(route, timeout_s)
        self.name = self._session.label
        self._calls: dict[int, bool] = {}
        """The pending calls on shared objects, and for each whether the server may have received it."""

    @property
    def host(self) -> str:
        """The host of the server that the session is connected to."""
        return self._route.at.host

    @property
    def port(self) -> int:
        """The port of that server."""
        return self._route.at.port

    def set_answer_timeout(self, patience_s: float) -> None:
        """Set how long the server may take to reply, independent of the timeout for connecting."""
        self.timeout_s = patience_s
        self._session.patience_s = patience_s

    @property
    def server_id(self) -> bytes:
        """The identity of the server: it changes when a server restarts without its data."""
        return self._session.server

    @property
    def servers(self) -> Sequence[str]:
        """The URLs of all servers of a store in etcd, as last reported by one of them; empty for other stores."""
        return self._session.servers

    @property
    def recovers(self) -> bool:
        """Whether the server restores its sessions after a restart."""
        return self._session.recovers

    def execute(self, op: ops.Op) -> Any:
        special = _SPECIAL.get(op.__class__)
        return self._session.ask(op, _wait_s(op)) if special is None else special(self, op)

    def _wait(self, op: ops.Wait | ops.MultiGet) -> Any:
        outcome = self._session.ask(op, _wait_s(op))
        if isinstance(outcome, TimedOut) and outcome.down:  # which keys exist is unknown
            return TimedOut(tuple(op.keys), outcome.down)
        return outcome

    def _swap(self, op: ops.CompareSwap) -> Swap:
        return Swap(*self._session.ask(op))

    def _take(self, op: ops.Pop | ops.BlockingPop) -> Any:
        item = self._session.ask(op, _wait_s(op))
        self._session.confirm()
        return item

    def _act(self, op: ops.Act) -> Done | Refused | Waiting:
        command, call = op.command, op.call
        if isinstance(command, Undo) and command.call in self._calls:
            return self._undo(op, command)
        if not op.timeout_s and not isinstance(command, _WAITING):
            return self._outcome(self._session.ask(op))
        known, self._calls[call] = self._calls.get(call, False), True
        try:
            outcome = self._outcome(self._session.act(op))
        except ServerDown as down:
            if call in self._calls:  # otherwise another thread has undone it
                self._calls[call] = known or down.sent
            return disconnected(down)
        if not isinstance(outcome, Waiting):
            self._calls.pop(call, None)
        return outcome

    def _undo(self, op: ops.Act, command: Undo) -> Done | Refused | Waiting:
        """Undo a pending call. In an outage, queue the undo; a call that was never sent needs none."""
        self._session.discard_parked(command.call)
        if not self._calls.pop(command.call, True):
            return Done()
        told = self._session.ask(op, 0.0, IGNORE_ANSWER)
        return Disconnected(told.down) if isinstance(told, TimedOut) else self._outcome(told)

    def _outcome(self, told: Any) -> Done | Refused | Waiting:
        self._session.confirm()
        kind, *facts = told
        return OUTCOMES[kind](*facts)

    def _lease(self, op: ops.SetLease) -> None:
        _check_heartbeat(op)
        self._session.ask(op)
        self._leased(op)

    def _leased(self, op: ops.SetLease) -> None:
        if op.ttl_s:
            self._session.need_heartbeat(op.ttl_s / 3)

    def watch(self, prefix: bytes) -> Feed:
        (feed,) = self.pipeline([ops.WatchPrefix(0, prefix)])
        assert isinstance(feed, Feed)
        return feed

    def begin(self, batch: Sequence[ops.Op]) -> Callable[[], list[Any]]:
        for op in batch:
            if isinstance(op, ops.SetLease):
                _check_heartbeat(op)
        sent = self._session.begin(batch)
        return lambda: [self._read(op, result) for op, result in zip(batch, sent.results(), strict=True)]

    def _read(self, op: ops.Op, result: Any) -> Any:
        """Return the result of an operation of a batch, as `execute` does; errors are results."""
        if isinstance(result, RallypointError):
            return result
        if isinstance(op, ops.CompareSwap):
            return Swap(*result)
        if isinstance(op, ops.Act):
            return self._outcome(result)
        if isinstance(op, ops.SetLease):
            return self._leased(op)
        return _NativeFeed(result) if isinstance(op, ops.WatchPrefix) else result

    def pipeline(self, batch: Sequence[ops.Op]) -> list[Any]:
        starts = range(0, len(batch), WINDOW)
        return [
            result for start in starts for result in super(NativeBackend, self).pipeline(batch[start : start + WINDOW])
        ]

    def clone(self) -> NativeBackend:
        return NativeBackend(self._route.copy(), self.timeout_s)

    def close(self) -> None:
        self._session.close()


def _check_heartbeat(op: ops.SetLease) -> None:
    if 0 < op.ttl_s < LEAST_TTL_S:
        raise ValueError(f"a heartbeat of {op.ttl_s:g} s is too short; the minimum is {LEAST_TTL_S:g} s")


def _wait_s(op: Any) -> float | None:
    """Return how long an operation may wait; None if it does not wait: then an outage must not decide its result."""
    return getattr(op, "timeout_s", None) or None


_SPECIAL: dict[type[ops.Op], Callable[[NativeBackend, Any], Any]] = {
    ops.Wait: NativeBackend._wait,
    ops.MultiGet: NativeBackend._wait,
    ops.CompareSwap: NativeBackend._swap,
    ops.Pop: NativeBackend._take,
    ops.BlockingPop: NativeBackend._take,
    ops.Act: NativeBackend._act,
    ops.SetLease: NativeBackend._lease,
}


class _NativeFeed(Feed):
    def __init__(self, watch: SessionWatch) -> None:
        self._watch = watch

    def next(self, deadline: Deadline) -> Event | TimedOut:
        return self._watch.next(deadline)

    def close(self) -> None:
        self._watch.close()
