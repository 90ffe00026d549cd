"""How a preempted node leaves: it closes the run for all nodes, unless enough of them are left to go on."""

from __future__ import annotations

from rallypoint.core.policy.stop_policy import PREEMPTED
from rallypoint.launch.run_state import RunState
from rallypoint.launch.wakeup_pipe import Preempted
from rallypoint.recipes.rendezvous import Rendezvous

__all__ = ["close_if_preempted"]


def close_if_preempted(rendezvous: Rendezvous, state: RunState, why: Preempted | None, has_joined: bool) -> None:
    """Close a run that this node has left, if all of it is preempted, or too few nodes are left.

    A node that `has_joined` no round was not needed for one: the others may still wait for more nodes. While others are
    in a round, this node was a spare, or out for its health, and their ranks stop at a step first.
    """
    if why is None:
        return
    status = rendezvous.status()
    if status.phase == "formed":
        return
    left = len({*status.nodes, *status.waiting})
    few = f"; {left} of at least {status.min_nodes} nodes are left"
    if left and (why.whole or (has_joined and left < status.min_nodes)):
        rendezvous.close(PREEMPTED, f"{rendezvous.node}: {why.reason}{few * (not why.whole)}")
        state.notify()
