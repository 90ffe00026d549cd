"""What everybody asked and was told, and whether that can be true.

It knows nothing of the machines' states, with two exceptions: at the end it asks them why somebody still waits, and
`check_loss` compares what a meeting was before and after it heard of a loss.

- Lock: no two calls have one fence; who is told that it holds, while its session lives, has a larger fence than anyone
  before, and nobody else that lives holds.
- Barrier: for one who was let through there was, for every member, an arrival that was under way at the same time; and
  each arrival served one round.
- Exchange: all that a rank got was given by calls that were under way at one same moment, its own among them, and
  whoever got anything of that round got the same. Nobody is refused for what an earlier process of its rank gave.
- Roster: one epoch, one view; ids are never used again; the ways back fit the maps.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from rallypoint.core.barrier import Arrive
from rallypoint.core.exchange import Give
from rallypoint.core.machine import Call, Command, Done, Refused
from rallypoint.core.roster import Join

from .world import NEVER, Process, World, Wrong

LOST = "session lost"
INTERRUPTED = "interrupted"
MEETINGS = ("barrier", "exchange")
UNKNOWN = (None, LOST, INTERRUPTED)
"""What a call came to of which nobody knows whether it came true."""


class Entry(Struct, eq=False):
    """One call: what, when from, when to, and what came of it (None: nobody knows)."""

    process: Process
    key: str
    call: Call
    command: Command
    began: int
    ended: float = NEVER
    outcome: Any = None
    fence: int = 0

    def overlaps(self, other: Entry) -> bool:
        return self.began <= other.ended and other.began <= self.ended


class Ledger(Struct, eq=False):
    """All calls of one world."""

    world: World
    size: int
    entries: list[Entry] = field(default_factory=list)
    holders: dict[str, Entry] = field(default_factory=dict)
    fences: dict[int, str] = field(default_factory=dict)
    members: dict[str, Entry] = field(default_factory=dict)
    """Who has joined, by the call, and not begun to leave."""

    views: dict[int, Any] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    epochs: dict[Process, int] = field(default_factory=dict)

    def begin(self, process: Process, key: str, call: Call, command: Command) -> Entry:
        """Write down that a call is made."""
        entry = Entry(process, key, call, command, self.world.step)
        self.entries.append(entry)
        self.world.note("begin", str(process), call.id, command)
        return entry

    def end(self, entry: Entry, outcome: Any) -> None:
        """Write down what came of a call."""
        entry.ended, entry.outcome = self.world.step, outcome
        self.world.note("end", str(entry.process), entry.call.id, outcome)

    def session_lost(self, process: Process) -> None:
        """Write down that a process was told that its session is over."""
        self.world.note("session lost", str(process))
        for entry in self.entries:
            if entry.call.session == process.session and entry.outcome is None:
                self.end(entry, LOST)
        for kept in (self.holders, self.members):
            for name in [name for name, entry in kept.items() if entry.call.session == process.session]:
                del kept[name]

    # The lock

    def holds(self, entry: Entry, fence: int) -> None:
        """Check that one may hold."""
        self.world.note("holds", str(entry.process), entry.call.id, fence)
        entry.fence = fence
        if self.fences.setdefault(fence, entry.call.id) != entry.call.id:
            raise Wrong(f"fence {fence} of {entry.call.id} was that of {self.fences[fence]}")
        if self._may_be_dead(entry):
            return
        if fence < max(self.fences):
            raise Wrong(f"fence {fence} of {entry.call.id} is not larger than {max(self.fences)}")
        for other in self.holders.values():
            if not self._may_be_dead(other):
                raise Wrong(f"{entry.call.id} holds while {other.call.id} does")
        self.holders[entry.call.id] = entry

    def lets_go(self, entry: Entry) -> None:
        """Write down that one holds no more, as far as it knows."""
        self.holders.pop(entry.call.id, None)

    def released(self, entry: Entry, outcome: Any, repeated: bool) -> None:
        """Check that one who lives was the holder until it released."""
        self.end(entry, outcome)
        if entry.fence and not repeated and not self._may_be_dead(entry) and outcome != Done(True):
            raise Wrong(f"{entry.call.id} held until it released, and was told {outcome}")

    def _may_be_dead(self, entry: Entry) -> bool:
        """Say whether a session was, or can have been, declared dead."""
        return entry.call.session in self.world.doubtful

    # The roster

    def epoch_of(self, process: Process) -> int:
        """Return the last epoch that a process saw."""
        return self.epochs.get(process, 0)

    def saw(self, process: Process, view: Any, entry: Entry | None = None) -> None:
        """Check a view; one that has joined must find itself there."""
        epoch = view["epoch"]
        if epoch < self.epoch_of(process) and view["members"]:
            raise Wrong(f"{process} saw epoch {self.epoch_of(process)}, and then {epoch}")
        self.epochs[process] = epoch
        if self.views.setdefault(epoch, view) != view:
            raise Wrong(f"two views of epoch {epoch}: {view} and {self.views[epoch]}")
        if entry is not None:
            own = view["members"].get(entry.call.member)
            if own is None or self.ids.setdefault(own["id"], entry.call.id) != entry.call.id:
                raise Wrong(f"{entry.call.id} joined, and its view is {view} (ids {self.ids})")
            self.members[entry.call.id] = entry
        check_maps(view["members"])

    def watched(self, process: Process, entry: Entry, answer: Any) -> None:
        """Check what a watch came to."""
        view, events, every = answer
        since = entry.command.epoch  # type: ignore[attr-defined]
        if view["epoch"] == since:
            raise Wrong(f"the watch of {entry.call.id} ended in the epoch {since} that it began with")
        if any(event[3] <= since for event in events):
            raise Wrong(f"{entry.call.id} was told of events before epoch {since}: {events}")
        before = self.views.get(since, {"members": {}} if since == 0 else None)
        if every and before is not None:
            members = {name: one["id"] for name, one in before["members"].items()}
            for what, name, number, _, _ in events:
                if what == "joined":
                    members[name] = number
                elif members.pop(name, None) != number:
                    raise Wrong(f"{name} {number} went, and was not here: {events}")
            if members != {name: one["id"] for name, one in view["members"].items()}:
                raise Wrong(f"the events do not lead to the view: {before} {events} {view}")
        self.saw(process, view)

    def leaves(self, entry: Entry) -> None:
        """Write down that a member begins to leave."""
        self.members.pop(entry.call.id, None)

    def left(self, entry: Entry, outcome: Any, repeated: bool) -> None:
        """Check that who left was there."""
        self.world.note("left", entry.call.id, outcome)
        if not repeated and not self._may_be_dead(entry) and outcome != Done(True):
            raise Wrong(f"{entry.call.id} left, and was told {outcome}")

    # Meetings, when all is over

    def judge(self) -> None:
        """Check barriers and exchanges."""
        for entry in self.entries:
            if not isinstance(entry.outcome, Refused):
                continue
            if entry.outcome.error == "MembersLost":
                self._judge_lost(entry)
            elif isinstance(entry.command, Join):
                self._judge_join(entry)
            elif not _asks_for_something_else(entry):
                raise Wrong(f"{entry.call.id} was refused: {entry.outcome}")
        self._judge_barrier([entry for entry in self.entries if isinstance(entry.command, Arrive)])
        self._judge_exchange([entry for entry in self.entries if isinstance(entry.command, Give)])

    def _judge_join(self, entry: Entry) -> None:
        """Check that nobody is refused a name that is only a dead process's."""
        if entry.outcome.error == "NameTaken" and self.world.host.waits_for_the_dead:
            raise Wrong(f"{entry.call.id} was refused: {entry.outcome}")

    def _judge_lost(self, entry: Entry) -> None:
        """Check that a round broke for one that came to it and then stopped."""
        names = entry.outcome.fields["lost"]
        stopped = {one.call.member for one in self.entries if one.key == entry.key and self._may_be_dead(one)}
        if not names or not set(names) <= stopped:
            raise Wrong(f"{entry.call.id} was told that {names} are lost; {sorted(stopped)} are")

    def _judge_barrier(self, entries: list[Entry]) -> None:
        through = [entry for entry in entries if entry.outcome == Done()]
        counts = [entry for entry in entries if entry.outcome in (*UNKNOWN, Done())]
        for process in {entry.process: None for entry in through}:
            for member in map(str, range(self.size)):
                used: set[int] = set()
                theirs = sorted((one for one in counts if one.call.member == member), key=lambda one: one.ended)
                for mine in (entry for entry in through if entry.process is process):
                    fits = [one for one in theirs if id(one) not in used and one.overlaps(mine)]
                    if not fits:
                        raise Wrong(f"{mine.call.id} went through the barrier, and {member} had not arrived")
                    used.add(id(fits[0]))

    def _judge_exchange(self, entries: list[Entry]) -> None:
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
                raise Wrong(f"{entry.call.id} got {got}, which were not given in one round")
            if any(one.outcome not in UNKNOWN and not isinstance(one.outcome, Done) for one in gives):
                raise Wrong(f"{entry.call.id} got {got}, of which some was taken back or refused")
            if how == "broadcast":
                ranks, expected = [gives[0].call.member], [str(entry.command.root)]  # type: ignore[attr-defined]
            else:
                ranks, expected = [one.call.member for one in gives], [str(rank) for rank in range(self.size)]
            if ranks != expected:
                raise Wrong(f"{entry.call.id} got {got}, which are of ranks {ranks}")
            if how != "broadcast" and entry.call.id.encode() not in got:
                raise Wrong(f"{entry.call.id} got {got}, and nothing of its own")
            for data in got:
                if how != "broadcast" and round_of.setdefault(data, tuple(got)) != tuple(got):
                    raise Wrong(f"{data!r} was in two rounds: {got} and {round_of[data]}")


def _asks_for_something_else(entry: Entry) -> bool:
    """Say whether a rank was refused for another collective than the others ask for: it restarted at another line."""
    return isinstance(entry.command, Give) and entry.outcome.fields.get("what") == "exchange"


def check_loss(before: Any, after: Any, session: str) -> None:
    """Check that nobody waits on in a meeting of which one who had come is lost."""
    if before.kind not in MEETINGS:
        return
    calls = [call if isinstance(call, Call) else call[1] for call in before.calls.values()]
    gone = {call.member for call in calls if call.session == session}
    gone -= {call.member for call in calls if call.session != session}
    gone -= {call.member for _, call in getattr(before, "held", {}).values() if call.session != session}
    if gone and any(after.keeps(call.id) for call in calls):
        raise Wrong(f"the {before.kind} lost {sorted(gone)}, and {list(map(str, calls))} wait on")


def check_maps(members: dict[str, Any]) -> None:
    """Check that maps fit to devices, and the ways back to maps."""
    for name, one in members.items():
        for peer, way in one["device_maps"].items():
            if peer not in members:
                continue
            there = members[peer]
            fits = set(way) <= set(one["devices"]) and set(way.values()) <= set(there["devices"])
            if not fits or {mine: theirs for theirs, mine in there["reverse_maps"][name].items()} != way:
                raise Wrong(f"the map of {name} for {peer} does not fit: {members}")
        if any(name not in members[peer]["device_maps"] for peer in one["reverse_maps"]):
            raise Wrong(f"{name} has a way back to where no map comes from: {members}")
