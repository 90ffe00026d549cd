"""The settings of a server: where to listen, where to store, and limits. The command line and `Server` fill them in."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_GRACE_S", "DEFAULT_PORT", "DEFAULT_RECOVERY_S", "MAX_SESSIONS", "Settings"]

DEFAULT_PORT = 29400
"""The default port, the same as that of torchrun's rendezvous."""

DEFAULT_GRACE_S = 2.0
"""The default grace period: how long a session outlives its connection."""

DEFAULT_RECOVERY_S = 60.0
"""How long clients try to reconnect to a server with a data directory, by default."""

MAX_SESSIONS = 65_536
"""The default limit of sessions."""

MIB = 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A server's settings; sizes are in bytes, durations in seconds."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = DEFAULT_PORT
    fds: tuple[int, ...] = ()
    """Bound sockets to listen on, instead of `hosts` and `port`."""

    url_file: str | None = None
    """A file to write the URL to once the server listens; removed when it ends."""

    storage: str | None = None
    """The URL of a store in etcd, shared with other servers; None: the store belongs to this server alone."""

    ready_fd: int | None = None
    """A descriptor to write the URL to once the server listens."""

    parent_pid: int | None = None
    """The parent process; the server ends when it does."""

    alone_s: float | None = None
    """End after this time without a connection; None: never."""

    max_memory: int = 4096 * MIB
    """Everything held for clients, in all namespaces: keys, values, waits, and data in transit.

    However full the store is, a quarter of this, and at least 32 MiB, may be in transit, so that a full store can be
    read.
    """

    max_connection_memory: int = 256 * MIB
    """The size of one request, or one reply, of one connection."""

    greeting_s: float = 10.0
    """How long a new connection may take to complete its greeting."""

    grace_s: float = DEFAULT_GRACE_S
    """The grace period: how long a session outlives its connection."""

    data_dir: str | None = None
    """The directory with the state, which a restarted server continues from; None: memory only."""

    recovery_s: float | None = None
    """With `data_dir`: how long clients try to reconnect after the server is gone. With `storage`: how long the store
    outlives its last server. None: `DEFAULT_RECOVERY_S`."""

    max_connections: int | None = None
    """The limit of connections; None: what the limit on open files allows, less a few for the server itself."""

    max_sessions: int = MAX_SESSIONS
    """The limit of sessions, including detached ones in their grace period."""
