"""Processes that use a protected store: our client and torch's, raw connections on an event loop, and an attacker.

Every process is given `Access` to each store, by name: its port, and the credentials as environment variables, for
credentials themselves do not travel between processes.

The attacker knows the address and the CA, and not the token. It connects at a steady pace, whatever becomes of earlier
attempts: each answers the challenge with a wrong proof as soon as the server asks for it. It never has more than
`MAX_OPEN` connections.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import rallypoint
from benchmarks.crowd import PATIENCE, connect
from benchmarks.rig import calls_a_second
from rallypoint.core import ops
from rallypoint.protocol.challenge import ANSWER_BYTES, CHALLENGE, NONCE_BYTES
from rallypoint.protocol.native import PREFACE
from rallypoint.protocol.native_client import ClientProtocol
from rallypoint.security.client_security import ClientSecurity
from rallypoint.security.credentials import resolve
from rallypoint.security.tls import client_context

KEY, COUNTER, LARGE_KEY = "bench/value", "bench/count", "bench/large"
LARGE = 8 * 1024 * 1024
PAUSE_S, WARM_S, PATIENCE_S = 0.0005, 0.05, 60.0
MAX_OPEN = 512


class Access(NamedTuple):
    """How a process connects to a store on this machine."""

    port: int
    environ: dict[str, str]
    tls: bool

    @property
    def url(self) -> str:
        """The URL for our client."""
        return f"{'tcps' if self.tls else 'tcp'}://127.0.0.1:{self.port}"

    def security(self) -> ClientSecurity:
        """Return how a connection of ours is secured."""
        return ClientSecurity(resolve(self.environ), tls=self.tls)


class StoreClients:
    """One client of each store: ours, or torch's."""

    def __init__(self, stores: dict[str, Access], torch: bool = False) -> None:
        self._stores: dict[str, Any] = {name: _open(access, torch) for name, access in stores.items()}
        self._large = os.urandom(LARGE)
        for store in self._stores.values():
            store.set(KEY, b"v" * 32)

    def median_us(self, name: str, what: str, calls: int) -> float:
        """Return the median time of some calls."""
        return statistics.median(self._times(self._call(name, what), calls)) * 1e6

    def percentile_us(self, name: str, for_s: float) -> float:
        """Return the 99th percentile of an `add`, one every half millisecond: each meets the server as it happens."""
        call, taken, end_at = self._call(name, "add"), [], time.monotonic() + for_s
        while time.monotonic() < end_at:
            taken += self._times(call, 1)
            time.sleep(PAUSE_S)
        return statistics.quantiles(taken, n=100)[98] * 1e6

    def _times(self, call: Callable[[], object], calls: int) -> list[float]:
        now, taken = time.perf_counter, []
        for _ in range(calls):
            began_at = now()
            call()
            taken.append(now() - began_at)
        return taken

    def _call(self, name: str, what: str) -> Callable[[], object]:
        store = self._stores[name]
        return {
            "add": lambda: store.add(COUNTER, 1),
            "get": lambda: store.get(KEY),
            "set 8 MiB": lambda: store.set(LARGE_KEY, self._large),
            "get 8 MiB": lambda: store.get(LARGE_KEY),
        }[what]


def _open(access: Access, torch: bool) -> Any:
    if torch:
        return connect(access.port)
    return rallypoint.connect(access.url, PATIENCE, credentials=resolve(access.environ))


class RawClient(asyncio.Protocol):
    """A connection with a session, which adds over and over while it is told to."""

    def __init__(self, security: ClientSecurity, number: int) -> None:
        self._greeting = security.new_greeting(PREFACE)
        self._core = ClientProtocol(f"raw client {number}")
        self._key = b"/bench/count%d" % number
        self._welcomed = self._adds = False
        self.answers = 0
        self.idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it is connected, and when the last call was answered."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(PREFACE)

    def data_received(self, data: bytes) -> None:
        greeting, core = self._greeting, self._core
        if not greeting.answer:
            self._transport.write(greeting.feed(data))
            if greeting.answer:
                self._transport.write(core.greet())
            return
        for reply in core.receive(data):
            if self._welcomed:
                core.settle(reply)
                self.answers += 1
            else:
                core.welcome(reply, "the server")
                self._welcomed = True
            if self._adds:
                self._transport.write(core.ask(ops.Add(0, self._key, 1)))
            else:
                self.idle.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.idle.done():
            self.idle.set_exception(error or ConnectionError("the server closed it"))

    def begin(self) -> None:
        """Add over and over from now on."""
        self.idle = asyncio.get_running_loop().create_future()
        self._adds = True
        self._transport.write(self._core.ask(ops.Add(0, self._key, 1)))

    def end(self) -> None:
        """Add no more."""
        self._adds = False

    def close(self) -> None:
        """End the session and the connection."""
        self._transport.write(self._core.ask(ops.Bye(0)))
        self._transport.close()


class RawClients:
    """Raw clients of one process, on an event loop."""

    def __init__(self, stores: dict[str, Access]) -> None:
        import uvloop

        self._stores = stores
        self._security = {name: access.security() for name, access in stores.items()}
        self._loop = uvloop.new_event_loop()
        self._clients: dict[str, list[RawClient]] = {}

    def connect(self, name: str, count: int) -> float:
        """Connect so many clients to a store, all at once; return how many milliseconds that took."""
        return float(self._loop.run_until_complete(asyncio.wait_for(self._connect(name, count), PATIENCE_S)))

    async def _connect(self, name: str, count: int) -> float:
        loop, security, began_at = asyncio.get_running_loop(), self._security[name], time.monotonic()
        place, context = ("127.0.0.1", self._stores[name].port), security.context_for("127.0.0.1")
        clients = self._clients[name] = [RawClient(security, number) for number in range(count)]
        made = (loop.create_connection(lambda one=one: one, *place, ssl=context) for one in clients)
        await asyncio.gather(*made, *(one.idle for one in clients))
        return (time.monotonic() - began_at) * 1000

    def rate(self, name: str, slice_s: float) -> tuple[float, int]:
        """Have the clients of a store add over and over; return the calls a second, and all calls."""
        work = asyncio.wait_for(self._rate(self._clients[name], slice_s), PATIENCE_S)
        rate, calls = self._loop.run_until_complete(work)
        return float(rate), int(calls)

    async def _rate(self, clients: list[RawClient], slice_s: float) -> tuple[float, int]:
        first = sum(one.answers for one in clients)
        for one in clients:
            one.begin()
        rate = await calls_a_second(clients, WARM_S, slice_s)
        for one in clients:
            one.end()
        await asyncio.gather(*(one.idle for one in clients))
        return rate, sum(one.answers for one in clients) - first

    def close(self, name: str) -> None:
        """Disconnect the clients of a store."""
        self._loop.run_until_complete(self._close(self._clients.pop(name)))

    async def _close(self, clients: list[RawClient]) -> None:
        for one in clients:
            one.close()
        await asyncio.sleep(WARM_S)


class Attempt:
    """One connection of the attacker, which does not wait: it goes on when the server lets it."""

    def __init__(self, port: int, context: ssl.SSLContext | None) -> None:
        sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or each attempt would wait for an acknowledgement
        sock.setblocking(False)
        self._shaken = context is None
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname="127.0.0.1", do_handshake_on_connect=False)
        self.socket = sock
        self._asked = b""
        self.over = False
        """Whether the proof was sent, or the server has closed the connection."""

        if context is None:
            sock.sendall(PREFACE)
        else:
            self.go_on()

    def go_on(self) -> None:
        """Do what is possible now."""
        try:
            if not self._shaken and isinstance(self.socket, ssl.SSLSocket):
                self.socket.do_handshake()
                self._shaken = True
                self.socket.sendall(PREFACE)
            while len(self._asked) < len(CHALLENGE) + NONCE_BYTES:
                data = self.socket.recv(4096)
                if not data:
                    self.over = True
                    return
                self._asked += data
            if not self._asked.startswith(CHALLENGE):
                raise RuntimeError(f"the server does not ask for a proof: {self._asked!r}")
            self.socket.sendall(os.urandom(ANSWER_BYTES))
            self.over = True
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except (ConnectionError, ssl.SSLEOFError):
            self.over = True


class Attacker:
    """A process that tries wrong proofs."""

    def __init__(self, stores: dict[str, Access]) -> None:
        self._stores = stores
        self._open: deque[Attempt] = deque()
        self._ready = select.epoll()

    def attack(self, name: str, a_second: float, for_s: float) -> int:
        """Fail to authenticate at a steady pace; return how often, which is less if that takes twice the time."""
        access, count, began_at = self._stores[name], round(a_second * for_s), time.monotonic()
        context = client_context(resolve(access.environ)) if access.tls else None
        under_way: dict[int, Attempt] = {}
        for number in range(count):
            while (left_s := began_at + number / a_second - time.monotonic()) > 0:
                for descriptor, _ in self._ready.poll(left_s):
                    self._go_on(under_way, descriptor)
            if time.monotonic() > began_at + 2 * for_s:
                return number
            self._begin(under_way, Attempt(access.port, context))
        return count

    def _begin(self, under_way: dict[int, Attempt], attempt: Attempt) -> None:
        while len(self._open) >= MAX_OPEN:
            oldest = self._open.popleft().socket
            under_way.pop(oldest.fileno(), None)
            oldest.close()
        self._open.append(attempt)
        under_way[attempt.socket.fileno()] = attempt
        self._ready.register(attempt.socket, select.EPOLLIN)

    def _go_on(self, under_way: dict[int, Attempt], descriptor: int) -> None:
        attempt = under_way[descriptor]
        attempt.go_on()
        if attempt.over:
            del under_way[descriptor]
            self._ready.unregister(descriptor)

    def rest(self) -> None:
        """Close all connections."""
        while self._open:
            self._open.popleft().socket.close()
