"""When a client doubts the server or relay where it is, and how it finds out whether that hangs.

A process that is stopped, or hangs, keeps its connections, and no kernel tells of it. Where there is somewhere else to
go, the session goes on there. An answer may be late for good reasons, such as the requests before it, so the proof is
another connection that is met with silence, too.

- One of several servers is pinged every second, and probed where the ping is not answered by the next.
- A relay is not pinged: the ping would be its server's to answer, for every idle client of every node. It is probed
  where a client has heard nothing for a while. It answers by itself, whether its server is there or not.

Rejected: a second connection that is kept for this. It would double those of a relay, and tell nothing more.
"""

from __future__ import annotations

from rallypoint.deadline import Deadline
from rallypoint.store.dial import answers
from rallypoint.store.route import Route

__all__ = ["PING_S", "PROBE_S", "RELAY_PROBE_S", "RELAY_SILENCE_S", "hangs", "silence_s"]

PING_S, PROBE_S = 1.0, 1.0
"""How often one of several servers is asked for a sign of life, which is late when the next is due; and how long a
probe may then take."""

RELAY_SILENCE_S, RELAY_PROBE_S = 2.0, 3.0
"""How long a relay may send nothing before it is probed, and how long that may take."""


def silence_s(route: Route) -> float:
    """Return how long the peer may be silent before it is asked for a sign of life."""
    return RELAY_SILENCE_S if route.relayed else PING_S


def hangs(route: Route) -> bool:
    """Connect once more to where a client is; return whether nobody answers there in time."""
    return not answers(route.here, Deadline(RELAY_PROBE_S if route.relayed else PROBE_S))
