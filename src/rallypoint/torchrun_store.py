"""The store that torchrun's agents of one round share, which also tells that an agent has come to the exit barrier."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rallypoint.deadline import Deadline, Timeout
from rallypoint.elastic.watch import Change
from rallypoint.errors import StoreTimeout
from rallypoint.store.base import Store
from rallypoint.text import printable
from rallypoint.torch import TorchStore

__all__ = ["LAST_MEMBER", "LOOK_S", "RoundStore"]

log = logging.getLogger("rallypoint.torchrun")

LOOK_S = 0.5
"""How often one who waits looks whether the round is over."""

EXIT_BARRIER = "torchelastic/agent/terminal_state"
LAST_MEMBER = f"{EXIT_BARRIER}/last_member"
"""What the keys of torchrun's exit barrier begin with, and the one that the last of a round's agents to come sets."""


class RoundStore(TorchStore):
    """The agents' store of a round, in which nobody waits for long once that is over."""

    def __init__(self, store: Store, change: Change) -> None:
        super().__init__(store)
        self._change = change
        self.done = False
        """Whether this agent has come to the exit barrier: its workers have succeeded."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self.done = self.done or key.startswith(EXIT_BARRIER)
        return super().add(key, amount)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Return when all of the keys exist at once; give up when the round is over."""
        deadline = Deadline(self._within(timeout))
        while True:
            over = self._change.is_set()
            try:
                return super().wait(keys, min(deadline.remaining(), LOOK_S))
            except StoreTimeout as error:
                if over:
                    log.warning("no longer waiting for the other agents: %s", printable(self._change.reason))
                if over or deadline.expired():
                    raise error from None
