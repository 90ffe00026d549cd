"""The sessions that this process has lost, by server: a new session there names them, so what they hold is its own.

A client gives a session up when it cannot resume it in time. The server may keep it for longer: it counts the grace
from when it noticed the cut. A place that the old session has in a shared object is then taken by the new one at once,
instead of after the old one's end. A forked child has lost nothing.

Rejected: to have the server end the old session at once. What waits with it would break before its successor is there.
"""

from __future__ import annotations

import os
import threading

from rallypoint.core.limits import MAX_FORMER

__all__ = ["note", "of"]

SERVERS = 64
"""Of how many servers they are remembered."""

_lost: dict[str, list[bytes]] = {}
_lock = threading.Lock()


def note(server: str, session: bytes) -> None:
    """Remember a session that was lost."""
    with _lock:
        sessions = _lost.pop(server, [])
        _lost[server] = [*sessions, session][-MAX_FORMER:]
        while len(_lost) > SERVERS:
            del _lost[next(iter(_lost))]


def of(server: str) -> list[bytes]:
    """Return the sessions that were lost at a server, the oldest first."""
    with _lock:
        return list(_lost.get(server, ()))


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _lost.clear()


os.register_at_fork(after_in_child=_forked)
