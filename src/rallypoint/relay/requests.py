"""What clients of a relay ask, and what the server is asked for them: the records of `relay/merging.py`.

A `Call` is one client's, a `Request` the relay's own, for one call or for many. Both are compared by identity.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Protocol

__all__ = ["Asker", "Call", "Request", "Stage"]


class Asker(Protocol):
    """Whoever asks: one client, as far as merging needs to know it."""

    position: int
    """The place in the queue of its last call that was queued."""

    def go_on(self) -> None:
        """Ask what was held back behind a call that gathered."""


class Call:
    """One thing that one client asked."""

    __slots__ = ("answer", "asker", "done", "op", "request", "size", "taken_back")

    def __init__(self, asker: Asker, op: Any, size: int) -> None:
        self.asker = asker
        self.op = op
        self.size = size
        """The bytes of its message."""

        self.request: Request | None = None
        """What the server is asked for it; None before, and where nobody is asked."""

        self.done = False
        self.taken_back = False
        """Whether it is done because its client took it back: there is no reply."""

        self.answer: Any = None
        """What the server said, once it is done: a result, or an error."""

    @property
    def gathers(self) -> bool:
        """Whether it waits for an equal request to be answered before it is queued."""
        return self.request is not None and self.request.stage is Stage.GATHERING


class Stage(Enum):
    """How far a request has come."""

    GATHERING = auto()
    QUEUED = auto()
    SENT = auto()
    ENDED = auto()


class Request:
    """One request to the server: `target` is what a `Drop` gives up, `turn` the wait that a `Draw` goes by."""

    __slots__ = ("calls", "dropped", "lane", "number", "op", "position", "stage", "target", "turn")

    def __init__(self, op: Any, *calls: Call) -> None:
        self.op = op
        self.calls = list(calls)
        self.lane: Any = None
        """What equal requests it may be merged with; the merger's own."""

        self.stage = Stage.QUEUED
        self.position = 0
        self.number = 0
        """Its number in the session, once it is sent."""

        self.dropped = False
        """Whether it was given up, and a `Drop` queued for it."""

        self.target: Request | None = None
        self.turn: Request | None = None
        for call in calls:
            call.request = self

    @property
    def sent(self) -> bool:
        """Whether the server may have it, and owes an answer."""
        return self.stage is Stage.SENT

    def add(self, call: Call) -> None:
        """Ask this for another client, too."""
        self.calls.append(call)
        call.request = self
