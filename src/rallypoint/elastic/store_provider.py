"""Where a node meets the others, and where its workers find the store of a round, which is a store of its own.

At a server of ours every node has a relay (`node_relay.py`), and the store of a round is a port of one: of rank 0's,
for the workers of all nodes, at the address of that node, as torchrun has it; or, where that is `local`, of every
node's own, for its own workers. Behind each is the round's namespace at the server.

Where the store is etcd, every node has a gateway on loopback instead, for its workers: PyTorch's clients know one
address and never come again, so theirs must not be on another machine that may be lost. When it dies, they cannot go
on, nor can those who have not come to it yet: the round is over, and the next one has another gateway.

Rejected: ports for rounds at the server itself. Every node would have to reach any port there, and PyTorch's clients
would lose their store with every restart of the server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.elastic import round_port
from rallypoint.elastic.home import find_or_start, is_loopback, to_bind
from rallypoint.elastic.node_relay import NodeRelay
from rallypoint.elastic.workers import describe_exit
from rallypoint.errors import ConnectFailed
from rallypoint.spawn import Server
from rallypoint.store.base import Store
from rallypoint.store.session import SessionBackend
from rallypoint.store.tcp import TCPStore
from rallypoint.store.url import connect

if TYPE_CHECKING:
    from rallypoint.elastic.rendezvous import Round

__all__ = ["StoreProvider", "alone", "at_endpoint", "on_etcd", "rank0_address"]

PROBE_S = 3.0
"""How long a relay may take to say that it is there, where a worker has failed; silence proves nothing."""

LOOPBACK = "127.0.0.1"


class StoreProvider:
    """The store in which the nodes of a run meet, and those of its rounds; here, both at a gateway that somebody runs.

    `store_of` returns where workers find the store of a round, once rank 0 has told all what its `offer` returned.
    """

    def __init__(self, store: Store, server: net.Endpoint) -> None:
        self.store = store
        self._server = server

    def server(self) -> net.Endpoint:
        """Return where the server is."""
        return self._server

    @property
    def server_id(self) -> bytes:
        """The identity of the server, empty where the state outlives every server."""
        backend = self.store._backend
        return backend.server_id if isinstance(backend, SessionBackend) else b""

    def relay(self) -> str:
        """Return what RALLYPOINT_RELAY is for the workers of this node; empty where it has no relay."""
        return ""

    def offer(self, run: str, now: Round, timeout_s: float) -> int:
        """As rank 0, open the port of a round, if others have to know it, and return it; 0 where there is none."""
        return 0

    def store_of(self, run: str, now: Round, port: int, timeout_s: float) -> net.Endpoint:
        """Return where this node's workers find the store of a round; `port` is what rank 0 was offered."""
        server = self.server()
        return net.Endpoint(server.host, round_port.open_round(server, run, now.scope, timeout_s, now.number))

    def close_round(self, run: str, scope: int, timeout_s: float) -> None:
        """Close the store of a round, where nobody is left who could use it."""
        round_port.close_round(self.server(), run, timeout_s, scope, again=False)

    def lost(self, failed: bool = False) -> str:
        """Say how the store of this round has ended, empty while it is there.

        Where a worker has `failed`, perhaps of that, the store is asked whether it is there, also on another node.
        """
        return ""

    def close(self) -> None:
        """Be here no more."""
        self.store.close()


class _RelayProvider(StoreProvider):
    """A server of ours, and a relay of it on every node; the store of a round is a port of rank 0's, or of each."""

    def __init__(self, store: Store, server: net.Endpoint, relay: NodeRelay, local: bool) -> None:
        super().__init__(store, server)
        self._relay = relay
        self._local = local
        self._place: tuple[net.Endpoint, str] | None = None  # the store of this round, and whose relay it is

    def relay(self) -> str:
        return self._relay.variable(self.server_id)

    def offer(self, run: str, now: Round, timeout_s: float) -> int:
        if now.rank:
            return 0
        everywhere = not self._local and rank0_address(now) != LOOPBACK
        return self._relay.open(run, now.scope, now.number, timeout_s, everywhere=everywhere)

    def store_of(self, run: str, now: Round, port: int, timeout_s: float) -> net.Endpoint:
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
        self._relay.close_round(run, scope, timeout_s)

    def lost(self, failed: bool = False) -> str:
        known = self._relay.lost()
        if known or not failed or self._place is None or not round_port.is_gone(self._place[0], PROBE_S):
            return known
        return f"{self._place[1]} at {self._place[0]}, is gone"

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._relay.close()


class _OwnServer(_RelayProvider):
    """A server of this node's own, which ends with it."""

    def __init__(self, store: Store, server: Server, relay: NodeRelay) -> None:
        super().__init__(store, net.Endpoint(LOOPBACK, server.port), relay, True)
        self._child = server

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._child.close()


class _GatewayProvider(StoreProvider):
    """A store in etcd, and a gateway to it, which is started again if it has died; `on_end` is called when it does."""

    def __init__(self, url: str, timeout_s: float, on_end: Callable[[], object] | None) -> None:
        self._url = url
        self._on_end = on_end
        self._gateway = self._start()
        try:
            super().__init__(connect(url, timeout_s), net.Endpoint(LOOPBACK, self._gateway.port))
        except BaseException:
            self._gateway.close()
            raise

    def server(self) -> net.Endpoint:
        if not self._gateway.running():
            self._gateway.close()
            self._gateway = self._start()
            self._server = net.Endpoint(LOOPBACK, self._gateway.port)
        return self._server

    def lost(self, failed: bool = False) -> str:
        code = self._gateway.wait(0.0)
        return "" if code is None else f"its gateway (pid {self._gateway.pid}) has ended: {describe_exit(code)}"

    def _start(self) -> Server:
        gateway, on_end = Server(storage=self._url), self._on_end
        if on_end is not None:

            def watch() -> None:
                gateway.wait()
                on_end()

            threading.Thread(target=watch, name=f"end of gateway {gateway.pid}", daemon=True).start()
        return gateway

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._gateway.close()


def on_etcd(url: str, run: str, timeout_s: float, on_end: Callable[[], object] | None = None) -> StoreProvider:
    """Open a store in etcd for a run, with a gateway of this node's own; what the run stores goes with it.

    `on_end` is called, in a thread of its own, when a gateway has ended.
    """
    return _GatewayProvider(url, timeout_s, on_end)


def alone(data_dir: str | None, timeout_s: float, on_end: Callable[[], object]) -> StoreProvider:
    """Start a server for this node alone, at a free port of loopback, and its relay at the same time."""
    (listener,) = net.listen([LOOPBACK], 0)  # here, so that the relay can be told where before the server is up
    with contextlib.ExitStack() as undo:
        relay = NodeRelay(net.Endpoint(LOOPBACK, listener.getsockname()[1]), on_end)
        undo.callback(relay.close)
        server = undo.enter_context(Server(fd=listener.detach(), data_dir=data_dir))
        store = TCPStore(LOOPBACK, server.port, timeout=timeout_s, wait_for_workers=False)
        undo.pop_all()
    return _OwnServer(store, server, relay)


def at_endpoint(
    endpoint: net.Endpoint,
    is_host: bool | None,
    timeout_s: float,
    on_failure: Callable[[ConnectFailed], object],
    data_dir: str | None = None,
    local: bool = False,
    on_end: Callable[[], object] = lambda: None,
) -> StoreProvider:
    """Find or start the server of an endpoint, and start a relay of it; the rest is as `find_or_start` has it.

    Where a server has to be started here, the relay is started at the same time; else when there is one to relay.
    """
    with contextlib.ExitStack() as undo:
        early = NodeRelay(endpoint, on_end) if endpoint.port and to_bind(endpoint.host, is_host) else None
        if early is not None:
            undo.callback(early.close)
        store = find_or_start(endpoint, is_host, timeout_s, on_failure, data_dir)
        undo.callback(store.close)
        server = net.Endpoint(endpoint.host, store.port)
        if not store._backend.hosts_objects:  # a gateway to etcd, which has no channels for relays
            undo.pop_all()
            if early is not None:
                early.close()
            return StoreProvider(store, server)
        relay = early or NodeRelay(server, on_end)
        undo.pop_all()
    return _RelayProvider(store, server, relay, local)


def rank0_address(now: Round) -> str:
    """Return where the workers of a round reach the node of rank 0; loopback where all are on one machine."""
    first = now.first.host
    return LOOPBACK if now.world_size == 1 or is_loopback(first) else first
