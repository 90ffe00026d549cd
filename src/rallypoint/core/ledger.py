"""What the answers cost that a server keeps until they are confirmed, and how those that many get cost it only once.

An exchange of n ranks has n answers, and each is all that n gave. So the server encodes that once (`Shared`), and the
answers are in two parts: a head with the number of the request, and a body that all of them have. It is counted when
the first one is kept, and no more when the last one is confirmed.

Rejected: to keep the list of what was given, and encode it for each. It is the encoding that takes the memory.
"""

from __future__ import annotations

from rallypoint.core.native import DONE, Status, encode, pack_length
from rallypoint.core.records import Shared

__all__ = ["Ledger", "Split"]


class Ledger:
    """What all sessions of a server make it keep, in bytes, and how much that may be: in one answer, and in all."""

    __slots__ = ("answer_limit", "kept", "limit")

    def __init__(self, answer_limit: int = 1 << 62, limit: int = 1 << 62) -> None:
        self.answer_limit = answer_limit
        self.limit = limit
        self.kept = 0


class Split:
    """A reply in two parts, of which the second is others' too."""

    __slots__ = ("body", "head")

    def __init__(self, number: int, body: Shared) -> None:
        head = encode((number, Status.OK, (DONE, None)))[:-1]  # the answer comes last, and nil is one byte
        self.head = pack_length(len(head) + len(body.data)) + head
        self.body = body

    def __len__(self) -> int:
        return len(self.head) + len(self.body.data)

    def __bytes__(self) -> bytes:
        return self.head + self.body.data

    def hold(self) -> int:
        """Keep it, and return how many bytes are kept by that which were not before."""
        self.body.holders += 1
        return len(self) if self.body.holders == 1 else len(self.head)

    def let_go(self) -> int:
        """Keep it no more, and return how many bytes nobody keeps any more."""
        self.body.holders -= 1
        return len(self.head) if self.body.holders else len(self)
