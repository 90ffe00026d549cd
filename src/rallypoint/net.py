"""Endpoints, detection of this host's own addresses, listening sockets, and connecting within a deadline.

Rules:
- We bind exactly the requested address: no wildcard unless requested, and every IPv6 socket is IPv6 only, so that one
  family's wildcard leaves the other family alone.
- A port is never guessed. Port 0 is bound and then read back; a bound descriptor may be passed in and adopted.
- An address is ours if we can bind it. There is no reverse DNS: it is slow, often absent, sometimes wrong.
- The resolver runs in a daemon thread: `getaddrinfo` has no timeout and Ctrl-C cannot interrupt it.
- Connecting is one deadline over many rounds: resolve, try every address, pause, repeat, because a peer's name and
  its server may both appear after we start. Every address is tried at least once, for at least `_LEAST_S`, so a
  timeout of 0 is one real attempt and may overrun by that much per address.

Rejected: racing all addresses at once (RFC 8305). It opens connections only to drop them, which a server counts as
sessions that started and died; trying them in turn, each with a limit, costs two seconds per black-holed address.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import queue
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.deadline import Deadline
from rallypoint.errors import AddressTaken, ConnectFailed
from rallypoint.liveness import PeerWatch, keep_alive

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "Endpoint",
    "Endpoints",
    "parse_endpoint",
    "parse_endpoints",
    "is_loopback",
    "is_this_host",
    "listen",
    "adopt",
    "bound_socket",
    "free_port",
    "connect",
    "keep_alive",
    "set_options",
    "watch",
    "caller_name",
    "raise_file_limit",
    "why_failed",
]

_Address = tuple[Any, ...]
_Place = tuple[int, _Address]  # an address family and a socket address of it

_LEAST_S = 0.1  # shortest attempt, however little time is left
_PATIENCE_S = (2.0, 30.0)  # longest attempt: in the first round, and after doubling each round
_PAUSE_S = (0.04, 1.0)  # pause between rounds, likewise; jitter removes up to half of it
_RESOLVE_S = 10.0  # for calls without a deadline
_PORT_TRIES = 32  # a free port may turn out to be taken at another of the addresses
_BACKLOG = 4096
_WILDCARDS = ("0.0.0.0", "::")
_WORDS = {
    errno.ECONNREFUSED: "refused, nothing listens there",
    errno.EADDRINUSE: "EADDRINUSE: address already in use",
    errno.EADDRNOTAVAIL: "not an address of this machine",
    errno.EACCES: "permission denied (ports below 1024 usually need privileges)",
}


def why_failed(error: Exception) -> str:
    """Return why an operation on an address failed."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError):
        return _WORDS.get(error.errno or 0) or error.strerror or str(error)
    return str(error)


class Endpoint(NamedTuple):
    """A host and a port; as text `host:port`, with brackets around an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Endpoints(tuple[Endpoint, ...]):
    """The addresses of one store, at least one, in the order in which to try them; as text, comma-separated."""

    def __str__(self) -> str:
        return ",".join(map(str, self))


def _is_ipv6(host: str) -> bool:
    with suppress(OSError, ValueError):
        return bool(socket.inet_pton(socket.AF_INET6, re.sub(r"%[\w.-]+\Z", "", host)))
    return False


def parse_endpoint(text: str | None, default_port: int) -> Endpoint:
    """Parse `host[:port]`; an IPv6 address needs brackets only if a port follows.

    Empty or blank text means localhost. Raises `ValueError`, which quotes the endpoint.
    """
    stripped = (text or "").strip()
    if not stripped or _is_ipv6(stripped):
        return Endpoint(stripped or "localhost", default_port)
    parts = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::([^:]*))?", stripped)
    host = (parts[1] or parts[2]) if parts else ""
    if parts is None or not (_is_ipv6(host) or re.fullmatch(r"[\w.-]+", host)):
        raise ValueError(f"endpoint {text!r} is not host[:port] with a name, an IPv4 address or a [bracketed] IPv6 one")
    if parts[3] is None:
        return Endpoint(host, default_port)
    if not re.fullmatch(r"[0-9]{1,5}", parts[3]) or int(parts[3]) > 65535:
        raise ValueError(f"endpoint {text!r} does not end with a port number from 0 to 65535")
    return Endpoint(host, int(parts[3]))


def parse_endpoints(text: str, default_port: int) -> Endpoints:
    """Parse `host[:port],host[:port]`, each as `parse_endpoint` does but none empty; duplicates are dropped."""
    parts = text.split(",")
    if not all(part.strip() for part in parts):
        raise ValueError(f"endpoints {text!r} are not host[:port],host[:port]: one of them is empty")
    return Endpoints(dict.fromkeys(parse_endpoint(part, default_port) for part in parts))


def _ask_resolver(host: str, flags: int, within_s: float) -> list[Any]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags))
        except Exception as error:
            answers.put(error)

    try:
        threading.Thread(target=ask, name=f"resolve {host}", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down and starts no threads
        ask()
    try:
        answer = answers.get(timeout=within_s)
    except queue.Empty:
        answer = socket.gaierror(socket.EAI_AGAIN, f"no answer from the resolver within {within_s:.1f} s")
    if isinstance(answer, Exception):
        raise answer
    return list(answer)


def _resolve(host: str, port: int, within_s: float) -> tuple[list[_Place], bool]:
    """Return the addresses of a host, and whether it is a name; raise `gaierror` or `ValueError`."""
    named = False
    try:
        found: list[Any] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        named = True
        found = _ask_resolver(host, 0, within_s)
    except ValueError as error:  # DNS cannot encode it: an empty label, or one of more than 63 bytes
        raise ValueError(f"{host!r} is not a host name: {error}") from None
    return list(dict.fromkeys((f[0], (f[4][0], port, *f[4][2:])) for f in found)), named


def _is_mine(family: int, address: _Address) -> bool:
    first = socket.inet_pton(family, address[0].partition("%")[0])[0]
    multicast = first == 0xFF if family == socket.AF_INET6 else 224 <= first < 240
    if multicast or address[0] in (*_WILDCARDS, "255.255.255.255"):
        return False  # bindable, but not an address of this machine
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_host(host: str) -> bool:
    """Return whether a name or address is this machine's; False, never an error, if the resolver fails or hangs."""
    name = host.strip().rstrip(".").lower()
    own = socket.gethostname().rstrip(".").lower()
    if not name or name in ("localhost", own):
        return bool(name)
    deadline = Deadline(_RESOLVE_S)
    with suppress(OSError, ValueError):
        if any(_is_mine(*place) for place in _resolve(host.strip(), 0, deadline.remaining())[0]):
            return True
    with suppress(OSError, ValueError):
        found = _ask_resolver(own, socket.AI_CANONNAME, deadline.remaining())
        return name in {canonical.rstrip(".").lower() for _, _, _, canonical, _ in found}
    return False


def _listen_at(places: Iterable[_Place], port: int, backlog: int) -> list[socket.socket]:
    opened: list[socket.socket] = []
    with ExitStack() as undo:
        for family, address in places:
            try:
                sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                sock.settimeout(None)  # whatever socket.setdefaulttimeout says
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((address[0], port, *address[2:]))
                set_options(sock)  # every connection inherits them, if set before the first one queues
                sock.listen(backlog)
            except OSError as error:
                raise AddressTaken(address=str(Endpoint(address[0], port)), why=why_failed(error)) from error
            opened.append(sock)
            port = sock.getsockname()[1]
        undo.pop_all()
    return opened


def listen(hosts: Sequence[str], port: int, *, backlog: int = _BACKLOG) -> list[socket.socket]:
    """Listen on exactly the addresses of the hosts, all with the same port number.

    Port 0 picks a free one, the same at every address. An address that a name resolves to but this machine lacks is
    skipped if another address of the name is available. Raises `AddressTaken`, and then leaves nothing open.
    """
    if isinstance(hosts, str) or not hosts or not 0 <= port <= 65535:
        raise ValueError(f"listen needs a list of hosts and a port from 0 to 65535, not {hosts!r} and {port}")
    wanted: list[_Place] = []
    for host in hosts:
        try:
            places, named = _resolve(host, 0, _RESOLVE_S)
        except (OSError, ValueError) as error:
            raise AddressTaken(address=str(Endpoint(host, port)), why=why_failed(error)) from error
        wanted += [place for place in places if named and _is_mine(*place)] or places
    # A wildcard covers every address of its family; the kernel would refuse to bind one of them as well.
    wild = {family: address for family, address in wanted if address[0] in _WILDCARDS}
    distinct = dict.fromkeys((family, wild.get(family, address)) for family, address in wanted)
    tries = 1 if port else _PORT_TRIES
    while True:
        tries -= 1
        try:
            return _listen_at(distinct, port, backlog)
        except AddressTaken as error:
            if not tries or not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise


def _refusal(sock: socket.socket) -> str | None:
    internet = sock.family in (socket.AF_INET, socket.AF_INET6)
    if not internet or sock.type != socket.SOCK_STREAM or sock.proto not in (0, socket.IPPROTO_TCP):
        return "is not a TCP socket"
    if sock.getsockname()[1] == 0:
        return "is not bound to a port"
    try:
        return f"is connected to {Endpoint(*sock.getpeername()[:2])}"
    except OSError:
        return None


def adopt(fd: int) -> socket.socket:
    """Adopt the descriptor of a bound TCP socket, and listen on it unless it already does.

    The returned socket owns the descriptor and closes it on exec. Raises `ValueError` for anything but a bound,
    unconnected TCP socket, and `AddressTaken` if it cannot listen; the caller then still owns the open descriptor.
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise ValueError(f"descriptor {fd} is not a socket: {why_failed(error)}") from error
    with ExitStack() as undo:
        undo.callback(sock.detach)
        if refusal := _refusal(sock):
            raise ValueError(f"descriptor {fd} {refusal}; give a bound TCP socket to listen on")
        set_options(sock)
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            try:
                sock.listen(_BACKLOG)
            except OSError as error:
                raise AddressTaken(address=str(Endpoint(*sock.getsockname()[:2])), why=why_failed(error)) from error
        sock.setblocking(True)
        sock.set_inheritable(False)
        undo.pop_all()
    return sock


def bound_socket(host: str = "localhost") -> socket.socket:
    """Return a socket that listens on a free port of the host's first address."""
    first, *others = listen([host], 0)
    for other in others:
        other.close()
    return first


def free_port(host: str = "localhost") -> int:
    """Return a port that was free a moment ago; another process may take it, so prefer `bound_socket` and `adopt`."""
    with bound_socket(host) as sock:
        return int(sock.getsockname()[1])


def set_options(sock: socket.socket) -> None:
    """Set the options of every connection: TCP_NODELAY and keep-alive."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)


def watch(
    loop: asyncio.AbstractEventLoop, transport: asyncio.BaseTransport, vanished: Callable[[float], object]
) -> PeerWatch | None:
    """Set a connection's options, and call `vanished` when its peer's host is gone; do nothing if it is not TCP."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    with suppress(OSError):  # not TCP, or reset already
        set_options(sock)
    return PeerWatch(loop, sock, vanished)


def _attempt(family: int, address: _Address, within_s: float) -> socket.socket:
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.settimeout(within_s)
        sock.connect(address)
        if sock.getsockname() == sock.getpeername():
            # A self-connection: our ephemeral port was the target port. Close by reset, so that a server can bind it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError("refused, only this socket itself answered")
        set_options(sock)
        sock.settimeout(None)
        undo.pop_all()
    return sock


def _round(host: str, port: int, deadline: Deadline, patience_s: float, tried: dict[str, str]) -> socket.socket | None:
    """Try every address once, each for its share of the time left, and note in `tried` how each one failed."""
    try:
        places, _ = _resolve(host, port, min(max(_LEAST_S, deadline.remaining()), _PATIENCE_S[1]))
    except OSError as error:
        tried[host] = why_failed(error)
        return None
    tried.pop(host, None)
    for index, (family, address) in enumerate(places):
        where = str(Endpoint(*address[:2]))
        if deadline.expired() and where in tried:
            continue
        share_s = deadline.remaining() / (len(places) - index)
        try:
            return _attempt(family, address, max(_LEAST_S, min(share_s, patience_s)))
        except InterruptedError:
            raise
        except OSError as error:
            tried[where] = why_failed(error)
    return None


def connect(host: str, port: int, deadline: Deadline, *, once: bool = False) -> socket.socket:
    """Connect to the first address of the host that accepts, retrying until the deadline unless `once`.

    The socket is blocking, with TCP_NODELAY and keep-alive. Raises `ConnectFailed`, with the reason at each address,
    and `ValueError` for an invalid host name or port.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"the port to connect to must be from 1 to 65535, not {port}")
    tried: dict[str, str] = {}
    patience_s, pause_s = _PATIENCE_S[0], _PAUSE_S[0]
    while (sock := _round(host, port, deadline, patience_s, tried)) is None:
        if not once:
            time.sleep(min(deadline.remaining(), pause_s * random.uniform(0.5, 1.0)))
        if once or deadline.expired():
            raise ConnectFailed(peer=str(Endpoint(host, port)), timeout_s=deadline.timeout_s, tried=tried)
        patience_s, pause_s = min(2 * patience_s, _PATIENCE_S[1]), min(2 * pause_s, _PAUSE_S[1])
    return sock


def caller_name() -> str:
    """Return the name of this process in a server's logs and statistics: host, pid, and rank if known."""
    rank = os.environ.get("RANK")
    return f"{socket.gethostname()}:{os.getpid()}" + (f" rank {rank}" if rank else "")


def raise_file_limit(wanted: int) -> int:
    """Raise the limit on open files toward `wanted`, never lower it; return the new limit (`wanted` if unlimited)."""
    try:
        import resource
    except ImportError:
        return wanted
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    target = min(wanted, hard)
    if soft < target:
        with suppress(OSError, ValueError):  # macOS has a ceiling below the hard limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, limits[1]))
            return target
    return soft
