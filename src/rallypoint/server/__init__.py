"""The store's server: one asyncio process that serves PyTorch's protocol, our own and HTTP on one port."""

from rallypoint.server.settings import Settings

__all__ = ["Settings"]
