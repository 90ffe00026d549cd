"""Records all calls and checks their outcomes.

It does not use the machines' states, with two exceptions: at the end it asks them why a process still waits, and
`check_loss` compares a barrier or exchange before and after the loss of a session.

- Lock: fences are unique; a holder whose session lives has a larger fence than all before, and is the only one.
- Barrier: for each released call, every member had an arrival that overlapped it in time; each arrival serves one
  round.
- Exchange: all contributions of a result were pending at one moment, the rank's own among them, and all ranks of the
  round get the same result. A rank is not refused because of the bytes of an earlier process.
- Work queue: an item has one holder, is not delivered after it was done, and is done once. A holder whose session lives
  can finish its item.
- Membership: one view per epoch; ids are never reused; reverse maps match the maps.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from rallypoint.core.machines.barrier import BarrierArrive
from rallypoint.core.machines.exchange import ExchangeGive
from rallypoint.core.machines.machine import Call, Command, Done, Refused
from rallypoint.core.machines.membership import MembershipJoin
from rallypoint.testing.simulation.simulator import INTERRUPTED, NEVER, ScheduledProcess, Simulator, Violation

LOST = "session lost"
MEETINGS = ("barrier", "exchange")
UNKNOWN = (None, LOST, INTERRUPTED)
"""Outcomes of calls that may or may not have completed."""


class CheckedCall(Struct, eq=False):
    """One call: its command, its start and end, and its outcome (None: unknown)."""

    process: ScheduledProcess
    key: str
    call: Call
    command: Command
    began: int
    ended: float = NEVER
    outcome: Any = None
    fence: int = 0

    def overlaps(self, other: CheckedCall) -> bool:
        return self.began <= other.ended and other.began <= self.ended


class CallChecker(Struct, eq=False):
    """All calls of one simulation."""

    simulator: Simulator
    size: int
    entries: list[CheckedCall] = field(default_factory=list)
    holders: dict[str, CheckedCall] = field(default_factory=dict)
    fences: dict[int, str] = field(default_factory=dict)
    members: dict[str, CheckedCall] = field(default_factory=dict)
    """Members that have joined and not begun to leave, by call."""

    workers: dict[str, CheckedCall] = field(default_factory=dict)
    """The calls that hold an item, by item."""

    finished: dict[str, str] = field(default_factory=dict)
    """The items that were done, each with the call that held it."""

    views: dict[int, Any] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    epochs: dict[ScheduledProcess, int] = field(default_factory=dict)

    def begin(self, process: ScheduledProcess, key: str, call: Call, command: Command) -> CheckedCall:
        """Record the start of a call."""
        entry = CheckedCall(process, key, call, command, self.simulator.step)
        self.entries.append(entry)
        self.simulator.note("begin", str(process), call.id, command)
        return entry

    def end(self, entry: CheckedCall, outcome: Any) -> None:
        """Record the outcome of a call."""
        entry.ended, entry.outcome = self.simulator.step, outcome
        self.simulator.note("end", str(entry.process), entry.call.id, outcome)

    def session_lost(self, process: ScheduledProcess) -> None:
        """Record that a process has learned that its session is over."""
        self.simulator.note("session lost", str(process))
        for entry in self.entries:
            if entry.call.session == process.session and entry.outcome is None:
                self.end(entry, LOST)
        for kept in (self.holders, self.members, self.workers):
            for name in [name for name, entry in kept.items() if entry.call.session == process.session]:
                del kept[name]

    # The lock

    def holds(self, entry: CheckedCall, fence: int) -> None:
        """Check that a call may hold the lock."""
        self.simulator.note("holds", str(entry.process), entry.call.id, fence)
        entry.fence = fence
        if self.fences.setdefault(fence, entry.call.id) != entry.call.id:
            raise Violation(f"fence {fence} of {entry.call.id} was that of {self.fences[fence]}")
        if self._may_be_dead(entry):
            return
        if fence < max(self.fences):
            raise Violation(f"fence {fence} of {entry.call.id} is not larger than {max(self.fences)}")
        for other in self.holders.values():
            if not self._may_be_dead(other):
                raise Violation(f"{entry.call.id} holds while {other.call.id} does")
        self.holders[entry.call.id] = entry

    def lets_go(self, entry: CheckedCall) -> None:
        """Record that a holder begins to release the lock."""
        self.holders.pop(entry.call.id, None)

    def released(self, entry: CheckedCall, outcome: Any, repeated: bool) -> None:
        """Check that a living holder held the lock until it released it."""
        self.end(entry, outcome)
        if entry.fence and not repeated and not self._may_be_dead(entry) and outcome != Done(True):
            raise Violation(f"{entry.call.id} held the lock until it released it, and got {outcome}")

    def _may_be_dead(self, entry: CheckedCall) -> bool:
        """Return whether the session was, or may have been, declared dead."""
        return entry.call.session in self.simulator.doubtful

    # The work queue

    def works_on(self, entry: CheckedCall, item: str) -> None:
        """Check that a call may have an item."""
        self.simulator.note("works on", str(entry.process), entry.call.id, item)
        if item in self.finished and not self._may_be_dead(entry):
            raise Violation(f"{entry.call.id} got item {item}, which {self.finished[item]} had finished")
        other = self.workers.get(item)
        if other is not None and not self._may_be_dead(other) and not self._may_be_dead(entry):
            raise Violation(f"{entry.call.id} got item {item}, which {other.call.id} has")
        self.workers[item] = entry

    def lets_item_go(self, entry: CheckedCall, item: str) -> None:
        """Record that a call begins to finish its item, or to give it back."""
        if self.workers.get(item) is entry:
            del self.workers[item]

    def settled(self, entry: CheckedCall, item: str, outcome: Any, repeated: bool, done: bool) -> None:
        """Check that a living holder could settle its item, and that no item is done twice."""
        self.end(entry, outcome if isinstance(outcome, Done) else LOST)
        if isinstance(outcome, Refused):
            if not repeated and not self._may_be_dead(entry):
                raise Violation(f"{entry.call.id} had item {item}, and got {outcome}")
        elif done and self.finished.setdefault(item, entry.call.id) != entry.call.id:
            raise Violation(f"{entry.call.id} finished item {item}, and so did {self.finished[item]}")

    # Membership

    def epoch_of(self, process: ScheduledProcess) -> int:
        """Return the last epoch that a process saw."""
        return self.epochs.get(process, 0)

    def saw(self, process: ScheduledProcess, view: Any, entry: CheckedCall | None = None) -> None:
        """Check a view; a member that has joined must be in it."""
        epoch = view["epoch"]
        if epoch < self.epoch_of(process) and view["members"]:
            raise Violation(f"{process} saw epoch {self.epoch_of(process)}, and then {epoch}")
        self.epochs[process] = epoch
        if self.views.setdefault(epoch, view) != view:
            raise Violation(f"two views of epoch {epoch}: {view} and {self.views[epoch]}")
        if entry is not None:
            own = view["members"].get(entry.call.member)
            if own is None or self.ids.setdefault(own["id"], entry.call.id) != entry.call.id:
                raise Violation(f"{entry.call.id} joined, and its view is {view} (ids {self.ids})")
            self.members[entry.call.id] = entry
        check_maps(view["members"])

    def watched(self, process: ScheduledProcess, entry: CheckedCall, answer: Any) -> None:
        """Check the answer of a watch."""
        view, events, every = answer
        since = entry.command.epoch  # type: ignore[attr-defined]
        if view["epoch"] == since:
            raise Violation(f"the watch of {entry.call.id} ended in the epoch {since} that it began with")
        if any(event[3] <= since for event in events):
            raise Violation(f"{entry.call.id} got events before epoch {since}: {events}")
        before = self.views.get(since, {"members": {}} if since == 0 else None)
        if every and before is not None:
            members = {name: one["id"] for name, one in before["members"].items()}
            for what, name, number, _, _ in events:
                if what == "joined":
                    members[name] = number
                elif members.pop(name, None) != number:
                    raise Violation(f"{name} {number} left without having joined: {events}")
            if members != {name: one["id"] for name, one in view["members"].items()}:
                raise Violation(f"the events do not lead to the view: {before} {events} {view}")
        self.saw(process, view)

    def leaves(self, entry: CheckedCall) -> None:
        """Record that a member begins to leave."""
        self.members.pop(entry.call.id, None)

    def left(self, entry: CheckedCall, outcome: Any, repeated: bool) -> None:
        """Check that a member that left was in the group."""
        self.simulator.note("left", entry.call.id, outcome)
        if not repeated and not self._may_be_dead(entry) and outcome != Done(True):
            raise Violation(f"{entry.call.id} left, and got {outcome}")

    # Barriers and exchanges, at the end

    def judge(self) -> None:
        """Check all refusals, barriers and exchanges."""
        for entry in self.entries:
            if not isinstance(entry.outcome, Refused):
                continue
            if entry.outcome.error == "MembersLost":
                self._judge_lost(entry)
            elif isinstance(entry.command, MembershipJoin):
                self._judge_join(entry)
            elif not _asks_for_something_else(entry):
                raise Violation(f"{entry.call.id} was refused: {entry.outcome}")
        self._judge_barrier([entry for entry in self.entries if isinstance(entry.command, BarrierArrive)])
        self._judge_exchange([entry for entry in self.entries if isinstance(entry.command, ExchangeGive)])

    def _judge_join(self, entry: CheckedCall) -> None:
        """Check that no join is refused because of a dead process's name."""
        if entry.outcome.error == "NameTaken" and self.simulator.host.waits_for_the_dead:
            raise Violation(f"{entry.call.id} was refused: {entry.outcome}")

    def _judge_lost(self, entry: CheckedCall) -> None:
        """Check that a broken round names members that came to it and then stopped."""
        names = entry.outcome.fields["lost"]
        stopped = {one.call.member for one in self.entries if one.key == entry.key and self._may_be_dead(one)}
        if not names or not set(names) <= stopped:
            raise Violation(f"{entry.call.id} got {names} as lost; {sorted(stopped)} are")

    def _judge_barrier(self, entries: list[CheckedCall]) -> None:
        through = [entry for entry in entries if entry.outcome == Done()]
        counts = [entry for entry in entries if entry.outcome in (*UNKNOWN, Done())]
        for process in {entry.process: None for entry in through}:
            for member in map(str, range(self.size)):
                used: set[int] = set()
                theirs = sorted((one for one in counts if one.call.member == member), key=lambda one: one.ended)
                for mine in (entry for entry in through if entry.process is process):
                    fits = [one for one in theirs if id(one) not in used and one.overlaps(mine)]
                    if not fits:
                        raise Violation(f"{mine.call.id} went through the barrier, and {member} had not arrived")
                    used.add(id(fits[0]))

    def _judge_exchange(self, entries: list[CheckedCall]) -> None:
        given = {entry.call.id.encode(): entry for entry in entries}
        round_of: dict[bytes, tuple[bytes, ...]] = {}
        for entry in entries:
            if not isinstance(entry.outcome, Done) or entry.outcome.answer is None:
                continue
            answer, how = entry.outcome.answer, entry.command.how  # type: ignore[attr-defined]
            got = [answer] if how == "broadcast" else answer
            gives = [given[data] for data in got]
            together = [*gives, entry]
            if max(one.began for one in together) > min(one.ended for one in together):
                raise Violation(f"{entry.call.id} got {got}, which were not given in one round")
            if any(one.outcome not in UNKNOWN and not isinstance(one.outcome, Done) for one in gives):
                raise Violation(f"{entry.call.id} got {got}, of which some was taken back or refused")
            if how == "broadcast":
                ranks, expected = [gives[0].call.member], [str(entry.command.root)]  # type: ignore[attr-defined]
            else:
                ranks, expected = [one.call.member for one in gives], [str(rank) for rank in range(self.size)]
            if ranks != expected:
                raise Violation(f"{entry.call.id} got {got}, which are of ranks {ranks}")
            if how != "broadcast" and entry.call.id.encode() not in got:
                raise Violation(f"{entry.call.id} got {got}, and nothing of its own")
            for data in got:
                if how != "broadcast" and round_of.setdefault(data, tuple(got)) != tuple(got):
                    raise Violation(f"{data!r} was in two rounds: {got} and {round_of[data]}")


def _asks_for_something_else(entry: CheckedCall) -> bool:
    """Return whether a rank was refused for requesting another collective: it restarted at another line."""
    return isinstance(entry.command, ExchangeGive) and entry.outcome.fields.get("what") == "exchange"


def check_loss(before: Any, after: Any, session: str) -> None:
    """Check that nobody goes on waiting at a barrier or exchange that has lost a member."""
    if before.kind not in MEETINGS:
        return
    calls = [call if isinstance(call, Call) else call[1] for call in before.calls.values()]
    gone = {call.member for call in calls if call.session == session}
    gone -= {call.member for call in calls if call.session != session}
    gone -= {call.member for _, call in getattr(before, "held", {}).values() if call.session != session}
    if gone and any(after.holds(call.id) for call in calls):
        raise Violation(f"the {before.kind} lost {sorted(gone)}, and {list(map(str, calls))} wait on")


def check_maps(members: dict[str, Any]) -> None:
    """Check that maps match devices, and reverse maps match maps."""
    for name, one in members.items():
        for peer, way in one["device_maps"].items():
            if peer not in members:
                continue
            there = members[peer]
            fits = set(way) <= set(one["devices"]) and set(way.values()) <= set(there["devices"])
            if not fits or {mine: theirs for theirs, mine in there["reverse_maps"][name].items()} != way:
                raise Violation(f"the map of {name} for {peer} does not match: {members}")
        if any(name not in members[peer]["device_maps"] for peer in one["reverse_maps"]):
            raise Violation(f"{name} has a reverse map without a map: {members}")
