"""The state that the agents of a run share through the store, besides their rendezvous.

    run:RUN/restarts      number of restarts that the job has used
    run:RUN/progress      highest step that a worker reached, and the number of restarts since then: `STEP RESTARTS`
    run:RUN/failure       the failure that ended the run
    run:RUN/news          counter, incremented to notify all agents: every agent watches it
    run:RUN/node:NODE     lease: the report of that node (monitoring/node_reporter.py)
    run:RUN/ask:ID, run:RUN/answer:ID:NODE   requests to the agents, and their answers (monitoring/agent_requests.py)
    run:RUN/alive:NODE    lease with a heartbeat of the agent (agent_liveness.py)
    run:RUN/agent:NODE    lease: exists while the agent of that node is alive and has not left
    round:RUN:SCOPE/failure       the failure for which all nodes stop, by compare-and-set: the first one counts
    round:RUN:SCOPE/hang          the node that looks for the ranks that hang
    round:RUN:SCOPE/stop/         the step at which all ranks stop (preemption/stop_keys.py)
    round:RUN:SCOPE/done:NODE     the workers of that node have succeeded

The counter notifies sooner than the rendezvous can. A node whose worker failed rejoins only after its other workers
have ended, which may take their whole grace period; the other nodes must stop their workers meanwhile.

Rejected: to replace the first failure by one with an earlier timestamp. The timestamp says when an agent saw the
failure, so a late agent would still be wrong, and the other agents have acted on the first already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.launch.changes import ChangeListener
from rallypoint.launch.failures import Failure
from rallypoint.recipes.join_args import quoted
from rallypoint.store.base import Change, Lease, Store
from rallypoint.store.batch import Answer, Batch

__all__ = ["RunState", "failure_in"]


class RunState:
    """One agent's access to the shared state; `on_notify` is called, in another thread, after each notification."""

    def __init__(self, store: Store, run_id: str, on_notify: Callable[[], object], used: int = 0) -> None:
        self._store = store
        self.used = used
        """Number of restarts the job had used when this agent last read it."""

        self._run = f"run:{quoted(run_id)}/"
        self._on_notify = on_notify
        self._round: Any = None
        self._presence: Lease | None = None
        self._claim_by: Deadline | None = None
        self.charged = False
        """Whether the last `charge` used a restart; otherwise another failure of the round has."""

        self.notified = False
        """Whether there was a notification; the reader resets it before it checks."""

        self._news = self._listen("news")

    def confirm(self) -> None:
        """Wait until notifications reach this agent; raise an error if they never will."""
        self._news.confirm()

    def enter_round(self, batch: Batch, store: Any, node: str) -> None:
        """Switch to the store of a round, in which this node is called `node`."""
        self._round, self._claim_by = store, None
        batch.lease(self._store, f"{self._run}agent:{node}", "").then(self._entered)

    def _entered(self, presence: Lease) -> None:
        self._presence = presence

    @property
    def round_store(self) -> Any:
        """The store of the round; its keys go with the round."""
        return self._round

    def leave(self, batch: Batch) -> None:
        """Release the lease of this agent: it has left."""
        if self._presence is not None:
            batch.release(self._presence)

    def dead_among(self, nodes: Collection[str]) -> list[str]:
        """Return the nodes whose agents have died or left."""
        with Batch(self._store) as batch:
            alive = {node: batch.check(self._store, [f"{self._run}agent:{node}"]) for node in nodes}
        return sorted(node for node in nodes if not alive[node].value)

    def watch_agents(self) -> None:
        """Notify this agent now, and whenever an agent leaves; the rendezvous reports the end of a round only once."""
        self._listen("agent:").confirm()
        self.notified = True

    def notify(self, batch: Batch | None = None) -> None:
        """Notify all agents, at once or with a batch."""
        if batch is None:
            with Batch(self._store) as batch:
                self.notify(batch)
        else:
            batch.add(self._store, f"{self._run}news", 1)

    # Restarts and failures

    def restarts(self) -> int:
        """Return the number of restarts that the job has used."""
        return self._count(0)

    def carry_over(self, used: int) -> int:
        """Raise the number of used restarts to at least `used`, on a server that lost it; return the result.

        Every agent of the run does so with the number that it last read: the highest wins.
        """
        key, found = f"{self._run}restarts", None
        while found is None or int(found) < used:
            swap = self._store.swap(key, found, str(used))
            if swap.won:
                break
            found = swap.value
        return self._count(0)

    def count_restarts(self, batch: Batch) -> None:
        """Read the number of restarts that the job has used with a batch; then `used` has it."""
        batch.add(self._store, f"{self._run}restarts", 0).then(self._counted)

    def _counted(self, used: int) -> None:
        self.used = used

    def _count(self, more: int) -> int:
        self.used = self._store.add(f"{self._run}restarts", more)
        return self.used

    def charge(self, failure: Failure, of_all: bool) -> int:
        """Use a restart, and return the number used; with `of_all`, only the first failure of a round uses one."""
        self.charged = self.set_cause(failure) if of_all else True
        return self._count(int(self.charged))

    def count_stalled(self, step: int | None) -> int:
        """Count a failure after this highest step; return the number of restarts in a row without a new step."""
        key, found = f"{self._run}progress", None
        while True:
            best, stalled = (None, -1) if found is None else _progress(found)
            is_new = step is not None and (best is None or step > best)
            best, stalled = (step, 0) if is_new else (best, stalled + 1)
            swap = self._store.swap(key, found, f"{'' if best is None else best} {stalled}")
            if swap.won:
                return stalled
            found = swap.value

    def set_cause(self, failure: Failure) -> bool:
        """Record the failure for which all nodes stop, unless there is one; return whether this is the recorded one."""
        text = failure.encode()
        return bool(self._round.compare_set("failure", "", text) == text.encode())

    def announce(self, failure: Failure) -> None:
        """Record the failure for which all nodes stop, unless there is one, and notify all agents."""
        with Batch(self._store) as batch:
            batch.compare_set(self._round, "failure", "", failure.encode())
            self.notify(batch)

    def refund(self) -> None:
        """Give back one restart: its failure was not the worker's fault."""
        self._count(-1)

    def ask_cause(self, batch: Batch) -> Answer[bytes | None]:
        """Ask for the failure for which all nodes stop: pass the answer to `failure_in`."""
        return batch.get(self._round, "failure")

    def cause(self) -> Failure | None:
        """Return the failure for which all nodes stop, or None."""
        with Batch(self._store) as batch:
            found = self.ask_cause(batch)
        return failure_in(found)

    def claim_hang(self, node: str, patience_s: float) -> bool:
        """Return whether this node is to look for hanging ranks: the first to ask is, or one after its patience."""
        if self._claim_by is None:
            self._claim_by = Deadline(patience_s)
        won: bool = self._round.compare_set("hang", "", node) == node.encode()
        return won or self._claim_by.expired()

    def fail(self, batch: Batch, failure: Failure) -> None:
        """Record the failure that ended the run, unless there is one already."""
        batch.compare_set(self._store, f"{self._run}failure", "", failure.encode())

    def failure(self) -> Failure | None:
        """Return the failure that ended the run, or None."""
        with Batch(self._store) as batch:
            found = batch.get(self._store, f"{self._run}failure")
        return failure_in(found)

    # Success

    def finish(self, batch: Batch, node: str) -> Answer[list[str]]:
        """Record that the workers of a node have succeeded; the answer is the nodes whose workers have."""
        batch.set(self._round, f"done:{node}", "")
        return self.ask_done(batch)

    def ask_done(self, batch: Batch) -> Answer[list[str]]:
        """Ask for the nodes whose workers have succeeded."""
        return batch.list_keys(self._round, "done:")

    def done(self) -> list[str]:
        """Return the nodes whose workers have succeeded."""
        with Batch(self._store) as batch:
            done = self.ask_done(batch)
        return done.value

    def clear(self, batch: Batch) -> None:
        """Delete all keys of the run; for the last agent to leave."""
        batch.delete_prefix(self._store, self._run)

    def _listen(self, what: str) -> ChangeListener:
        return ChangeListener(self._store, f"{self._run}{what}", self._notified, f"{what} of a run")

    def _notified(self, _: Change) -> None:
        self.notified = True
        self._on_notify()


def failure_in(found: Answer[bytes | None]) -> Failure | None:
    """Decode a recorded failure, if there is one."""
    return None if found.value is None else Failure.decode(found.value)


def _progress(text: bytes) -> tuple[int | None, int]:
    best, stalled = text.decode().split(" ")
    return int(best) if best else None, int(stalled)
