"""The sessions that this process has lost, by server: a new session names them and takes over what they hold.

A client gives up a session that it cannot resume in time. The server may keep it longer: its grace period starts when
it notices the cut. The new session then takes over the old one's place in a shared object at once, instead of after the
old one expires. A forked child starts without lost sessions.

Rejected: letting the server end the old session at once. Calls of other members would fail before its successor joins.
"""

from __future__ import annotations

import os
import threading

from rallypoint.core.limits import MAX_FORMER

__all__ = ["note", "of"]

SERVERS = 64
"""The number of servers whose lost sessions are remembered."""

_lost: dict[str, list[bytes]] = {}
_lock = threading.Lock()


def note(server: str, session: bytes) -> None:
    """Remember a lost session."""
    with _lock:
        sessions = _lost.pop(server, [])
        _lost[server] = [*sessions, session][-MAX_FORMER:]
        while len(_lost) > SERVERS:
            del _lost[next(iter(_lost))]


def of(server: str) -> list[bytes]:
    """Return the lost sessions of a server, oldest first."""
    with _lock:
        return list(_lost.get(server, ()))


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _lost.clear()


os.register_at_fork(after_in_child=_forked)
