"""The requests of a rendezvous as parts of a batch, for a caller that has others to send with them (`store/batch.py`).

They are for the launcher, whose store is on our server, and not for users. Each is the request of the method of
`Rendezvous` with the same name, and takes effect when the batch does.
"""

from __future__ import annotations

from rallypoint.core.machines import rendezvous as machine
from rallypoint.deadline import Timeout
from rallypoint.recipes import join_args
from rallypoint.recipes.rendezvous import Rendezvous, Round, Status
from rallypoint.store.batch import Answer, Batch

__all__ = ["begin_anew", "close", "drop_round", "join", "leave", "status"]


def begin_anew(rendezvous: Rendezvous, batch: Batch) -> Answer[bool]:
    """Start a new run if the last one is closed and all nodes have left it; before the first join."""
    return rendezvous._object.ask(batch, rendezvous.node, machine.RendezvousReopen(if_left=True))


def join(rendezvous: Rendezvous, batch: Batch, timeout: Timeout) -> Round:
    """Join, and return the round; delete the keys of the round before with the batch."""
    joined = rendezvous._join_round(timeout)
    if joined.rank == 0 and joined._before:
        drop_round(rendezvous, batch, joined._before)
    return joined


def status(rendezvous: Rendezvous, batch: Batch) -> Answer[Status]:
    """Ask for the state of the run."""
    return rendezvous._object.ask(batch, rendezvous.node, machine.RendezvousQuery(), Status.decode)


def close(rendezvous: Rendezvous, batch: Batch, result: str, reason: str) -> None:
    """Close the run with a result, for all nodes; the first one counts."""
    command = machine.RendezvousClose(join_args.shortened(result, "result"), join_args.shortened(reason, "reason"))
    rendezvous._object.ask(batch, rendezvous.node, command)


def leave(rendezvous: Rendezvous, batch: Batch, failed: str, done: bool) -> Answer[int] | None:
    """Leave the round; the answer is how many nodes are left. None if this node had not joined."""
    left = rendezvous._leave(batch, failed, done)
    if left is not None:
        left.then(lambda _: rendezvous._forget_round())
    return left


def drop_round(rendezvous: Rendezvous, batch: Batch, scope: int) -> None:
    """Delete the keys of a round."""
    batch.delete_prefix(rendezvous._store, f"{join_args.round_prefix(rendezvous._object.name, scope)}/")
