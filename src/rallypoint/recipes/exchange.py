"""Exchange: every rank gives bytes, and gets those of the others, in one round trip.

On our server it leaves nothing behind. On another store it keeps one key, `exchange:NAME`, with what was given last and
what is given now, as text: both must fit into one value, so a rank may give less there. More is refused before anything
is sent, by a rule that is the same for all ranks and all rounds: what each would give if all gave as much.
"""

from __future__ import annotations

from typing import Any, Literal

from rallypoint.core import exchange
from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.deadline import Timeout
from rallypoint.errors import LimitExceeded
from rallypoint.recipes.hosting import Object, Progress, Recipe
from rallypoint.recipes.members import count_of

__all__ = ["Exchange"]

STATE_BYTES, CALL_BYTES = 16_384, 320
"""What the state has beside the data: once, and of each rank (its call in this round and in the last)."""


class Exchange(Recipe):
    """Collectives of small data among `size` ranks, as often as they like, in the same order on all of them.

    A rank that is restarted while its old session lives on, and gives other bytes, waits for that session's end; then
    its bytes count. Until then the round is not complete.

    On our server a rank may give 8 MiB. On a store that only has bytes, all ranks together may give about 3 MiB, and
    each of them its share of that, a broadcast's root all of it. Raises LimitExceeded for more.
    """

    def __init__(self, store: Any, name: str, size: int, progress: Progress | None = None) -> None:
        self.size = count_of(size, "ranks")
        self._object = Object("exchange", store, name)
        self._on_server = self._object.statistics().hosted_by == "server"
        self._progress = progress

    def all_gather(self, rank: int, data: bytes, timeout: Timeout | None = None) -> list[bytes]:
        """Give `data`, and return what all ranks gave, in their order.

        Raises MembersMissing when not all came in time, MembersLost at once when one dies that had given.
        """
        return list(self._give(rank, data, "all_gather", 0, timeout))

    def gather(self, rank: int, data: bytes, root: int = 0, timeout: Timeout | None = None) -> list[bytes] | None:
        """Give `data`; the root returns what all ranks gave, the others None once all have."""
        answer = self._give(rank, data, "gather", root, timeout)
        return None if answer is None else list(answer)

    def broadcast(self, rank: int, data: bytes = b"", root: int = 0, timeout: Timeout | None = None) -> bytes:
        """Return what the root gave, once all ranks have come; the data of others is not looked at."""
        return bytes(self._give(rank, data if rank == root else b"", "broadcast", root, timeout))

    def _most(self, how: str) -> int:
        """Return how many bytes a rank may give; to a broadcast, its root."""
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
                raise ValueError(f"the {what} in {self._object.thing} must be 0 to {self.size - 1}, not {number!r}")
        if not isinstance(data, bytes):
            raise TypeError(f"rank {rank} must give bytes to {self._object.thing}, not {type(data).__name__}")
        most = self._most(how)
        if len(data) > most:
            what = f"what rank {rank} of {self.size} gives to exchange"
            raise LimitExceeded(what=what, key=self._object.name, size=len(data), limit=most)
        command = exchange.Give(self.size, rank, data, how, root)
        deadline = self._object.deadline(timeout)
        return self._object.perform(str(rank), command, exchange.TakeBack, deadline, self._progress)[1]
