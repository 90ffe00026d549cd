"""The store provider of a node: the store in which the nodes rendezvous, and the store of each round for its workers.

Every node runs a relay of the server (`node_relay.py`), and the store of a round is a port of a relay: the relay of
rank 0's node, at its address, for the workers of all nodes, as in torchrun; or, with `local`, each node's own relay,
for its own workers. Each port serves the round's namespace on the server.

Three functions find the server: `provide_alone` starts a child process, for a run on one node; `provide_at_endpoint`
uses a running server, or starts one on the node with that address; `provide_on_etcd` uses the leader of a store in
etcd, for which three nodes run a server each (`node_server.py`).

Rejected: ports for rounds on the server itself. Every node would need access to arbitrary ports there, and PyTorch's
clients would lose their store at every restart of the server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rallypoint import net
from rallypoint.client.routing.route import Route
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed, NoQuorum
from rallypoint.etcd.address import Address
from rallypoint.launch.stores import round_port
from rallypoint.launch.stores.node_relay import NodeRelay
from rallypoint.launch.stores.node_server import NodeServer
from rallypoint.launch.stores.run_server import ATTEMPT_S, PATIENCE_S, find_or_start, to_bind
from rallypoint.net import is_loopback
from rallypoint.process.spawn import Server
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import Credentials, new_token
from rallypoint.store.base import Store
from rallypoint.store.internal import backend_of
from rallypoint.store.native_backend import NativeBackend
from rallypoint.store.tcp import TCPStore

if TYPE_CHECKING:
    from rallypoint.recipes.rendezvous import Round

__all__ = ["OnFailure", "StoreProvider", "address_in", "provide_alone", "provide_at_endpoint", "provide_on_etcd",
           "rank0_address"]  # fmt: skip

PROBE_S = 3.0
"""Timeout of the probe of a relay after a worker has failed; no reply proves nothing."""

LOOPBACK = "127.0.0.1"

OnFailure = Callable[[ConnectFailed | NoQuorum], object]
"""Called after every failed attempt to find a server."""


class StartedProcess(Protocol):
    """A process that ends with its provider."""

    def close(self) -> None:
        """End the process."""


class StoreProvider:
    """The store of a run, and the stores of its rounds, on this node's relay or on rank 0's.

    `url` is the address of the store for clients, without secrets; `child` is a server that this node runs. Rank 0
    calls `open_shared_port` and announces the port; then every node passes it to `store_of`.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        relay: NodeRelay,
        local: bool,
        security: ClientSecurity,
        child: StartedProcess | None = None,
    ) -> None:
        self.store = store
        self.url = url
        self.for_workers = Credentials(run_token=security.credentials.token)
        """Credentials with which workers use the store."""

        self._relay = relay
        self._local = local
        self._child = child
        self._round_store: tuple[net.Endpoint, str] | None = (
            None  # address of the round's store, and its relay in words
        )

    @property
    def server_id(self) -> bytes:
        """Identity of the server; the servers of a store in etcd share one."""
        return self._backend.server_id

    @property
    def recovers(self) -> bool:
        """Whether the server may return with its sessions; then the store has confirmed a refusal itself."""
        return self._backend.recovers

    def relay(self) -> str:
        """Return the value of RALLYPOINT_RELAY for the workers of this node."""
        return self._relay.variable(self.server_id, self._backend.servers)

    @property
    def _backend(self) -> NativeBackend:
        backend = backend_of(self.store)
        assert isinstance(backend, NativeBackend)
        return backend

    def open_shared_port(self, run: str, joined: Round, timeout_s: float) -> int:
        """On rank 0, open the port of a round, and return it; on other nodes, return 0."""
        if joined.rank:
            return 0
        everywhere = not self._local and rank0_address(joined) != LOOPBACK
        return self._relay.open(run, joined.scope, joined.number, timeout_s, everywhere=everywhere)

    def store_of(self, run: str, joined: Round, port: int, timeout_s: float) -> net.Endpoint:
        """Return the address of the store of a round for this node's workers; `port` is the one that rank 0 opened."""
        owner = "its relay"
        if joined.rank and self._local:
            port = self._relay.open(run, joined.scope, joined.number, timeout_s, port=port)
        elif joined.rank:
            self._relay.close_port(run, timeout_s)
            owner = f"the relay of rank 0 on {joined.first.name}"
        place = net.Endpoint(LOOPBACK if self._local else rank0_address(joined), port)
        self._round_store = place, owner
        return place

    def close_round(self, run: str, scope: int, timeout_s: float) -> None:
        """Begin to close the store of a round that no worker uses any more; `close` waits for the end of that."""
        self._relay.close_round(run, scope, timeout_s)

    def failure_reason(self, failed: bool = False) -> str:
        """Return why the store of this round is lost; empty if it is not known to be.

        If a worker has `failed`, perhaps because of that, probe the store, also on another node.
        """
        known = self._relay.lost()
        if known or not failed or self._round_store is None or not round_port.is_gone(self._round_store[0], PROBE_S):
            return known
        return f"{self._round_store[1]} ({self._round_store[0]}) is gone"

    def close(self) -> None:
        """Close the store, and end the relay and the server of this node."""
        with contextlib.ExitStack() as ending:
            if self._child is not None:
                ending.callback(self._child.close)
            ending.callback(self._relay.close)
            ending.callback(self.store.close)


def provide_alone(
    data_dir: str | None, timeout_s: float, security: ClientSecurity, on_end: Callable[[], object]
) -> StoreProvider:
    """Start a private server on a free port of loopback, and its relay at the same time.

    Without a token among the credentials, it gets a new one, which only this run knows.
    """
    if not security.credentials.token:
        security = ClientSecurity(Credentials(token=new_token()))
    (listener,) = net.listen([LOOPBACK], 0)  # bound here, so that the relay can start before the server is up
    url = f"tcp://{net.Endpoint(LOOPBACK, listener.getsockname()[1])}"
    with contextlib.ExitStack() as undo:
        relay = NodeRelay(url, security, on_end)
        undo.callback(relay.close)
        credentials = security.credentials
        server = undo.enter_context(Server(fd=listener.detach(), data_dir=data_dir, credentials=credentials))
        store = TCPStore(LOOPBACK, server.port, timeout=timeout_s, wait_for_workers=False, credentials=credentials)
        undo.pop_all()
    return StoreProvider(store, url, relay, True, security, server)


def provide_at_endpoint(
    endpoint: net.Endpoint,
    is_host: bool | None,
    timeout_s: float,
    security: ClientSecurity,
    on_failure: OnFailure,
    data_dir: str | None = None,
    local: bool = False,
    on_end: Callable[[], object] = lambda: None,
) -> StoreProvider:
    """Find or start the server of an endpoint as `find_or_start` does, and start a relay of it.

    If the server may be started here, the relay starts at the same time, otherwise once the server is found.
    """
    with contextlib.ExitStack() as undo:
        here = endpoint.port and to_bind(endpoint.host, is_host)
        early = NodeRelay(security.url_of(endpoint), security, on_end) if here else None
        if early is not None:
            undo.callback(early.close)
        store = find_or_start(endpoint, is_host, timeout_s, security, on_failure, data_dir)
        undo.callback(store.close)
        found = net.Endpoint(endpoint.host, store.port)
        relay = early or NodeRelay(security.url_of(found), security, on_end)
        undo.pop_all()
    return StoreProvider(store, security.url_of(found, files=True), relay, local, security)


def provide_on_etcd(
    address: Address,
    own_address: str | None,
    timeout_s: float,
    security: ClientSecurity,
    on_failure: OnFailure,
    local: bool = True,
    on_end: Callable[[], object] = lambda: None,
) -> StoreProvider:
    """Open a store in etcd, start a relay of it, and a server if it has too few (`node_server.py`).

    `own_address` is the address of this node for others, if given. Raises NoQuorum if etcd does not answer in time,
    EtcdRefused if it denies access, ConnectFailed if no server answers, and ServerFailed if this node's server fails.
    """
    with contextlib.ExitStack() as undo:
        relay = NodeRelay(address.url, security, on_end)
        undo.callback(relay.close)
        server = NodeServer(address, security, own_address)
        undo.callback(server.close)
        backend = _find(address, server, security, Deadline(timeout_s), on_failure)
        server.known = lambda: backend.servers
        undo.pop_all()
    store = Store(backend, backend.root, timeout_s)
    return StoreProvider(store, address.public_url, relay, local, security, server)


def _find(
    address: Address, server: NodeServer, security: ClientSecurity, deadline: Deadline, on_failure: OnFailure
) -> NativeBackend:
    """Open a session with the leader of a store in etcd."""
    while True:
        attempt = Deadline(min(ATTEMPT_S, deadline.remaining()))
        try:
            route = Route(net.Endpoints(), None, address.name, server.find, security)
            backend = NativeBackend(route, attempt.timeout_s)
        except (ConnectFailed, NoQuorum) as error:
            if deadline.expired():
                raise
            on_failure(error)
            time.sleep(attempt.remaining())  # it may have failed at once
        else:
            backend.set_answer_timeout(PATIENCE_S)
            return backend


def rank0_address(joined: Round) -> str:
    """Return the address of rank 0's node for the workers of a round; loopback if all are on one machine."""
    return address_in(joined, joined.first.host)


def address_in(joined: Round, address: str) -> str:
    """Return the address of a node for the workers of a round, given the one that it announced."""
    return LOOPBACK if joined.world_size == 1 or is_loopback(address) else address
