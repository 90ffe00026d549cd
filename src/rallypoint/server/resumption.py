"""What a resumed session brings: requests that come again, and pushes that have to be sent again.

A client repeats, with their old numbers, the requests that were not answered before the cut. `core/session.py` gives
them their kept answers; here is what the server must know before it asks the log or the session for anything.

Rejected: to let a confirmed number pass as a new request. It would be carried out twice, and that is a bug of the
client which it should hear of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from rallypoint.core import ops
from rallypoint.core.engine import Engine
from rallypoint.core.records import Push
from rallypoint.core.session import Session
from rallypoint.protocol import BadMessage
from rallypoint.protocol.native import encode_answer

__all__ = ["check_repeated", "encode_pushes", "is_read"]


def check_repeated(session: Session, op: ops.Op, refusals: Mapping[int, Collection[int]]) -> None:
    """Raise BadMessage for a number that was used, unless its request may come again, as one in `refusals` may."""
    if isinstance(op, (ops.Confirm, ops.Beat)):
        return
    if op.number <= 0:
        raise BadMessage(f"{op.__class__.__name__} has number {op.number}, and requests count from 1")
    was_read = isinstance(op, ops.Await)  # it may have been; and to wait again does no harm
    if op.changes and not (was_read or session.knows(op.number) or op.number in refusals.get(session.serial, ())):
        raise BadMessage(f"request {op.number} came again after it was confirmed")


def is_read(session: Session, op: ops.Op, engine: Engine) -> bool:
    """Return whether a wait needs no entry: its key is there, and the log knows nothing of it from before a cut."""
    if not isinstance(op, ops.Await) or not engine.holds(op.key):
        return False
    return op.number > session.highest or not (session.knows(op.number) or op.number in session.turns)


def encode_pushes(pushes: Sequence[Push], sent: int, limit: int) -> tuple[bytes, int, bool]:
    """Encode the pushes behind number `sent`, until they are past the limit in bytes.

    Returns them, the number of the last, and whether there may be more.
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
