"""EtcdStore: a store whose servers keep their log in etcd, found through etcd, and started where there is none.

The store is on those servers (`server/replicated.py`): a client asks etcd where they are, and then has a session with
the one that leads, as with any server. It asks again when none of those that it knows is there any more.

Where no server is listed at all, the client starts one as a child process, if it gets a seat
(`storage/etcd_lookup.py`), else it waits for those who did. That server is for everybody. It lives as long as this
process, whichever stores that opens and closes; when the process ends, it hands over to another. A forked child does
not own its parent's server.

Nothing of gRPC is imported here: only the server needs it, in a process of its own.

Rejected: a server that outlives its process when nobody else has one. The next client starts one, and finds all that
was stored in etcd.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.deadline import Deadline, Timeout, seconds
from rallypoint.etcd.address import DEFAULT_PORT, DEFAULT_SPACE, Address, parse
from rallypoint.storage.etcd_lookup import claim_seat, give_up_seat, look_up
from rallypoint.store.base import Store
from rallypoint.store.relay_address import relay_for
from rallypoint.store.route import Route
from rallypoint.store.session import SessionBackend
from rallypoint.store.view import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from rallypoint.spawn import Server

__all__ = ["EtcdStore", "Finder", "route_to"]

START_S = 60.0
"""How long a server that is started here may take to come up."""

RELEASE_S = 2.0
"""How long etcd may take when a seat is given up; else that ends by itself."""


class OwnServer:
    """A server of a store that this process has started: about to come up, running, or ended."""

    def __init__(self, address: Address, seat: int) -> None:
        self.server: Server | None = None
        self.error: Exception | None = None
        """Why it did not come up."""

        self._address, self._seat = address, seat
        self._thread = threading.Thread(target=self._start, name=f"start a server of {address.name}", daemon=True)
        self._thread.start()

    @property
    def useful(self) -> bool:
        """Whether it runs, or may come up."""
        return self._thread.is_alive() or (self.server is not None and self.server.running())

    def wait(self, deadline: Deadline) -> str:
        """Wait until it is up, and return its URL; nothing at the deadline. Raises ServerFailed where it is not."""
        self._thread.join(deadline.remaining())
        if self.error is not None:
            raise self.error
        return "" if self.server is None else self.server.url

    def _start(self) -> None:
        from rallypoint.spawn import Server

        try:
            self.server = Server(listen_host(self._address), storage=self._address.url, start_timeout=START_S)
        except Exception as error:
            self.error = error
        give_up_seat(self._address, self._seat, Deadline(RELEASE_S))


_own: dict[Address, OwnServer] = {}
"""The servers that this process has started: kept, so that they live as long as it does."""

_starting = threading.Lock()


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()
    _own.clear()


os.register_at_fork(after_in_child=_after_fork)


class Finder:
    """Says where the servers of a store are, and starts one where there is none; any thread may call it."""

    def __init__(self, address: Address, starts: bool = True) -> None:
        self._address, self._starts = address, starts

    def __call__(self, deadline: Deadline) -> tuple[str, ...]:
        """Return the servers' URLs, that of the leader first; none where others are about to start one.

        Raises NoQuorum and EtcdRefused, and ServerFailed where a server that was started here did not come up.
        """
        servers = look_up(self._address, deadline).servers
        if servers or not self._starts:
            return servers
        own = self._own_server(deadline)
        url = "" if own is None else own.wait(deadline)
        return (url,) if url else ()

    def _own_server(self, deadline: Deadline) -> OwnServer | None:
        """Return this process's server of the store, which may have to be started; None where others start theirs."""
        with _starting:
            own = _own.get(self._address)
            if own is None or not own.useful:
                seat = claim_seat(self._address, deadline)
                own = None if seat is None else OwnServer(self._address, seat)
                if own is not None:
                    _own[self._address] = own
            return own


def listen_host(address: Address) -> str:
    """Return where a server listens: as the address says, or where this machine is, seen from etcd's."""
    if address.host:
        return address.host
    for endpoint in net.parse_endpoints(",".join(address.endpoints), DEFAULT_PORT):
        with contextlib.suppress(OSError):
            family, _, _, _, place = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def route_to(address: Address) -> Route:
    """Return the way to a store, by its relay if the environment names one; raise ValueError for a bad variable."""
    members = net.parse_endpoints(",".join(address.endpoints), DEFAULT_PORT)
    return Route(net.Endpoints(), relay_for(members, address.space), address.name, Finder(address))


class EtcdStore(Store):
    """A store in etcd, by its name there; `connect("etcd://a:2379,b:2379/name")` opens one too.

    Where it has no server, one is started as a child of this process, and ends with it; `host` is where that listens.
    `space` is the old word for `name`. Raises NoQuorum where etcd is silent, EtcdRefused where it will not let us in,
    ConnectFailed where no server comes up within `timeout`, ServerFailed where ours does not.
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
    ) -> None:
        place = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
        options = {"ca": ca, "cert": cert, "key": key, "user": user, "password": password, "host": host}
        backend = SessionBackend(route_to(parse(place, space or name, options)), seconds(timeout))
        super().__init__(backend, backend.root, timeout)

    @classmethod
    def at(cls, address: Address, timeout: Timeout) -> EtcdStore:
        """Open the store at an address."""
        return cls(address.endpoints, address.space, timeout=timeout, host=address.host, **address.access._asdict())
