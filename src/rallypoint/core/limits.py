"""Limits that every store enforces, so that a program can move from one store to another.

The key, value and list limits are those of PyTorch's own server, which closes the connection of a client that exceeds
them; here they are errors. The last two bound what a server's options may be set to.
"""

from __future__ import annotations

__all__ = ["LEAST_BYTES", "MAX_FORMER", "MAX_GRACE_S", "MAX_KEYS", "MAX_KEY_BYTES", "MAX_VALUE_BYTES"]

MAX_KEY_BYTES = 8191
"""The longest key, prefixes included, in UTF-8. PyTorch's wire format has one more byte, for the leading `/`."""

MAX_VALUE_BYTES = 8 * 1024 * 1024
"""The longest value in one call; `append` may grow a stored value past it."""

MAX_KEYS = 131_072
"""The longest list of keys in one call."""

MAX_FORMER = 8
"""How many lost sessions of its own process a new session may list."""

LEAST_BYTES = {"max_memory": 1024**2, "max_connection_memory": 32 * 1024**2}
"""The smallest memory limits a server accepts; the largest request is two of the largest values."""

MAX_GRACE_S = 86_400.0
"""The longest grace period of a session: one day."""
