"""The torchrun plug-in: `torchrun --rdzv-backend=rallypoint --rdzv-endpoint=host:29400 ...`.

If no rallypoint server runs at the endpoint, the node with that address starts one, which outlives the agent. Every
agent runs a relay to it. As MASTER_ADDR and MASTER_PORT, workers get a port of rank 0's relay or of their own node's
(`launch/stores/store_provider.py`): a separate store for each round, which survives the death of any worker. If the
store is in etcd, `etcd://a:2379,b:2379/name`, three of the agents run a server of it, and each node uses its own relay.

How an agent joins, leaves and ends its run is in `compat/rendezvous/agent_rendezvous.py`, for this handler and for the
one of `compat`. In addition, an agent that leaves after it has reached torchrun's exit barrier is done, and its
round remains valid without it. An agent that fails (`shutdown` sees the exception) closes the run as failed if fewer
nodes than the minimum are left; otherwise the others form another round.

An agent that has lost its server rejoins in `next_rendezvous`, with a new session, until its join timeout.

torchrun calls `num_nodes_waiting` whenever it checks its workers. It returns 1 if the round is over because a node was
lost, left or waits: the agent then stops its workers and rejoins. An agent whose workers have finished waits at the
exit barrier instead: in torch for five minutes, even if the others are dead; here while its round is valid
(`RoundStore`).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from rallypoint import net
from rallypoint.client.routing.refusals import Refusals
from rallypoint.client.routing.relay_address import VARIABLE as RELAY
from rallypoint.compat.rendezvous.agent_rendezvous import SUCCEEDED, AgentRendezvous
from rallypoint.compat.rendezvous.backend import READ_TIMEOUT_S
from rallypoint.compat.rendezvous.errors import RendezvousClosedError, RendezvousConnectionError
from rallypoint.compat.rendezvous.settings import DEFAULTS_S
from rallypoint.core.machines.machine import Waiting
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, NetworkError, NoQuorum, RallypointError, RunClosed, StoreTimeout
from rallypoint.integrations.torchrun_options import read_credentials, read_flag, read_options
from rallypoint.integrations.torchrun_store import CHECK_S, RoundStore, wait_in_round
from rallypoint.launch.job import LOCAL, RANK0
from rallypoint.launch.run_errors import describe_loss
from rallypoint.launch.stores import store_provider
from rallypoint.launch.stores.round_port import RoundOver
from rallypoint.launch.stores.store_provider import StoreProvider, rank0_address
from rallypoint.recipes.rendezvous import Rendezvous, Round
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import RUN_TOKEN
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.store.url import parse_url, shown_url
from rallypoint.text import printable

__all__ = ["RoundStore", "TorchrunHandler", "create_handler", "handler"]

log = logging.getLogger("rallypoint.torchrun")

PORT_KEY = "rallypoint/port"
"""The key in the round's store under which rank 0's agent publishes the port of the workers' store."""

RANK0_ADDRESS = "RALLYPOINT_RANK0_ADDR"
"""The environment variable with which workers find the address of rank 0's node."""

ENDPOINT = "PET_RDZV_ENDPOINT"
"""The environment variable from which torchrun reads the endpoint if it is not an argument."""

RETRY_S = 1.0
"""The pause before the next reconnect to a lost server, if the last attempt failed."""


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the handler factory: the entry point of the group `torchrun.handlers`."""
    return create_handler


def create_handler(params: RendezvousParameters) -> TorchrunHandler:
    """Return the handler of one agent."""
    return TorchrunHandler(params)


class TorchrunHandler(RendezvousHandler):  # type: ignore[misc, unused-ignore]
    """The rendezvous of one torchrun agent."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._params = params
        self._options = options = read_options(params)
        self._read_s = float(options.get("read_timeout", READ_TIMEOUT_S))
        self._join_s = float(options.get("join_timeout", DEFAULTS_S["join"]))
        self._is_host = read_flag(params, "is_host")
        self._etcd = parse_url(params.endpoint).etcd() if params.endpoint.startswith("etcd://") else None
        self._security = ClientSecurity(read_credentials(options))
        protects = self._security.credentials.protects
        self._relay = options.get("relay", LOCAL if self._etcd or protects else RANK0)
        if self._relay == RANK0 and protects and params.max_nodes > 1:
            raise ValueError(
                "--rdzv-conf relay=rank0 lets workers of all nodes connect to one relay by PyTorch's protocol, which "
                "has no authentication: with a token or TLS, use relay=local (the default then)"
            )
        self._store: RoundStore | None = None
        try:
            self._provider = self._open(self._read_s)
        except RallypointError as error:
            raise RendezvousConnectionError(f"no server at {shown_url(params.endpoint)}: {error}") from error
        self._agent = AgentRendezvous(self._new_node(), self._join_s, self._workers_store, self._closed_error)

    @property
    def _rendezvous(self) -> Rendezvous:
        return self._agent.node

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return "rallypoint"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers connect to an existing store instead of starting one: always True."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join or rejoin, and return this node's place in the next round."""
        with self._agent.torch_errors():
            found, place = self._next_round()
        self._store = RoundStore(found.store, self._rendezvous.changed)
        self._store.set_timeout(timedelta(seconds=self._read_s))
        store: Any = self._store
        return RendezvousInfo(store, found.rank, found.world_size, RendezvousStoreInfo(*place))

    def is_closed(self) -> bool:
        """Return whether the run is closed."""
        return self._agent.is_closed()

    def set_closed(self) -> None:
        """Close the run for all nodes."""
        self._agent.close("by its agent")

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round is over: a node was lost, left or waits, or the workers' store has died. Else 0."""
        change = self._rendezvous.changed
        over = (
            (change.reason or "this node left it")
            if change.is_set()
            else self._agent.round is not None and self._provider.failure_reason()
        )
        if over:
            log.warning("the round is over: %s", printable(over))
        return int(bool(over))

    def get_run_id(self) -> str:
        """Return the id of the run."""
        run_id: str = self._params.run_id
        return run_id

    def shutdown(self) -> bool:
        """Leave; close the run if all agents have succeeded, or if this one has failed and too few are left."""
        failure = sys.exc_info()[1]  # torchrun calls this from a finally clause
        done = failure is None and self._store is not None and self._store.done
        try:
            return self._agent.leave(
                failed="" if failure is None else _cause(failure), done=done, then=self._close_round
            )
        finally:
            self._close()

    # The session with the server

    def _open(self, within_s: float) -> StoreProvider:
        where, local = self._params.endpoint, self._relay == LOCAL
        if self._etcd is not None:
            if ENDPOINT in os.environ:
                os.environ[ENDPOINT] = self._etcd.public_url  # workers inherit it, and need no password
            found = store_provider.provide_on_etcd(
                self._etcd, self._params.local_addr, within_s, self._security, _log_failure, local
            )
        else:
            endpoint = net.parse_endpoint(where, DEFAULT_PORT)
            found = store_provider.provide_at_endpoint(
                endpoint, self._is_host, within_s, self._security, _log_failure, local=local
            )
        found.store.set_timeout(self._read_s)
        return found

    def _new_node(self) -> Rendezvous:
        params, options = self._params, self._options
        return Rendezvous(
            self._provider.store,
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            node=options.get("node"),
            rank=None if "rank" not in options else int(options["rank"]),
            settings={} if self._relay == RANK0 else {"relay": self._relay},
            last_call=float(options.get("last_call_timeout", DEFAULTS_S["last_call"])),
            address=params.local_addr,
            spare=params.min_nodes < params.max_nodes,
            progress=_log_waiting,
        )

    def _attach_again(self, lost: NetworkError, deadline: Deadline) -> None:
        """Open a new session after one was lost; the node stays the same, and so does the run on the same server."""
        log.warning("%s; looking for the server again for up to %.0f s", describe_loss(lost), deadline.remaining())
        before, earlier = self._provider.server_id, self._rendezvous
        self._close()
        self._provider = self._open(deadline.remaining())
        self._agent.node = self._new_node()
        self._rendezvous.succeed(earlier, before == self._provider.server_id)

    def _close(self) -> None:
        """End the session and the relay, and remove the relay from the environment."""
        os.environ.pop(RELAY, None)
        os.environ.pop(RUN_TOKEN, None)
        self._provider.close()

    # Rounds

    def _next_round(self) -> tuple[Round, net.Endpoint]:
        """Join a round; reconnect and rejoin if the server is lost meanwhile."""
        deadline, refusals = Deadline(self._join_s), Refusals(confirms=True)
        lost: NetworkError | None = None
        while True:
            try:
                if lost is not None:
                    self._attach_again(lost, deadline)
                if self._agent.round is None:
                    self._rendezvous.begin_anew()
                return self._agent.next_round()
            except NetworkError as error:
                if deadline.expired() or refusals.ends(error):
                    raise
                if lost is not None:
                    time.sleep(min(RETRY_S, deadline.remaining()))
                lost = error

    def _workers_store(self, found: Round) -> net.Endpoint:
        """Return the endpoint of the workers' store, at the port that rank 0's node publishes; export the relay.

        The workers inherit the environment of their torchrun agent. Raises RoundOver.
        """
        provider, run = self._provider, self.get_run_id()
        try:
            port = provider.open_shared_port(run, found, self._read_s)
            if found.rank == 0:
                found.store.set(PORT_KEY, str(port))
            else:
                port = self._await_port(found)
            place = provider.store_of(run, found, port, self._read_s)
        except RoundOver:
            self._rendezvous.changed.wait(CHECK_S)  # a relay may refuse before the server ends the round: do not spin
            raise
        os.environ[RANK0_ADDRESS] = rank0_address(found)
        os.environ[RELAY] = provider.relay()
        os.environ[RUN_TOKEN] = provider.for_workers.run_token
        return place

    def _await_port(self, found: Round) -> int:
        """Return the port that rank 0's agent publishes for this round. Raises RoundOver at the timeout."""
        try:
            wait = functools.partial(found.store.get, PORT_KEY)
            return int(wait_in_round(wait, self._rendezvous.changed, self._read_s))
        except StoreTimeout:
            raise RoundOver(f"rank 0 ({found.first.name}) has not published the workers' store") from None

    def _close_round(self) -> None:
        """Close the store of the last round, if no node is left to use it."""
        status, last = self._rendezvous.status(), self._agent.round
        if last is not None and not status.nodes and not status.waiting:
            self._provider.close_round(self.get_run_id(), last.scope, self._read_s)

    def _closed_error(self, closed: RunClosed) -> BaseException:
        """Return the error of an agent whose run is closed: an exit with success, if it was in a run that succeeded."""
        if closed.result != SUCCEEDED or not (self._agent.round is not None or closed.waited):
            return RendezvousClosedError(str(closed))
        log.warning("this node was not needed: %s", closed)
        return SystemExit(0)  # torch's agent would fail on torch's own error for this


def _log_waiting(waiting: Waiting) -> None:
    log.warning("waiting for %.0f s: %s", waiting.waited_s, printable(waiting.reason))


def _log_failure(error: ConnectFailed | NoQuorum) -> None:
    log.warning("no server yet: %s", error)


def _cause(failure: BaseException) -> str:
    """Return why an agent failed; of torch's page-long error for workers, only the first failure."""
    if isinstance(failure, ChildFailedError):
        rank, first = failure.get_first_failure()
        how = first.signal_name() if first.exitcode < 0 else f"exit code {first.exitcode}"
        return f"rank {rank} failed: {how}, pid {first.pid}"
    return f"{type(failure).__name__}: {failure}"
