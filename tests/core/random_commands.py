"""Random commands to shared objects: mostly such that meetings take place, some that no sane client makes."""

from __future__ import annotations

import random
from typing import Any

from rallypoint.core import barrier, exchange, lock, rendezvous, roster
from rallypoint.core.gathering import Limits

__all__ = ["MEMBERS", "Commands"]

MEMBERS = ("0", "1", "2")


class Commands:
    """What the members of one history ask of shared objects, and what they mostly agree on."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._makers = {
            "barrier": self._barrier,
            "exchange": self._exchange,
            "lock": self._lock,
            "roster": self._roster,
            "rendezvous": self._rendezvous,
        }
        self.kinds = chance.choice((list(self._makers), [chance.choice(list(self._makers))]))
        self._size = chance.choice((1, 2, 2, 3))
        self._last = chance.choice(("", "", "0"))
        self._how = chance.choice(("all_gather", "gather", "broadcast"))
        self._limits = chance.choice((Limits(1, 1), Limits(2, 2), Limits(1, 3, 2.0), Limits(1, 2, 2.0), Limits(2, 3)))

    def make(self, kind: str, machine: Any, member: str) -> Any:
        """Make a command for a machine as it is now."""
        return self._makers[kind](machine, member)

    def undo(self, kind: str, earlier: int) -> Any:
        """Take back a call, or end what it began."""
        chance = self.chance
        failed, done = chance.choice(("", "", "it broke")), chance.random() < 0.5
        undone: dict[str, tuple[Any, ...]] = {
            "barrier": (
                barrier.Withdraw(earlier),
                barrier.Leave(earlier),
                barrier.Leave(earlier),
                barrier.Stay(earlier),
            ),
            "exchange": (exchange.TakeBack(earlier),),
            "lock": (lock.Release(earlier),),
            "roster": (roster.Leave(earlier),),
            "rendezvous": (rendezvous.Withdraw(earlier), rendezvous.Leave(earlier, failed, done)),
        }
        return chance.choice(undone[kind])

    def _mostly(self, usual: Any, *others: Any) -> Any:
        return usual if self.chance.random() < 0.9 else self.chance.choice(others)

    def _barrier(self, machine: Any, member: str) -> Any:
        return barrier.Arrive(self._mostly(self._size, 1, 3, ["0", "1", "0"]), self._mostly(self._last, "", "1"))

    def _exchange(self, machine: Any, member: str) -> Any:
        data = self.chance.choice((b"d" * 5, b"d" * 5, b"e" * 30, b""))
        how = self._mostly(self._how, "all_gather", "gather", "broadcast")
        return exchange.Give(self._mostly(self._size, 1, 3), int(member), data, how, self._mostly(0, 1))

    def _lock(self, machine: Any, member: str) -> Any:
        return self.chance.choice((lock.Acquire(), lock.Acquire(), lock.Look()))

    def _roster(self, machine: Any, member: str) -> Any:
        chance = self.chance
        maps = chance.choice(
            ({}, {}, {"0": {"d0": "d1"}}, {"1": {"d0": "d0", "d1": "d1"}}, {"1": {"d0": "d0", "d1": "d0"}})
        )
        join = roster.Join(b"info", self._mostly(["d0", "d1"], ["d0"], [], ["d0", "d0"]), maps)
        watch = roster.Watch(chance.choice((0, machine.epoch, machine.epoch)))
        return chance.choice((join, join, watch, watch, roster.Look()))

    def _rendezvous(self, machine: Any, member: str) -> Any:
        chance = self.chance
        settings = self._mostly({}, {"batch": "8", "lr": "1"})
        where = {"host": self._mostly("h", "i"), "address": "h:1", "loopback": chance.random() < 0.1}
        runs = {"run": self._mostly(-1, machine.run), "spare": chance.random() < 0.8}
        limits = self._mostly(self._limits, Limits(1, 1), Limits(3, 2))
        join = rendezvous.Join(limits, settings, self._mostly(-1, 0, 1), **where, **runs)
        watch = rendezvous.Watch(chance.choice((0, machine.scope, machine.scope)))
        others = (
            rendezvous.Close("done", "well"),
            rendezvous.Open(),
            rendezvous.Look(),
            rendezvous.Look(machine.scope),
        )
        return chance.choice((join, join, join, watch, watch, chance.choice(others)))
