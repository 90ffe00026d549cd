"""The thread that brings a session back after a cut, while its callers wait for their own answers and no longer.

Whoever notices a cut starts it: a call that reads, or the connection's keeper. It becomes the reader, so nobody else
reads meanwhile, and holds no lock while it connects: calls are numbered and wait as always, and are sent when the
session is resumed. So a call may end at its deadline or by Ctrl-C, and the store may be closed or forgotten, and none
of them waits for a connection. A second one that starts finds the reader's place taken, and ends.

Rejected: to let the reading call connect, and hand over at its deadline. Calls that are shorter than a greeting takes
would each begin one and none would finish it; and a signal could strike between any two steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

from rallypoint.errors import ConnectFailed, ConnectionLost, RallypointError, ServerRestarted, SessionLost
from rallypoint.store.dial import Contact, Dialer, NotOurs

__all__ = ["Reconnected", "start", "why_over"]


class Reconnected(Protocol):
    """What is brought back: see `store/wire.py`."""

    closed: threading.Event
    """Set when there is nothing to bring back any more."""

    def take_over(self, connection: object, reader: object) -> bool:
        """Become the reader in its place, or in nobody's; return False where another does, or there is no need."""

    def lose(self) -> tuple[Dialer, float] | None:
        """Give up the old connection; return what finds another, after what pause; None where the session has ended."""

    def resume(self, contact: Contact) -> bool:
        """Go on with a new connection, and let others read; return False where that is lost, too."""

    def met(self, why: str, no_quorum: Mapping[str, str]) -> None:
        """Note why an attempt failed; what it met at each address, where one said that etcd has no quorum."""

    def give_up(self, error: Exception) -> None:
        """End the session."""


def why_over(error: Exception, peer: str, away_s: float) -> RallypointError:
    """Return why a session is over that may be without a connection for so long, and met this error when it was."""
    if isinstance(error, ConnectFailed):
        return SessionLost(peer=peer, why=f"cut for {away_s:g} s; {error}")
    if isinstance(error, NotOurs):
        return ServerRestarted(peer=peer, why="a PyTorch server answers there now")
    if isinstance(error, RallypointError):
        return error
    return ConnectionLost(peer=peer, operation="reconnecting", why=f"{type(error).__name__}: {error}")


def start(lost: Reconnected, connection: object, reader: object) -> None:
    """Bring a session back, in a thread of its own; return once that is the reader, or has nothing to do.

    `connection` is the one that was cut, `reader` who noticed while it read (None: nobody reads).
    """
    begun = threading.Event()
    arguments = (weakref.ref(lost), connection, reader, begun)
    try:
        threading.Thread(target=_run, args=arguments, name="rallypoint reconnect", daemon=True).start()
    except RuntimeError:  # the interpreter is going down and starts no threads
        _run(*arguments)
    begun.wait()


def _run(reference: weakref.ref[Reconnected], connection: object, reader: object, begun: threading.Event) -> None:
    lost = reference()
    try:
        ours = lost is not None and lost.take_over(connection, reader)
    finally:
        begun.set()
    if lost is None or not ours:
        return
    closed, found = lost.closed, lost.lose()
    del lost  # between attempts its owner may let go of it
    dialer, pause_s = found or (None, None)
    while pause_s is not None and dialer is not None and not closed.wait(pause_s):
        pause_s = _attempt(reference, dialer)


def _attempt(reference: weakref.ref[Reconnected], dialer: Dialer) -> float | None:
    """Try once to bring a session back; return how long to pause before the next time, None where there is none."""
    try:
        contact = dialer.try_all()
        lost = reference()
        if lost is None:
            if contact is not None:
                contact.socket.close()
            return None
        if contact is not None and lost.resume(contact):
            return None
        lost.met(dialer.why, dialer.no_quorum)
        return dialer.pause_s()
    except Exception as error:  # also a bug: nobody else would ever let the callers go
        lost = reference()
        if lost is not None:
            lost.give_up(error)
        return None
