"""The relay of a node: a child process of its agent, for the node's workers; it starts in the background.

Our clients find it by RALLYPOINT_RELAY (`variable`), and bypass it if it dies. PyTorch's clients have one of its ports
as their store: if the relay dies, they lose that store, and the round ends. The relay is restarted at once
(`supervisor.py`), and opens the port of the next round.

A relay that hangs, as after SIGSTOP, looks alive to its clients: the agent kills it (`liveness_probe.py`).

The relay listens on loopback. The port of a round that workers of other nodes use is open on all interfaces.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rallypoint import net
from rallypoint.client.routing.route import MAX_ADDRESSES, read_server
from rallypoint.errors import MeetingError, NetworkError, RallypointError
from rallypoint.launch.stores import liveness_probe, round_port
from rallypoint.launch.stores.liveness_probe import LivenessProbe
from rallypoint.launch.stores.round_port import RelayRequests, RoundPort
from rallypoint.relay.settings import upstream_store
from rallypoint.relay.spawn import Relay
from rallypoint.security.client_security import ClientSecurity

__all__ = ["NodeRelay"]


class NodeRelay:
    """A relay of the store at a URL; `on_end` is called, in a thread of its own, if it dies during a round."""

    def __init__(self, upstream: str, security: ClientSecurity, on_end: Callable[[], object] = lambda: None) -> None:
        self._store = upstream_store(upstream)
        self._upstream = upstream
        self._security = security
        self._on_end = on_end
        self._port: RoundPort | None = None
        self._closed = threading.Event()
        self._closing: list[threading.Thread] = []
        self._started: Future[Relay] = Future()
        threading.Thread(target=self._run, name=f"relay of {self._store.label}", daemon=True).start()

    def _run(self) -> None:
        try:
            relay = Relay(self._upstream, credentials=self._security.credentials)
        except BaseException as error:  # raised to the caller that needs the relay
            self._started.set_exception(error)
            return
        self._started.set_result(relay)
        probe = LivenessProbe(relay, self._at, "the relay of this node", self._closed, self._security)
        while not self._closed.wait(liveness_probe.LOOK_S) and relay.running():
            probe.check()

    @property
    def relay(self) -> Relay:
        """The relay; waits until it is up, and raises ServerFailed if it fails to start."""
        return self._started.result()

    def variable(self, identity: bytes, servers: Sequence[str]) -> str:
        """Return RALLYPOINT_RELAY for workers: with the identity of the store and, for etcd, its servers."""
        known = [read_server(url) for url in servers[:MAX_ADDRESSES]] if self._store.etcd is not None else []
        endpoints = net.Endpoints(endpoint for endpoint in known if endpoint is not None)
        return self._store.relay_address(self.relay.url)._replace(identity=identity, servers=endpoints).variable

    def open(
        self, run: str, scope: int, number: int, timeout_s: float, *, port: int = 0, everywhere: bool = False
    ) -> int:
        """Open the port of a round, `port` if it is free, and close that of an earlier round."""
        opened = round_port.open_port(
            self._requests, run, scope, timeout_s, self._on_end, number=number, port=port, everywhere=everywhere
        )
        self._release_port()
        self._port = opened
        return opened.port

    def close_port(self, run: str, timeout_s: float) -> None:
        """Close the port of an earlier round, if any; the port of this round is on another node."""
        before = self._port
        self._release_port()
        if before is not None and not before.lost:
            with contextlib.suppress(NetworkError, MeetingError):  # it closes with the relay
                round_port.close_round(self._requests, run, timeout_s, before.scope, again=False)

    def close_round(self, run: str, scope: int | None, timeout_s: float) -> threading.Thread:
        """Close a round on the relay and on the server, in the thread that is returned; `close` waits for it."""
        self._release_port()
        thread = threading.Thread(target=self._close_round, args=(run, scope, timeout_s), name="end of a round")
        self._closing.append(thread)
        thread.start()
        return thread

    def _close_round(self, run: str, scope: int | None, timeout_s: float) -> None:
        with contextlib.suppress(RallypointError):  # it closes with the relay
            round_port.close_round(self._requests, run, timeout_s, scope)

    def lost(self) -> str:
        """Return why the port of this round is lost, the death of the relay; empty if it is not lost."""
        port = self._port
        return f"its relay (pid {port.pid}) has died" if port is not None and port.lost else ""

    def close(self) -> None:
        """End the relay, also while it starts, once it has closed what it was told to."""
        self._closed.set()
        for thread in self._closing:
            thread.join()
        self._release_port()
        if self._started.exception() is None:
            self._started.result().close()

    def _release_port(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.close()

    @property
    def _requests(self) -> RelayRequests:
        return RelayRequests(self._at, self._security)

    @property
    def _at(self) -> net.Endpoint:
        return net.Endpoint("127.0.0.1", self.relay.port)
