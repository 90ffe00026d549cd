"""Ends a run from outside: closes its rendezvous as failed, and notifies its agents, wherever they wait."""

from __future__ import annotations

from rallypoint.launch.failures import server_failure
from rallypoint.launch.node_run import FAILED
from rallypoint.launch.run_state import RunState
from rallypoint.recipes import rendezvous_batch
from rallypoint.recipes.rendezvous import Rendezvous
from rallypoint.store.base import Store
from rallypoint.store.batch import Batch

__all__ = ["end_run"]


def end_run(store: Store, run_id: str, who: str, reason: str) -> None:
    """Record the reason as the failure of a run, and end the run on all nodes."""
    state = RunState(store, run_id, lambda: None)
    with Batch(store) as batch:
        state.fail(batch, server_failure(who, reason))
        rendezvous_batch.close(Rendezvous(store, run_id, 1, node=who[:100]), batch, FAILED, reason)
        state.notify(batch)
