"""Session resumption: repeated requests, and pushes that must be sent again.

After a reconnect a client repeats its unanswered requests with their old numbers. `core/session.py` returns the kept
replies; this module has the checks that come before the server asks the log or the session.

Rejected: treating a confirmed number as a new request. It would be executed twice; this is a bug in the client, which
should be told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import PushedEvent
from rallypoint.core.session import Session
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import encode_answer

__all__ = ["check_repeated", "encode_pushes", "is_read"]


def check_repeated(session: Session, op: ops.Op, refusals: Mapping[int, Collection[int]]) -> None:
    """Raise BadMessage for a used request number, unless the request may be repeated, as those in `refusals` may."""
    if isinstance(op, (ops.Confirm, ops.SessionHeartbeat)):
        return
    if op.number <= 0:
        raise BadMessage(f"{op.__class__.__name__} has number {op.number}; request numbers start at 1")
    was_read = isinstance(op, ops.WaitOrTurn)  # it may have run as a read, and waiting again is harmless
    if op.changes and not (was_read or session.knows(op.number) or op.number in refusals.get(session.serial, ())):
        raise BadMessage(f"request {op.number} was repeated after it was confirmed")


def is_read(session: Session, op: ops.Op, engine: Engine) -> bool:
    """Return whether a wait needs no entry: its key exists, and the log has no earlier attempt of this request."""
    if not isinstance(op, ops.WaitOrTurn) or not engine.holds(op.key):
        return False
    return op.number > session.highest or not (session.knows(op.number) or op.number in session.turns)


def encode_pushes(pushes: Sequence[PushedEvent], sent: int, limit: int) -> tuple[bytes, int, bool]:
    """Encode the pushes after number `sent`, until they exceed the limit in bytes.

    Return the bytes, the number of the last push, and whether there may be more.
    """
    parts: list[bytes] = []
    size = 0
    for push in islice(pushes, max(0, sent + 1 - pushes[0].push) if pushes else 0, None):
        parts.append(bytes(encode_answer(0, push)))
        size += len(parts[-1])
        sent = push.push
        if size > limit:
            return b"".join(parts), sent, True
    return b"".join(parts), sent, False
