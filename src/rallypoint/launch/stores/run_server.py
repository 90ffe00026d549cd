"""The server of a run at an endpoint: the node with that address starts it, all others connect to it.

The server outlives the process that started it, and exits when it has had no connection for OUTLIVE_S. If several
processes could start it, the one that binds the port does.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Callable

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed
from rallypoint.security.client_security import ClientSecurity
from rallypoint.store import master
from rallypoint.store.internal import backend_of
from rallypoint.store.native_backend import NativeBackend
from rallypoint.store.tcp import TCPStore, TorchBackend, reach

__all__ = ["ATTEMPT_S", "PATIENCE_S", "find_or_start", "resolved", "to_bind"]

log = logging.getLogger("rallypoint.server")

OUTLIVE_S = 10.0
"""How long a server that we started runs without connections."""

ATTEMPT_S = 10.0
"""Time of one attempt to connect; then its failure is reported, and a server is started if this is the host."""

PATIENCE_S = 60.0
"""How long a connected server may take to reply: it may be busy with thousands of nodes."""


def find_or_start(
    endpoint: net.Endpoint,
    is_host: bool | None,
    timeout_s: float,
    security: ClientSecurity,
    on_failure: Callable[[ConnectFailed], object] = lambda error: None,
    data_dir: str | None = None,
) -> TCPStore:
    """Connect to the server of an endpoint; start it first if the address is local and the port is free.

    `is_host` overrides whether the address is local. A started server keeps its state in `data_dir`, if given.
    `on_failure` is called after every failed attempt. Raises AddressTaken if another program has the port, and
    ConnectFailed if no server of ours answers in time, and AuthenticationFailed if one does that denies us.
    """
    deadline = Deadline(timeout_s)
    port = endpoint.port
    while True:
        hosts = to_bind(endpoint.host, is_host)  # on every attempt: the name may become resolvable later
        if hosts:
            server = master.serve(hosts, port, True, None, deadline, security, OUTLIVE_S, data_dir)
            if server is not None:
                port = server.port
                _warn_if_open(hosts, port, security)
        if not port:
            tried = {str(endpoint): "port 0 is not an address; pass the actual port of the server"}
            raise ConnectFailed(peer=str(endpoint), timeout_s=0.0, tried=tried)
        attempt = Deadline(min(ATTEMPT_S, deadline.remaining()))
        try:
            store = reach(net.Endpoints((net.Endpoint(endpoint.host, port),)), attempt.timeout_s, security)
        except ConnectFailed as error:  # the server that was found may just have exited
            if deadline.expired():
                raise ConnectFailed(peer=error.peer, timeout_s=timeout_s, tried=error.tried) from None
            on_failure(error)
            time.sleep(attempt.remaining())  # it may have failed at once
            continue
        backend = backend_of(store)
        if isinstance(backend, TorchBackend):
            store.close()
            peer = str(net.Endpoint(endpoint.host, port))
            why = "a PyTorch server answers there; a rallypoint server is needed"
            raise ConnectFailed(peer=peer, timeout_s=timeout_s, tried={peer: why})
        if isinstance(backend, NativeBackend):
            backend.set_answer_timeout(PATIENCE_S)
        store.set_timeout(timeout_s)
        return store


def _warn_if_open(hosts: list[str], port: int, security: ClientSecurity) -> None:
    """Say in one line that whoever reaches the server may use it: the server itself has no terminal."""
    if not security.credentials.authenticates and not all(map(net.is_loopback, hosts)):
        words = "the server at %s is open to everybody who reaches it: set a token (--token-file; docs/security.md)"
        log.warning(words, net.Endpoint(hosts[0], port))


def to_bind(host: str, is_host: bool | None) -> list[str]:
    """Return the addresses to listen on so that others reach this machine as `host`; empty if it is not the host.

    On this machine, its own name may resolve to loopback. With `is_host`, and an address that is not this machine's,
    other nodes reach it through port forwarding. In both cases, listen on all interfaces.
    """
    here = net.is_this_host(host)
    if not (here if is_host is None else is_host):
        return []
    named = host != "localhost" and not _is_address(host)
    if here and not (named and all(map(net.is_loopback, resolved(host)))):
        return [host]
    return ["::" if ":" in host else "0.0.0.0"]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolved(host: str) -> set[str]:
    """Return the addresses that a host name resolves to on this machine."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()  # other nodes cannot resolve the name either, and report it
