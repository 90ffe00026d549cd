"""The limits that every store keeps, so that a program may move from one to another.

They are those of PyTorch's own server, which closes the connection of whoever exceeds them; here they are errors.
The last two are what a server may be told.
"""

from __future__ import annotations

__all__ = ["LEAST_BYTES", "MAX_FORMER", "MAX_GRACE_S", "MAX_KEYS", "MAX_KEY_BYTES", "MAX_VALUE_BYTES"]

MAX_KEY_BYTES = 8191
"""The longest key, prefixes included, as UTF-8. On PyTorch's wire it is one longer, for the `/` before it."""

MAX_VALUE_BYTES = 8 * 1024 * 1024
"""The longest value in one call; `append` may grow a stored one past it."""

MAX_KEYS = 131_072
"""The longest list of keys in one call."""

MAX_FORMER = 8
"""How many lost sessions of its own process a new session may name."""

LEAST_BYTES = {"max_memory": 1024**2, "max_connection_memory": 32 * 1024**2}
"""The least that a server's memory limits may be; the largest request is two of the largest values."""

MAX_GRACE_S = 86_400.0
"""The longest grace of a session: a day."""
