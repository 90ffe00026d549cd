"""The server of a run: whoever has its address starts it, everybody else finds it; and the doors in it.

The server outlives whoever started it, and ends when nobody has been connected for a while. Of several processes that
could start it, the one that binds the port does.

Where the store is etcd, every node has a server of its own instead, a gateway on loopback, for its workers: PyTorch's
clients know one address and never come again, so theirs must not be on another machine that may be lost. When it dies,
they cannot go on, nor can those who have not come to it yet: the round is over, and the next one has another gateway.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.elastic.workers import describe_exit
from rallypoint.errors import ConnectFailed, ConnectionLost, MeetingError
from rallypoint.spawn import Server
from rallypoint.store import master
from rallypoint.store.base import Store
from rallypoint.store.route import backoff_s
from rallypoint.store.session import SessionBackend
from rallypoint.store.tcp import TCPStore, TorchBackend
from rallypoint.store.url import connect

__all__ = ["Home", "RoundOver", "close_door", "find_or_start", "is_loopback", "on_etcd", "open_door", "to_bind"]

OUTLIVE_S = 10.0
"""How long a server that we started lives with nobody connected."""

ATTEMPT_S = 10.0
"""How long an attempt to reach a server takes: then one is started where it may be here, and why it failed is told."""


PATIENCE_S = 60.0
"""How long a server that we are connected to may take to answer: it may be busy with thousands of nodes."""


class RoundOver(MeetingError):
    """The door of a later round is open."""


class Home:
    """The store in which the nodes of a run meet, and the server that this node's workers use."""

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

    @property
    def recovers(self) -> bool:
        """Whether the server comes back with what it knew, so that a request which it did not answer is repeated."""
        backend = self.store._backend
        return isinstance(backend, SessionBackend) and backend.recovers

    def lost(self) -> str:
        """Say how the server of this node alone has ended, empty while it runs; that of all nodes is the store's."""
        return ""

    def close(self) -> None:
        """Be here no more."""
        self.store.close()


class _Gatehouse(Home):
    """A store in etcd, and a gateway to it, which is started again if it has died; `on_end` is called when it does."""

    def __init__(self, url: str, timeout_s: float, on_end: Callable[[], object] | None) -> None:
        self._url = url
        self._on_end = on_end
        self._gateway = self._start()
        try:
            super().__init__(connect(url, timeout_s), net.Endpoint("127.0.0.1", self._gateway.port))
        except BaseException:
            self._gateway.close()
            raise

    def server(self) -> net.Endpoint:
        if not self._gateway.running():
            self._gateway.close()
            self._gateway = self._start()
            self._server = net.Endpoint("127.0.0.1", self._gateway.port)
        return self._server

    def lost(self) -> str:
        code = self._gateway.wait(0.0)
        return "" if code is None else f"its gateway (pid {self._gateway.pid}) has ended: {describe_exit(code)}"

    def _start(self) -> Server:
        gateway, on_end = Server(engine=self._url), self._on_end
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


def on_etcd(url: str, run: str, timeout_s: float, on_end: Callable[[], object] | None = None) -> Home:
    """Open a store in etcd for a run, with a gateway of this node's own; what the run stores goes with it.

    `on_end` is called, in a thread of its own, when a gateway has ended.
    """
    joined = "&" if "?" in url else "?"
    return _Gatehouse(f"{url}{joined}run={urllib.parse.quote(run, safe='')}", timeout_s, on_end)


def find_or_start(
    endpoint: net.Endpoint,
    is_host: bool | None,
    timeout_s: float,
    on_failure: Callable[[ConnectFailed], object] = lambda error: None,
    data_dir: str | None = None,
) -> TCPStore:
    """Connect to the server of an endpoint, after starting it if that is here and nobody has (`is_host` overrules).

    With `data_dir` a server that is started keeps its state there. `on_failure` is called after every attempt in vain.
    Raises AddressTaken where something else has the port, ConnectFailed where nobody, or no server of ours, answers in
    time.
    """
    deadline = Deadline(timeout_s)
    port = endpoint.port
    while True:
        hosts = to_bind(endpoint.host, is_host)  # anew each time: a name may be known to the resolver only later
        if hosts:
            server = master.serve(hosts, port, True, None, deadline, OUTLIVE_S, data_dir)
            port = port if server is None else server.port
        attempt = Deadline(min(ATTEMPT_S, deadline.remaining()))
        try:
            store = TCPStore(endpoint.host, port, timeout=attempt.timeout_s, wait_for_workers=False)
        except ConnectFailed as error:  # the one that was found may have been just ending
            if deadline.expired() or not port:  # nobody ever listens at port 0
                raise ConnectFailed(peer=error.peer, timeout_s=timeout_s, tried=error.tried) from None
            on_failure(error)
            time.sleep(attempt.remaining())  # it may have failed at once
            continue
        if isinstance(store._backend, TorchBackend):
            store.close()
            peer = str(net.Endpoint(endpoint.host, port))
            why = "what answers there is a PyTorch server, not one of ours"
            raise ConnectFailed(peer=peer, timeout_s=timeout_s, tried={peer: why})
        if isinstance(store._backend, SessionBackend):
            store._backend.be_patient(PATIENCE_S)
        store.set_timeout(timeout_s)
        return store


def open_door(
    host: str, port: int, run: str, scope: int, timeout_s: float, number: int = 0, recovers: bool = False
) -> int:
    """Return the port of a store of its own for a round of a run; raise RoundOver where a later round has one.

    `number` is what people call the round; the server shows it. One that `recovers` is asked until it answers in time.
    """
    path = _path(run, scope) + (f"?round={number}" if number else "")
    return int(_ask(host, port, "PUT", path, timeout_s, recovers)["port"])


def close_door(
    host: str, port: int, run: str, timeout_s: float, scope: int | None = None, recovers: bool = False
) -> None:
    """Close a run's door, with `scope` only if it is not that of a later round; what was stored behind it is gone."""
    _ask(host, port, "DELETE", _path(run, scope), timeout_s, recovers)


def is_loopback(host: str) -> bool:
    """Say whether an address means another machine on every machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def to_bind(host: str, is_host: bool | None) -> list[str]:
    """Return where to listen so that others reach us under this host; nowhere if that is not to be here.

    A name of this machine may be a loopback address on it, and only there. And who is told to be the host, though the
    address is not this machine's, is reached by others through something that forwards to it. Both listen everywhere.
    """
    here = net.is_this_host(host)
    if not (here if is_host is None else is_host):
        return []
    named = host != "localhost" and not _is_address(host)
    if here and not (named and all(map(is_loopback, _addresses(host)))):
        return [host]
    return ["::" if ":" in host else "0.0.0.0"]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()  # a name of ours that nobody resolves: others cannot either, and are told so


def _path(run: str, scope: int | None) -> str:
    return f"/rounds/{urllib.parse.quote(run, safe='')}" + ("" if scope is None else f"/{scope}")


def _ask(host: str, port: int, method: str, path: str, timeout_s: float, recovers: bool) -> dict[str, Any]:
    """Ask a server, and again where it recovers: what it did before it died, it does not do twice."""
    deadline = Deadline(timeout_s)
    for times in itertools.count():
        attempt_s = min(timeout_s, ATTEMPT_S) if recovers else timeout_s
        try:
            status, body = _ask_once(host, port, method, path, attempt_s)
            break
        except (OSError, HTTPException) as error:
            if not recovers or deadline.expired():
                peer = str(net.Endpoint(host, port))
                raise ConnectionLost(peer=peer, operation=f"{method} {path}", why=str(error)) from error
        time.sleep(min(backoff_s(times), deadline.remaining()))
    if status != HTTPStatus.OK:
        why = body.decode(errors="replace").strip()
        kind = RoundOver if status == HTTPStatus.CONFLICT else MeetingError
        raise kind(f"the server at {net.Endpoint(host, port)} refused {method} {path}: {why}")
    facts: dict[str, Any] = json.loads(body)
    return facts


def _ask_once(host: str, port: int, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
    with contextlib.closing(HTTPConnection(host, port, timeout=timeout_s)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
