"""The store shared by the torchrun agents of one round; it also notices when an agent reaches the exit barrier."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.compat.rendezvous.agent_rendezvous import EXIT_BARRIER
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import StoreTimeout
from rallypoint.recipes.round_watch import RoundChange
from rallypoint.store.base import Store
from rallypoint.text import printable
from rallypoint.torch import TorchStore

__all__ = ["CHECK_S", "RoundStore", "wait_in_round"]

log = logging.getLogger("rallypoint.torchrun")

CHECK_S = 0.5
"""How often a waiting agent checks whether the round is over."""

Result = TypeVar("Result")


def wait_in_round(wait: Callable[[float], Result], change: RoundChange, timeout_s: float) -> Result:
    """Call `wait`, which takes a timeout, until it succeeds; return its result.

    Raises its StoreTimeout at the timeout, or soon after the round is over.
    """
    deadline = Deadline(timeout_s)
    while True:
        over = change.is_set()
        try:
            return wait(min(deadline.remaining(), CHECK_S))
        except StoreTimeout:
            if over or deadline.expired():
                raise


class RoundStore(TorchStore):
    """The agents' store of a round; waits in it end soon after the round is over."""

    def __init__(self, store: Store, change: RoundChange) -> None:
        super().__init__(store)
        self._change = change
        self.done = False
        """Whether this agent has reached the exit barrier: its workers have succeeded."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self.done = self.done or key.startswith(EXIT_BARRIER)
        return super().add(key, amount)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Return when all keys exist at once; raise StoreTimeout at the timeout, or when the round is over."""
        try:
            wait_in_round(functools.partial(super().wait, keys), self._change, self._within(timeout))
        except StoreTimeout as error:
            if self._change.is_set():
                log.warning("no longer waiting for the other agents: %s", printable(self._change.reason))
            raise error from None
