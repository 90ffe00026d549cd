"""What the agents of a run tell each other through the store, besides their rendezvous.

    run:RUN/restarts      how many restarts the job has used
    run:RUN/failure       the failure that ended the run
    run:RUN/news          changes when there is something to look at: every agent watches it
    run:RUN/agent:NODE    leased: it is there while the agent of that node lives, and has not left
    round:RUN:SCOPE/failure       the failure of which all stop, by compare-and-set: the first one counts
    round:RUN:SCOPE/done:NODE     the workers of that node have succeeded

The news are for what the rendezvous cannot tell in time. A node whose worker failed comes again only when its other
workers have ended, which may take as long as their grace; the other nodes are to stop theirs meanwhile.

Rejected: to let a failure that is older by its own node's clock take the place of the one that came first. Its age says
when its agent saw it, which is what was late; when the other came, the store does not tell; and all have acted on it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

from rallypoint.elastic.card import quoted
from rallypoint.elastic.failure import Failure
from rallypoint.errors import RallypointError, StoreTimeout
from rallypoint.store.base import Lease, Store

__all__ = ["Board"]


class Board:
    """Where one agent reads and writes; `ring` is called, in a thread, when there are news."""

    def __init__(self, store: Store, run_id: str, ring: Callable[[], object], used: int = 0) -> None:
        self._store = store
        self.used = used
        """How many restarts the job had used when this agent looked last."""

        self._run = f"run:{quoted(run_id)}/"
        self._ring = ring
        self._round: Any = None
        self._presence: Lease | None = None
        self.news = False
        """Whether there is something to look at; whoever looks says False first."""

        self._watch("news")

    def enter(self, store: Any, node: str) -> None:
        """Take the store of another round, in which this node goes by that name."""
        self._round = store
        self._presence = self._store.lease(f"{self._run}agent:{node}", "")

    def leave(self) -> None:
        """Be here no more."""
        if self._presence is not None:
            self._presence.release()

    def gone(self, nodes: Iterable[str]) -> list[str]:
        """Return those of the nodes whose agents have died or left."""
        return sorted(node for node in nodes if not self._store.check([f"{self._run}agent:{node}"]))

    def attend(self) -> None:
        """Look again now, and whenever an agent goes: the rendezvous tells of a round only that it is over, once."""
        self._watch("agent:")
        self.news = True

    def tell(self) -> None:
        """Have all agents look."""
        self._store.add(f"{self._run}news", 1)

    # Restarts and failures

    def restarts(self) -> int:
        """Return how many restarts the job has used."""
        return self._count(0)

    def carry_over(self, used: int) -> int:
        """See to it that at least so many restarts are used, at a server that knows of none; return how many are.

        Every agent of the run does this, each with what it knows: the highest counts.
        """
        key, found = f"{self._run}restarts", None
        while found is None or int(found) < used:
            swap = self._store.swap(key, found, str(used))
            if swap.won:
                break
            found = swap.value
        return self._count(0)

    def _count(self, more: int) -> int:
        self.used = self._store.add(f"{self._run}restarts", more)
        return self.used

    def charge(self, failure: Failure, of_all: bool) -> int:
        """Use a restart, and return how many are used; if it is one `of_all`, only the first of a round uses one."""
        return self._count(int(self.blame(failure) if of_all else True))

    def blame(self, failure: Failure) -> bool:
        """Say because of what all stop, unless that was said; say whether it was not."""
        text = failure.encode()
        return bool(self._round.compare_set("failure", "", text) == text.encode())

    def refund(self) -> None:
        """Give back the restart that was used last: it was not the worker's fault."""
        self._count(-1)

    def cause(self) -> Failure | None:
        """Return the failure because of which all stop."""
        return Failure.decode(self._round.get("failure")) if self._round.check(["failure"]) else None

    def fail(self, failure: Failure) -> None:
        """Say what the run failed of, unless that was said."""
        self._store.compare_set(f"{self._run}failure", "", failure.encode())

    def failure(self) -> Failure | None:
        """Return what the run failed of."""
        key = f"{self._run}failure"
        return Failure.decode(self._store.get(key)) if self._store.check([key]) else None

    # Success

    def finish(self, node: str) -> None:
        """Say that the workers of a node have succeeded."""
        self._round.set(f"done:{node}", "")

    def done(self) -> list[str]:
        """Return the nodes whose workers have succeeded."""
        return [key.removeprefix("done:") for key in self._round.list_keys() if key.startswith("done:")]

    def clear(self) -> None:
        """Leave nothing behind: the last one has left."""
        self._store.delete_prefix(self._run)

    def _watch(self, what: str) -> None:
        watch = self._store.watch(f"{self._run}{what}")
        threading.Thread(target=self._listen, args=(watch,), name=f"{what} of a run", daemon=True).start()

    def _listen(self, watch: Any) -> None:
        with contextlib.suppress(RallypointError):
            while True:
                with contextlib.suppress(StoreTimeout):
                    watch.next()
                    self.news = True
                    self._ring()
