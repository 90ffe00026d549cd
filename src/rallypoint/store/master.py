"""The master's server: start one, share one, or say who is in the way.

A port that is taken is asked who has it. Our servers and PyTorch's both answer our greeting, each in its own way; one
that stays silent is asked in HTTP too, on another connection. What this finds out is said in `AddressTaken`, and so is
what it could not find out: a server that is stopped looks like a listener that never answers.

With `multi_tenant` a server of ours is shared. One that is just starting does not answer yet, though the kernel takes
its callers: two masters may start at the same moment, and one of them has the port. So the other waits for an answer
as long as a server may take to start, within its own timeout. One that is just ending hangs up or refuses: then the
port is tried again for a moment.

A launcher that serves the store of its workers says so in their environment, by PyTorch's names. As in PyTorch, that
changes nothing until a master finds the launcher's own port taken: then it is a client there (`become`). Rejected: to
be a client without trying; where that launcher is gone, nobody would serve.
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
from rallypoint.protocol.native import ACCEPTED, PREFACE

if TYPE_CHECKING:
    from rallypoint.spawn import Server

__all__ = ["Holder", "ask_who", "become", "serve"]

PROBE_S = 1.0
"""How long whoever has a port may take to say who it is."""

START_S = 30.0
"""How long a server that is to be shared may take to answer, for it may be just starting."""

SILENCE_S = 0.3
"""How long a greeting may stay unanswered before the same is asked in HTTP."""

PAUSE_S = 0.05
ABOUT_BYTES = 16 * 1024

_TRUE = frozenset(("1", "t", "true", "y", "yes"))  # what PyTorch's C++ takes for true in an environment variable
_ABOUT = b"GET /about HTTP/1.0\r\n\r\n"
_tenants: weakref.WeakValueDictionary[tuple[tuple[str, ...], int], Server] = weakref.WeakValueDictionary()
_tenants_lock = threading.Lock()


def become(host: str, port: int, multi_tenant: bool, fd: int | None, deadline: Deadline) -> tuple[bool, Server | None]:
    """Serve as a master; return (True, what `serve` returns), or (False, None) for a client of the launcher's store."""
    launchers = _is_launchers(port)
    try:
        server = serve(host, port, multi_tenant, fd, deadline)
    except AddressTaken:
        if not launchers:
            raise
        server = None
    return server is not None or not launchers, server


def _is_launchers(port: int) -> bool:
    """Return whether the environment says that a launcher serves a store at this port."""
    told = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").strip().lower()
    return told in _TRUE and os.environ.get("MASTER_PORT", "").strip() == str(port)


def serve(
    host: str | Sequence[str],
    port: int,
    multi_tenant: bool,
    fd: int | None,
    deadline: Deadline,
    outlive_s: float | None = None,
    data_dir: str | None = None,
) -> Server | None:
    """Start a server child, or share one: that of this process, which ends with its last user, or (None) another's.

    Raises AddressTaken, with who has the port.
    """
    hosts = (host,) if isinstance(host, str) else tuple(host)
    if fd is not None or port == 0:
        return _start(hosts, port, multi_tenant, fd, outlive_s, data_dir)
    patience = Deadline(min(deadline.timeout_s, START_S) if multi_tenant else PROBE_S)
    moment = Deadline(min(deadline.timeout_s, PROBE_S))
    holder: Holder | None = None
    while True:
        last = moment.expired()
        try:
            return _start(hosts, port, multi_tenant, None, outlive_s, data_dir)
        except AddressTaken as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            taken = error
        if holder is None or not patience.expired():
            holder = ask_who(net.parse_endpoint(taken.address, port), patience)
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
    outlive_s: float | None,
    data_dir: str | None,
) -> Server:
    from rallypoint.spawn import Server

    with _tenants_lock:
        server = _tenants.get((hosts, port)) if multi_tenant else None
        if server is None or not server.running():
            server = Server(hosts, port, fd=fd, outlive=outlive_s, data_dir=data_dir)
            if multi_tenant:
                _tenants[hosts, server.port] = server
        return server


class Holder(NamedTuple):
    """Who has a port: one of ours, somebody else, or (None) that cannot be said; and the same in words."""

    ours: bool | None
    words: str
    pid: int | None = None


def ask_who(endpoint: net.Endpoint, deadline: Deadline) -> Holder:
    """Ask whoever listens at an address who that is; return within the deadline, and for ours `PROBE_S` more."""
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
            pass  # silent, too
        except OSError as error:
            return Holder(None, f"and who has it could not be asked: {error.strerror or error}")
    if answer:
        return _judge(endpoint, answer[0] is greeted, answer[1])
    if silent:
        why = f"did not answer a greeting within {deadline.timeout_s:g} s: it is not one of ours, or is stopped"
        return Holder(None, f"by what {why}, or not up yet")
    return Holder(None, "by what hung up on a greeting: it is not one of ours, or takes no more connections")


def _answer(sockets: list[socket.socket], within_s: float) -> tuple[tuple[socket.socket, bytes] | None, list[Any]]:
    """Return who answers first, and its first bytes, else None; and who neither answered nor hung up."""
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
    """Read so many bytes, or what there is when the other side hangs up or the time is over."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < size:
            sock.settimeout(max(deadline.remaining(), 0.001))
            if not (piece := sock.recv(size - len(data))):
                break
            data += piece
    return data


def _judge(endpoint: net.Endpoint, greeted: bool, answer: bytes) -> Holder:
    """Say who answered so, to our greeting or else to HTTP."""
    if greeted and answer == PREFACE[-len(ACCEPTED) :]:
        return Holder(False, "not by one of ours: a PyTorch server answers there")
    if (greeted and answer == ACCEPTED) or (not greeted and answer == b"HTTP"):
        facts = _about(endpoint)
        version, pid = facts.get("version"), facts.get("pid")
        if facts.get("server") == "rallypoint" and isinstance(pid, int):
            return Holder(True, f"by a rallypoint server {version}", pid)
        if greeted:
            return Holder(True, f"by a rallypoint server, which did not tell its pid within {PROBE_S:g} s")
    return Holder(False, f"not by one of ours: it answered {'a greeting' if greeted else 'HTTP'} with {answer!r}")


def _about(endpoint: net.Endpoint) -> dict[str, object]:
    """Return what a server of ours says of itself in HTTP; nothing where it does not in time."""
    deadline = Deadline(PROBE_S)
    with contextlib.suppress(OSError, ValueError), _sent(endpoint, _ABOUT, deadline) as sock:
        facts = json.loads(_read(sock, ABOUT_BYTES, deadline).partition(b"\r\n\r\n")[2])
        return facts if isinstance(facts, dict) else {}
    return {}


def _sent(endpoint: net.Endpoint, data: bytes, deadline: Deadline) -> socket.socket:
    """Connect, once, and send a few bytes."""
    sock = socket.create_connection(endpoint, max(deadline.remaining(), 0.001))
    try:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused, only this socket itself answered")
        sock.sendall(data)
    except BaseException:
        sock.close()
        raise
    return sock
