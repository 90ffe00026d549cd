"""Abandon one of several servers if it hangs or is no longer the leader, while its connections stay open.

When the server has sent nothing for a while, the relay probes it with a second connection. A server that is only slow
or idle accepts it. If there is no answer, the relay aborts its connection and tries the next address first. It does the
same if the server answers that it is a standby: it was deposed, and nobody serves the connections that it accepted as
leader. A server that refuses or closes the probe does not hang; the loss of its connection is detected otherwise.

While only one address is known, there is no alternative and no probe; a server may report others at any time.

Rejected: a ping frame. An old server would treat it as a protocol error, and its answer may be late for a good reason,
so that a second connection would be needed anyway.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rallypoint.client.routing.route import Route
from rallypoint.client.side_connection import side_connection
from rallypoint.protocol import BadMessage
from rallypoint.protocol.challenge import Denied
from rallypoint.protocol.channels import PREFACE
from rallypoint.relay.upstream.channel_connection import ChannelConnection
from rallypoint.relay.upstream.traffic import Traffic
from rallypoint.within import within

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["PROBE_S", "SILENCE_S", "until_lost"]

SILENCE_S, PROBE_S = 3.0, 1.5
"""How long a server may send nothing before it is probed, and the timeout of a probe."""

CHECKS = 10
"""Checks per `SILENCE_S`; silence is detected at most one interval late."""


async def until_lost(lost: Awaitable[object], connection: ChannelConnection, route: Route, traffic: Traffic) -> None:
    """Wait until the connection is `lost`; if its server hangs, abort it and make another address the next to try."""
    watching = asyncio.ensure_future(_watch(connection, route, traffic))
    try:
        await lost
    finally:
        watching.cancel()


async def _watch(connection: ChannelConnection, route: Route, traffic: Traffic) -> None:
    received, received_at = traffic.bytes_received, time.monotonic()
    while True:
        await asyncio.sleep(SILENCE_S / CHECKS)
        if traffic.bytes_received != received:
            received, received_at = traffic.bytes_received, time.monotonic()
        elif route.several and time.monotonic() >= received_at + SILENCE_S:
            why = await _probe(route)
            if why and traffic.bytes_received == received:
                route.leave(hangs=True)
                connection.abort(f"the server sent nothing for {SILENCE_S:g} s and {why}")
                return
            received_at = time.monotonic()


async def _probe(route: Route) -> str:
    """Open a second connection; return why to abandon the server, or ""."""
    try:
        return await within(PROBE_S, _why_abandon(route))
    except asyncio.TimeoutError:
        return f"did not answer a second connection within {PROBE_S:g} s"
    except (OSError, BadMessage, Denied):
        return ""


async def _why_abandon(route: Route) -> str:
    async with side_connection(route.at, route.security, PREFACE) as connection:
        return "is now a standby" if connection.greeting.standby is not None else ""
