"""The torchrun plug-in: `torchrun --rdzv-backend=rallypoint --rdzv-endpoint=host:29400 ...`.

The endpoint is a rallypoint server that runs already, or else the node whose address that is starts one, which outlives
the agent. Every agent has a relay of it, and workers get as MASTER_ADDR and MASTER_PORT a port of rank 0's relay, or of
their own node's (`elastic/store_provider.py`): a store of its own for each round, that dies with no worker. Where the
store is in etcd, `etcd://a:2379,b:2379/name`, three of the agents run a server of it, and the relay is each node's own.

torchrun calls `shutdown` when an agent ends, whatever came of it, and its own handlers then close the rendezvous for
all. Here it is leaving. An agent that has come to torchrun's exit barrier is done, and its round stands without it;
where all of them have passed it, the run is closed as succeeded. One that ends in failure, which is then on its way as
an exception, closes the run as failed where fewer than the minimum are left; else the others form another round.

An agent that has lost its server comes again by `next_rendezvous`, which opens another session, until its join timeout.

torchrun asks `num_nodes_waiting` at every look at its workers. A round that is over, because a node was lost, left or
waits, counts as one: then the agent stops its workers and comes again. One whose workers have finished waits at the
exit barrier instead, five minutes for agents that may be dead: here it waits while its round stands (`RoundStore`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from rallypoint import net
from rallypoint.core.machine import Waiting
from rallypoint.deadline import Deadline
from rallypoint.elastic import store_provider
from rallypoint.elastic.job import LOCAL, RANK0
from rallypoint.elastic.meeting import why_lost
from rallypoint.elastic.rendezvous import Rendezvous, Round
from rallypoint.elastic.round_port import RoundOver
from rallypoint.elastic.store_provider import StoreProvider, rank0_address
from rallypoint.errors import (
    ConnectFailed,
    MembersMissing,
    NetworkError,
    NoQuorum,
    RallypointError,
    RunClosed,
    StoreTimeout,
)
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.store.relay_address import VARIABLE as RELAY
from rallypoint.store.url import parse_url, shown_url
from rallypoint.text import printable
from rallypoint.torchrun_options import read_flag, read_options
from rallypoint.torchrun_store import LAST_MEMBER, LOOK_S, RoundStore

__all__ = ["RoundStore", "TorchrunHandler", "create_handler", "handler"]

log = logging.getLogger("rallypoint.torchrun")

SUCCEEDED = "succeeded"

PORT_KEY = "rallypoint/port"
"""The key of a round by which rank 0's agent tells the port of the workers' store."""

RANK0_ADDRESS = "RALLYPOINT_RANK0_ADDR"
"""The variable that tells workers where the node of rank 0 is reached."""

ENDPOINT = "PET_RDZV_ENDPOINT"
"""The variable from which torchrun takes the endpoint, where that is not an argument."""

AGAIN_S = 1.0
"""How long an agent pauses before it looks for a lost server again, where that failed at once."""


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torchrun makes handlers with: the entry point `torchrun.handlers`."""
    return create_handler


def create_handler(params: RendezvousParameters) -> TorchrunHandler:
    """Make the handler of one agent."""
    return TorchrunHandler(params)


class TorchrunHandler(RendezvousHandler):  # type: ignore[misc, unused-ignore]
    """The rendezvous of one torchrun agent."""

    def __init__(self, params: RendezvousParameters) -> None:
        options = read_options(params)
        self._run_id = params.run_id
        self._read_s = float(options.get("read_timeout", 60))
        self._join_s = float(options.get("join_timeout", 600))
        self._joined = False
        self._round: Round | None = None
        self._store: RoundStore | None = None
        self._params = params
        self._is_host = read_flag(options.get("is_host"))
        self._etcd = parse_url(params.endpoint).etcd() if params.endpoint.startswith("etcd://") else None
        self._relay = options.get("relay", LOCAL if self._etcd else RANK0)
        try:
            self._provider = self._open(self._read_s)
        except RallypointError as error:
            raise RendezvousConnectionError(f"no server at {shown_url(params.endpoint)}: {error}") from error
        self._rendezvous = self._meet(options)

    def _open(self, within_s: float) -> StoreProvider:
        where, local = self._params.endpoint, self._relay == LOCAL
        if self._etcd is not None:
            if ENDPOINT in os.environ:
                os.environ[ENDPOINT] = self._etcd.public_url  # workers have this environment, and need no password
            found = store_provider.on_etcd(self._etcd, self._params.local_addr, within_s, _say_in_vain, local)
        else:
            endpoint = net.parse_endpoint(where, DEFAULT_PORT)
            found = store_provider.at_endpoint(endpoint, self._is_host, within_s, _say_in_vain, local=local)
        found.store.set_timeout(self._read_s)
        return found

    def _meet(self, options: dict[str, Any]) -> Rendezvous:
        params = self._params
        return Rendezvous(
            self._provider.store,
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            node=options.get("node"),
            rank=None if "rank" not in options else int(options["rank"]),
            settings={} if self._relay == RANK0 else {"relay": self._relay},
            last_call=float(options.get("last_call_timeout", 30)),
            address=params.local_addr,
            spare=params.min_nodes < params.max_nodes,
            progress=_say,
        )

    def _attach_again(self, lost: NetworkError, deadline: Deadline) -> None:
        """Open another session after one was lost; the node is the same, and the run, too, if the server is."""
        log.warning("%s; looking for the server again for up to %.0f s", why_lost(lost), deadline.remaining())
        before, earlier = self._provider.server_id, self._rendezvous
        self._close()
        self._provider = self._open(deadline.remaining())
        self._rendezvous = self._meet(read_options(self._params))
        self._rendezvous.succeed(earlier, before == self._provider.server_id)

    def get_backend(self) -> str:
        """Return the name of this back end."""
        return "rallypoint"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers are clients of a store that is there already: they are."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Come, or come again, and return this node's place in the next round."""
        try:
            found, master = self._come()
        except MembersMissing as error:
            raise RendezvousTimeoutError(str(error)) from error
        except NetworkError as error:
            raise RendezvousConnectionError(str(error)) from error
        except RallypointError as error:
            raise RendezvousError(str(error)) from error
        log.info("%r: %s", found, printable(found.reason))
        self._store = RoundStore(found.store, self._rendezvous.changed)
        self._store.set_timeout(timedelta(seconds=self._read_s))
        info = RendezvousStoreInfo(*master)
        store: Any = self._store
        return RendezvousInfo(store, found.rank, found.world_size, info)

    def is_closed(self) -> bool:
        """Say whether the run has its result."""
        return self._rendezvous.status().phase == "closed"

    def set_closed(self) -> None:
        """Close the run, for everybody."""
        self._rendezvous.close("closed", "by its agent")

    def num_nodes_waiting(self) -> int:
        """Return more than 0 when the round is over: a node was lost, left or waits, or its workers' store has died."""
        change = self._rendezvous.changed
        over = (
            (change.reason or "it was left") if change.is_set() else self._round is not None and self._provider.lost()
        )
        if over:
            log.warning("the round is over: %s", printable(over))
        return int(bool(over))

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave; close the run where all agents have succeeded, or this one has failed and too few are left."""
        failure = sys.exc_info()[1]  # torchrun calls this from a finally clause
        done = failure is None and self._store is not None and self._store.done
        try:
            if self._round is not None and self._round.store.check([LAST_MEMBER]):
                self._rendezvous.close(SUCCEEDED, "all agents have passed the exit barrier")
            self._rendezvous.leave(failed="" if failure is None else _cause(failure), done=done)
            self._close_round()
        except RallypointError as error:
            log.warning("could not leave %r: %s", self._rendezvous, error)
            return False
        finally:
            self._close()
        return True

    def _come(self) -> tuple[Round, net.Endpoint]:
        """Come to a round, and come again where the server was lost meanwhile."""
        deadline = Deadline(self._join_s)
        lost: NetworkError | None = None
        while True:
            try:
                if lost is not None:
                    self._attach_again(lost, deadline)
                return self._enter(deadline)
            except NetworkError as error:
                if deadline.expired():
                    raise
                if lost is not None:
                    time.sleep(min(AGAIN_S, deadline.remaining()))
                lost = error

    def _enter(self, deadline: Deadline) -> tuple[Round, net.Endpoint]:
        """Join, and find the store of the round; one that is past already is followed by another."""
        while True:
            found = self._round = self._join()
            self._joined = True
            try:
                return found, self._store_of(found)
            except RoundOver as error:
                if deadline.expired():
                    raise
                log.warning("%r was over before this node could begin: %s", found, error)
                self._rendezvous.changed.wait(LOOK_S)

    def _store_of(self, found: Round) -> net.Endpoint:
        """Return where the workers of a round find their store, as rank 0's node tells all; tell them of the relay.

        Workers of torchrun's have the environment of its agent.
        """
        provider, run = self._provider, self._run_id
        port = provider.offer(run, found, self._read_s)
        if found.rank == 0:
            found.store.set(PORT_KEY, str(port))
        else:
            port = self._await_port(found)
        place = provider.store_of(run, found, port, self._read_s)
        os.environ[RANK0_ADDRESS] = rank0_address(found)
        os.environ[RELAY] = provider.relay()
        return place

    def _await_port(self, found: Round) -> int:
        """Return the port that rank 0's agent has for this round; raise RoundOver where it does not say in time."""
        deadline = Deadline(self._read_s)
        while True:
            over = self._rendezvous.changed.is_set()
            try:
                return int(found.store.get(PORT_KEY, timeout=min(deadline.remaining(), LOOK_S)))
            except StoreTimeout:
                if over or deadline.expired():
                    raise RoundOver(f"rank 0 ({found.first.name}) has not said where the workers' store is") from None

    def _close(self) -> None:
        """End the session, and the relay, of which others must not be told any more."""
        os.environ.pop(RELAY, None)
        self._provider.close()

    def _join(self) -> Round:
        """Join, and end where the run does: well, if that ended well."""
        if not self._joined:
            self._rendezvous.begin_anew()
        try:
            return self._rendezvous.join(self._join_s)
        except RunClosed as closed:
            if closed.result != SUCCEEDED or not (self._joined or closed.waited):
                raise RendezvousClosedError(str(closed)) from closed
            log.warning("this node was not needed: %s", closed)
            raise SystemExit(0) from None  # torch's agent would fail over its own error for this

    def _close_round(self) -> None:
        """Close the store of the last round, where nobody is left who could use it."""
        status = self._rendezvous.status()
        if self._round is not None and not status.nodes and not status.waiting:
            self._provider.close_round(self._run_id, self._round.scope, self._read_s)


def _say(waiting: Waiting) -> None:
    log.warning("waiting for %.0f s: %s", waiting.waited_s, printable(waiting.reason))


def _say_in_vain(error: ConnectFailed | NoQuorum) -> None:
    log.warning("no server yet: %s", error)


def _cause(failure: BaseException) -> str:
    """Say of what an agent has failed; torch's own error for workers is a page, of which the first failure matters."""
    if isinstance(failure, ChildFailedError):
        rank, first = failure.get_first_failure()
        how = first.signal_name() if first.exitcode < 0 else f"exit code {first.exitcode}"
        return f"rank {rank} failed: {how}, pid {first.pid}"
    return f"{type(failure).__name__}: {failure}"
