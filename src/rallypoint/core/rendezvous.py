"""The rendezvous machine: the nodes of a run form a round, and form another when somebody goes or comes.

A node joins and waits until it is in a round, of which everybody agrees who is in it and who has which rank. A round
stands until one of its nodes is lost, leaves or comes again, or until others wait and there is room for them: then it
is over, whoever watches is told why, and its nodes come again. Those who wait when a round has all that it may have are
spares, and step in when there is a place, unless they came with `spare` off: those are refused.

Leaving closes nothing: only `Close` ends a run, with a result that reaches everybody, and `Open` begins another under
the same name. The exception is a node that leaves in failure with fewer than the minimum left: that closes the run as
failed. A node whose work is done leaves without ending the round for those who still work.

Who may join, and when a round is formed of whom, is decided in `core/gathering.py`.

Last call, the time in which more may come once enough are here, needs a clock, which the machine has not: `alarm` says
that one is set, by a number and for how long. Whoever hosts the machine lets it `ring` when that time has passed since
it first saw that number, by its own clock.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from rallypoint.core.gathering import Hold, Limits, Node, Refuse, Situation, chosen, decide, few, ranks_for, wait_s
from rallypoint.core.machine import (
    MAX_MEMBERS,
    WAIT,
    Call,
    Command,
    Done,
    Machine,
    Name,
    Outcome,
    Refused,
    Step,
    Undo,
    Waiting,
)

__all__ = ["Close", "Join", "Leave", "Look", "Open", "Rendezvous", "Watch", "Withdraw"]

MAX_SETTINGS = 256
MAX_TEXT = 1024
PAST_BYTES = 120
"""What it costs to remember a rank, beside its node's name; near enough for a limit."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class Join(Command, tag="rendezvous.join"):
    """Come, or come again, and wait for a round; answered by `[run, number, scope, rank, size, first, before, reason]`.

    `scope` is a number that no other round of this name ever has, `before` that of the last round. `first` is the node
    of rank 0: its name and its address.
    """

    limits: Limits
    settings: Annotated[dict[Name, Text], Meta(max_length=MAX_SETTINGS)] = field(default_factory=dict)
    """What all nodes must have the same."""

    rank: Annotated[int, Meta(ge=-1, lt=MAX_MEMBERS)] = -1
    """The rank that is asked for."""

    host: Name = ""
    address: Name = ""
    """Where others reach this node."""

    loopback: bool = False
    """Whether it came over a loopback address, which only means something on its own machine."""

    run: int = -1
    """The run that this node has been in, if any: one that was opened later is not for it."""

    spare: bool = True
    """Whether it waits for a place where a round has all of its nodes; else it is refused."""

    @property
    def weight(self) -> int:
        """The bytes of its settings and addresses."""
        texts = sum(len(name) + len(value) for name, value in self.settings.items())
        return texts + len(self.host) + len(self.address)


class Withdraw(Undo, tag="rendezvous.withdraw"):
    """Take back a join that still waits, or a watch; refused as these are where the run was closed before."""


class Leave(Undo, tag="rendezvous.leave"):
    """Take back a join, also where it is in a round; answered by how many nodes are then left."""

    failed: Text = ""
    """Why this node failed, if it did: where fewer than the minimum are left, that closes the run."""

    done: bool = False
    """Whether this node's work is done: then the round stands without it."""


class Watch(Command, tag="rendezvous.watch"):
    """Wait while the round of that scope stands; answered by why it does not."""

    scope: int


class Close(Command, tag="rendezvous.close"):
    """End the run with a result; answered by whether it was open."""

    result: Text
    reason: Text


class Open(Command, tag="rendezvous.open"):
    """Begin a new run where the last one was closed; answered by whether it was."""


class Look(Command, tag="rendezvous.look"):
    """Answer at once what there is: everything, or the nodes of the round of that scope, if it is the last."""

    scope: int = 0


class Rendezvous(Machine, kw_only=True):
    """The round that stands or stood last, and who waits for the next."""

    kind = "rendezvous"
    comes_again = True

    run: int = 0
    """When it was opened; 0 for the first of its name."""

    number: int = 0
    scope: int = 0
    before: int = 0
    reason: str = ""
    """Why the last round was formed."""

    over: str = "no round has been formed yet"
    """Why it does not stand; empty while it does."""

    limits: Limits = Limits()
    settings: dict[str, str] = field(default_factory=dict)
    origin: Node | None = None
    """Whose limits and settings these are."""

    ranks: dict[str, int] = field(default_factory=dict)
    """The ranks of the last round, all of them."""

    nodes: dict[str, Node] = field(default_factory=dict)
    """Those of the last round who are here and have not come again."""

    finished: dict[str, None] = field(default_factory=dict)
    """Those of the last round who left when their work was done: their places are not free."""

    waiting: dict[str, Node] = field(default_factory=dict)
    first: tuple[str, str] = ("", "")
    """Name and address of rank 0."""

    past: dict[str, int] = field(default_factory=dict)
    """Ranks of nodes that were in earlier rounds."""

    calls: dict[str, str] = field(default_factory=dict)
    """The calls by which nodes are here, and their names."""

    asked: dict[int, str] = field(default_factory=dict)
    """The ranks that nodes who are here asked for, and their names."""

    spares: dict[str, None] = field(default_factory=dict)
    """Those who wait and have seen a round stand without them."""

    watchers: dict[str, Call] = field(default_factory=dict)
    last_call: int = 0
    closed: tuple[str, str] | None = None
    """The result, and why it came to that."""

    waited: dict[str, None] = field(default_factory=dict)
    """The calls that waited for a round when the run was closed: its result is theirs, too."""

    # What every machine has

    def apply(self, call: Call, command: Command, stamp: int) -> Step:
        """Join, leave, watch, close, open, or look."""
        if isinstance(command, Join):
            return self._join(call, command, stamp)
        if isinstance(command, Watch):
            return self._watch(call, command.scope)
        if isinstance(command, Undo):
            return self._take_back(call, command, stamp)
        if isinstance(command, Close):
            return self._close(command)
        if isinstance(command, Open):
            return self._open(stamp)
        assert isinstance(command, Look)
        return Step(Done(self._status() if not command.scope else self._table(command.scope)))

    def lost(self, session: str, stamp: int) -> Step:
        """Take out everything of a session; a round that loses a node is over."""
        watches = [call_id for call_id, call in self.watchers.items() if call.session == session]
        for call_id in watches:
            del self.watchers[call_id]
        waited = [node for node in self.waiting.values() if node.call.session == session]
        lost = [node for node in self.nodes.values() if node.call.session == session]
        for node in (*waited, *lost):
            self._out(node)
        if not (watches or waited or lost):
            return Step(Done())
        woken = self._end(f"lost {few([str(node.call) for node in lost])}") if lost else []
        return self._formed(Done(), stamp, woken)

    def ring(self, alarm: int, stamp: int) -> Step:
        """Form a round of those who are here: last call is over."""
        if not alarm or alarm != self.last_call:
            return Step(Done())
        return self._formed(Done(), stamp, [], last_call_over=True)

    @property
    def alarm(self) -> tuple[int, float] | None:
        """Last call, while it is on."""
        return (self.last_call, wait_s(self.limits, self.nodes)) if self.last_call else None

    def keeps(self, call_id: str) -> bool:
        """Say whether a call made a node that is here, or watches."""
        return call_id in self.calls or call_id in self.watchers

    def sessions(self) -> set[str]:
        """Return the sessions of nodes and watchers."""
        calls = [node.call for nodes in (self.nodes, self.waiting) for node in nodes.values()]
        return {call.session for call in [*calls, *self.watchers.values()]}

    def why(self, call: Call) -> Waiting:
        """Say what a node waits for."""
        if call.id in self.watchers:
            return Waiting(f"round {self.number} stands: {self.reason}")
        spare = call.member in self.spares
        if not self.over:
            reason = f"round {self.number} has all of its {self.limits.max_nodes} nodes; this one is a spare"
            return Waiting(reason, stands_by=True)
        latest = next(reversed(self.waiting.values()), None)
        joined = "" if latest is None else f"; last joined {latest.call}"
        return Waiting(f"{decide(self._situation())[0]}{joined}", tuple(self.nodes), stands_by=spare)

    @property
    def idle(self) -> bool:
        """Whether nobody is here."""
        return not self.nodes and not self.waiting and not self.watchers

    @property
    def lasts(self) -> bool:
        """Whether there is a result, which those who come late must hear, or a round, whose ranks may be asked for."""
        return self.closed is not None or self.run > 0 or self.number > 0

    def put_away(self, most: int) -> int:
        """Keep how the run stands; and while it is open, who had which rank lately."""
        self.settings, self.waited = {}, {}  # the settings of whoever comes next are as good
        if self.closed is not None:
            self.past = {}
        texts = (self.over, self.reason, *self.first, *(self.closed or ()))
        size = sum(map(len, (*texts, *self.past))) + PAST_BYTES * (len(self.past) + len(texts))
        for name in list(self.past) if size > most else ():
            if size <= most:
                break
            del self.past[name]
            size -= len(name) + PAST_BYTES
        return size

    # Inside

    def _join(self, call: Call, command: Join, stamp: int) -> Step:
        name = call.member
        waits, member = self.waiting.get(name), self.nodes.get(name)
        if waits is not None and waits.call.id == call.id:
            return self._waits_on(waits, command)
        if member is not None and member.call.id == call.id:
            return Step(Done(self._round(name)))
        if self.closed is not None or 0 <= command.run < self.run:
            return Step(self._refusal(call.id))
        stale = waits if waits is not None and waits.call.session in call.former else None
        taken = waits if stale is None else None
        other = taken or (member if member is not None and not call.owns(member.call) else None)
        if other is not None:
            return Step(Refused("NameTaken", {"member": name, "other": str(other.call)}))
        node = Node(call, command.rank, command.host, command.address, command.loopback)
        decision = decide(self._situation(node, command))
        if isinstance(decision, Refuse):
            return Step(Refused(decision.error, decision.fields))
        if member is None and not command.spare and self._full():
            return Step(self._no_place(name))
        if self.origin is None:
            self.limits, self.settings, self.origin = command.limits, command.settings, node
        if not self.number:  # else it has been told to others
            self.run = max(self.run, command.run)
        woken: list[Call] = []
        for own in filter(None, (stale, member)):
            self._out(own)
        if member is not None:
            woken = self._end(f"{call} came again")
        elif len(self.nodes) + len(self.finished) < self.limits.max_nodes:
            woken = self._end(f"{call} waits, and there is room for it")
        self._in(node)
        step = self._formed(WAIT, stamp, woken, node)
        return step._replace(dropped=[*(own.call for own in (stale, member) if own is not None), *step.dropped])

    def _waits_on(self, node: Node, command: Join) -> Step:
        """Let a node wait that does, unless a round was formed without it and it is not to be a spare."""
        if command.spare or not self._full():
            return Step(WAIT)
        self._out(node)
        return Step(self._no_place(node.name), True)

    def _full(self) -> bool:
        """Return whether a round stands that has no place left."""
        return not self.over and len(self.nodes) + len(self.finished) >= self.limits.max_nodes

    def _no_place(self, name: str) -> Refused:
        """Refuse a node that is not to wait as a spare."""
        return Refused("RunFull", {"member": name, "nodes": list(self.ranks)})

    def _refusal(self, call_id: str) -> Refused:
        """Refuse a call whose run is over."""
        result, reason = self.closed or ("", "it was closed, and another has been opened under this name")
        return Refused("RunClosed", {"result": result, "reason": reason, "waited": call_id in self.waited})

    def _situation(self, newcomer: Node | None = None, command: Join | None = None, over: bool = False) -> Situation:
        """Put together what `decide` needs to know."""
        if newcomer is None or command is None:
            highest = max(self.asked, default=-1) if self.asked else -1
            return Situation(self.limits, len(self.waiting), bool(self.ranks), self.nodes, highest, over)
        rival = self.asked.get(newcomer.rank)
        return Situation(
            command.limits,
            len(self.waiting) + 1,
            newcomer=newcomer,
            origin=self.origin,
            differs=None if self.origin is None else self._difference(command),
            rival=self._here(rival) if rival is not None and rival != newcomer.name else None,
        )

    def _difference(self, command: Join) -> tuple[str, str, str] | None:
        """Return the first setting that a newcomer has otherwise."""
        if command.limits == self.limits and command.settings == self.settings:
            return None
        for mine, theirs in (_told(command.limits), _told(self.limits)), (command.settings, self.settings):
            for what in {**theirs, **mine}:
                if mine.get(what) != theirs.get(what):
                    return what, mine.get(what, "not set"), theirs.get(what, "not set")
        return None  # seconds that differ by less than one can see

    def _here(self, name: str) -> Node:
        return self.waiting.get(name) or self.nodes[name]

    def _in(self, node: Node) -> None:
        """Let a node wait."""
        self.waiting[node.name] = node
        self.calls[node.call.id] = node.name
        if node.rank != -1:
            self.asked[node.rank] = node.name

    def _out(self, node: Node) -> None:
        """Take a node out, wherever it is."""
        del self.calls[node.call.id]
        if node.rank != -1:
            del self.asked[node.rank]
        nodes = self.waiting if self.waiting.get(node.name) is node else self.nodes
        del nodes[node.name]
        self.spares.pop(node.name, None)

    def _watch(self, call: Call, scope: int) -> Step:
        if self.closed is not None:
            result, reason = self.closed
            return Step(Done(f"the run was closed: {result}: {reason}"), self._unwatched(call.id))
        if self.over or scope != self.scope:
            return Step(Done(self.over or f"round {self.number} has been formed"), self._unwatched(call.id))
        changed = call.id not in self.watchers
        self.watchers[call.id] = call
        return Step(WAIT, changed)

    def _unwatched(self, call_id: str) -> bool:
        return self.watchers.pop(call_id, None) is not None

    def _take_back(self, call: Call, command: Undo, stamp: int) -> Step:
        target, leave = f"{call.session}/{command.call}", command if isinstance(command, Leave) else None
        if self._unwatched(target):
            return Step(Done(), True)
        waits, member = self.waiting.get(call.member), self.nodes.get(call.member)
        if waits is not None and waits.call.id == target:
            self._out(waits)
            return self._left(waits, leave, stamp, [])
        if member is None or member.call.id != target:
            return Step(Done(self._count()) if leave or self.closed is None else self._refusal(target))
        if leave is None:
            return Step(Done([self._round(call.member)]))
        self._out(member)
        if leave.done and not self.over:
            self.finished[member.name] = None
            return self._left(member, leave, stamp, [])
        return self._left(member, leave, stamp, self._end(f"{member.call} left"))

    def _left(self, node: Node, leave: Leave | None, stamp: int, woken: list[Call]) -> Step:
        """After a node has left: close the run if it failed and the others are too few, else see to the next round."""
        failed = leave.failed if leave is not None else ""
        if failed and self.closed is None and 0 < self._count() < self.limits.min_nodes:
            few_left = f"{self._count()} of at least {self.limits.min_nodes} nodes are left"
            closed = self._close(Close("failed", f"{node.call} ended in failure, {few_left}: {failed}"))
            return closed._replace(outcome=Done(self._count()), woken=[*woken, *closed.woken])
        return self._formed(Done(self._count()), stamp, woken)

    def _count(self) -> int:
        return len(self.nodes) + len(self.waiting)

    def _close(self, command: Close) -> Step:
        if self.closed is not None:
            return Step(Done(False))
        self.closed = (command.result, command.reason)
        self.waited = {node.call.id: None for node in self.waiting.values()}
        woken = self._end(f"the run was closed: {command.result}: {command.reason}")
        for node in list(self.waiting.values()):
            self._out(node)
            woken.append(node.call)
        self.last_call = 0
        return Step(Done(True), True, woken)

    def _open(self, stamp: int) -> Step:
        """Begin anew; those of the closed run are told that it is over when they come."""
        if self.closed is None:
            return Step(Done(False))
        dropped = [node.call for node in self.nodes.values()]
        fresh = Rendezvous(run=stamp, scope=self.scope, over="the last run was closed, and this one had no round yet")
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))
        return Step(Done(True), True, dropped=dropped)

    def _end(self, reason: str) -> list[Call]:
        """Let the round that stands stand no more; return those who wait to hear that."""
        if not self.over:
            self.over = reason
        woken, self.watchers = list(self.watchers.values()), {}
        return woken

    def _formed(
        self,
        outcome: Outcome,
        stamp: int,
        woken: list[Call],
        newcomer: Node | None = None,
        last_call_over: bool = False,
    ) -> Step:
        """After a change: form a round if it is time, else set or stop the alarm; return the step that this makes."""
        if not self.nodes and not self.waiting:  # whoever comes next begins anew
            self.origin, self.past, self.ranks, self.finished = None, self._remembered(), {}, {}
        if not self.over or self.closed is not None:
            if newcomer is not None:
                self.spares[newcomer.name] = None
            return Step(outcome, True, woken)
        decision = decide(self._situation(over=last_call_over))
        if isinstance(decision, Hold):
            self.last_call = (self.last_call or stamp) if decision.last_call else 0
            return Step(outcome, True, woken)
        dropped = list(self.nodes.values())
        self._form(decision[0], stamp)
        calls = [node.call for node in self.nodes.values() if node is not newcomer]
        if newcomer is not None and newcomer.name in self.nodes:
            outcome = Done(self._round(newcomer.name))
        return Step(outcome, True, [*woken, *calls], dropped=[node.call for node in dropped])

    def _form(self, reason: str, stamp: int) -> None:
        """Form a round. Who was in the last one, lives, and has not come again is in none."""
        self.past = self._remembered()
        nodes = chosen(list(self.waiting.values()), self.ranks, self.limits.max_nodes)
        for node in list(self.nodes.values()):
            self._out(node)
        self.ranks = ranks_for(nodes, self.ranks, self.past)
        self.nodes, self.finished = {node.name: node for node in nodes}, {}
        self.waiting = {name: node for name, node in self.waiting.items() if name not in self.nodes}
        self.spares = dict.fromkeys(self.waiting)
        head = self.nodes[next(iter(self.ranks))]
        self.first = (head.name, head.address or head.host)
        self.number += 1
        self.before, self.scope = self.scope, stamp
        self.over, self.reason, self.last_call = "", reason, 0

    def _remembered(self) -> dict[str, int]:
        """Return the ranks of nodes that were in a round, of those who were lately."""
        past = {name: rank for name, rank in self.past.items() if name not in self.ranks} | self.ranks
        return dict(list(past.items())[-2 * self.limits.max_nodes :])

    def _round(self, name: str) -> list[Any]:
        rank = self.ranks[name]
        return [self.run, self.number, self.scope, rank, len(self.ranks), self.first, self.before, self.reason]

    def _table(self, scope: int) -> list[list[str]]:
        """Return the nodes of a round by rank: name, host, and where it runs, which is empty for those who went."""
        if scope != self.scope:
            return []
        nodes = {**self.waiting, **self.nodes}
        rows = []
        for name in self.ranks:
            node = nodes.get(name)
            rows.append([name, node.host, node.call.where] if node else [name, "", ""])
        return rows

    def _status(self) -> dict[str, Any]:
        """Say everything, as plain data."""
        latest = next(reversed(self.waiting.values()), None)
        if self.closed is not None:
            phase, reason = "closed", f"{self.closed[0]}: {self.closed[1]}"
        elif not self.over:
            phase, reason = "formed", self.reason
        else:
            phase, reason = "gathering", self.over if latest is None else self.why(latest.call).reason
        return {
            "phase": phase,
            "reason": reason,
            "run": self.run,
            "round": self.number,
            "scope": self.scope,
            "min_nodes": self.limits.min_nodes,
            "max_nodes": self.limits.max_nodes,
            "nodes": {name: self.ranks[name] for name in self.nodes},
            "waiting": list(self.waiting),
            "spares": [] if self.over else list(self.waiting),
            "over": self.over,
            "result": None if self.closed is None else self.closed[0],
        }


for _command in (Join, Withdraw, Leave, Watch, Close, Open, Look):
    _command.machine = Rendezvous


def _told(limits: Limits) -> dict[str, str]:
    return {name: f"{getattr(limits, name):g}" for name in limits.__struct_fields__}
