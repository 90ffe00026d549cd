"""TLS handshakes in turn: one holds the event loop for up to half a millisecond, and any stranger may ask for one.

One handshake begins in each turn of the event loop, so that the requests of others are served in between. A host may
have `WINDOW` handshakes open or failed lately; its further connections wait, before any cryptography. A client that
proves who it is makes room for the next one at once, so a node with thousands of clients does not wait. A handshake
that leads to nothing (a wrong token or certificate, a peer that hangs up or stays silent) makes room only after
`FORGET_S`. Meanwhile one of all waiting connections begins every `PACE_S`, the hosts in turn: so floods of
handshakes take less than one hundredth of the server's time, and no connected client notices them.

Of a host, the newest connection begins first, and of one that has failed often the oldest is closed when more than
`MAX_WAITING` wait. A client among attackers behind its own address has the same chance as each of them, learns soon
that it had none, and tries again.

Rejected: threads for handshakes. OpenSSL releases the interpreter lock, but the thread takes it back many times, and
the 99th percentile of other clients was as high as without. Rejected: to close all connections of a host that fails;
see `denied_peers.py`. Rejected: a limit on all hosts together. A cluster that reconnects would wait for it as well.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

__all__ = ["FORGET_S", "MAX_HOSTS", "MAX_WAITING", "PACE_S", "WINDOW", "TlsQueue", "TlsTurn"]

WINDOW = 32
"""Handshakes of a host that are open, or failed lately."""

FORGET_S = 1.0
"""A host's failed handshakes are forgotten at this pace, one after the other."""

PACE_S = 0.05
"""The time between two handshakes of hosts that have used up their window, all of them together."""

MAX_WAITING = 32
"""Connections that wait of a host that has failed often: half of its window."""

MAX_HOSTS = 1024
"""Hosts whose failures are remembered, the latest ones."""


class _Stage(Enum):
    WAITING = "for its host"
    READY = "for the event loop"
    BEGUN = "the handshake is open"
    OVER = "it was proved, or has failed"


class _TlsHost:
    """One host: its open handshakes, and how many failed lately."""

    __slots__ = ("_failed_at", "_failures", "open", "waiting")

    def __init__(self) -> None:
        self.open = 0
        self.waiting: dict[TlsTurn, None] = {}  # oldest first
        self._failures, self._failed_at = 0.0, 0.0

    def failures(self, now: float) -> float:
        """Return the number of failures that are not forgotten yet."""
        return max(0.0, self._failures - (now - self._failed_at) / FORGET_S)

    def fail(self, now: float) -> None:
        """Count a failure; more than fill the window make no difference."""
        self._failures, self._failed_at = min(self.failures(now) + 1, WINDOW), now

    def has_room(self, now: float) -> bool:
        """Return whether the window has room for another handshake: failures are forgotten as wholes."""
        return self.open + math.ceil(self.failures(now)) < WINDOW


class TlsTurn:
    """The place of one connection: it is told when to begin, or that it must go, and tells how it ended."""

    __slots__ = ("_queue", "begin", "host", "refuse", "stage")

    def __init__(
        self, queue: TlsQueue, host: _TlsHost, begin: Callable[[], object], refuse: Callable[[], object]
    ) -> None:
        self._queue, self.host, self.begin, self.refuse = queue, host, begin, refuse
        self.stage = _Stage.WAITING

    def proved(self) -> None:
        """The client has proved who it is."""
        self._queue.end(self, failed=False)

    def ended(self) -> None:
        """The connection is gone, or goes on without proof."""
        self._queue.end(self, failed=True)


class TlsQueue:
    """The handshakes of one process; used on its event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused = 0
        """Number of connections closed because too many of their host waited."""

        self._clock = clock
        self._hosts: dict[str, _TlsHost] = {}  # least recent first
        self._in_turn: dict[_TlsHost, None] = {}  # hosts with waiting connections, the next one first
        self._ready: deque[TlsTurn] = deque()
        self._paced_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of connections that wait."""
        return sum(len(host.waiting) for host in self._in_turn)

    def enter(self, name: str, begin: Callable[[], object], refuse: Callable[[], object]) -> TlsTurn:
        """Call `begin` when a connection of a host may begin its handshake, or `refuse` if it may not."""
        now, host = self._clock(), self._hosts.pop(name, None) or _TlsHost()
        if len(self._hosts) >= MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        self._hosts[name] = host
        turn = TlsTurn(self, host, begin, refuse)
        if host.has_room(now):
            self._admit(turn)
        else:
            self._wait(turn, now)
        return turn

    def end(self, turn: TlsTurn, failed: bool) -> None:
        """Release the place of a connection; called by its turn."""
        stage, turn.stage = turn.stage, _Stage.OVER
        host, now = turn.host, self._clock()
        if stage is _Stage.WAITING:
            self._forget(turn)
        elif stage is not _Stage.OVER:
            host.open -= 1
            if failed and stage is _Stage.BEGUN:
                host.fail(now)
            while host.waiting and host.has_room(now):
                self._admit_newest(host)

    # Waiting

    def _wait(self, turn: TlsTurn, now: float) -> None:
        host = turn.host
        host.waiting[turn] = None
        self._in_turn.setdefault(host)
        if len(host.waiting) > MAX_WAITING and host.failures(now) >= WINDOW / 2:
            oldest = next(iter(host.waiting))
            self.refused += 1
            self.end(oldest, failed=False)
            oldest.refuse()
        if self._timer is None:
            self._set_timer(now)

    def _forget(self, turn: TlsTurn) -> None:
        del turn.host.waiting[turn]
        if not turn.host.waiting:
            del self._in_turn[turn.host]

    def _set_timer(self, now: float) -> None:
        delay_s = max(0.0, self._paced_at + PACE_S - now)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        """Let the next host begin one handshake."""
        self._timer = None
        if not self._in_turn:
            return
        self._paced_at = self._clock()
        host = next(iter(self._in_turn))
        del self._in_turn[host]
        self._in_turn[host] = None
        self._admit_newest(host)
        if self._in_turn:
            self._set_timer(self._paced_at)

    # Beginning

    def _admit_newest(self, host: _TlsHost) -> None:
        turn = next(reversed(host.waiting))
        self._forget(turn)
        self._admit(turn)

    def _admit(self, turn: TlsTurn) -> None:
        turn.stage = _Stage.READY
        turn.host.open += 1
        self._ready.append(turn)
        if len(self._ready) == 1:
            asyncio.get_running_loop().call_soon(self._begin_one)

    def _begin_one(self) -> None:
        """Begin one handshake; the next one in the next turn of the event loop."""
        turn = self._ready[0]
        try:
            if turn.stage is _Stage.READY:
                turn.stage = _Stage.BEGUN
                turn.begin()
        finally:
            self._ready.popleft()
            if self._ready:
                asyncio.get_running_loop().call_soon(self._begin_one)
