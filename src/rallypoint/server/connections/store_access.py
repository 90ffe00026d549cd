"""What the connections of a store use of their server: the state, the log, and what surrounds them.

`StoreServer` (`server/server.py`) implements it. Sockets, the table of connections, start and stop are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rallypoint.core.engine import Engine
    from rallypoint.core.entries import Entry
    from rallypoint.core.session import Session
    from rallypoint.core.state import State
    from rallypoint.errors import StoreError
    from rallypoint.server.clock import Clock
    from rallypoint.server.commit import CommitQueue
    from rallypoint.server.replication.notices import Notices
    from rallypoint.server.retries import Retries
    from rallypoint.server.round_namespaces import RoundNamespaces
    from rallypoint.server.settings import Settings
    from rallypoint.server.turn_budget import TurnBudget

__all__ = ["StoreAccess"]


class StoreAccess(Protocol):
    """A store, as the handlers of its connections see it."""

    settings: Settings
    state: State
    log: CommitQueue | None
    """Changes go through it; None: they run at once."""

    clock: Clock
    turns: TurnBudget
    retries: Retries
    rounds: RoundNamespaces
    notices: Notices
    recovery_s: float
    """How long clients try to resume their sessions while the server is down."""

    refusals: dict[int, dict[int, None]]
    """By session: the requests refused by a full disk, which the client may repeat."""

    openings: dict[bytes, list[Callable[[], None]]]
    """Client-chosen session ids being opened, each with the hellos that wait to open the same one."""

    ended: dict[bytes, None]
    """Ids of the sessions that ended last: a late hello must not open them again."""

    refused_sessions: int
    """Number of sessions over the limit so far."""

    def new_connection_owner(self) -> int:
        """Return a serial for a connection without a session."""

    def submit(
        self,
        entry: Entry,
        done: Callable[[Any], None] | None = None,
        refuse: Callable[[StoreError], None] | None = None,
    ) -> None:
        """Apply an entry, at once or once it is committed, then call `done`; `refuse` if the disk is full."""

    def settle(self, engine: Engine) -> None:
        """Send the replies that an engine has for waiting clients."""

    def deliver(self) -> None:
        """Send the replies and pushes that the state has for clients."""

    def detach(self, session: Session) -> None:
        """Note that a session has lost its connection."""

    def note_refusal(self, session: Session, number: int) -> None:
        """Remember that a request was refused, and not executed."""
