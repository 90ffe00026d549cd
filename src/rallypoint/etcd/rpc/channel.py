"""Calls to one member of etcd, over a connection that is opened on demand; for asyncio.

A call that is not answered within its timeout fails with DEADLINE_EXCEEDED. If the connection is lost, the caller does
not know whether the request was executed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rallypoint import net
from rallypoint.etcd.rpc.connection import RpcConnection, RpcStream
from rallypoint.etcd.rpc.http2_headers import header_block
from rallypoint.etcd.rpc.status import Code, RpcError

if TYPE_CHECKING:
    import ssl

__all__ = ["RpcChannel"]

Metadata = tuple[tuple[str, str], ...]


class RpcChannel:
    """Calls to one member, on one connection at a time."""

    def __init__(self, endpoint: net.Endpoint, tls: ssl.SSLContext | None) -> None:
        self._endpoint, self._tls = endpoint, tls
        self._connection: RpcConnection | None = None
        self._draining: list[RpcConnection] = []  # former connections, which may have calls in flight
        self._connecting: asyncio.Task[RpcConnection] | None = None
        self._waiting = 0  # callers that wait for `_connecting`
        self._blocks: dict[tuple[str, Metadata], bytes] = {}
        self._closed = False

    async def unary(self, method: str, request: bytes, timeout_s: float, metadata: Metadata = ()) -> bytes:
        """Make a unary call; raise RpcError if it fails."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        connection = self._connection
        if connection is None or not connection.usable:
            connection = await self._connect(timeout_s)
        call = connection.call(self._block(method, metadata), request)
        timer = loop.call_at(ends_at, connection.expire, call)
        try:
            return await call.answer
        finally:
            timer.cancel()
            connection.leave(call)

    async def stream(self, method: str, request: bytes, timeout_s: float, metadata: Metadata = ()) -> RpcStream:
        """Begin a bidirectional streaming call with its first message; raise RpcError if there is no connection."""
        connection = self._connection
        if connection is None or not connection.usable:
            connection = await self._connect(timeout_s)
        return connection.stream(self._block(method, metadata), request)

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in (self._connection, *self._draining):
            if connection is not None:
                connection.give_up(_closed())

    def _block(self, method: str, metadata: Metadata) -> bytes:
        block = self._blocks.get((method, metadata))
        if block is None:
            if len(self._blocks) > 64:  # tokens change
                self._blocks.clear()
            block = header_block(method, str(self._endpoint), self._tls is not None, metadata)
            self._blocks[method, metadata] = block
        return block

    async def _connect(self, timeout_s: float) -> RpcConnection:
        """Return a connection, shared by concurrent callers; the last caller that times out cancels the attempt."""
        if self._closed:
            raise _closed()
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._dial())
            self._connecting.add_done_callback(self._dialled)
        connecting = self._connecting
        self._waiting += 1
        try:
            await asyncio.wait((connecting,), timeout=timeout_s)
        finally:
            self._waiting -= 1
        if connecting.cancelled():
            raise _closed()
        if connecting.done():
            return connecting.result()
        if not self._waiting:
            connecting.cancel()  # the host may be gone
            self._connecting = None
        raise RpcError(Code.DEADLINE_EXCEEDED, "no connection")

    async def _dial(self) -> RpcConnection:
        try:
            host, port = self._endpoint
            name = host if self._tls is not None else None
            _, connection = await asyncio.get_running_loop().create_connection(
                RpcConnection, host, port, ssl=self._tls, server_hostname=name
            )
        except (OSError, ValueError) as error:
            raise RpcError(Code.UNAVAILABLE, net.why_failed(error)) from None
        if self._tls is not None and connection.alpn() != "h2":
            connection.give_up(RpcError(Code.UNAVAILABLE, "it does not offer HTTP/2"))
            raise RpcError(Code.UNAVAILABLE, "it does not offer HTTP/2")
        if self._connection is not None:
            self._draining = [one for one in (self._connection, *self._draining) if not one.ended]
        self._connection = connection
        return connection

    def _dialled(self, task: asyncio.Task[RpcConnection]) -> None:
        if self._connecting is task:
            self._connecting = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved; the callers get it from the task


def _closed() -> RpcError:
    return RpcError(Code.CANCELLED, "the client is closed")
