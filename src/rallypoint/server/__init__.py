"""The engine behind sockets: one asyncio process that speaks PyTorch's protocol and HTTP on one port."""

from rallypoint.server.settings import Settings

__all__ = ["Settings"]
