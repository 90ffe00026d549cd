"""Exchange: every rank contributes bytes and receives those of the others, in one round trip.

On our server it leaves nothing behind. On any other store it keeps one key, `exchange:NAME`, with the data of the last
round and the current one as text. Both must fit into one value, so the limit per rank is lower there. Data over the
limit is refused before anything is sent. The limit is the same for all ranks and rounds: an equal share for each rank.
"""

from __future__ import annotations

from typing import Any, Literal

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machines import exchange
from rallypoint.deadline import Timeout
from rallypoint.errors import LimitExceeded
from rallypoint.recipes.arguments import count_of
from rallypoint.recipes.hosting.shared_object import Progress, Recipe, SharedObject

__all__ = ["Exchange"]

STATE_BYTES, CALL_BYTES = 16_384, 320
"""Size of the state without the data: fixed, and per rank (its calls in this round and the last)."""


class Exchange(Recipe):
    """Repeatable collectives of small data among `size` ranks, which all call them in the same order.

    If a rank is restarted while its old session is still alive and contributes different bytes, it waits until the old
    session ends; then the new bytes count. The round is incomplete until then.

    On our server the limit is 8 MiB per rank. On any other store it is about 3 MiB for all ranks together, in equal
    shares; the root of a broadcast may use all of it. Raises LimitExceeded above the limit.
    """

    def __init__(self, store: Any, name: str, size: int, progress: Progress | None = None) -> None:
        self.size = count_of(size, "ranks")
        self._object = SharedObject("exchange", store, name)
        self._on_server = self._object.statistics().hosted_by == "server"
        self._progress = progress

    def all_gather(self, rank: int, data: bytes, timeout: Timeout | None = None) -> list[bytes]:
        """Contribute `data`, and return the data of all ranks, by rank.

        Raises MembersMissing at the timeout, MembersLost at once when a rank dies after contributing.
        """
        return list(self._give(rank, data, "all_gather", 0, timeout))

    def gather(self, rank: int, data: bytes, root: int = 0, timeout: Timeout | None = None) -> list[bytes] | None:
        """Contribute `data`; when all ranks have, return their data by rank on the root, None on the others."""
        answer = self._give(rank, data, "gather", root, timeout)
        return None if answer is None else list(answer)

    def broadcast(self, rank: int, data: bytes = b"", root: int = 0, timeout: Timeout | None = None) -> bytes:
        """Return the root's data once all ranks have called this; the data of the others is ignored."""
        return bytes(self._give(rank, data if rank == root else b"", "broadcast", root, timeout))

    def _most(self, how: str) -> int:
        """Return the limit in bytes for one rank; for a broadcast, for its root."""
        if self._on_server:
            return MAX_VALUE_BYTES
        text = (MAX_VALUE_BYTES - STATE_BYTES - self.size * CALL_BYTES) // 2 // (1 if how == "broadcast" else self.size)
        return max(0, text // 4 * 3)

    def _give(
        self,
        rank: int,
        data: bytes,
        how: Literal["all_gather", "gather", "broadcast"],
        root: int,
        timeout: Timeout | None,
    ) -> Any:
        for what, number in (("rank", rank), ("root", root)):
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < self.size:
                raise ValueError(f"the {what} of {self._object.title} must be 0 to {self.size - 1}, not {number!r}")
        if not isinstance(data, bytes):
            raise TypeError(f"the data of rank {rank} in {self._object.title} must be bytes, not {type(data).__name__}")
        most = self._most(how)
        if len(data) > most:
            what = f"the data of rank {rank} of {self.size} for exchange"
            raise LimitExceeded(what=what, key=self._object.name, size=len(data), limit=most)
        command = exchange.ExchangeGive(self.size, rank, data, how, root)
        deadline = self._object.deadline(timeout)
        return self._object.perform(str(rank), command, exchange.ExchangeWithdraw, deadline, self._progress)[1]
