"""This node's server of a store in etcd: a job starts one on each of three nodes, as a child of the node's agent.

A node starts a server if the store has fewer than three, counting those that others run; start permits in etcd bound
the number if all nodes start at once (`storage/etcd/lookup.py`). A node checks when it starts, when its own server has
died, when the list of servers that its session receives is short, and when its session finds none. So other nodes
replace the servers of lost nodes, and a job survives the loss of all nodes but one, one after the other.

A server that died is not restarted on the same port: a closed port refuses connections, which tells clients at once
that the server is gone. Its sessions continue on the next leader. A server that hangs is killed (`liveness_probe.py`):
another leads by then, and one that does not answer must not become the next leader.

Rejected: to choose the nodes by rank. Ranks are known only after the rendezvous, which needs a server.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum
from rallypoint.etcd.address import Address
from rallypoint.launch.stores import liveness_probe
from rallypoint.launch.stores.liveness_probe import LivenessProbe
from rallypoint.launch.stores.run_server import resolved
from rallypoint.launch.workers.worker_process import describe_exit
from rallypoint.net import is_loopback
from rallypoint.process.spawn import Server
from rallypoint.security.client_security import ClientSecurity
from rallypoint.storage.etcd.lookup import MAX_PERMITS, claim_start_permit, look_up, release_start_permit
from rallypoint.store.etcd import listen_host

__all__ = ["NodeServer"]

log = logging.getLogger("rallypoint.server")

LOOK_S = (1.0, 2.0)
"""Bounds of the random interval at which a node without a server checks the list that its session received."""

ASK_S = 5.0
"""Timeout of a request to etcd for a start permit; then it is retried."""

START_S, CLOSE_S = 60.0, 10.0
"""Timeouts of a server's start, and of ending one that is still starting."""

PAUSE_S, STEADY_S, LONGEST_S = 0.5, 10.0, 60.0
"""Pause before the next start if the last server ran for less than STEADY_S; after failed starts the pause doubles
each time, up to LONGEST_S."""

TRIES = 3
"""Number of consecutive failed starts after which `find` raises the error."""


class NodeServer:
    """This node's server of a store in etcd, if one is needed; `address` is this node's address, if known.

    `known` returns the servers that the node's session received last.
    """

    def __init__(self, store: Address, security: ClientSecurity, address: str | None = None) -> None:
        self.known: Callable[[], Sequence[str]] = tuple
        self._store, self._security, self._address = store, security, address
        self._failures = 0
        self._error: Exception | None = None
        self._server: Server | None = None
        self._starting = False
        self._closed = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"server of {store.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the server, or None."""
        server = self._server
        return None if server is None else server.pid

    def find(self, deadline: Deadline) -> tuple[str, ...]:
        """Return the URLs of the store's servers, the leader first; empty while the first server starts.

        Raises NoQuorum and EtcdRefused, and ServerFailed if there is no server and this node's fails to start.
        """
        servers = look_up(self._store, deadline).servers
        if len(servers) < MAX_PERMITS:
            self._wanted.set()
        if not servers and self._error is not None:
            raise self._error
        return servers

    def close(self) -> None:
        """End the server; if it leads, it hands over to another."""
        with self._lock:
            self._closed.set()
            server, starting = self._server, self._starting
        self._wanted.set()
        if server is not None:
            server.close()
        if starting:
            self._thread.join(CLOSE_S)  # after that it ends with this process

    def _run(self) -> None:
        while not self._closed.is_set():
            if not self._wanted.wait(random.uniform(*LOOK_S)) and len(self.known()) >= MAX_PERMITS:
                continue
            self._wanted.clear()
            lease = self._permit()
            with self._lock:
                self._starting = lease is not None and not self._closed.is_set()
            if lease is not None and self._starting:
                self._serve(lease)

    def _permit(self) -> int | None:
        try:
            return claim_start_permit(self._store, Deadline(ASK_S), beside=True)
        except (NoQuorum, EtcdRefused):  # `find` raises it to callers that need a server
            return None

    def _serve(self, lease: int) -> None:
        """Start a server, and wait until it exits."""
        hosts = self._hosts()
        try:
            known = self._security.credentials
            server = Server(hosts, storage=self._store.url, credentials=known, start_timeout=START_S)
        except Exception as error:
            self._failed(error)
            return
        finally:
            release_start_permit(self._store, lease, Deadline(ASK_S))
        self._failures, self._error = 0, None
        with self._lock:
            self._server, self._starting = server, False
            if self._closed.is_set():
                server.close()
        steady = Deadline(STEADY_S)
        at = net.Endpoint(_here(hosts[0]), server.port)
        probe = LivenessProbe(server, at, "the server of this node", self._closed, self._security)
        while (code := server.wait(liveness_probe.LOOK_S)) is None:
            probe.check()
        self._server = None
        self._wanted.set()
        if not self._closed.is_set():
            log.warning("server of this node (pid %d) exited: %s", server.pid, describe_exit(code))
            self._closed.wait(0.0 if steady.expired() else PAUSE_S)

    def _failed(self, error: Exception) -> None:
        """Record a failed start, and pause."""
        self._failures += 1
        if self._failures <= TRIES:
            log.warning("cannot start a server on this node: %s", error)
        if self._failures >= TRIES:
            self._error = error
        self._closed.wait(min(PAUSE_S * 2.0 ** min(self._failures - 1, 10), LONGEST_S))

    def _hosts(self) -> list[str]:
        """Return the addresses to listen on, so that other nodes reach the server."""
        own = self._address
        if own and not self._store.host and net.is_this_host(own):
            reachable = [address for address in resolved(own) if not is_loopback(address)]
            if reachable:
                return reachable[:1]
        return [listen_host(self._store)]


def _here(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
