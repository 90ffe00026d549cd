"""Calls of a relay's clients and the requests sent for them: the records of `relay/torch/merging.py`.

A `TorchCall` belongs to one client. A `MergedRequest` is the relay's request to the server, for one call or for many.
Both are compared by identity. They are msgspec structs because every small request creates one of each, and a struct
is created in half the time of an object.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto
from typing import Any, Protocol

from msgspec import Struct

__all__ = ["ENDED", "GATHERING", "QUEUED", "SENT", "CallOwner", "TorchCall", "MergedRequest", "Stage"]


class CallOwner(Protocol):
    """The client that makes a call, as merging sees it."""

    position: int
    """The queue position of its last queued call."""

    def issue_held(self) -> None:
        """Issue the calls that were held back while a call gathered."""


class Stage(Enum):
    """The progress of a request."""

    GATHERING = auto()
    QUEUED = auto()
    SENT = auto()
    ENDED = auto()


GATHERING, QUEUED, SENT, ENDED = Stage
"""The stages as module globals: looking up an attribute of an enum is slow."""


class TorchCall(Struct, eq=False):
    """One operation that one client has called."""

    owner: Any
    """The client, a `CallOwner`."""

    op: Any
    size: int
    """Size of its message in bytes."""

    request: MergedRequest | None = None
    """The request sent for it; None before that, and if none is needed."""

    done: bool = False
    cancelled: bool = False
    """Whether its client cancelled it: it is done, and there is no reply."""

    answer: Any = None
    """The server's answer, once it is done: a result or an error."""

    @property
    def gathers(self) -> bool:
        """Whether it is queued only after an equal request has been answered."""
        return self.request is not None and self.request.stage is GATHERING


class MergedRequest(Struct, eq=False):
    """One request to the server, for one call or for many."""

    op: Any
    calls: list[TorchCall]
    key: Hashable = None
    """Equal for requests that can be merged; None if it is not merged."""

    position: int = 0
    stage: Stage = QUEUED
    successor: MergedRequest | None = None
    """The request that gathers equal calls until this one is answered."""

    number: int = 0
    """Its number in the session, once it is sent."""

    dropped: bool = False
    """Whether it was abandoned and a `Drop` queued for it."""

    target: MergedRequest | None = None
    """The request that a `Drop` abandons."""

    turn: MergedRequest | None = None
    """The wait whose answer is the turn of a `TurnPop`."""

    @property
    def sent(self) -> bool:
        """Whether it was sent and not answered."""
        return self.stage is SENT

    def add(self, call: TorchCall) -> None:
        """Let another call share this request."""
        self.calls.append(call)
        call.request = self
