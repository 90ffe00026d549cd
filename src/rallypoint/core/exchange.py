"""The exchange machine: every rank gives bytes, and when all have, every rank gets what it is due.

One round is one collective of `size` ranks: all-gather (each gets everything, in rank order), gather (the root does) or
broadcast (each gets what the root gave). All ranks of a round must ask for the same one. As at a barrier, a rank that
gives up takes back what it gave, and one that is lost after it gave breaks the round for all. For those who have not
looked yet, what the last round came to is kept until the next one is complete; those that broke are kept by rank.

A rank may give twice in one round: a process that was killed and restarted while its old session lives on.
- The same bytes count once, whoever gives them.
- Other bytes of the same process, in the same session or after it lost that, take the place of those before, whose
  call is refused.
- Other bytes of another session are *held*: the call waits until the session that has the place ends or gives up, and
  then has the place, with its bytes; the round does not break. A round is not complete while a call is held, so nobody
  gets bytes of a dead process when its successor is here.

Rejected: to refuse other bytes of another session. The rank that returns is right, and only has to wait for the grace.
Rejected: to let the newest have the place at once. Two living processes with one rank would take it from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from rallypoint.core.broken_round import Broken, broken_for
from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machine import (
    MAX_MEMBERS,
    WAIT,
    WAITS,
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

REPLACED = 64
"""How many calls are remembered of those that a later call of their own process took the place of."""


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

    held: dict[str, tuple[Give, Call]] = field(default_factory=dict)
    """Calls that wait for another session to give up their rank's place."""

    replaced: dict[str, str] = field(default_factory=dict)
    """Calls whose place a later call of their own process has taken, and that call."""

    def apply(self, call: Call, command: Give | TakeBack, stamp: int) -> Step:
        """Give, look, or take back."""
        if isinstance(command, TakeBack):
            return self._take_back(call, f"{call.session}/{command.call}")
        call_id = call.id
        if call_id in self.calls or call_id in self.held:
            return Step(WAIT)
        over = self._how_it_ended(call, call_id)
        if over is not None:
            return Step(over)
        refusal = self._refuse(call, command)
        if refusal is not None:
            return Step(refusal)
        if self._rivals(call, command):
            self.held[call_id] = command, call
            return Step(WAIT, True)
        replaced = self._enter(call, command)
        if not self._complete:
            return Step(WAIT, True, replaced) if replaced else WAITS
        woken, told = self._finish()
        others = [other for other in woken if other is not call]
        return Step(self._due(command.rank), True, [*replaced, *others], None if replaced else told)

    def take_in(self, calls: Mapping[str, Call], commands: Sequence[Give]) -> bool:
        """Take in what ranks give that have not given yet, if they agree with the others and do not end the round."""
        wanted = self.wanted or commands[0]
        size, how, root = wanted.size, wanted.how, wanted.root
        if self.held or self.broken or root >= size or len(self.data) + len(calls) >= size:
            return False
        given = {command.rank: command.data for command in commands}
        if len(given) < len(calls) or not self.data.keys().isdisjoint(given) or max(given) >= size:
            return False
        if any((command.size, command.how, command.root) != (size, how, root) for command in commands):
            return False
        if not all(ids.isdisjoint(calls) for ids in (self.calls.keys(), self.ended.keys(), self.replaced.keys())):
            return False
        self.wanted = Give(size, 0, b"", how, root)
        self.data.update(given)
        for (call_id, call), rank in zip(calls.items(), given, strict=True):
            self.calls[call_id] = (rank, call)
            self.withdrawn.pop(str(rank), None)
        return True

    def lost(self, session: str, stamp: int) -> Step:
        """Break the round if a rank that had given is lost, unless its successor is held and takes the place."""
        theirs = [(rank, call) for rank, call in self.calls.values() if call.session == session]
        held = [call_id for call_id, (_, call) in self.held.items() if call.session == session]
        if not theirs and not held:
            return Step(Done())
        for call_id in held:
            del self.held[call_id]
        heirs = {give.rank for give, _ in self.held.values()}
        gone = [(rank, call) for rank, call in theirs if self._gone(rank, call.id)]
        lost = [str(call) for rank, call in gone if rank not in heirs]
        if not lost:
            return self._settled()
        woken = self._end([], lost)
        return self._settled(woken, Refused("MembersLost", {"lost": lost}))

    def keeps(self, call_id: str) -> bool:
        """Say whether a call waits."""
        return call_id in self.calls or call_id in self.held

    def sessions(self) -> set[str]:
        """Return the sessions of those who have given, and of those who are held."""
        return {call.session for calls in (self.calls, self.held) for _, call in calls.values()}

    def why(self, call: Call) -> Waiting:
        """Name the ranks that are missing, or the earlier process that has this one's place."""
        if call.id in self.held:
            give, _ = self.held[call.id]
            return Waiting(_place_taken(give.rank, self._holders(give.rank)[0]))
        size = 0 if self.wanted is None else self.wanted.size
        missing = [str(rank) for rank in range(size) if rank not in self.data]
        so_far = f"{len(self.data)} of {size} ranks have given"
        if not missing and self.held:
            give, other = next(iter(self.held.values()))
            taken = _place_taken(give.rank, self._holders(give.rank)[0])
            return Waiting(f"{so_far}; {other} waits to give for rank {give.rank}, but {taken}")
        return waiting_for(so_far, missing, self.withdrawn)

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self.calls and not self.held

    def _refuse(self, call: Call, command: Give) -> Refused | None:
        if command.rank >= command.size or command.root >= command.size:
            wrong = command.rank if command.rank >= command.size else command.root
            return Refused("NotAMember", {"member": str(wrong), "members": f"{command.size} ranks, from 0"})
        wanted = self.wanted
        if wanted is None or self._agrees(command):
            return None
        given = [*self.calls.values(), *((give.rank, other) for give, other in self.held.values())]
        others = [other for rank, other in given if rank != command.rank or not call.owns(other)]
        return disagreement("exchange", str(command), str(wanted), others[0]) if others else None

    def _agrees(self, command: Give) -> bool:
        wanted = self.wanted
        return wanted is None or (wanted.size, wanted.how, wanted.root) == (command.size, command.how, command.root)

    def _holders(self, rank: int) -> list[Call]:
        return [call for other, call in self.calls.values() if other == rank]

    def _rivals(self, call: Call, command: Give) -> list[Call]:
        """Return the calls of other processes that have given other bytes for this rank."""
        if self.data.get(command.rank, command.data) == command.data:
            return []
        return [other for other in self._holders(command.rank) if not call.owns(other)]

    def _enter(self, call: Call, command: Give) -> list[Call]:
        """Let a call have its rank's place; return the calls of its own process that had it and gave something else."""
        replaced = []
        if command.rank in self.data and not (self._agrees(command) and self.data[command.rank] == command.data):
            replaced = self._holders(command.rank)
            for other in replaced:
                del self.calls[other.id]
                self.replaced[other.id] = str(call)
            self.replaced = dict(list(self.replaced.items())[-REPLACED:])
        self.wanted = Give(command.size, 0, b"", command.how, command.root)
        self.calls[call.id] = (command.rank, call)
        self.data[command.rank] = command.data
        self.withdrawn.pop(str(command.rank), None)
        return replaced

    @property
    def _complete(self) -> bool:
        return self.wanted is not None and len(self.data) == self.wanted.size and not self.held

    def _finish(self) -> tuple[list[Call], Done | None]:
        """End a complete round; return those who waited, and what they get if that is the same for all."""
        assert self.wanted is not None
        woken = self._end([self.data[rank] for rank in range(self.wanted.size)], [])
        return woken, None if self.how == "gather" else self._due(0)

    def _settled(self, woken: Sequence[Call] = (), told: Refused | None = None) -> Step:
        """After calls are gone: let those that were held have their places, and end the round if it is complete."""
        woken = list(woken)
        for call_id, (give, call) in list(self.held.items()):
            if not self._rivals(call, give):
                del self.held[call_id]
                woken += self._enter(call, give)
        if not self._complete:
            return Step(Done(), True, woken, told)
        finished, all_told = self._finish()
        return Step(Done(), True, [*woken, *finished], None if woken else all_told)

    def _take_back(self, call: Call, given: str) -> Step:
        if self.held.pop(given, None) is not None:
            return self._settled()
        if given in self.calls:
            rank, _ = self.calls[given]
            if self._gone(rank, given):
                self.withdrawn[str(rank)] = None
            step = self._settled()
            if not self.calls:
                self.withdrawn = {}  # there is nobody to tell
            return step
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
        if given in self.replaced:
            other = f"{self.replaced[given]}, by a later call of the same process"
            return Refused("NameTaken", {"member": call.member, "other": other})
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


def _place_taken(rank: int, holder: Call) -> str:
    """Say whose end a rank that came again waits for."""
    process = holder.where or f"of session {holder.session}"
    return f"rank {rank}'s earlier process {process} still holds the place; it ends with its session"


Give.machine = TakeBack.machine = Exchange
