"""The search for the store of a job: connects to its server, or starts one, and reports which server does not answer.

The server is the one of --store, which is running already; or the one of the endpoint, started by the node with that
address, and outliving all nodes; or, on a single-node run, a child process on a free port. With a store in etcd, three
of the nodes run a server of the store, and one of the three leads.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, NoQuorum
from rallypoint.launch.events import Events
from rallypoint.launch.job import LOCAL, Job
from rallypoint.launch.stores import store_provider
from rallypoint.launch.stores.store_provider import StoreProvider
from rallypoint.launch.wakeup_pipe import WakeupPipe
from rallypoint.security.client_security import ClientSecurity
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.store.url import parse_url

__all__ = ["READ_S", "StoreSearch"]

READ_S = 60.0
"""Time limit of one operation on the store."""


class StoreSearch:
    """Finds the store of a job; a terminating signal ends the search at once."""

    def __init__(self, job: Job, events: Events, wakeup: WakeupPipe) -> None:
        self._job = job
        self._events = events
        self._wakeup = wakeup
        self.waits_for = ""
        """Which server does not answer; empty if the last search has found one."""

    def find(self, deadline: Deadline) -> StoreProvider:
        """Return the store, with a session open; raise NetworkError if no server answers by the deadline."""
        job, within_s, local, wake = self._job, deadline.remaining(), self._job.relay == LOCAL, self._wakeup.wake
        if job.alone:
            return store_provider.provide_alone(job.data_dir, READ_S, ClientSecurity(job.credentials), wake)
        url = None if job.store is None else parse_url(job.store)
        security = ClientSecurity(job.credentials) if url is None else url.security(job.credentials)
        if url is not None and url.scheme == "etcd":
            etcd, own = url.etcd(), job.local_address
            return self._search(
                f"{etcd.name} does not answer yet",
                lambda: store_provider.provide_on_etcd(
                    etcd, own, within_s, security, self._attempt_failed, local, wake
                ),
            )
        endpoint = url.endpoint() if url else net.parse_endpoint(job.endpoint or "", DEFAULT_PORT)
        is_host = False if url else job.is_host
        return self._search(
            f"no server answers at {endpoint} yet",
            lambda: store_provider.provide_at_endpoint(
                endpoint, is_host, within_s, security, self._attempt_failed, job.data_dir, local, wake
            ),
        )

    def _search(self, words: str, provide: Callable[[], StoreProvider]) -> StoreProvider:
        """Report meanwhile what this waits for: on a terminal continuously, elsewhere after every attempt."""
        self.waits_for = words
        with self._events.status(lambda: self.waits_for):
            found = self._wakeup.interruptible(provide, patience_s=0.0)
        self.waits_for = ""
        return found

    def _attempt_failed(self, error: ConnectFailed | NoQuorum) -> None:
        why = "; ".join(f"{address}: {why}" for address, why in error.tried.items()) or "no address was found"
        silent = (
            f"no server answers at {error.peer}" if isinstance(error, ConnectFailed) else f"{error.store} is silent"
        )
        self.waits_for = f"{silent} yet ({why})"
        self._events.waits(self.waits_for)
