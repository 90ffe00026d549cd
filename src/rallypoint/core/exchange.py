"""The exchange machine: every rank gives bytes, and when all have, every rank gets what it is due.

One round is one collective of `size` ranks: all-gather (each gets everything, in rank order), gather (the root does) or
broadcast (each gets what the root gave). All ranks of a round must ask for the same one. As at a barrier, a rank that
gives up takes back what it gave, and one that is lost after it gave breaks the round for all. For those who have not
looked yet, what the last round came to is kept until the next one is complete; those that broke are kept by rank.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from rallypoint.core.barrier import Broken, broken_for
from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machine import (
    MAX_MEMBERS,
    WAIT,
    Call,
    Command,
    Done,
    Machine,
    Refused,
    Step,
    Undo,
    Waiting,
    disagreement,
    waiting_for,
)

__all__ = ["Exchange", "Give", "TakeBack"]


class Give(Command, tag="exchange.give"):
    """Give what this rank has, and wait for the result."""

    size: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)]
    rank: Annotated[int, Meta(ge=0)]
    data: Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
    how: Literal["all_gather", "gather", "broadcast"]
    root: Annotated[int, Meta(ge=0)] = 0

    @property
    def weight(self) -> int:
        """The bytes that it gives."""
        return len(self.data)

    def __str__(self) -> str:
        return f"{self.how} of {self.size} ranks" + (f" with root {self.root}" if self.how != "all_gather" else "")


class TakeBack(Undo, tag="exchange.take_back"):
    """Take back what was given, unless the round has ended."""


class Exchange(Machine, kw_only=True):
    """What was given in this round, and what those before came to."""

    kind = "exchange"

    wanted: Give | None = None
    """What this round is: the first command of it, without its data."""

    data: dict[int, bytes] = field(default_factory=dict)
    calls: dict[str, tuple[int, Call]] = field(default_factory=dict)
    withdrawn: dict[str, None] = field(default_factory=dict)
    """The ranks that gave to this round and took it back."""

    ended: dict[str, int] = field(default_factory=dict)
    """The calls of the last round that was complete, and their ranks."""

    how: str = ""
    root: int = 0
    result: list[bytes] = field(default_factory=list)
    broken: dict[str, Broken] = field(default_factory=dict)
    """Of members that gave to rounds that broke since, the last of these."""

    def apply(self, call: Call, command: Give | TakeBack, stamp: int) -> Step:
        """Give, look, or take back."""
        if isinstance(command, TakeBack):
            return self._take_back(call, f"{call.session}/{command.call}")
        call_id = call.id
        if call_id in self.calls:
            return Step(WAIT)
        over = self._how_it_ended(call, call_id)
        if over is not None:
            return Step(over)
        refusal = self._refuse(call, command)
        if refusal is not None:
            return Step(refusal)
        self.wanted = Give(command.size, 0, b"", command.how, command.root)
        self.calls[call_id] = (command.rank, call)
        self.data[command.rank] = command.data
        self.withdrawn.pop(str(command.rank), None)
        if len(self.data) < command.size:
            return Step(WAIT, True)
        woken = self._end([self.data[rank] for rank in range(command.size)], [])
        told = None if self.how == "gather" else self._due(command.rank)
        return Step(self._due(command.rank), True, [other for other in woken if other is not call], told)

    def lost(self, session: str, stamp: int) -> Step:
        """Break the round if a rank that had given is lost."""
        theirs = [(rank, call) for rank, call in self.calls.values() if call.session == session]
        if not theirs:
            return Step(Done())
        lost = [str(call) for rank, call in theirs if self._gone(rank, call.id)]
        if not lost:
            return Step(Done(), True)
        return Step(Done(), True, self._end([], lost), Refused("MembersLost", {"lost": lost}))

    def keeps(self, call_id: str) -> bool:
        """Say whether a call waits."""
        return call_id in self.calls

    def sessions(self) -> set[str]:
        """Return the sessions of those who have given."""
        return {call.session for _, call in self.calls.values()}

    def why(self, call: Call) -> Waiting:
        """Name the ranks that are missing."""
        size = 0 if self.wanted is None else self.wanted.size
        missing = [str(rank) for rank in range(size) if rank not in self.data]
        return waiting_for(f"{len(self.data)} of {size} ranks have given", missing, self.withdrawn)

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self.calls

    def _refuse(self, call: Call, command: Give) -> Refused | None:
        if command.rank >= command.size or command.root >= command.size:
            wrong = command.rank if command.rank >= command.size else command.root
            return Refused("NotAMember", {"member": str(wrong), "members": f"{command.size} ranks, from 0"})
        wanted = self.wanted
        if self.calls and wanted is not None:
            _, other = next(iter(self.calls.values()))
            if (wanted.size, wanted.how, wanted.root) != (command.size, command.how, command.root):
                return disagreement("exchange", str(command), str(wanted), other)
            if command.rank in self.data and self.data[command.rank] != command.data:
                other = next(call for rank, call in self.calls.values() if rank == command.rank)
                return disagreement(f"data of rank {command.rank}", "other bytes", "some bytes", other)
        return None

    def _take_back(self, call: Call, given: str) -> Step:
        if given in self.calls:
            rank, _ = self.calls[given]
            if self._gone(rank, given):
                self.withdrawn[str(rank)] = None
            if not self.calls:
                self.withdrawn = {}  # there is nobody to tell
            return Step(Done(None), True)
        over = self._how_it_ended(call, given)
        return Step(over if isinstance(over, Refused) else Done(None if over is None else [over.answer]))

    def _gone(self, rank: int, call: str) -> bool:
        """Take out a call, and say whether what its rank gave went with it."""
        del self.calls[call]
        if any(other == rank for other, _ in self.calls.values()):
            return False
        del self.data[rank]
        return True

    def _end(self, result: list[bytes], lost: list[str]) -> list[Call]:
        assert self.wanted is not None
        woken = [call for _, call in self.calls.values()]
        if lost:
            self.broken.update(broken_for(woken, lost))
        else:
            self.ended, self.broken = {call: rank for call, (rank, _) in self.calls.items()}, {}
            self.how, self.root, self.result = self.wanted.how, self.wanted.root, result
        self.calls, self.data, self.withdrawn, self.wanted = {}, {}, {}, None
        return woken

    def _how_it_ended(self, call: Call, given: str) -> Done | Refused | None:
        """Say what came of what was given, if its round has ended."""
        if given in self.ended:
            return self._due(self.ended[given])
        broken = self.broken.get(call.member)
        return Refused("MembersLost", {"lost": broken.lost}) if broken and given in broken.calls else None

    def _due(self, rank: int) -> Done:
        """Return what a rank gets of the last round that was complete."""
        answer: Any = self.result
        if self.how == "broadcast":
            answer = self.result[self.root]
        elif self.how == "gather" and rank != self.root:
            answer = None
        return Done(answer)


Give.machine = TakeBack.machine = Exchange
