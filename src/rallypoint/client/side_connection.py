"""A second connection to a server, beside the one of a client or a relay: for a probe, or for one HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from rallypoint import net
from rallypoint.protocol.challenge import ClientGreeting
from rallypoint.security.client_security import ClientSecurity

__all__ = ["SideConnection", "side_connection"]

READ_BYTES = 4096


class SideConnection(NamedTuple):
    """A connection whose greeting is complete."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    greeting: ClientGreeting


@contextlib.asynccontextmanager
async def side_connection(
    endpoint: net.Endpoint, security: ClientSecurity, preface: bytes
) -> AsyncIterator[SideConnection]:
    """Connect and greet, and close the connection in the end; raise OSError, Denied and BadMessage."""
    reader, writer = await asyncio.open_connection(*endpoint, ssl=security.context_for(endpoint.host))
    try:
        greeting = security.new_greeting(preface)
        writer.write(preface)
        while not greeting.answer:
            data = await reader.read(READ_BYTES)
            if not data:
                raise ConnectionError("the server closed it")
            writer.write(greeting.feed(data))
        yield SideConnection(reader, writer, greeting)
    finally:
        writer.close()
