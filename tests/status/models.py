"""Servers in this event loop whose status is built with a clock that the test turns."""

from __future__ import annotations

from typing import Any

from tests.server.peers import NativePeer, native_peer, settle

from rallypoint.core import ops, run_keys
from rallypoint.core.machines import barrier, exchange, lock, membership
from rallypoint.core.machines.rendezvous import RendezvousJoin
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.core.run_report import FailureReport, NodeReport, RankReport, encode_report
from rallypoint.server.server import StoreServer
from rallypoint.server.status.builder import StatusBuilder
from rallypoint.server.status.model import ServerStatus
from rallypoint.server.status.wait_times import WaitTimes

__all__ = ["ACQUIRE", "GROUP_JOIN", "LONG_S", "Turned", "arrive", "give", "join", "report", "report_key"]

LONG_S = 1000.0


class Turned:
    """A server, its status, and the clock by which its durations are measured."""

    def __init__(self, server: StoreServer) -> None:
        self.now = 100.0
        self.server = server
        server.clock.times = WaitTimes(lambda: self.now)
        self.builder = StatusBuilder(server, lambda: self.now)
        self._numbers = 0

    def status(self) -> ServerStatus:
        """Build the model."""
        steps = self.builder.build()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: ServerStatus = end.value
                return found

    def observe(self) -> None:
        for _ in self.builder.observe():
            pass

    async def peer(self) -> NativePeer:
        return await native_peer(self.server)

    async def act(self, peer: NativePeer, name: bytes, member: str, command: Any, call: int = 0) -> int:
        """Send a call on a shared object, and let it run; return its number."""
        self._numbers += 1
        number = self._numbers
        peer.asks(ops.Act(number, name, member, call or number, command, LONG_S))
        await settle()
        return number

    async def put(self, peer: NativePeer, key: bytes, value: bytes) -> None:
        """Write a lease, as agents do."""
        self._numbers += 1
        peer.asks(ops.SetLease(self._numbers, key, value, 0.0))
        await settle()


def arrive(members: int | list[str], last: str = "") -> barrier.BarrierArrive:
    return barrier.BarrierArrive(members, last)


def give(size: int, rank: int) -> exchange.ExchangeGive:
    return exchange.ExchangeGive(size, rank, b"x", "all_gather")


def join(least: int, most: int = 0, host: str = "", address: str = "") -> RendezvousJoin:
    return RendezvousJoin(NodeLimits(least, most or least, 0.0), host=host, address=address)


ACQUIRE, GROUP_JOIN = lock.LockAcquire(), membership.MembershipJoin()


def report_key(run: str, node: str) -> bytes:
    """Return the key of a report, as a store without a prefix has it."""
    return f"/{run_keys.report_key(run, node)}".encode()


def report(run: str, node: str, *ranks: RankReport, failure: FailureReport | None = None, **more: Any) -> bytes:
    """Return a report of a node as its agent writes it."""
    facts = {"host": "a-host", "state": "running", "restarts": 1, "restart_budget": 3, **more}
    return encode_report(NodeReport(run=run, node=node, ranks=list(ranks), failure=failure, **facts))
