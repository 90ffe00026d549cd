"""Where a node meets the others, and where its workers find the store of a round, which is a store of its own.

Every node has a relay of the server (`node_relay.py`), and the store of a round is a port of one: of rank 0's, for the
workers of all nodes, at the address of that node, as torchrun has it; or, where that is `local`, of every node's own,
for its own workers. Behind each is the round's namespace at the server.

The server is one that runs, or that whoever has its address starts; a child, where a node is alone; or the leader of
a store in etcd, of which three nodes run a server each (`node_server.py`).

Rejected: ports for rounds at the server itself. Every node would have to reach any port there, and PyTorch's clients
would lose their store with every restart of the server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.elastic import round_port
from rallypoint.elastic.home import ATTEMPT_S, PATIENCE_S, find_or_start, is_loopback, to_bind
from rallypoint.elastic.node_relay import NodeRelay
from rallypoint.elastic.node_server import NodeServer
from rallypoint.errors import ConnectFailed, NoQuorum
from rallypoint.etcd.address import Address
from rallypoint.spawn import Server
from rallypoint.store.base import Store
from rallypoint.store.route import Route
from rallypoint.store.session import SessionBackend
from rallypoint.store.tcp import TCPStore

if TYPE_CHECKING:
    from rallypoint.elastic.rendezvous import Round

__all__ = ["InVain", "StoreProvider", "alone", "at_endpoint", "on_etcd", "rank0_address"]

PROBE_S = 3.0
"""How long a relay may take to say that it is there, where a worker has failed; silence proves nothing."""

LOOPBACK = "127.0.0.1"

InVain = Callable[[ConnectFailed | NoQuorum], object]
"""Called after every attempt to find a server that failed."""


class Child(Protocol):
    """What ends with its provider."""

    def close(self) -> None:
        """End."""


class StoreProvider:
    """The store in which the nodes of a run meet, and those of its rounds, at this node's relay or at rank 0's.

    `url` is how clients of the store find it, without what is secret; `child` is a server of this node's own.
    `store_of` returns where workers find the store of a round, once rank 0 has told all what its `offer` returned.
    """

    def __init__(self, store: Store, url: str, relay: NodeRelay, local: bool, child: Child | None = None) -> None:
        self.store = store
        self.url = url
        self._relay = relay
        self._local = local
        self._child = child
        self._place: tuple[net.Endpoint, str] | None = None  # the store of this round, and whose relay it is

    @property
    def server_id(self) -> bytes:
        """The identity of the server, or of all servers of a store in etcd."""
        backend = self.store._backend
        assert isinstance(backend, SessionBackend)
        return backend.server_id

    def relay(self) -> str:
        """Return what RALLYPOINT_RELAY is for the workers of this node."""
        return self._relay.variable(self.server_id)

    def offer(self, run: str, now: Round, timeout_s: float) -> int:
        """As rank 0, open the port of a round, and return it; 0 where it is not this node's to open."""
        if now.rank:
            return 0
        everywhere = not self._local and rank0_address(now) != LOOPBACK
        return self._relay.open(run, now.scope, now.number, timeout_s, everywhere=everywhere)

    def store_of(self, run: str, now: Round, port: int, timeout_s: float) -> net.Endpoint:
        """Return where this node's workers find the store of a round; `port` is what rank 0 was offered."""
        owner = "its relay"
        if now.rank and self._local:
            port = self._relay.open(run, now.scope, now.number, timeout_s, port=port)
        elif now.rank:
            self._relay.close_port(run, timeout_s)
            owner = f"the relay of rank 0, on {now.first.name}"
        place = net.Endpoint(LOOPBACK if self._local else rank0_address(now), port)
        self._place = place, owner
        return place

    def close_round(self, run: str, scope: int, timeout_s: float) -> None:
        """Close the store of a round, where nobody is left who could use it."""
        self._relay.close_round(run, scope, timeout_s)

    def lost(self, failed: bool = False) -> str:
        """Say how the store of this round has ended, empty while it is there.

        Where a worker has `failed`, perhaps of that, the store is asked whether it is there, also on another node.
        """
        known = self._relay.lost()
        if known or not failed or self._place is None or not round_port.is_gone(self._place[0], PROBE_S):
            return known
        return f"{self._place[1]} at {self._place[0]}, is gone"

    def close(self) -> None:
        """Be here no more."""
        with contextlib.ExitStack() as ending:
            if self._child is not None:
                ending.callback(self._child.close)
            ending.callback(self._relay.close)
            ending.callback(self.store.close)


def alone(data_dir: str | None, timeout_s: float, on_end: Callable[[], object]) -> StoreProvider:
    """Start a server for this node alone, at a free port of loopback, and its relay at the same time."""
    (listener,) = net.listen([LOOPBACK], 0)  # here, so that the relay can be told where before the server is up
    url = f"tcp://{net.Endpoint(LOOPBACK, listener.getsockname()[1])}"
    with contextlib.ExitStack() as undo:
        relay = NodeRelay(url, on_end)
        undo.callback(relay.close)
        server = undo.enter_context(Server(fd=listener.detach(), data_dir=data_dir))
        store = TCPStore(LOOPBACK, server.port, timeout=timeout_s, wait_for_workers=False)
        undo.pop_all()
    return StoreProvider(store, url, relay, True, server)


def at_endpoint(
    endpoint: net.Endpoint,
    is_host: bool | None,
    timeout_s: float,
    on_failure: InVain,
    data_dir: str | None = None,
    local: bool = False,
    on_end: Callable[[], object] = lambda: None,
) -> StoreProvider:
    """Find or start the server of an endpoint, and start a relay of it; the rest is as `find_or_start` has it.

    Where a server has to be started here, the relay is started at the same time; else when there is one to relay.
    """
    with contextlib.ExitStack() as undo:
        early = NodeRelay(f"tcp://{endpoint}", on_end) if endpoint.port and to_bind(endpoint.host, is_host) else None
        if early is not None:
            undo.callback(early.close)
        store = find_or_start(endpoint, is_host, timeout_s, on_failure, data_dir)
        undo.callback(store.close)
        url = f"tcp://{net.Endpoint(endpoint.host, store.port)}"
        relay = early or NodeRelay(url, on_end)
        undo.pop_all()
    return StoreProvider(store, url, relay, local)


def on_etcd(
    address: Address,
    own_address: str | None,
    timeout_s: float,
    on_failure: InVain,
    local: bool = True,
    on_end: Callable[[], object] = lambda: None,
) -> StoreProvider:
    """Open a store in etcd, and start a relay of it, and a server where it has too few (`node_server.py`).

    `own_address` is where other nodes reach this one, if that was said. Raises NoQuorum and EtcdRefused where etcd does
    not answer in time or will not let us in, ConnectFailed where no server does, ServerFailed where ours fails.
    """
    with contextlib.ExitStack() as undo:
        relay = NodeRelay(address.url, on_end)
        undo.callback(relay.close)
        server = NodeServer(address, own_address)
        undo.callback(server.close)
        backend = _find(address, server, Deadline(timeout_s), on_failure)
        server.known = lambda: backend.servers
        undo.pop_all()
    return StoreProvider(Store(backend, backend.root, timeout_s), address.public_url, relay, local, server)


def _find(address: Address, server: NodeServer, deadline: Deadline, on_failure: InVain) -> SessionBackend:
    """Open a session at the leader of a store in etcd."""
    while True:
        attempt = Deadline(min(ATTEMPT_S, deadline.remaining()))
        try:
            backend = SessionBackend(Route(net.Endpoints(), None, address.name, server.find), attempt.timeout_s)
        except (ConnectFailed, NoQuorum) as error:
            if deadline.expired():
                raise
            on_failure(error)
            time.sleep(attempt.remaining())  # it may have failed at once
        else:
            backend.be_patient(PATIENCE_S)
            return backend


def rank0_address(now: Round) -> str:
    """Return where the workers of a round reach the node of rank 0; loopback where all are on one machine."""
    first = now.first.host
    return LOOPBACK if now.world_size == 1 or is_loopback(first) else first
