"""The exchange machine: every rank gives bytes, and once all have, every rank gets its result.

One round is one collective of `size` ranks: all-gather (each rank gets everything, in rank order), gather (the root
does) or broadcast (each rank gets the root's bytes). All ranks of a round must ask for the same collective. As at a
barrier, a rank that gives up takes back its bytes, and a rank that is lost after it gave breaks the round for all. For
calls that have yet to check, the last result is kept until the next round completes; broken rounds are kept per rank.

A rank may give twice in one round: a process was killed and restarted while its old session lives on.
- The same bytes count once, whichever process gives them.
- Different bytes from the same process, in the same session or after it lost that one, replace the earlier ones, whose
  call is refused.
- Different bytes from another session are *held*: the call waits until the session in place ends or gives up, then
  takes the place with its own bytes; the round does not break. A round is not complete while a call is held, so no rank
  gets the bytes of a dead process whose successor is here.

Rejected: refusing different bytes from another session. The returning rank is right, and only has to wait for the grace
period.
Rejected: giving the place to the newest call at once. Two live processes with one rank would keep taking it from each
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from rallypoint.core.limits import MAX_VALUE_BYTES
from rallypoint.core.machines.broken_round import Broken, broken_for
from rallypoint.core.machines.machine import (
    MAX_MEMBERS,
    WAIT,
    WAITS_STEP,
    Call,
    Command,
    Done,
    Machine,
    Refused,
    Step,
    Undo,
    Waiting,
    disagreement,
    explain_missing,
)

__all__ = ["ExchangeMachine", "ExchangeGive", "ExchangeWithdraw"]

REPLACED = 64
"""How many replaced calls are remembered."""


class ExchangeGive(Command, tag="exchange.give"):
    """Give this rank's bytes, and wait for the result."""

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


class ExchangeWithdraw(Undo, tag="exchange.take_back"):
    """Take back the bytes, unless the round has ended."""


class ExchangeMachine(Machine, kw_only=True):
    """The bytes given in this round, and the results of earlier rounds."""

    kind = "exchange"

    wanted: ExchangeGive | None = None
    """The collective of this round: its first command, without data."""

    data: dict[int, bytes] = field(default_factory=dict)
    calls: dict[str, tuple[int, Call]] = field(default_factory=dict)
    withdrawn: dict[str, None] = field(default_factory=dict)
    """The ranks that gave to this round and took it back."""

    ended: dict[str, int] = field(default_factory=dict)
    """The calls of the last completed round, and their ranks."""

    how: str = ""
    root: int = 0
    result: list[bytes] = field(default_factory=list)
    broken: dict[str, Broken] = field(default_factory=dict)
    """For each member of rounds that broke since then, the last of these rounds."""

    held: dict[str, tuple[ExchangeGive, Call]] = field(default_factory=dict)
    """Calls that wait for another session to give up the place of their rank."""

    replaced: dict[str, str] = field(default_factory=dict)
    """Replaced calls, and the later call of the same process that took each place."""

    def apply(self, call: Call, command: ExchangeGive | ExchangeWithdraw, stamp: int) -> Step:
        """Give, recheck, or take back."""
        if isinstance(command, ExchangeWithdraw):
            return self._withdraw(call, f"{call.session}/{command.call}")
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
            return Step(WAIT, True, replaced) if replaced else WAITS_STEP
        woken, told = self._finish()
        others = [other for other in woken if other is not call]
        return Step(self._due(command.rank), True, [*replaced, *others], None if replaced else told)

    def admit_all(self, calls: Mapping[str, Call], commands: Sequence[ExchangeGive]) -> bool:
        """Admit ranks that have not given yet, if they agree with the others and do not end the round."""
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
        self.wanted = ExchangeGive(size, 0, b"", how, root)
        self.data.update(given)
        for (call_id, call), rank in zip(calls.items(), given, strict=True):
            self.calls[call_id] = (rank, call)
            self.withdrawn.pop(str(rank), None)
        return True

    def session_ended(self, session: str, stamp: int) -> Step:
        """Break the round if a rank that gave is lost, unless its held successor takes the place."""
        theirs = [(rank, call) for rank, call in self.calls.values() if call.session == session]
        held = [call_id for call_id, (_, call) in self.held.items() if call.session == session]
        if not theirs and not held:
            return Step(Done())
        for call_id in held:
            del self.held[call_id]
        heirs = {give.rank for give, _ in self.held.values()}
        gone = [(rank, call) for rank, call in theirs if self._remove_contribution(rank, call.id)]
        lost = [str(call) for rank, call in gone if rank not in heirs]
        if not lost:
            return self._settled()
        woken = self._end([], lost)
        return self._settled(woken, Refused("MembersLost", {"lost": lost}))

    def holds(self, call_id: str) -> bool:
        """Return whether a call waits."""
        return call_id in self.calls or call_id in self.held

    def sessions(self) -> set[str]:
        """Return the sessions of the calls that have given or are held."""
        return {call.session for calls in (self.calls, self.held) for _, call in calls.values()}

    def explain(self, call: Call) -> Waiting:
        """Name the missing ranks, or the earlier process that holds this rank's place."""
        if call.id in self.held:
            give, _ = self.held[call.id]
            return Waiting(_place_taken(give.rank, self._holders(give.rank)[0]))
        size = 0 if self.wanted is None else self.wanted.size
        missing = [str(rank) for rank in range(size) if rank not in self.data]
        so_far = f"{len(self.data)} of {size} ranks have contributed"
        if not missing and self.held:
            give, other = next(iter(self.held.values()))
            taken = _place_taken(give.rank, self._holders(give.rank)[0])
            return Waiting(f"{so_far}; {other} waits to contribute for rank {give.rank}, but {taken}")
        return explain_missing(so_far, missing, self.withdrawn)

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self.calls and not self.held

    def _refuse(self, call: Call, command: ExchangeGive) -> Refused | None:
        if command.rank >= command.size or command.root >= command.size:
            wrong = command.rank if command.rank >= command.size else command.root
            return Refused("NotAMember", {"member": str(wrong), "members": f"{command.size} ranks, from 0"})
        wanted = self.wanted
        if wanted is None or self._agrees(command):
            return None
        given = [*self.calls.values(), *((give.rank, other) for give, other in self.held.values())]
        others = [other for rank, other in given if rank != command.rank or not call.owns(other)]
        return disagreement("exchange", str(command), str(wanted), others[0]) if others else None

    def _agrees(self, command: ExchangeGive) -> bool:
        wanted = self.wanted
        return wanted is None or (wanted.size, wanted.how, wanted.root) == (command.size, command.how, command.root)

    def _holders(self, rank: int) -> list[Call]:
        return [call for other, call in self.calls.values() if other == rank]

    def _rivals(self, call: Call, command: ExchangeGive) -> list[Call]:
        """Return the calls of other processes that gave different bytes for this rank."""
        if self.data.get(command.rank, command.data) == command.data:
            return []
        return [other for other in self._holders(command.rank) if not call.owns(other)]

    def _enter(self, call: Call, command: ExchangeGive) -> list[Call]:
        """Give a call its rank's place; return the replaced calls of the same process."""
        replaced = []
        if command.rank in self.data and not (self._agrees(command) and self.data[command.rank] == command.data):
            replaced = self._holders(command.rank)
            for other in replaced:
                del self.calls[other.id]
                self.replaced[other.id] = str(call)
            self.replaced = dict(list(self.replaced.items())[-REPLACED:])
        self.wanted = ExchangeGive(command.size, 0, b"", command.how, command.root)
        self.calls[call.id] = (command.rank, call)
        self.data[command.rank] = command.data
        self.withdrawn.pop(str(command.rank), None)
        return replaced

    @property
    def _complete(self) -> bool:
        return self.wanted is not None and len(self.data) == self.wanted.size and not self.held

    def _finish(self) -> tuple[list[Call], Done | None]:
        """End a complete round; return the waiting calls, and their result if all get the same."""
        assert self.wanted is not None
        woken = self._end([self.data[rank] for rank in range(self.wanted.size)], [])
        return woken, None if self.how == "gather" else self._due(0)

    def _settled(self, woken: Sequence[Call] = (), told: Refused | None = None) -> Step:
        """After calls are gone: let held calls take their places, and end the round if it is complete."""
        woken = list(woken)
        for call_id, (give, call) in list(self.held.items()):
            if not self._rivals(call, give):
                del self.held[call_id]
                woken += self._enter(call, give)
        if not self._complete:
            return Step(Done(), True, woken, told)
        finished, all_told = self._finish()
        return Step(Done(), True, [*woken, *finished], None if woken else all_told)

    def _withdraw(self, call: Call, given: str) -> Step:
        if self.held.pop(given, None) is not None:
            return self._settled()
        if given in self.calls:
            rank, _ = self.calls[given]
            if self._remove_contribution(rank, given):
                self.withdrawn[str(rank)] = None
            step = self._settled()
            if not self.calls:
                self.withdrawn = {}  # nobody is left to inform
            return step
        over = self._how_it_ended(call, given)
        return Step(over if isinstance(over, Refused) else Done(None if over is None else [over.answer]))

    def _remove_contribution(self, rank: int, call: str) -> bool:
        """Remove a call; return whether its rank's bytes went with it."""
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
        """Return the outcome of a contribution, if its round has ended."""
        if given in self.ended:
            return self._due(self.ended[given])
        if given in self.replaced:
            other = f"{self.replaced[given]}, by a later call of the same process"
            return Refused("NameTaken", {"member": call.member, "other": other})
        broken = self.broken.get(call.member)
        return Refused("MembersLost", {"lost": broken.lost}) if broken and given in broken.calls else None

    def _due(self, rank: int) -> Done:
        """Return a rank's result of the last completed round."""
        answer: Any = self.result
        if self.how == "broadcast":
            answer = self.result[self.root]
        elif self.how == "gather" and rank != self.root:
            answer = None
        return Done(answer)


def _place_taken(rank: int, holder: Call) -> str:
    """Return which process still holds the place of a rank that came again."""
    process = holder.where or f"of session {holder.session}"
    return f"rank {rank}'s earlier process {process} still holds the place until its session ends"


ExchangeGive.machine = ExchangeWithdraw.machine = ExchangeMachine
