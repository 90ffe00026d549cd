"""The master's server: start one, share one, or report the owner of the port.

If the port is taken, we identify its owner. Our servers and PyTorch's both reply to our greeting, each in its own way;
an owner that stays silent also gets an HTTP request, on another connection. `AddressTaken` reports the result, and also
when there is none: a stopped server looks like a listener that never replies.

With `multi_tenant`, a rallypoint server at the port is shared. A server that is still starting does not reply yet,
though the kernel accepts its connections: two masters may start at the same moment, and one of them gets the port. So
the other waits for a reply as long as a server may take to start, within its own timeout. A server that is ending hangs
up or refuses: then we retry the port for a moment.

A launcher that serves the store of its workers announces that in their environment, by PyTorch's names. As in PyTorch,
this matters only if a master finds the launcher's own port taken: then it becomes a client there (`become`). Rejected:
becoming a client without trying the port; if the launcher is gone, there would be no server.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken
from rallypoint.protocol import BadMessage
from rallypoint.protocol.challenge import OURS
from rallypoint.protocol.native import ACCEPTED, PREFACE
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.http_client import open_http

if TYPE_CHECKING:
    from rallypoint.process.spawn import Server

__all__ = ["PortHolder", "identify_holder", "become", "serve"]

PROBE_S = 1.0
"""How long the owner of a port may take to identify itself."""

START_S = 30.0
"""How long a server to be shared may take to reply: it may still be starting."""

SILENCE_S = 0.3
"""How long to wait for a reply to the greeting before trying HTTP."""

PAUSE_S = 0.05
ABOUT_BYTES = 16 * 1024

_TRUE = frozenset(("1", "t", "true", "y", "yes"))  # true in an environment variable for PyTorch's C++
_ABOUT = b"GET /about HTTP/1.0\r\n\r\n"
_shared_servers: weakref.WeakValueDictionary[tuple[tuple[str, ...], int], Server] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def become(
    host: str, port: int, multi_tenant: bool, fd: int | None, deadline: Deadline, security: ClientSecurity
) -> tuple[bool, Server | None]:
    """Serve as a master; return (True, result of `serve`), or (False, None) for a client of the launcher's store."""
    launchers = _is_launchers(port)
    try:
        server = serve(host, port, multi_tenant, fd, deadline, security)
    except AddressTaken:
        if not launchers:
            raise
        server = None
    return server is not None or not launchers, server


def _is_launchers(port: int) -> bool:
    """Return whether the environment announces a launcher's store at this port."""
    told = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").strip().lower()
    return told in _TRUE and os.environ.get("MASTER_PORT", "").strip() == str(port)


def serve(
    host: str | Sequence[str],
    port: int,
    multi_tenant: bool,
    fd: int | None,
    deadline: Deadline,
    security: ClientSecurity,
    outlive_s: float | None = None,
    data_dir: str | None = None,
) -> Server | None:
    """Start a server child, or share one: this process's, which ends with its last user, or (None) another process's.

    Raises AddressTaken, which names the owner of the port.
    """
    hosts = (host,) if isinstance(host, str) else tuple(host)
    if fd is not None or port == 0:
        return _start(hosts, port, multi_tenant, fd, security, outlive_s, data_dir)
    patience = Deadline(min(deadline.timeout_s, START_S) if multi_tenant else PROBE_S)
    moment = Deadline(min(deadline.timeout_s, PROBE_S))
    holder: PortHolder | None = None
    while True:
        last = moment.expired()
        try:
            return _start(hosts, port, multi_tenant, None, security, outlive_s, data_dir)
        except AddressTaken as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            taken = error
        if holder is None or not patience.expired():
            holder = identify_holder(net.parse_endpoint(taken.address, port), patience, security)
        if holder.ours and multi_tenant:
            return None
        if not multi_tenant or holder.ours is not None or patience.expired() or last:
            why = f"{taken.why}, {holder.words}"
            raise AddressTaken(address=taken.address, why=why, ours=holder.ours, pid=holder.pid) from taken
        time.sleep(min(PAUSE_S, moment.remaining()))


def _start(
    hosts: tuple[str, ...],
    port: int,
    multi_tenant: bool,
    fd: int | None,
    security: ClientSecurity,
    outlive_s: float | None,
    data_dir: str | None,
) -> Server:
    from rallypoint.process.spawn import Server

    with _shared_lock:
        server = _shared_servers.get((hosts, port)) if multi_tenant else None
        if server is None or not server.running():
            known = security.credentials
            server = Server(hosts, port, fd=fd, outlive=outlive_s, data_dir=data_dir, credentials=known)
            if multi_tenant:
                _shared_servers[hosts, server.port] = server
        return server


class PortHolder(NamedTuple):
    """The owner of a port: a rallypoint server, another program, or (None) unknown; and a description of it."""

    ours: bool | None
    words: str
    pid: int | None = None


def identify_holder(endpoint: net.Endpoint, deadline: Deadline, security: ClientSecurity | None = None) -> PortHolder:
    """Identify the listener at an address; return within the deadline, or `PROBE_S` later for a rallypoint server."""
    answer: tuple[socket.socket, bytes] | None = None
    silent: list[Any] = [endpoint]
    with contextlib.ExitStack() as stack:
        try:
            greeted = stack.enter_context(_sent(endpoint, PREFACE, deadline))
            answer, silent = _answer([greeted], min(SILENCE_S, deadline.remaining()))
            if not answer:
                asked = stack.enter_context(_sent(endpoint, _ABOUT, deadline))
                answer, silent = _answer([*silent, asked], deadline.remaining())
        except TimeoutError:
            pass  # no reply either
        except OSError as error:
            return PortHolder(None, f"owner unknown: {error.strerror or error}")
    if answer:
        return _judge(endpoint, answer[0] is greeted, answer[1], security or ClientSecurity())
    if silent:
        why = f"did not reply to a greeting within {deadline.timeout_s:g} s: another program"
        return PortHolder(None, f"by a process that {why}, or a server that is stopped or still starting")
    why = "closed the connection on a greeting: another program, or a server at its connection limit"
    return PortHolder(None, f"by a process that {why}")


def _answer(sockets: list[socket.socket], within_s: float) -> tuple[tuple[socket.socket, bytes] | None, list[Any]]:
    """Return the first socket with a reply and its first bytes, or None; and the sockets still open without a reply."""
    deadline = Deadline(within_s)
    with selectors.DefaultSelector() as ready:
        for sock in sockets:
            ready.register(sock, selectors.EVENT_READ)
        while ready.get_map():
            events = ready.select(deadline.remaining())
            for key, _ in events:
                sock = key.fileobj  # type: ignore[assignment]
                ready.unregister(sock)
                if data := _read(sock, len(ACCEPTED), deadline):
                    return (sock, data), []
            if not events:
                break
        return None, [key.fileobj for key in ready.get_map().values()]


def _read(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Read `size` bytes, or fewer if the peer hangs up or the deadline passes."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < size:
            sock.settimeout(max(deadline.remaining(), 0.001))
            if not (piece := sock.recv(size - len(data))):
                break
            data += piece
    return data


def _judge(endpoint: net.Endpoint, greeted: bool, answer: bytes, security: ClientSecurity) -> PortHolder:
    """Return the owner of the port, by its reply to our greeting or else to HTTP."""
    if greeted and answer == PREFACE[-len(ACCEPTED) :]:
        return PortHolder(False, "by a PyTorch server")
    if (greeted and answer.startswith(OURS)) or (not greeted and answer == b"HTTP"):
        facts = _about(endpoint, security)
        version, pid = facts.get("version"), facts.get("pid")
        if facts.get("server") == "rallypoint" and isinstance(pid, int):
            return PortHolder(True, f"by a rallypoint server {version}", pid)
        if greeted:
            return PortHolder(True, f"by a rallypoint server, which did not report its pid within {PROBE_S:g} s")
    return PortHolder(False, f"by another program, which replied {answer!r} to {'a greeting' if greeted else 'HTTP'}")


def _about(endpoint: net.Endpoint, security: ClientSecurity) -> dict[str, object]:
    """Return the facts that a rallypoint server reports over HTTP; empty if it does not, or not to us, or too late."""
    deadline = Deadline(PROBE_S)
    with contextlib.suppress(OSError, ValueError, BadMessage), _sent(endpoint, b"", deadline) as sock:
        open_http(sock, security, deadline)
        sock.sendall(_ABOUT)
        facts = json.loads(_read(sock, ABOUT_BYTES, deadline).partition(b"\r\n\r\n")[2])
        return facts if isinstance(facts, dict) else {}
    return {}


def _sent(endpoint: net.Endpoint, data: bytes, deadline: Deadline) -> socket.socket:
    """Connect in one attempt, and send a few bytes."""
    sock = socket.create_connection(endpoint, max(deadline.remaining(), 0.001))
    try:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused, only this socket itself answered")
        sock.sendall(data)
    except BaseException:
        sock.close()
        raise
    return sock
