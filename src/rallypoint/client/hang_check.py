"""Detection of a server or relay that hangs, or of a server that is no longer the leader.

A stopped or hung process keeps its connections, and the kernel does not report it. If the client has an alternative
address, the session moves there. A reply may be late for good reasons, such as earlier requests, so the proof is a
probe on another connection: it gets no reply either, or the reply of a standby, which is a deposed leader.

- One of several servers is pinged every second, and probed if the ping has no reply when the next is due.
- A relay is not pinged: its server would have to reply, for every idle client of every node. It is probed if a client
  has received nothing for a while. A relay replies to a probe itself, whether its server is up or not.

Rejected: a permanent second connection for the probes. It would double the connections of a relay without a benefit.
"""

from __future__ import annotations

from rallypoint.client.routing.dial import serves
from rallypoint.client.routing.route import Route
from rallypoint.deadline import Deadline

__all__ = ["PING_S", "PROBE_S", "RELAY_PROBE_S", "RELAY_SILENCE_S", "is_hung", "silence_s"]

PING_S, PROBE_S = 1.0, 1.0
"""The interval of pings to one of several servers, which is also the timeout of a ping; and the timeout of a probe."""

RELAY_SILENCE_S, RELAY_PROBE_S = 2.0, 3.0
"""How long a relay may send nothing before it is probed; and the timeout of that probe."""


def silence_s(route: Route) -> float:
    """Return how long the peer may be silent before it is pinged or probed."""
    return RELAY_SILENCE_S if route.relayed else PING_S


def is_hung(route: Route) -> bool:
    """Probe the client's current address; return whether it does not reply in time, or no longer serves clients."""
    patience = Deadline(RELAY_PROBE_S if route.relayed else PROBE_S)
    return not serves(route.current_address, patience, route.security)
