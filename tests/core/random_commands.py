"""Random commands to shared objects: most let members meet, some only a broken client sends."""

from __future__ import annotations

import random
from typing import Any

from rallypoint.core.machines import barrier, exchange, lock, membership, rendezvous, work_queue
from rallypoint.core.policy.round_policy import NodeLimits

__all__ = ["MEMBERS", "Commands"]

MEMBERS = ("0", "1", "2")


class Commands:
    """Commands of the members of one history, with the arguments that they mostly agree on."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._makers = {
            "barrier": self._barrier,
            "exchange": self._exchange,
            "lock": self._lock,
            "roster": self._membership,
            "rendezvous": self._rendezvous,
            "work_queue": self._work_queue,
        }
        self.kinds = chance.choice((list(self._makers), [chance.choice(list(self._makers))]))
        self._size = chance.choice((1, 2, 2, 3))
        self._last = chance.choice(("", "", "0"))
        self._how = chance.choice(("all_gather", "gather", "broadcast"))
        self._limits = chance.choice(
            (NodeLimits(1, 1), NodeLimits(2, 2), NodeLimits(1, 3, 2.0), NodeLimits(1, 2, 2.0), NodeLimits(2, 3))
        )

    def make(self, kind: str, machine: Any, member: str) -> Any:
        """Make a command that suits the present state of the machine."""
        return self._makers[kind](machine, member)

    def undo(self, kind: str, earlier: int) -> Any:
        """Make a command that withdraws a call, or ends what it began."""
        chance = self.chance
        failed, done = chance.choice(("", "", "it broke")), chance.random() < 0.5
        undone: dict[str, tuple[Any, ...]] = {
            "barrier": (
                barrier.BarrierWithdraw(earlier),
                barrier.BarrierLeave(earlier),
                barrier.BarrierLeave(earlier),
                barrier.BarrierUndoLeave(earlier),
            ),
            "exchange": (exchange.ExchangeWithdraw(earlier),),
            "lock": (lock.LockRelease(earlier),),
            "roster": (membership.MembershipLeave(earlier),),
            "rendezvous": (rendezvous.RendezvousWithdraw(earlier), rendezvous.RendezvousLeave(earlier, failed, done)),
            "work_queue": (work_queue.WorkWithdraw(earlier), work_queue.WorkAbandon(earlier)),
        }
        return chance.choice(undone[kind])

    def _mostly(self, usual: Any, *others: Any) -> Any:
        return usual if self.chance.random() < 0.9 else self.chance.choice(others)

    def _barrier(self, machine: Any, member: str) -> Any:
        return barrier.BarrierArrive(self._mostly(self._size, 1, 3, ["0", "1", "0"]), self._mostly(self._last, "", "1"))

    def _exchange(self, machine: Any, member: str) -> Any:
        data = self.chance.choice((b"d" * 5, b"d" * 5, b"e" * 30, b""))
        how = self._mostly(self._how, "all_gather", "gather", "broadcast")
        return exchange.ExchangeGive(self._mostly(self._size, 1, 3), int(member), data, how, self._mostly(0, 1))

    def _lock(self, machine: Any, member: str) -> Any:
        return self.chance.choice((lock.LockAcquire(), lock.LockAcquire(), lock.LockQuery()))

    def _membership(self, machine: Any, member: str) -> Any:
        chance = self.chance
        maps = chance.choice(
            ({}, {}, {"0": {"d0": "d1"}}, {"1": {"d0": "d0", "d1": "d1"}}, {"1": {"d0": "d0", "d1": "d0"}})
        )
        join = membership.MembershipJoin(b"info", self._mostly(["d0", "d1"], ["d0"], [], ["d0", "d0"]), maps)
        watch = membership.MembershipWatch(chance.choice((0, machine.epoch, machine.epoch)))
        return chance.choice((join, join, watch, watch, membership.MembershipQuery()))

    def _rendezvous(self, machine: Any, member: str) -> Any:
        chance = self.chance
        settings = self._mostly({}, {"batch": "8", "lr": "1"})
        where = {"host": self._mostly("h", "i"), "address": "h:1", "loopback": chance.random() < 0.1}
        runs = {"run": self._mostly(-1, machine.run), "spare": chance.random() < 0.8}
        limits = self._mostly(self._limits, NodeLimits(1, 1), NodeLimits(3, 2))
        join = rendezvous.RendezvousJoin(limits, settings, self._mostly(-1, 0, 1), **where, **runs)
        watch = rendezvous.RendezvousWatch(chance.choice((0, machine.scope, machine.scope)))
        others = (
            rendezvous.RendezvousClose("done", "well"),
            rendezvous.RendezvousReopen(chance.random() < 0.5),
            rendezvous.RendezvousQuery(),
            rendezvous.RendezvousQuery(machine.scope),
            rendezvous.RendezvousEvict(machine.scope, member, "silent"),
        )
        return chance.choice((join, join, join, watch, watch, chance.choice(others)))

    def _work_queue(self, machine: Any, member: str) -> Any:
        chance = self.chance
        take = work_queue.WorkTake(chance.random() < 0.7)
        put = work_queue.WorkPut(chance.choice(([b"a"], [b"b" * 30, b""])), self._mostly(2, 1))
        others: tuple[Any, ...] = (
            work_queue.WorkJoin(),
            work_queue.WorkQuery(),
            work_queue.WorkDead(chance.choice((0, 0, machine.last_dead))),
            work_queue.WorkRemoveDead([machine.last_dead, 1], chance.random() < 0.5),
        )
        held = [(int(call.split("/")[1]), taken.item.id) for call, taken in machine.taken.items()]
        if held and chance.random() < 0.5:  # mostly of another session, which has no item of that call
            call, item = chance.choice(held)
            return chance.choice((work_queue.WorkDone(call, item), work_queue.WorkRelease(call, item, "broke")))
        return chance.choice((take, take, take, put, put, chance.choice(others)))
