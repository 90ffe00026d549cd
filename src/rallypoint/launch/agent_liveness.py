"""The liveness of agents: a stopped agent is noticed, and leaves the round.

    run:RUN/alive:NODE    lease of the agent of that node, with a heartbeat

A stopped process (SIGSTOP, a debugger) keeps its connection, because its kernel answers for it, so its session does
not end. Its lease does, when the heartbeat has stopped for the agent timeout. The agents of the first few nodes of a
round watch the leases, and evict a node whose lease is gone. If the agent goes on later, it finds that the round is
over, stops its workers and rejoins.

Rejected: that every agent watches all leases. Each of n agents would receive n events at every start of a round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rallypoint.launch.changes import ChangeListener
from rallypoint.recipes.join_args import quoted
from rallypoint.store.base import Change, Lease, Store
from rallypoint.store.batch import Batch

__all__ = ["AgentLiveness"]

WATCHERS = 3
"""The number of nodes that watch: several, because any of them may be stopped itself."""


class AgentLiveness:
    """One agent's lease, and its watch of the other leases; without effect in a round of one node."""

    def __init__(self, run_id: str, timeout_s: float, wake: Callable[[], object]) -> None:
        self._prefix = f"run:{quoted(run_id)}/alive:"
        self._timeout_s = timeout_s
        self._wake = wake
        self._lease: Lease | None = None
        self._listener: ChangeListener | None = None
        self._others: frozenset[str] = frozenset()
        self.silent: deque[str] = deque()
        """Nodes whose lease has ended."""

    @property
    def reason(self) -> str:
        """Why such a node is evicted; a lease ends with its session, too, and does not say which it was."""
        return f"its agent has ended, or was stopped for {self._timeout_s:g} s (--agent-timeout)"

    def enter(self, batch: Batch, store: Store, members: Sequence[str], rank: int) -> None:
        """Enter a round with these nodes: keep a lease and, on the first few nodes, watch those of the others."""
        self._stop_watching()
        if not self._timeout_s or len(members) == 1:
            return
        if rank < WATCHERS:
            self._others = others = frozenset(members).difference([members[rank]])
            self._listener = ChangeListener(store, self._prefix, partial(self._changed, others), "liveness of agents")
        batch.lease(store, f"{self._prefix}{members[rank]}", "", self._timeout_s).then(self._entered)

    def _entered(self, lease: Lease) -> None:
        self._lease = lease

    def confirm(self) -> None:
        """Wait until this node watches the others, if it is to; raise an error if it never will."""
        if self._listener is not None:
            self._listener.confirm()

    def leave(self, batch: Batch) -> None:
        """Give up the lease; call this after this node has left the rendezvous."""
        self._stop_watching()
        if self._lease is not None:
            batch.release(self._lease)
            self._lease = None

    def _stop_watching(self) -> None:
        self._others = frozenset()
        self.silent.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _changed(self, others: frozenset[str], change: Change) -> None:
        node = change.key.removeprefix(self._prefix)
        if change.value is None and node in others and others is self._others:  # not of an earlier round
            self.silent.append(node)
            self._wake()
