"""The keeper: a daemon thread that looks after a connection while no call is under way.

It mends cuts, takes in pushes, and keeps the heart beating for leases that ask for it. A call in progress does not
notice it: it listens for data only when nobody reads, and woken by an answer that a call will read, it leaves that be.
It holds the connection weakly, and ends with it.
"""

from __future__ import annotations

import select
import socket
import threading
import time
import weakref
from typing import Protocol

from rallypoint.store.ear import poll

__all__ = ["KEEP_S", "Kept", "start"]

KEEP_S = 0.25
"""How often the keeper looks around, when the socket does not wake it."""


class Kept(Protocol):
    """What is kept: see `store/wire.py`."""

    label: str
    beat_s: float

    def look(self) -> tuple[socket.socket, bool] | None:
        """Return the socket and whether somebody reads from it; None when all is over."""

    def mend(self, sock: socket.socket) -> None:
        """Mend a cut of this socket."""

    def read_idle(self) -> bool:
        """Take in what came unasked, if nobody else reads; say so."""

    def beat(self) -> None:
        """Tell the server that this process runs."""


def start(kept: Kept) -> None:
    """Keep a connection, in a thread of its own, until it is over or gone."""
    threading.Thread(target=_keep, args=[weakref.ref(kept)], name=f"keeper of {kept.label}", daemon=True).start()


def _keep(reference: weakref.ref[Kept]) -> None:
    hung_up = getattr(select, "POLLRDHUP", 0)
    wanted, beaten_at = hung_up, time.monotonic()
    while True:
        kept = reference()
        seen = kept.look() if kept is not None else None
        if seen is None:
            return
        del kept  # so that its owner may let go of it meanwhile
        sock, read = seen
        events = poll(sock, wanted, KEEP_S)
        kept = reference()
        if kept is None:
            return
        if time.monotonic() - beaten_at >= kept.beat_s:
            beaten_at = time.monotonic()
            kept.beat()
        if not events:
            wanted = hung_up if read else hung_up | select.POLLIN
        elif events == select.POLLIN:
            wanted = hung_up | select.POLLIN if kept.read_idle() else hung_up
        else:
            kept.mend(sock)
        del kept
