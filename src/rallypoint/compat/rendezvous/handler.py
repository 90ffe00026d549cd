"""The dynamic rendezvous of one node, as in `torch.distributed.elastic.rendezvous.dynamic_rendezvous` of PyTorch.

It is our own rendezvous machine (`core/rendezvous.py`), hosted by the nodes in whatever backend they were given
(`host.py`). Keys, in the store:

    torch.rendezvous.RUN            the state, where the backend is on that store (`backend.py`)
    torch.rendezvous.RUN.SCOPE/…    what the nodes of one round store together; no other round ever has that number

The node of rank 0 says in the store of the round where workers start (`start.py`).

Leaving is not closing. `shutdown`, which torchrun calls when an agent ends, whatever came of it, leaves; others form
another round. It closes the run only where all agents of the round have passed torchrun's exit barrier. Who is in a
round that is over sees that as `num_nodes_waiting`, and comes again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from rallypoint.compat.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rallypoint.compat.rendezvous.backend import RendezvousBackend
from rallypoint.compat.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from rallypoint.compat.rendezvous.host import BackendHost
from rallypoint.compat.rendezvous.settings import RendezvousSettings, RendezvousTimeout, check
from rallypoint.compat.rendezvous.start import RoundServer, await_start, scoped
from rallypoint.core.gathering import Limits
from rallypoint.core.machine import MAX_NAME, Command, Done, Waiting
from rallypoint.core.rendezvous import Close, Join, Leave, Look, Withdraw
from rallypoint.deadline import Deadline
from rallypoint.errors import MembersMissing, NameTaken, NetworkError, RallypointError, RunClosed, SessionLost
from rallypoint.recipes.hosting import Object
from rallypoint.text import printable

__all__ = ["DynamicRendezvousHandler", "create_handler"]

log = logging.getLogger("rallypoint.rendezvous")

KEEP_ALIVE = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}

EXIT_BARRIER = "torchelastic/agent/terminal_state/last_member"
"""The key that the last of a round's agents sets when all have come to torchrun's exit barrier."""


class _Node(NamedTuple):
    """One node: where others reach it, and which process and handler it is."""

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


class _Place(NamedTuple):
    """A node's place in a round: what a join is answered by."""

    run: int
    number: int
    scope: int
    rank: int
    size: int
    first: tuple[str, str]
    before: int
    reason: str


class DynamicRendezvousHandler(RendezvousHandler):
    """The rendezvous of one node with others, in rounds that nodes may leave, lose, and come to."""

    _local_ids = itertools.count()

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """Make the handler of one node, whose state is in the backend, and whose rounds are in the store.

        The backend is any object with `name`, `get_state` and `set_state`. A node that has missed
        `keep_alive_max_attempt` keep-alives, one every `keep_alive_interval` seconds, is lost.
        """
        interval = timedelta(seconds=keep_alive_interval)
        if interval <= timedelta(0) or keep_alive_max_attempt < 1:
            raise ValueError(
                f"keep_alive_interval and keep_alive_max_attempt must be positive, not {keep_alive_interval} and "
                f"{keep_alive_max_attempt}"
            )
        settings = RendezvousSettings(
            run_id, min_nodes, max_nodes, timeout or RendezvousTimeout(), interval, keep_alive_max_attempt
        )
        node = _Node(local_addr or socket.getfqdn(), os.getpid(), next(cls._local_ids))
        return cls(node, settings, backend.name, store, BackendHost(backend, settings))

    def __init__(
        self, node: Any, settings: RendezvousSettings, backend_name: str, store: Any, state_holder: BackendHost
    ) -> None:
        check(settings)
        self._node = node
        self._name, self._own_name = node.addr[:MAX_NAME], str(node)[-MAX_NAME:]
        self._settings = settings
        self._backend_name = backend_name
        self._store = store
        self._host = state_holder
        self._object = Object("rendezvous", store, settings.run_id, state_holder)
        limits = Limits(settings.min_nodes, settings.max_nodes, settings.timeout.last_call.total_seconds())
        self._command = Join(limits, host=socket.gethostname()[:MAX_NAME], address=self._name)
        self._call = 0
        self._place: _Place | None = None
        self._round_store: Any = None
        self._round_server = RoundServer(node.addr)

    @property
    def settings(self) -> RendezvousSettings:
        """What all nodes of the run agree on."""
        return self._settings

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self._backend_name

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the server that rank 0 keeps: yes, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Come, or come again, and return this node's place in the next round.

        Raises RendezvousTimeoutError where none was formed in time (a spare waits as long as it takes),
        RendezvousClosedError, RendezvousGracefulExitError where it closed for this spare, RendezvousConnectionError,
        RendezvousStateError, or RendezvousError where this node cannot be in a round with the others.
        """
        with self._in_torchs_words():
            while True:
                place = self._join()
                store = scoped(f"torch.rendezvous.{self._settings.run_id}.{place.scope}", self._store)
                start = self._start_of_workers(place, store)
                if start is not None:
                    self._round_store = store
                    return RendezvousInfo(store, place.rank, place.size, start)
                log.info("round %d was over before its workers could start", place.number)

    def is_closed(self) -> bool:
        """Say whether the run is closed."""
        return bool(self._status()["phase"] == "closed")

    def set_closed(self) -> None:
        """Close the run, for everybody; raises RendezvousTimeoutError where that takes too long."""
        self._ask(Close("closed", f"by {self._node}"))

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for a place that there is; at least 1 where this node's round is over."""
        status = self._status()
        if status["phase"] == "closed":
            return 0
        waiting = len(status["waiting"]) - len(status["spares"])
        if self._place is None or not self._is_over(status):
            return waiting
        why = printable(status["over"] or "another one has been formed")
        log.info("round %d is over: %s", self._place.number, why)
        return max(1, waiting)

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._settings.run_id

    def shutdown(self) -> bool:
        """Leave, and say whether that went well; close the run where all agents have passed the exit barrier."""
        try:
            if self._round_store is not None and self._round_store.check([EXIT_BARRIER]):
                self._ask(Close("succeeded", "all agents have passed the exit barrier"))
            if self._call:
                self._ask(Leave(self._call))
            self._call, self._place, self._round_store = 0, None, None
        except (RallypointError, RuntimeError) as error:  # torch's stores raise the latter
            log.warning("%s could not leave %r: %s", self._node, self._object, error)
            return False
        finally:
            self._host.stop()
        return True

    # Inside

    def _stop_heartbeats(self) -> None:
        """Give no sign of life any more, so that others think this node dead; PyTorch's name."""
        self._host.stop()

    def _join(self) -> _Place:
        """Join, by the name of this node's host, under which it gets its rank back, unless another has that name."""
        deadline = Deadline(self._settings.timeout.join)
        while True:
            self._host.begin()
            try:
                self._call, told = self._object.perform(self._name, self._command, Withdraw, deadline, _say)
                break
            except NameTaken:
                if self._name == self._own_name:
                    raise
                self._name = self._own_name
            except SessionLost as lost:
                log.warning("%s comes again: %s", self._node, lost)
        self._place = _Place(*told)
        self._command.run = self._place.run
        log.info(
            "%s is rank %d of %d: %s", self._name, self._place.rank, self._place.size, printable(self._place.reason)
        )
        return self._place

    def _start_of_workers(self, place: _Place, store: Any) -> RendezvousStoreInfo | None:
        """Say where the workers start, as rank 0, or be told; None where the round is over before that."""
        port = None
        if place.rank == 0 and self.use_agent_store:
            port = self._round_server.open(place.scope)
            if port is None:
                return None
        elif place.rank and not await_start(store, Deadline(self._settings.timeout.join), self._is_over):
            return None
        return RendezvousStoreInfo.build(place.rank, store, self._node.addr, port)

    def _is_over(self, status: dict[str, Any] | None = None) -> bool:
        status = self._status() if status is None else status
        return self._place is None or status["scope"] != self._place.scope or bool(status["over"])

    def _status(self) -> dict[str, Any]:
        told: dict[str, Any] = self._ask(Look())
        return told

    def _ask(self, command: Command) -> Any:
        """Carry out a command that does not wait; once more where others thought that this node is dead."""
        with self._in_torchs_words():
            try:
                outcome = self._object.act(self._name, self._object.next_call(), command, 0.0)
            except SessionLost as lost:
                log.warning("%s goes on: %s", self._node, lost)
                outcome = self._object.act(self._name, self._object.next_call(), command, 0.0)
        assert isinstance(outcome, Done)
        return outcome.answer

    @contextlib.contextmanager
    def _in_torchs_words(self) -> Iterator[None]:
        try:
            yield
        except RendezvousError:
            raise
        except MembersMissing as error:
            raise RendezvousTimeoutError(str(error)) from error
        except RunClosed as error:
            kind = RendezvousGracefulExitError if self._host.stands_by else RendezvousClosedError
            words = f"the rendezvous {self._settings.run_id!r} has {error.result}: {error.reason}"
            raise kind(printable(words)) from error
        except NetworkError as error:
            raise RendezvousConnectionError(str(error)) from error
        except RallypointError as error:
            raise RendezvousError(str(error)) from error


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Make a handler from parameters.

    Options, in whole seconds: `join_timeout` (600), `last_call_timeout` (30), `close_timeout` (30), `heartbeat_timeout`
    (5), `keep_alive_interval` (5); and `keep_alive_max_attempt` (3).
    """
    given = {part: params.get_as_int(f"{part}_timeout") for part in ("join", "last_call", "close", "heartbeat")}
    timeout = RendezvousTimeout(**{part: timedelta(seconds=s) for part, s in given.items() if s is not None})
    interval, attempts = (params.get_as_int(option, default) for option, default in KEEP_ALIVE.items())
    if interval is None or attempts is None:
        raise TypeError(f"the rendezvous options {', '.join(KEEP_ALIVE)} must be whole numbers, not None")
    nodes = (params.min_nodes, params.max_nodes, params.local_addr)
    return DynamicRendezvousHandler.from_backend(params.run_id, store, backend, *nodes, timeout, interval, attempts)


def _say(waiting: Waiting) -> None:
    log.info("waiting for %.0f s: %s", waiting.waited_s, printable(waiting.reason))
