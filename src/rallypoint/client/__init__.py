"""The client side: sessions that survive lost connections, for threads and for asyncio."""
