"""`CuttingProxy`: a proxy in front of a server that cuts, delays, holds back or refuses its connections on request.

Bytes are forwarded as they arrive, up to exactly the byte of a cut; then both sides see the connection end. The proxy
knows no protocol, so it also stands before servers of TLS, of PyTorch, or of anything else. It runs in threads of the
test's own process and listens on loopback.

Rejected: iptables and tc. They need root, and cannot cut at a byte.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading

from rallypoint import net
from rallypoint.deadline import Timeout, seconds
from rallypoint.testing.forwarding import check_bytes, delayed_pieces, end, reserve_port

__all__ = ["DOWN", "HANGS_UP", "REFUSES", "SILENT", "UP", "CuttingProxy"]

UP = "up"
"""The direction from the client to the server."""

DOWN = "down"
"""The direction from the server to the client."""

REFUSES = "refuses"
"""A way to be down: nothing listens, as after the death of a server."""

HANGS_UP = "hangs up"
"""A way to be down: connections are accepted and closed."""

SILENT = "silent"
"""A way to be down: connections are accepted and never answered, as by a server that hangs."""

CONNECT_S = 10.0
"""How long the upstream may take to accept a connection."""

_Pair = tuple[socket.socket, socket.socket]


class CuttingProxy:
    """A proxy in front of `upstream`: a port of this machine, `host:port`, or a tcp:// URL; a context manager.

    Clients connect to its `url`, or its `port` on loopback. An upstream on another machine needs `allow_remote`.

        with CuttingProxy(server.port) as proxy, rallypoint.connect(proxy.url) as store:
            proxy.cut_after(DOWN, 7)         # cut the connection after 7 more bytes from the server
            assert store.add("n", 1) == 1    # the client reconnects, and the add counts once
    """

    def __init__(self, upstream: int | str, *, allow_remote: bool = False) -> None:
        self._allow_remote = allow_remote
        self._upstream = self._endpoint(upstream)
        self._reserved = reserve_port()  # in an outage, too
        self.port: int = self._reserved.getsockname()[1]
        self.connections = 0
        """Number of connections accepted so far."""

        self.passed = {UP: 0, DOWN: 0}
        """Number of bytes that were to be forwarded so far, by direction."""

        self.refusing = False
        """Whether new connections are accepted and closed; existing ones stay."""

        self.silent = False
        """Whether new connections are accepted and never answered; existing ones stay."""

        self.half_open = False
        """Whether a cut is hidden from the server, as when the network between fails."""

        self.was_cut = threading.Event()
        """Set once a connection has ended, cleared by `cut_after`."""

        self.holding = threading.Event()
        """Set once bytes are held back, cleared by `hold`."""

        self._delay_s = 0.0
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._left: dict[str, int | None] = {UP: None, DOWN: None}
        self._cuts: tuple[random.Random, int] | None = None  # of random cuts: the next ones, and the most bytes between
        self._gates = {UP: threading.Event(), DOWN: threading.Event()}
        self.release()
        self._unanswered: list[socket.socket] = []
        self._stopped = False
        self._listen()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<CuttingProxy {self.port} -> {self._upstream}{' stopped' if self._stopped else ''}>"

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"tcp://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Cut every connection, and refuse new ones, as after the death of a server; a second call does nothing."""
        self._stopped = True
        self._close_listener()
        self._reserved.close()
        self.half_open = False
        self.cut_all()
        self.release()  # afterwards: what was held is lost with its connection
        end(self._unanswered)

    # Cuts

    def cut_all(self) -> None:
        """Cut every connection now."""
        with self._lock:
            self._left = {UP: None, DOWN: None}
            self._arm_randomly()
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            self._end_pair(pair)
        self.was_cut.set()

    def cut_after(self, way: str, size: int) -> None:
        """Cut the connection once, when `size` more bytes have passed in this direction, `UP` or `DOWN`."""
        _check_way(way)
        check_bytes("size", size, 0)
        with self._lock:
            self._left[way] = size
            self.was_cut.clear()
        if size == 0 and way == UP:
            self.cut_all()

    def cut_randomly(self, seed: int, most: int = 4096) -> None:
        """Cut again and again, each time after a random number of bytes, at most `most`, in a random direction.

        The same seed gives the same numbers. `disarm` ends it.
        """
        check_bytes("most", most, 1)
        with self._lock:
            self._cuts = random.Random(seed), most
            self._arm_randomly()

    def disarm(self) -> None:
        """Cancel cuts that were not reached, random ones included."""
        with self._lock:
            self._cuts = None
            self._left = {UP: None, DOWN: None}

    def _arm_randomly(self) -> None:
        """Choose the next random cut, if there are any; the lock is held."""
        if self._cuts is not None:
            chance, most = self._cuts
            self._left[chance.choice((UP, DOWN))] = chance.randint(1, most)

    # Outages

    def go_down(self, how: str = REFUSES) -> None:
        """Cut every connection, and forward nothing until `come_back`: `REFUSES`, `HANGS_UP` or `SILENT`."""
        if how not in (REFUSES, HANGS_UP, SILENT):
            raise ValueError(f"how must be {REFUSES!r}, {HANGS_UP!r} or {SILENT!r}, not {how!r}")
        if how == REFUSES:
            self._close_listener()
        self.refusing, self.silent = how == HANGS_UP, how == SILENT
        self.cut_all()

    def come_back(self) -> None:
        """Forward again, on the same port; connections that were silent stay so."""
        if self._stopped:
            raise ValueError(f"{self!r} cannot come back: create another proxy")
        self.refusing = self.silent = False
        if self._listener.fileno() < 0:
            self._listen()

    def redirect(self, upstream: int | str) -> None:
        """Send new connections to another server, and cut the existing ones."""
        self._upstream = self._endpoint(upstream)
        self.cut_all()

    # Slow networks

    @property
    def delay_s(self) -> float:
        """How long each byte takes, in each direction; a round trip takes twice as long."""
        return self._delay_s

    def delay(self, delay: Timeout) -> None:
        """Delay all bytes that arrive from now on; the bandwidth stays."""
        self._delay_s = seconds(delay, "delay")

    def hold(self, way: str = DOWN) -> None:
        """Hold back all bytes of a direction until `release`; nothing is lost."""
        _check_way(way)
        self.holding.clear()
        self._gates[way].clear()

    def release(self) -> None:
        """Forward the bytes that were held back, and all that follow."""
        for gate in self._gates.values():
            gate.set()

    # Threads

    def _endpoint(self, upstream: int | str) -> net.Endpoint:
        if isinstance(upstream, bool) or not isinstance(upstream, (int, str)):
            raise TypeError(f"upstream must be a port, host:port or a tcp:// URL, not {upstream!r}")
        text = f"127.0.0.1:{upstream}" if isinstance(upstream, int) else upstream.removeprefix("tcp://")
        endpoint = net.parse_endpoint(text.partition("?")[0].rstrip("/"), 0)
        if not endpoint.port:
            raise ValueError(f"upstream has no port: {upstream!r}")
        if not self._allow_remote and not net.is_loopback(endpoint.host):
            raise ValueError(f"upstream {endpoint} is not on loopback: pass allow_remote=True if that is meant")
        return endpoint

    def _close_listener(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise it listens while a thread is in accept
        self._listener.close()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        threading.Thread(target=self._accept, args=[self._listener], name=f"accept {self!r}", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.silent:
                self._unanswered.append(client)
                continue
            try:
                if self.refusing:
                    raise ConnectionError
                server = socket.create_connection(self._upstream, timeout=CONNECT_S)
            except OSError:
                client.close()
                continue
            self._forward((client, server))
            if self._stopped:  # accepted just before `stop`
                self.cut_all()
                return

    def _forward(self, pair: _Pair) -> None:
        client, server = pair
        for sock in pair:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._pairs.add(pair)
        for way, source, sink in ((UP, client, server), (DOWN, server, client)):
            threading.Thread(target=self._pump, args=(way, source, sink, pair), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, sink: socket.socket, pair: _Pair) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            for piece in delayed_pieces(source, lambda: self._delay_s):
                data, last = self._count(way, piece, pair)
                if not self._gates[way].is_set():
                    self.holding.set()
                    self._gates[way].wait()
                sink.sendall(data)
                if last:
                    break
        with self._lock:
            self._pairs.discard(pair)
        self._end_pair(pair)
        self.was_cut.set()

    def _count(self, way: str, data: bytes, pair: _Pair) -> tuple[bytes, bool]:
        """Return the part of a piece that is forwarded, and whether the connection is cut after it."""
        with self._lock:
            left = self._left[way]
            last = left is not None and len(data) >= left
            data = data[:left] if last else data
            self.passed[way] += len(data)
            if left is not None:
                self._left[way] = None if last else left - len(data)
            if last:
                self._pairs.discard(pair)
                self._arm_randomly()
        return data, last

    def _end_pair(self, pair: _Pair) -> None:
        """Close both sides after the forwarded bytes; with `half_open`, only the client's."""
        if self.half_open:
            self._unanswered.append(pair[1])
            end(pair[:1])
        else:
            end(pair)


def _check_way(way: str) -> None:
    if way not in (UP, DOWN):
        raise ValueError(f"way must be {UP!r} or {DOWN!r}, not {way!r}")
