"""What a server can be told: where to listen, and its limits. The command line and `Server` both fill this in."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_GRACE_S", "DEFAULT_PORT", "DEFAULT_RECOVERY_S", "MAX_SESSIONS", "Settings"]

DEFAULT_PORT = 29400
"""Where a server listens when it is not told, as torchrun's rendezvous does."""

DEFAULT_GRACE_S = 2.0
"""How long a session outlives its connection when nobody says."""

DEFAULT_RECOVERY_S = 60.0
"""How long clients wait for a server with a data directory that is gone, when nobody says."""

MAX_SESSIONS = 65_536
"""How many sessions a server has at most when nobody says."""

MIB = 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A server's settings; sizes are in bytes, durations in seconds."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = DEFAULT_PORT
    fds: tuple[int, ...] = ()
    """Bound sockets to listen on, instead of hosts and port."""

    url_file: str | None = None
    """A file to write the server's URL to once it listens; removed when it ends."""

    storage: str | None = None
    """The URL of the store in etcd that this is one of the servers of; None: the store is this server's alone."""

    ready_fd: int | None = None
    """A descriptor to write the URL to once it listens."""

    parent_pid: int | None = None
    """The process to live and die with."""

    alone_s: float | None = None
    """End after so long with nobody connected; None: never."""

    max_memory: int = 4096 * MIB
    """Everything held for clients: keys, values, waits and what is on its way in or out.

    However much is stored, a quarter of it, and 32 MiB at least, may be on its way, so that a full store can be read.
    """

    max_connection_memory: int = 256 * MIB
    """What one connection may make the server hold in one request or one answer."""

    greeting_s: float = 10.0
    """How long a new connection may take to say who calls."""

    grace_s: float = DEFAULT_GRACE_S
    """How long a session outlives its connection."""

    data_dir: str | None = None
    """Where the state is kept, so that a server which is started again there goes on with it; None: nowhere."""

    recovery_s: float | None = None
    """With that, how long clients try to come back to a server that is gone, and with `storage`, how long the store
    outlives its last server; None: `DEFAULT_RECOVERY_S`."""

    max_connections: int | None = None
    """How many may be connected; None: as many as the limit on open files allows, with a few for the server itself."""

    max_sessions: int = MAX_SESSIONS
    """How many sessions there may be, those included that are away in their grace."""
