"""One agent's rendezvous, behind both handlers: `handler.py`, and the torchrun plug-in (`integrations/torchrun.py`).

A handler provides the node of a run, on our server or in a backend, and finds the workers' store of a round. The rules
that torchrun's agents depend on are here:

- A round that is over before its workers could start is skipped: the node rejoins.
- Leaving is not closing. torchrun calls `shutdown` when an agent ends, successful or not: the node leaves, and the
  others form another round. The run is closed only if all agents of the round have passed torchrun's exit barrier.
- Errors have PyTorch's names (`errors.py`).

Both handlers answer `num_nodes_waiting` themselves: the plug-in is notified by the server, a backend has to be read.

Rejected: one handler class on `recipes.rendezvous.Rendezvous`. In a backend, names, keys and evictions follow PyTorch's
handler, and that class would need an option for each.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from rallypoint import net
from rallypoint.compat.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import MembersMissing, NetworkError, RallypointError, RunClosed
from rallypoint.launch.stores.round_port import RoundOver
from rallypoint.recipes.rendezvous import Round, Status
from rallypoint.text import printable

__all__ = ["EXIT_BARRIER", "LAST_MEMBER", "SUCCEEDED", "AgentRendezvous", "RunNode"]

log = logging.getLogger("rallypoint.rendezvous")

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""The key prefix of torchrun's exit barrier."""

LAST_MEMBER = f"{EXIT_BARRIER}/last_member"
"""The key that the last agent of a round sets when it arrives at the exit barrier."""

SUCCEEDED = "succeeded"
"""The result of a run whose agents have all passed the exit barrier."""


class RunNode(Protocol):
    """One node's calls on the rendezvous of a run."""

    def join(self, timeout: Timeout | None = None) -> Round:
        """Join or rejoin, and return the next round once this node is in it."""

    def status(self) -> Status:
        """Return the current state of the run."""

    def close(self, result: str, reason: str = "") -> bool:
        """Close the run with a result, for all nodes; return whether it was still open."""

    def leave(self, *, failed: str = "", done: bool = False) -> bool:
        """Leave the round, or stop waiting for one; return whether this was the last node."""


Node = TypeVar("Node", bound=RunNode)


class AgentRendezvous(Generic[Node]):
    """The rounds of one agent.

    `find_store` returns the address of the workers' store of a round; it raises RoundOver if the round ends before the
    address is known. `on_closed` returns the error to raise when the run is closed.
    """

    def __init__(
        self,
        node: Node,
        join_timeout: Timeout,
        find_store: Callable[[Round], net.Endpoint],
        on_closed: Callable[[RunClosed], BaseException],
    ) -> None:
        self.node = node
        """The agent's node, which the handler replaces after its session was lost."""

        self.round: Round | None = None
        """The round that this node joined last, until it leaves."""

        self._join_timeout = join_timeout
        self._find_store = find_store
        self._on_closed = on_closed

    def next_round(self) -> tuple[Round, net.Endpoint]:
        """Join rounds until one lasts until its workers' store is known; return it, and the store's address.

        The join timeout applies to each join. RoundOver is raised when it has also passed since the first round that
        was over too early: a spare may have waited for that round for any time.
        """
        patience: Deadline | None = None
        while True:
            found = self.round = self.node.join(self._join_timeout)
            log.info("%r: %s", found, printable(found.reason))
            try:
                return found, self._find_store(found)
            except RoundOver as error:
                patience = patience or Deadline(self._join_timeout)
                if patience.expired():
                    raise
                log.warning("%r was over before this node could start: %s", found, error)

    def is_closed(self) -> bool:
        """Return whether the run is closed."""
        with self.torch_errors():
            return self.node.status().phase == "closed"

    def close(self, reason: str) -> None:
        """Close the run for all nodes."""
        with self.torch_errors():
            self.node.close("closed", reason)

    def leave(self, *, failed: str = "", done: bool = False, then: Callable[[], object] = lambda: None) -> bool:
        """Leave, and call `then`; close the run first if all agents have passed the exit barrier.

        Return whether that succeeded.
        """
        try:
            if self.round is not None and self.round.store.check([LAST_MEMBER]):
                self.node.close(SUCCEEDED, "all agents have passed the exit barrier")
            self.node.leave(failed=failed, done=done)
            then()
        except RuntimeError as error:  # ours, or one of torch's stores
            log.warning("could not leave %r: %s", self.node, error)
            return False
        self.round = None
        return True

    @contextlib.contextmanager
    def torch_errors(self) -> Iterator[None]:
        """Raise the errors of this block under PyTorch's names."""
        try:
            yield
        except RendezvousError:
            raise
        except MembersMissing as error:
            raise RendezvousTimeoutError(str(error)) from error
        except RunClosed as error:
            raise self._on_closed(error) from error
        except NetworkError as error:
            raise RendezvousConnectionError(str(error)) from error
        except RallypointError as error:
            raise RendezvousError(str(error)) from error
