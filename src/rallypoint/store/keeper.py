"""The keeper: one daemon thread of a process that looks after its connections while no call is under way on them.

It has cuts mended, takes in pushes, keeps hearts beating for leases that ask for it, has a server that may hang probed,
cuts a connection whose server's host is gone (`liveness.py`), also under calls in progress, and looks how long a server
has been away (`outage.py`).
A call in progress does not notice it: data is listened for only where somebody expects pushes and nobody reads. Mending
takes as long as it takes, so each cut has a thread of its own (`reconnect.py`), and so does a probe. Connections are
held weakly; with the last one the keeper ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from typing import Protocol

from rallypoint.liveness import PAUSE_S, VANISHED_S, PauseDetector, silence_s

__all__ = ["KEEP_S", "Kept", "start"]

KEEP_S = 0.25
"""How often the keeper looks around, when no socket wakes it."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0)


class Kept(Protocol):
    """What is kept: see `store/wire.py`."""

    beat_s: float

    def look(self) -> tuple[socket.socket | None, bool] | None:
        """Return the socket, None while another is being made, and whether what comes there is for nobody who reads;
        or None when all is over."""

    def mend(self, sock: socket.socket) -> None:
        """Have a cut of this socket mended, unless somebody does."""

    def doubts(self) -> socket.socket | None:
        """Ask for a sign of life; return the socket where none came, and another server could be asked instead."""

    def probe(self, sock: socket.socket) -> None:
        """Find out whether the server of this socket hangs, and cut it if so."""

    def read_idle(self) -> None:
        """Take in what came unasked, if nobody else reads."""

    def beat(self) -> bool:
        """Tell the server that this process runs; say whether that was possible now."""


class Keeper:
    """All connections of a process that are kept, and the thread that does it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[int, weakref.ref[Kept]] = {}
        self._beaten_at: dict[int, float] = {}
        self._left_alone_until: dict[int, float] = {}
        """Those whose cut was noticed: whoever reads there notices it, too. They are looked at again a little later."""

        self._probing: set[int] = set()
        self._runs = False
        self._pauses = PauseDetector()
        self._judges_at = 0.0

    def keep(self, kept: Kept) -> None:
        """Look after a connection from now on, until it is over or gone."""
        with self._lock:
            self._all[id(kept)] = weakref.ref(kept)
            self._beaten_at[id(kept)] = time.monotonic()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="rallypoint keeper", daemon=True).start()

    def _run(self) -> None:
        while True:
            poller, watched, judges = select.poll(), {}, self._may_judge()
            for number, reference in self._those_left():
                kept = reference()
                seen = None if kept is None else kept.look()
                if kept is None or seen is None:
                    with self._lock:
                        if self._all.get(number) is reference:
                            del self._all[number], self._beaten_at[number]
                            self._left_alone_until.pop(number, None)
                    continue
                sock, listens = seen
                if sock is None or self._left_alone(number):
                    continue
                self._beat(number, kept)
                self._doubt(number, kept)
                if judges:
                    _cut_if_vanished(sock)
                try:
                    poller.register(sock, _HUNG_UP | (select.POLLIN if listens else 0))
                    watched[sock.fileno()] = (number, reference, sock)
                except ValueError:  # closed by somebody who had to
                    self._mend(number, kept, sock)
            kept = None  # so that its owner may let go of it meanwhile
            with self._lock:
                if not self._all:
                    self._runs = False
                    return
            self._pauses.plan(KEEP_S)
            for descriptor, events in poller.poll(KEEP_S * 1000):
                number, reference, sock = watched[descriptor]
                kept = reference()
                if kept is not None and events != select.POLLIN:
                    self._mend(number, kept, sock)
                elif kept is not None:
                    kept.read_idle()
            kept = None

    def _may_judge(self) -> bool:
        """Return whether it is time to look for servers whose hosts are gone; not right after a pause of ours."""
        now = time.monotonic()
        if self._pauses.paused():
            self._judges_at = now + PAUSE_S
        judges = now >= self._judges_at
        if judges:
            self._judges_at = now + KEEP_S
        return judges

    def _those_left(self) -> list[tuple[int, weakref.ref[Kept]]]:
        with self._lock:
            return list(self._all.items())

    def _beat(self, number: int, kept: Kept) -> None:
        now = time.monotonic()
        if now - self._beaten_at[number] >= kept.beat_s and kept.beat():
            self._beaten_at[number] = now

    def _doubt(self, number: int, kept: Kept) -> None:
        """Have a server probed that gives no sign of life, in a thread of its own."""
        doubted = None if number in self._probing else kept.doubts()
        if doubted is None:
            return
        reference, sock = weakref.ref(kept), doubted

        def probe() -> None:
            try:
                kept = reference()
                if kept is not None:
                    kept.probe(sock)
            finally:
                self._probing.discard(number)

        self._probing.add(number)
        threading.Thread(target=probe, name="rallypoint keeper, probing", daemon=True).start()

    def _mend(self, number: int, kept: Kept, sock: socket.socket) -> None:
        """Have a cut mended, and leave that connection alone for a moment."""
        self._left_alone_until[number] = time.monotonic() + KEEP_S
        kept.mend(sock)

    def _left_alone(self, number: int) -> bool:
        return time.monotonic() < self._left_alone_until.get(number, 0.0)


def _cut_if_vanished(sock: socket.socket) -> None:
    """Cut a connection whose server's host is gone; whoever reads there, or else the keeper, mends it."""
    if (silence_s(sock) or 0.0) >= VANISHED_S:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


_keeper = Keeper()


def start(kept: Kept) -> None:
    """Keep a connection until it is over or gone."""
    _keeper.keep(kept)


def _forked() -> None:
    """In a forked child: the thread is not there, and the connections are the parent's."""
    global _keeper
    _keeper = Keeper()


os.register_at_fork(after_in_child=_forked)
