"""The dynamic rendezvous of one node, as in `torch.distributed.elastic.rendezvous.dynamic_rendezvous` of PyTorch.

It is our own rendezvous machine (`core/machines/rendezvous.py`), hosted by the nodes in their backend
(`backend_host.py`). Keys in the store:

    torch.rendezvous.RUN            the state, if the backend is on that store (`backend.py`)
    torch.rendezvous.RUN.SCOPE/…    the shared keys of one round; SCOPE is never reused

The node of rank 0 publishes the address of the workers' store in the store of the round (`round_server.py`). How an
agent joins, leaves and ends its run is in `agent_rendezvous.py`. A node whose round is over gets a `num_nodes_waiting`
above 0, and rejoins.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from datetime import timedelta
from typing import Any, NamedTuple

from rallypoint import net
from rallypoint.compat.rendezvous.agent_rendezvous import AgentRendezvous
from rallypoint.compat.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from rallypoint.compat.rendezvous.backend import RendezvousBackend
from rallypoint.compat.rendezvous.backend_host import BackendHost
from rallypoint.compat.rendezvous.errors import RendezvousClosedError, RendezvousError, RendezvousGracefulExitError
from rallypoint.compat.rendezvous.round_server import RoundServer, await_start
from rallypoint.compat.rendezvous.settings import RendezvousSettings, RendezvousTimeout, check
from rallypoint.core.machines.machine import MAX_NAME, Command, Done, Waiting
from rallypoint.core.machines.rendezvous import (
    RendezvousClose,
    RendezvousJoin,
    RendezvousLeave,
    RendezvousQuery,
    RendezvousWithdraw,
)
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.deadline import Deadline, Timeout
from rallypoint.errors import NameTaken, RunClosed, SessionLost
from rallypoint.recipes.hosting.shared_object import SharedObject
from rallypoint.recipes.rendezvous import Round, Status
from rallypoint.store.prefix import with_prefix
from rallypoint.text import printable

__all__ = ["BackendNode", "DynamicRendezvousHandler", "create_handler"]

log = logging.getLogger("rallypoint.rendezvous")

KEEP_ALIVE = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}


class _Node(NamedTuple):
    """One node: its address, process id and handler number."""

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


class BackendNode:
    """One node's calls on a rendezvous in a backend; if other nodes evict it, it continues with a new session."""

    def __init__(self, node: Any, settings: RendezvousSettings, store: Any, host: BackendHost) -> None:
        self.name = node.addr[:MAX_NAME]
        """The name under which it joins: its address, by which it gets its rank back, or a unique name."""

        self._unique_name = str(node)[-MAX_NAME:]
        self._settings = settings
        self._store = store
        self._host = host
        self._object = SharedObject("rendezvous", store, settings.run_id, host)
        limits = NodeLimits(settings.min_nodes, settings.max_nodes, settings.timeout.last_call.total_seconds())
        self._command = RendezvousJoin(limits, host=socket.gethostname()[:MAX_NAME], address=self.name)
        self._call = 0

    def __repr__(self) -> str:
        return repr(self._object)

    def join(self, timeout: Timeout | None = None) -> Round:
        """Join or rejoin, and return the next round once this node is in it."""
        deadline = Deadline(self._settings.timeout.join if timeout is None else timeout)
        while True:
            self._host.begin()
            try:
                self._call, answer = self._object.perform(
                    self.name, self._command, RendezvousWithdraw, deadline, _log_waiting
                )
                break
            except NameTaken:
                if self.name == self._unique_name:
                    raise
                self.name = self._unique_name
            except SessionLost as lost:
                log.warning("%s rejoins: %s", self.name, lost)
        run, _, scope, *_ = answer
        self._command.run = run
        store = with_prefix(f"torch.rendezvous.{self._settings.run_id}.{scope}", self._store)
        return Round(self._object, answer, store)

    def status(self) -> Status:
        """Return the current state of the run."""
        return Status.decode(self._ask(RendezvousQuery()))

    def close(self, result: str, reason: str = "") -> bool:
        """Close the run with a result, for all nodes; return whether it was still open."""
        return bool(self._ask(RendezvousClose(result, reason)))

    def leave(self, *, failed: str = "", done: bool = False) -> bool:
        """Leave the round, or stop waiting for one; return whether this was the last node."""
        left = self._ask(RendezvousLeave(self._call, failed, done)) if self._call else None
        self._call = 0
        return left == 0

    def _ask(self, command: Command) -> Any:
        """Apply a command that does not wait; retry once if other nodes have evicted this one."""
        try:
            outcome = self._object.act(self.name, self._object.next_call(), command, 0.0)
        except SessionLost as lost:
            log.warning("%s continues with a new session: %s", self.name, lost)
            outcome = self._object.act(self.name, self._object.next_call(), command, 0.0)
        assert isinstance(outcome, Done)
        return outcome.answer


class DynamicRendezvousHandler(RendezvousHandler):
    """One node's side of an elastic rendezvous, in rounds: nodes may join, leave and be lost."""

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
        """Create the handler of one node, with the state in the backend and the keys of the rounds in the store.

        The backend is any object with `name`, `get_state` and `set_state`. A node that has missed
        `keep_alive_max_attempt` keep-alives, one every `keep_alive_interval` seconds, is lost.
        """
        interval, timeout = timedelta(seconds=keep_alive_interval), timeout or RendezvousTimeout()
        settings = RendezvousSettings(run_id, min_nodes, max_nodes, timeout, interval, keep_alive_max_attempt)
        node = _Node(local_addr or socket.getfqdn(), os.getpid(), next(cls._local_ids))
        return cls(node, settings, backend.name, store, BackendHost(backend, settings))

    def __init__(
        self, node: Any, settings: RendezvousSettings, backend_name: str, store: Any, state_holder: BackendHost
    ) -> None:
        check(settings)
        self._node = node
        self._settings = settings
        self._backend_name = backend_name
        self._store = store
        self._host = state_holder
        self._round_server = RoundServer(node.addr)
        self._agent = AgentRendezvous(
            BackendNode(node, settings, store, state_holder),
            settings.timeout.join,
            self._workers_store,
            self._closed_error,
        )

    @property
    def settings(self) -> RendezvousSettings:
        """The settings, which are the same on all nodes of the run."""
        return self._settings

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return self._backend_name

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the server of rank 0's node: True unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join or rejoin, and return this node's place in the next round.

        Raises RendezvousTimeoutError if no round forms in time (a spare waits without limit), RendezvousClosedError,
        RendezvousGracefulExitError if the run closes while this node is a spare, RendezvousConnectionError,
        RendezvousStateError, or RendezvousError if this node cannot be in a round with the others.
        """
        with self._agent.torch_errors():
            found, place = self._agent.next_round()
        return RendezvousInfo(found.store, found.rank, found.world_size, RendezvousStoreInfo(*place))

    def is_closed(self) -> bool:
        """Return whether the run is closed."""
        return self._agent.is_closed()

    def set_closed(self) -> None:
        """Close the run for all nodes. Raises RendezvousTimeoutError if that takes too long."""
        self._agent.close(f"by {self._node}")

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes that could join a round; at least 1 if this node's round is over."""
        with self._agent.torch_errors():
            status = self._agent.node.status()
        if status.phase == "closed":
            return 0
        waiting = len(status.waiting) - len(status.spares)
        over = self._over(status)
        if not over:
            return waiting
        log.info("%r is over: %s", self._agent.round, printable(over))
        return max(1, waiting)

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._settings.run_id

    def shutdown(self) -> bool:
        """Leave; close the run if all agents have passed the exit barrier. Return whether that succeeded."""
        try:
            return self._agent.leave()
        finally:
            self._host.stop()

    # Internal

    def _stop_heartbeats(self) -> None:
        """Stop the keep-alive, so that the others evict this node; the name is PyTorch's."""
        self._host.stop()

    def _workers_store(self, found: Round) -> net.Endpoint:
        """Publish the address of the workers' store, or wait for it. Raises RoundOver."""
        port = None
        if found.rank == 0 and self.use_agent_store:
            port = self._round_server.open(found.scope)
        elif found.rank:
            await_start(found.store, Deadline(self._settings.timeout.join), self._is_over)
        start = RendezvousStoreInfo.build(found.rank, found.store, self._node.addr, port)
        return net.Endpoint(start.master_addr, start.master_port)

    def _is_over(self) -> bool:
        return bool(self._over(self._agent.node.status()))

    def _over(self, status: Status) -> str:
        """Return why this node's round is over; empty while it is valid, and without a round."""
        last = self._agent.round
        if last is None:
            return ""
        moved_on = status.round != last.number or self._agent.node.name not in status.nodes
        return status.over or ("another round has formed" if moved_on else "")

    def _closed_error(self, closed: RunClosed) -> RendezvousError:
        kind = RendezvousGracefulExitError if self._host.is_spare else RendezvousClosedError
        return kind(f"the rendezvous {self._settings.run_id!r} has {closed.result}: {closed.reason}")


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create a handler from parameters.

    Options, in integer seconds: `join_timeout` (600), `last_call_timeout` (30), `close_timeout` (30),
    `heartbeat_timeout` (5), `keep_alive_interval` (5); and `keep_alive_max_attempt` (3).
    """
    given = {part: params.get_as_int(f"{part}_timeout") for part in ("join", "last_call", "close", "heartbeat")}
    timeout = RendezvousTimeout(**{part: timedelta(seconds=s) for part, s in given.items() if s is not None})
    interval, attempts = (params.get_as_int(option, default) for option, default in KEEP_ALIVE.items())
    if interval is None or attempts is None:
        raise TypeError(f"the rendezvous options {', '.join(KEEP_ALIVE)} must be integers, not None")
    nodes = (params.min_nodes, params.max_nodes, params.local_addr)
    return DynamicRendezvousHandler.from_backend(params.run_id, store, backend, *nodes, timeout, interval, attempts)


def _log_waiting(waiting: Waiting) -> None:
    log.info("waiting for %.0f s: %s", waiting.waited_s, printable(waiting.reason))
