"""EtcdStore: a store whose servers keep their log in etcd; clients find the servers in etcd, or start one.

The data is on those servers (`server/replication/replicated_server.py`): a client asks etcd for their addresses and
opens a session with the leader, as with any server. It asks again when none of the servers it knows can be reached.

If no server is registered, the client starts one as a child process, provided it gets a start permit
(`storage/etcd/lookup.py`); otherwise it waits for the servers of clients that got one. Any client may use that server.
It lives as long as this process, whichever stores that opens and closes; when the process ends, another server takes
over. A forked child does not own its parent's server.

The lookup uses etcd's JSON API. Only the server, in its own process, needs our HTTP/2 client of etcd's gRPC API.

Rejected: a server that outlives its process when it is the last one. The next client starts a new server, which
restores everything from etcd.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.client.routing.relay_address import relay_for
from rallypoint.client.routing.route import Route
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.etcd.address import DEFAULT_PORT, DEFAULT_SPACE, Address, parse
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import OPEN, Credentials
from rallypoint.storage.etcd.lookup import claim_start_permit, look_up, release_start_permit
from rallypoint.store.base import Store
from rallypoint.store.native_backend import NativeBackend
from rallypoint.store.view import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from rallypoint.process.spawn import Server

__all__ = ["EtcdStore", "ServerLookup", "route_to"]

START_S = 60.0
"""Timeout for the start of a server child."""

RELEASE_S = 2.0
"""Timeout for releasing a start permit in etcd; after that, the permit expires by itself."""


class StartedServer:
    """A server that this process has started: starting, running, or ended."""

    def __init__(self, address: Address, permit: int, credentials: Credentials) -> None:
        self.server: Server | None = None
        self.error: Exception | None = None
        """Why it did not start."""

        self._address, self._permit, self._credentials = address, permit, credentials
        self._thread = threading.Thread(target=self._start, name=f"start a server of {address.name}", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether it is running or starting."""
        return self._thread.is_alive() or (self.server is not None and self.server.running())

    def wait(self, deadline: Deadline) -> str:
        """Wait until it is up and return its URL; "" at the deadline. Raises ServerFailed if it did not start."""
        self._thread.join(deadline.remaining())
        if self.error is not None:
            raise self.error
        return "" if self.server is None else self.server.url

    def _start(self) -> None:
        from rallypoint.process.spawn import Server

        try:
            host, storage = listen_host(self._address), self._address.url
            self.server = Server(host, storage=storage, credentials=self._credentials, start_timeout=START_S)
        except Exception as error:
            self.error = error
        release_start_permit(self._address, self._permit, Deadline(RELEASE_S))


_own: dict[Address, StartedServer] = {}
"""The servers that this process has started; the reference keeps them alive as long as the process."""

_starting = threading.Lock()


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()
    _own.clear()


os.register_at_fork(after_in_child=_after_fork)


class ServerLookup:
    """Looks up the servers of a store, and starts one if there is none; thread-safe."""

    def __init__(self, address: Address, credentials: Credentials = OPEN, starts: bool = True) -> None:
        self._address, self._credentials, self._starts = address, credentials, starts

    def __call__(self, deadline: Deadline) -> tuple[str, ...]:
        """Return the URLs of the servers, the leader's first; none while other processes are starting one.

        Raises NoQuorum and EtcdRefused, and ServerFailed if a server started here did not come up.
        """
        servers = look_up(self._address, deadline).servers
        if servers or not self._starts:
            return servers
        own = self._own_server(deadline)
        url = "" if own is None else own.wait(deadline)
        return (url,) if url else ()

    def _own_server(self, deadline: Deadline) -> StartedServer | None:
        """Return this process's server of the store, starting it if needed; None while other processes start theirs."""
        with _starting:
            own = _own.get(self._address)
            if own is None or not own.is_usable:
                permit = claim_start_permit(self._address, deadline)
                own = None if permit is None else StartedServer(self._address, permit, self._credentials)
                if own is not None:
                    _own[self._address] = own
            return own


def listen_host(address: Address) -> str:
    """Return the address for a server to listen on: the configured host, or this machine's address facing etcd."""
    if address.host:
        return address.host
    for endpoint in net.parse_endpoints(",".join(address.endpoints), DEFAULT_PORT):
        with contextlib.suppress(OSError):
            family, _, _, _, place = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def route_to(address: Address, credentials: Credentials | None = None) -> Route:
    """Return the route to a store, via the relay that the environment names, if any; raise ValueError if invalid."""
    relay = relay_for(net.parse_endpoints(",".join(address.endpoints), DEFAULT_PORT), address.space)
    servers = net.Endpoints() if relay is None else relay.servers
    security = ClientSecurity(credentials)
    return Route(servers, relay, address.name, ServerLookup(address, security.credentials), security)


class EtcdStore(Store):
    """A store in etcd, by name; `connect("etcd://a:2379,b:2379/name")` opens one too.

    If it has no server, one is started as a child of this process and ends with it; it listens on `host`. `space` is
    the old spelling of `name`. `user` and `password` are etcd's; `credentials` are the token and the files for TLS of
    the store's servers, by default those of the environment. Raises NoQuorum if etcd does not reply, EtcdRefused if it
    denies access, ConnectFailed if no server comes up within `timeout`, ServerFailed if our own does not start.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        name: str = DEFAULT_SPACE,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT_S,
        ca: str = "",
        cert: str = "",
        key: str = "",
        user: str = "",
        password: str = "",
        host: str = "",
        space: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        place = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
        options = {"ca": ca, "cert": cert, "key": key, "user": user, "password": password, "host": host}
        backend = NativeBackend(route_to(parse(place, space or name, options), credentials), seconds(timeout))
        super().__init__(backend, backend.root, timeout)

    @classmethod
    def at(cls, address: Address, timeout: Timeout, credentials: Credentials | None = None) -> EtcdStore:
        """Open the store at an address."""
        backend = NativeBackend(route_to(address, credentials), seconds(timeout))
        store = cls.__new__(cls)
        Store.__init__(store, backend, backend.root, timeout)
        return store
