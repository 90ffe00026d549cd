"""Answers shared by many members of an object: encoded once, and kept as one copy if that saves memory."""

from __future__ import annotations

from typing import Any

import msgspec

from rallypoint.core.machines.machine import Done, Outcome, Refused
from rallypoint.core.records import SharedAnswer

__all__ = ["SHARED_BYTES", "Encoded", "as_shared", "encode_once"]

SHARED_BYTES = 1024
"""Answers of at least this size are kept as one copy; for shorter ones sharing costs more than it saves."""

Encoded = dict[int, tuple[Any, msgspec.Raw | SharedAnswer]]
"""Answers by id, each with its encoding; holding the answer keeps its id from being reused."""


def encode_once(outcome: Done | Refused, encoded: Encoded) -> Done | Refused:
    """Return the outcome with its answer encoded, once for all members that get it."""
    if not isinstance(outcome, Done) or not isinstance(outcome.answer, (list, bytes)):
        return outcome
    if id(outcome.answer) not in encoded:
        data = _encode(outcome.answer)
        encoded[id(outcome.answer)] = (
            outcome.answer,
            SharedAnswer(data) if len(data) >= SHARED_BYTES else msgspec.Raw(data),
        )
    return Done(encoded[id(outcome.answer)][1])


def as_shared(outcome: Outcome, encoded: Encoded) -> Outcome:
    """Return the outcome with the shared copy of its answer if others get it too and it is large."""
    if not isinstance(outcome, Done) or id(outcome.answer) not in encoded:
        return outcome
    answer = encoded[id(outcome.answer)][1]
    return Done(answer) if isinstance(answer, SharedAnswer) else outcome


_encode = msgspec.msgpack.Encoder().encode
