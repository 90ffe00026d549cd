"""Answers that many members of a shared object get: encoded once, and kept once where that saves something."""

from __future__ import annotations

from typing import Any

import msgspec

from rallypoint.core.machine import Done, Outcome, Refused
from rallypoint.core.records import Shared

__all__ = ["SHARED_BYTES", "Encoded", "as_shared", "encode_once"]

SHARED_BYTES = 1024
"""From what size on an answer that many get is kept once for all; what is shorter costs more that way."""

Encoded = dict[int, tuple[Any, msgspec.Raw | Shared]]
"""Answers by their id, and what they are encoded: the answer is kept, so that its id is no other's."""


def encode_once(outcome: Done | Refused, encoded: Encoded) -> Done | Refused:
    """Encode what many get only once."""
    if not isinstance(outcome, Done) or not isinstance(outcome.answer, (list, bytes)):
        return outcome
    if id(outcome.answer) not in encoded:
        data = _encode(outcome.answer)
        encoded[id(outcome.answer)] = outcome.answer, Shared(data) if len(data) >= SHARED_BYTES else msgspec.Raw(data)
    return Done(encoded[id(outcome.answer)][1])


def as_shared(outcome: Outcome, encoded: Encoded) -> Outcome:
    """Return an outcome as others get it too, if they do and it is large."""
    if not isinstance(outcome, Done) or id(outcome.answer) not in encoded:
        return outcome
    answer = encoded[id(outcome.answer)][1]
    return Done(answer) if isinstance(answer, Shared) else outcome


_encode = msgspec.msgpack.Encoder().encode
