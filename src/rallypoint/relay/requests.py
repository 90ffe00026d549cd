"""What clients of a relay ask, and what the server is asked for them: the records of `relay/merging.py`.

A `Call` is one client's, a `Request` the relay's own, for one call or for many. Both are compared by identity. They are
structs of msgspec because each small request makes one of either, and a struct is made in half the time of an object.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto
from typing import Any, Protocol

from msgspec import Struct

__all__ = ["ENDED", "GATHERING", "QUEUED", "SENT", "Asker", "Call", "Request", "Stage"]


class Asker(Protocol):
    """Whoever asks: one client, as far as merging needs to know it."""

    position: int
    """The place in the queue of its last call that was queued."""

    def go_on(self) -> None:
        """Ask what was held back behind a call that gathered."""


class Stage(Enum):
    """How far a request has come."""

    GATHERING = auto()
    QUEUED = auto()
    SENT = auto()
    ENDED = auto()


GATHERING, QUEUED, SENT, ENDED = Stage
"""The stages by names of their own: an attribute of an enumeration takes long to look up."""


class Call(Struct, eq=False):
    """One thing that one client asked."""

    asker: Any
    """The client, an `Asker`."""

    op: Any
    size: int
    """The bytes of its message."""

    request: Request | None = None
    """What the server is asked for it; None before, and where nobody is asked."""

    done: bool = False
    taken_back: bool = False
    """Whether it is done because its client took it back: there is no reply."""

    answer: Any = None
    """What the server said, once it is done: a result, or an error."""

    @property
    def gathers(self) -> bool:
        """Whether it waits for an equal request to be answered before it is queued."""
        return self.request is not None and self.request.stage is GATHERING


class Request(Struct, eq=False):
    """One request to the server: `target` is what a `Drop` gives up, `turn` the wait that a `Draw` goes by."""

    op: Any
    calls: list[Call]
    key: Hashable = None
    """What equal requests have in common; None where it is not merged with others."""

    position: int = 0
    stage: Stage = QUEUED
    behind: Request | None = None
    """What gathers until this one is answered."""

    number: int = 0
    """Its number in the session, once it is sent."""

    dropped: bool = False
    """Whether it was given up, and a `Drop` queued for it."""

    target: Request | None = None
    turn: Request | None = None

    @property
    def sent(self) -> bool:
        """Whether the server may have it, and owes an answer."""
        return self.stage is SENT

    def add(self, call: Call) -> None:
        """Ask this for another client, too."""
        self.calls.append(call)
        call.request = self
