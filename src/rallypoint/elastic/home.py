"""The server of a run: whoever has its address starts it, everybody else finds it.

The server outlives whoever started it, and ends when nobody has been connected for a while. Of several processes that
could start it, the one that binds the port does.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectFailed
from rallypoint.store import master
from rallypoint.store.session import SessionBackend
from rallypoint.store.tcp import TCPStore, TorchBackend

__all__ = ["ATTEMPT_S", "PATIENCE_S", "find_or_start", "is_loopback", "resolved", "to_bind"]

OUTLIVE_S = 10.0
"""How long a server that we started lives with nobody connected."""

ATTEMPT_S = 10.0
"""How long an attempt to reach a server takes: then one is started where it may be here, and why it failed is told."""

PATIENCE_S = 60.0
"""How long a server that we are connected to may take to answer: it may be busy with thousands of nodes."""


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
    if here and not (named and all(map(is_loopback, resolved(host)))):
        return [host]
    return ["::" if ":" in host else "0.0.0.0"]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolved(host: str) -> set[str]:
    """Return the addresses that a host name has here."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()  # a name of ours that nobody resolves: others cannot either, and are told so
