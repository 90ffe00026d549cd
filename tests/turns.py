"""Turn budgets for tests, whose time does not depend on the load of the machine."""

from __future__ import annotations

from rallypoint.server.server import StoreServer
from rallypoint.server.turn_budget import TURN_S, TurnBudget

__all__ = ["STEPS", "AmpleTurns", "SteppedTurns", "use_turns"]

STEPS = 5
"""How many steps of long work a `SteppedTurns` allows at most, queued or new, in one turn of the loop."""


class AmpleTurns(TurnBudget):
    """A budget that is never spent: work waits for nothing but its peer, and the log."""

    def spent(self) -> bool:
        return False


class SteppedTurns(TurnBudget):
    """A budget whose time passes only when it is asked: each question takes a fifth of a turn."""

    def __init__(self) -> None:
        super().__init__(self._step)
        self._now = 0.0

    def _step(self) -> float:
        self._now += TURN_S / STEPS
        return self._now


def use_turns(server: StoreServer, turns: TurnBudget) -> StoreServer:
    """Give a server that is not open yet another budget."""
    server.turns = server.listener.turns = turns
    return server
