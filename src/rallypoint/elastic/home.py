"""The server of a run: whoever has its address starts it, everybody else finds it; and the doors in it.

The server outlives whoever started it, and ends when nobody has been connected for a while. Of several processes that
could start it, the one that binds the port does.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import urllib.parse
from http.client import HTTPConnection, HTTPException
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost, MeetingError
from rallypoint.store import master
from rallypoint.store.tcp import TCPStore

__all__ = ["close_door", "find_or_start", "is_loopback", "open_door"]

OUTLIVE_S = 10.0
"""How long a server that we started lives with nobody connected."""


def find_or_start(endpoint: net.Endpoint, is_host: bool | None, timeout_s: float) -> TCPStore:
    """Connect to the server of an endpoint, after starting it if that is here and nobody has (`is_host` overrules)."""
    deadline = Deadline(timeout_s)
    port = endpoint.port
    if net.is_this_host(endpoint.host) if is_host is None else is_host:
        server = master.serve(_to_bind(endpoint.host), port, True, None, deadline, OUTLIVE_S)
        port = port if server is None else server.port
    return TCPStore(endpoint.host, port, timeout=deadline.remaining(), wait_for_workers=False)


def open_door(host: str, port: int, run: str, scope: int, timeout_s: float) -> int:
    """Return the port of a store of its own for a round of a run."""
    return int(_ask(host, port, "PUT", f"/doors/{urllib.parse.quote(run, safe='')}/{scope}", timeout_s)["port"])


def close_door(host: str, port: int, run: str, timeout_s: float) -> None:
    """Close a run's door; what was stored behind it is gone."""
    _ask(host, port, "DELETE", f"/doors/{urllib.parse.quote(run, safe='')}", timeout_s)


def is_loopback(host: str) -> bool:
    """Say whether an address means another machine on every machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _to_bind(host: str) -> list[str]:
    """Return where to listen so that others reach us by a name: a name of ours may be a loopback address, here only."""
    try:
        ipaddress.ip_address(host)
        return [host]
    except ValueError:
        pass
    if host == "localhost":
        return [host]
    places = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return ["0.0.0.0"] if all(map(is_loopback, places)) else [host]


def _ask(host: str, port: int, method: str, path: str, timeout_s: float) -> dict[str, Any]:
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, HTTPException) as error:
        peer = str(net.Endpoint(host, port))
        raise ConnectionLost(peer=peer, operation=f"{method} {path}", why=str(error)) from error
    finally:
        connection.close()
    if answer.status != 200:
        why = body.decode(errors="replace").strip()
        raise MeetingError(f"the server at {net.Endpoint(host, port)} refused {method} {path}: {why}")
    facts: dict[str, Any] = json.loads(body)
    return facts
