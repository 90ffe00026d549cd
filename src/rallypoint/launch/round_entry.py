"""How a node enters a round that has formed: the nodes tell each other what they must know, and agree on a store.

An exchange that lasts is reported, and ends early if the round is over: then the node joins the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint import net
from rallypoint.launch.events import Events
from rallypoint.launch.job import Job
from rallypoint.launch.round_spec import NodeInfo, RoundSpec, exchange_node_info
from rallypoint.launch.stores.store_provider import StoreProvider, address_in, rank0_address
from rallypoint.launch.stores.store_search import READ_S
from rallypoint.recipes.rendezvous import Rendezvous, Round

__all__ = ["RoundEntry"]

REPORT_S = 10.0
"""How often a wait is reported."""


class RoundEntry:
    """One node's entry into one round; call `exchange` first."""

    def __init__(self, job: Job, events: Events, joined: Round, rendezvous: Rendezvous, stores: StoreProvider) -> None:
        self._job, self._events, self._joined = job, events, joined
        self._rendezvous, self._stores = rendezvous, stores
        self._infos: Sequence[NodeInfo] = ()
        self._master = net.Endpoint("", 0)
        self._reported_s = 0.0

    def exchange(self) -> None:
        """Exchange the data of the nodes; raise MeetingError if that fails because the round is over."""
        run, here, joined = self._job.run_id, self._stores, self._joined
        port = here.open_shared_port(run, joined, READ_S)
        own = NodeInfo(self._rendezvous.node, self._job.workers, port)
        self._infos = exchange_node_info(joined, own, self._is_over, READ_S)
        self._master = here.store_of(run, joined, self._infos[0].port, READ_S)

    @property
    def members(self) -> list[str]:
        """The nodes, by rank."""
        return [one.node for one in self._infos]

    def spec(self, relay: str, restarts: int) -> RoundSpec:
        """Return the round as the workers see it, given RALLYPOINT_RELAY and the number of used restarts."""
        joined = self._joined
        return RoundSpec(
            run_id=self._job.run_id,
            url=self._stores.url,
            relay=relay,
            credentials=self._stores.for_workers,
            scope=joined.scope,
            number=joined.number,
            reason=joined.reason,
            members=self.members,
            node_rank=joined.rank,
            workers=[one.workers for one in self._infos],
            master=self._master,
            address=address_in(joined, self._rendezvous.address),
            rank0=rank0_address(joined),
            role=self._job.role,
            restarts=restarts,
            max_restarts=self._job.rules.budget,
        )

    def _is_over(self, waited_s: float, missing: Sequence[str]) -> bool:
        """Report which nodes are missing, and return whether the round is over."""
        late = f"node rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else ""
        if late and waited_s >= self._reported_s + REPORT_S:
            self._reported_s = waited_s
            self._events.waits(f"waited {waited_s:.0f} s in a new round for the number of workers of {late}")
        return self._rendezvous.changed.is_set()
