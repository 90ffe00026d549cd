"""Leave one of several servers that hangs: it keeps its connections, and no kernel tells of it.

When nothing has come from the server for a while, another connection is tried. A server that is only slow, or has
nothing to say, accepts it; where that is met with silence, too, the relay's connection is given up, and the next of the
addresses is called first. A server that refuses, or hangs up, does not hang: its end is noticed without this.

With one address there is nowhere else to go, and nothing is asked.

Rejected: a ping among the frames. An old server would take it for a broken protocol, and its answer may be late for a
good reason, so that the other connection would have to be tried anyway.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.protocol.channels import PREFACE
from rallypoint.relay.channel_connection import ChannelConnection
from rallypoint.relay.traffic import Traffic
from rallypoint.store.route import Route
from rallypoint.within import within

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["PROBE_S", "SILENCE_S", "until_lost"]

SILENCE_S, PROBE_S = 3.0, 2.0
"""How long a server may send nothing before it is asked for a sign of life, and how long that may take."""


async def until_lost(lost: Awaitable[object], connection: ChannelConnection, route: Route, traffic: Traffic) -> None:
    """Wait until the connection is `lost`; where its server hangs, end it, and have another address called next."""
    watching = asyncio.ensure_future(_watch(connection, route, traffic)) if route.several else None
    try:
        await lost
    finally:
        if watching is not None:
            watching.cancel()


async def _watch(connection: ChannelConnection, route: Route, traffic: Traffic) -> None:
    while True:
        heard = traffic.bytes_received
        await asyncio.sleep(SILENCE_S)
        if traffic.bytes_received == heard and await _hangs(route.at) and traffic.bytes_received == heard:
            route.leave()
            connection.abort(f"it has sent nothing for {SILENCE_S + PROBE_S:g} s, and answers nobody")
            return


async def _hangs(endpoint: net.Endpoint) -> bool:
    """Connect once more; return whether nobody answers in time."""
    try:
        await within(PROBE_S, _hear(endpoint))
    except asyncio.TimeoutError:
        return True
    except OSError:
        pass
    return False


async def _hear(endpoint: net.Endpoint) -> None:
    """Return when a server answers the preface, or hangs up."""
    reader, writer = await asyncio.open_connection(*endpoint)
    try:
        writer.write(PREFACE)
        await reader.read(1)
    finally:
        writer.close()
