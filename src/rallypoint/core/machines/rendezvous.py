"""The rendezvous machine: the nodes of a run form a round, and form another when a node leaves or joins.

A node joins and waits until it is in a round; all nodes agree on the members of a round and their ranks. A round stands
until one of its nodes is lost, leaves or rejoins, or until others wait and there is room for them: then it is over, its
watchers learn why, and its nodes rejoin. Nodes that wait while a round is full are spares, which step in when a place
is free, unless they joined with `spare` off: those are refused.

Leaving closes nothing: only `RendezvousClose` ends a run, with a result that reaches all nodes, and `RendezvousReopen`
begins another run of the same name. The exception: a node that leaves in failure with fewer than the minimum left
closes the run as failed. A node whose work is done leaves without ending the round for the others.

Which nodes may join, and when a round forms of which nodes, is decided in `core/policy/round_policy.py`.

Last call, the time for more nodes to join once there are enough, needs a clock, which the machine lacks: `timer` has a
number and a duration. The host starts the timer when it first sees the number, and calls `on_timer` when the duration
has passed by the host's clock.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from rallypoint.core.machines.machine import (
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
from rallypoint.core.policy.round_policy import (
    Hold,
    JoinedNode,
    NodeLimits,
    Refuse,
    RoundSituation,
    assign_ranks,
    choose_nodes,
    decide,
    list_few,
    wait_s,
)

__all__ = [
    "RendezvousClose",
    "RendezvousJoin",
    "RendezvousLeave",
    "RendezvousQuery",
    "RendezvousEvict",
    "RendezvousReopen",
    "RendezvousMachine",
    "RendezvousWatch",
    "RendezvousWithdraw",
]

MAX_SETTINGS = 256
MAX_TEXT = 1024
PAST_BYTES = 120
"""The cost of remembering a rank, besides the node's name; accurate enough for a limit."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class RendezvousJoin(Command, tag="rendezvous.join"):
    """Join or rejoin, and wait for a round; answered by `[run, number, scope, rank, size, first, before, reason]`.

    `scope` is a number that no other round of this name ever has, `before` is the scope of the last round. `first` is
    the name and the address of the node of rank 0.
    """

    limits: NodeLimits
    settings: Annotated[dict[Name, Text], Meta(max_length=MAX_SETTINGS)] = field(default_factory=dict)
    """Settings that must be the same on all nodes."""

    rank: Annotated[int, Meta(ge=-1, lt=MAX_MEMBERS)] = -1
    """The requested rank."""

    host: Name = ""
    address: Name = ""
    """The address at which other nodes reach this node."""

    loopback: bool = False
    """Whether the node connected over a loopback address, which is valid on its own machine only."""

    run: int = -1
    """The run that this node has been in, if any: it does not join a run opened later."""

    spare: bool = True
    """Whether the node waits for a place when a round is full; otherwise it is refused."""

    @property
    def weight(self) -> int:
        """The bytes of its settings and addresses."""
        texts = sum(len(name) + len(value) for name, value in self.settings.items())
        return texts + len(self.host) + len(self.address)


class RendezvousWithdraw(Undo, tag="rendezvous.withdraw"):
    """Take back a waiting join, or a watch; refused, as these are, if the run was closed before."""


class RendezvousLeave(Undo, tag="rendezvous.leave"):
    """Take back a join, even if it is in a round; answered by how many nodes are left."""

    failed: Text = ""
    """Why this node failed, if it did: a failure with fewer than the minimum of nodes left closes the run."""

    done: bool = False
    """Whether this node's work is done: the round then stands without it."""


class RendezvousWatch(Command, tag="rendezvous.watch"):
    """Wait while the round of that scope stands; answered by why it is over."""

    scope: int


class RendezvousClose(Command, tag="rendezvous.close"):
    """End the run with a result; answered by whether it was open."""

    result: Text
    reason: Text


class RendezvousReopen(Command, tag="rendezvous.open"):
    """Begin a new run if the last one was closed; answered by whether it was."""

    if_left: bool = False
    """Whether to do so only if all nodes have left: a late node must learn the result of its run."""


class RendezvousQuery(Command, tag="rendezvous.look"):
    """Answer the whole status at once, or the nodes of the round of that scope, if it is the last."""

    scope: int = 0


class RendezvousEvict(Command, tag="rendezvous.evict"):
    """Remove a node whose process does not respond from the round of that scope, if the node is still in it."""

    scope: int
    node: Name
    reason: Text


class RendezvousMachine(Machine, kw_only=True):
    """The current or last round, and the nodes that wait for the next."""

    kind = "rendezvous"
    rejoins = True

    run: int = 0
    """The stamp at which the run was opened; 0 for the first run of its name."""

    number: int = 0
    scope: int = 0
    before: int = 0
    reason: str = ""
    """Why the last round formed."""

    over: str = "no round has been formed yet"
    """Why the round is over; empty while it stands."""

    limits: NodeLimits = NodeLimits()
    settings: dict[str, str] = field(default_factory=dict)
    origin: JoinedNode | None = None
    """The node that set these limits and settings."""

    ranks: dict[str, int] = field(default_factory=dict)
    """The ranks of all nodes of the last round."""

    nodes: dict[str, JoinedNode] = field(default_factory=dict)
    """The live nodes of the last round that have not rejoined or left."""

    finished: dict[str, None] = field(default_factory=dict)
    """The nodes of the last round that left when their work was done: their places stay taken."""

    waiting: dict[str, JoinedNode] = field(default_factory=dict)
    first: tuple[str, str] = ("", "")
    """Name and address of rank 0."""

    past: dict[str, int] = field(default_factory=dict)
    """Ranks of nodes of earlier rounds."""

    calls: dict[str, str] = field(default_factory=dict)
    """The names of the nodes in the round and of those that wait, by join call."""

    asked: dict[int, str] = field(default_factory=dict)
    """The names of the nodes in the round and of those that wait, by the rank that they requested."""

    spares: dict[str, None] = field(default_factory=dict)
    """The waiting nodes that have seen a round stand without them."""

    watchers: dict[str, Call] = field(default_factory=dict)
    last_call: int = 0
    closed: tuple[str, str] | None = None
    """The result of the run, and the reason for it."""

    waited: dict[str, None] = field(default_factory=dict)
    """The calls that waited for a round when the run was closed: they receive its result, too."""

    # The machine interface

    def apply(self, call: Call, command: Command, stamp: int) -> Step:
        """Join, leave, watch, close, reopen, evict, or query."""
        if isinstance(command, RendezvousJoin):
            return self._join(call, command, stamp)
        if isinstance(command, RendezvousWatch):
            return self._watch(call, command.scope)
        if isinstance(command, Undo):
            return self._take_back(call, command, stamp)
        if isinstance(command, RendezvousClose):
            return self._close(command)
        if isinstance(command, RendezvousReopen):
            return Step(Done(False)) if command.if_left and self.nodes else self._open(stamp)
        if isinstance(command, RendezvousEvict):
            return self._evict(command, stamp)
        assert isinstance(command, RendezvousQuery)
        return Step(Done(self._status() if not command.scope else self._table(command.scope)))

    def session_ended(self, session: str, stamp: int) -> Step:
        """Remove the nodes and watchers of a session; a round that loses a node is over."""
        watches = [call_id for call_id, call in self.watchers.items() if call.session == session]
        for call_id in watches:
            del self.watchers[call_id]
        waited = [node for node in self.waiting.values() if node.call.session == session]
        lost = [node for node in self.nodes.values() if node.call.session == session]
        for node in (*waited, *lost):
            self._remove(node)
        if not (watches or waited or lost):
            return Step(Done())
        woken = self._end(f"lost {list_few([str(node.call) for node in lost])}") if lost else []
        return self._form_if_due(Done(), stamp, woken)

    def on_timer(self, timer: int, stamp: int) -> Step:
        """Form a round of the waiting nodes: last call has ended."""
        if not timer or timer != self.last_call:
            return Step(Done())
        return self._form_if_due(Done(), stamp, [], last_call_over=True)

    @property
    def timer(self) -> tuple[int, float] | None:
        """Last call, while it runs."""
        return (self.last_call, wait_s(self.limits, self.nodes)) if self.last_call else None

    def holds(self, call_id: str) -> bool:
        """Return whether a call is a watch, or the join of a node that waits or is in the round."""
        return call_id in self.calls or call_id in self.watchers

    def sessions(self) -> set[str]:
        """Return the sessions of nodes and watchers."""
        calls = [node.call for nodes in (self.nodes, self.waiting) for node in nodes.values()]
        return {call.session for call in [*calls, *self.watchers.values()]}

    def explain(self, call: Call) -> Waiting:
        """Return what a node waits for."""
        if call.id in self.watchers:
            return Waiting(f"round {self.number} stands: {self.reason}")
        spare = call.member in self.spares
        if not self.over:
            reason = f"round {self.number} is full with {self.limits.max_nodes} nodes; this node is a spare"
            return Waiting(reason, is_spare=True)
        latest = next(reversed(self.waiting.values()), None)
        joined = "" if latest is None else f"; last joined {latest.call}"
        return Waiting(f"{decide(self._situation())[0]}{joined}", tuple(self.nodes), is_spare=spare)

    @property
    def idle(self) -> bool:
        """Whether there are no nodes and no watchers."""
        return not self.nodes and not self.waiting and not self.watchers

    @property
    def persists_idle(self) -> bool:
        """Whether there is a result that late nodes must learn, or a round whose ranks may be needed."""
        return self.closed is not None or self.run > 0 or self.number > 0

    def trim(self, most: int) -> int:
        """Keep the status of the run and, while it is open, the recent ranks."""
        self.settings, self.waited = {}, {}  # the next node brings its own settings
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

    def _join(self, call: Call, command: RendezvousJoin, stamp: int) -> Step:
        name = call.member
        waits, member = self.waiting.get(name), self.nodes.get(name)
        if waits is not None and waits.call.id == call.id:
            return self._keep_waiting(waits, command)
        if member is not None and member.call.id == call.id:
            return Step(Done(self._round(name)))
        if self.closed is not None or 0 <= command.run < self.run:
            return Step(self._refuse_closed(call.id))
        stale = waits if waits is not None and waits.call.session in call.former else None
        taken = waits if stale is None else None
        other = taken or (member if member is not None and not call.owns(member.call) else None)
        if other is not None:
            return Step(Refused("NameTaken", {"member": name, "other": str(other.call)}))
        node = JoinedNode(call, command.rank, command.host, command.address, command.loopback)
        decision = decide(self._situation(node, command))
        if isinstance(decision, Refuse):
            return Step(Refused(decision.error, decision.fields))
        if member is None and not command.spare and self._full():
            return Step(self._refuse_full(name))
        if self.origin is None:
            self.limits, self.settings, self.origin = command.limits, command.settings, node
        if not self.number:  # after the first round, other nodes know the run
            self.run = max(self.run, command.run)
        woken: list[Call] = []
        for own in filter(None, (stale, member)):
            self._remove(own)
        if member is not None:
            woken = self._end(f"{call} rejoined")
        elif len(self.nodes) + len(self.finished) < self.limits.max_nodes:
            woken = self._end(f"{call} is waiting, and the round has a free place")
        self._add_waiting(node)
        step = self._form_if_due(WAIT, stamp, woken, node)
        return step._replace(dropped=[*(own.call for own in (stale, member) if own is not None), *step.dropped])

    def _keep_waiting(self, node: JoinedNode, command: RendezvousJoin) -> Step:
        """Keep a node waiting, unless a round formed without it and it is not to be a spare."""
        if command.spare or not self._full():
            return Step(WAIT)
        self._remove(node)
        return Step(self._refuse_full(node.name), True)

    def _full(self) -> bool:
        """Return whether a round stands that has no place left."""
        return not self.over and len(self.nodes) + len(self.finished) >= self.limits.max_nodes

    def _refuse_full(self, name: str) -> Refused:
        """Refuse a node that is not to wait as a spare."""
        return Refused("RunFull", {"member": name, "nodes": list(self.ranks)})

    def _refuse_closed(self, call_id: str) -> Refused:
        """Refuse a call whose run is over."""
        result, reason = self.closed or ("", "it was closed, and another has been opened under this name")
        return Refused("RunClosed", {"result": result, "reason": reason, "waited": call_id in self.waited})

    def _situation(
        self, newcomer: JoinedNode | None = None, command: RendezvousJoin | None = None, over: bool = False
    ) -> RoundSituation:
        """Collect the facts that `decide` needs."""
        if newcomer is None or command is None:
            highest = max(self.asked, default=-1) if self.asked else -1
            return RoundSituation(self.limits, len(self.waiting), bool(self.ranks), self.nodes, highest, over)
        rival = self.asked.get(newcomer.rank)
        return RoundSituation(
            command.limits,
            len(self.waiting) + 1,
            newcomer=newcomer,
            origin=self.origin,
            differs=None if self.origin is None else self._difference(command),
            rival=self._find(rival) if rival is not None and rival != newcomer.name else None,
        )

    def _difference(self, command: RendezvousJoin) -> tuple[str, str, str] | None:
        """Return the first setting in which a newcomer differs."""
        if command.limits == self.limits and command.settings == self.settings:
            return None
        for mine, theirs in (
            (_describe_limits(command.limits), _describe_limits(self.limits)),
            (command.settings, self.settings),
        ):
            for what in {**theirs, **mine}:
                if mine.get(what) != theirs.get(what):
                    return what, mine.get(what, "not set"), theirs.get(what, "not set")
        return None  # durations that differ by less than the text shows

    def _find(self, name: str) -> JoinedNode:
        return self.waiting.get(name) or self.nodes[name]

    def _add_waiting(self, node: JoinedNode) -> None:
        """Add a node to the waiting nodes."""
        self.waiting[node.name] = node
        self.calls[node.call.id] = node.name
        if node.rank != -1:
            self.asked[node.rank] = node.name

    def _remove(self, node: JoinedNode) -> None:
        """Remove a node, whether it waits or is in the round."""
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
        target, leave = f"{call.session}/{command.call}", command if isinstance(command, RendezvousLeave) else None
        if self._unwatched(target):
            return Step(Done(), True)
        waits, member = self.waiting.get(call.member), self.nodes.get(call.member)
        if waits is not None and waits.call.id == target:
            self._remove(waits)
            return self._left(waits, leave, stamp, [])
        if member is None or member.call.id != target:
            return Step(Done(self._count()) if leave or self.closed is None else self._refuse_closed(target))
        if leave is None:
            return Step(Done([self._round(call.member)]))
        self._remove(member)
        if leave.done and not self.over:
            self.finished[member.name] = None
            return self._left(member, leave, stamp, [])
        return self._left(member, leave, stamp, self._end(f"{member.call} left"))

    def _evict(self, command: RendezvousEvict, stamp: int) -> Step:
        node = self.nodes.get(command.node) if command.scope == self.scope else None
        if node is None:
            return Step(Done())
        self._remove(node)
        return self._form_if_due(Done(), stamp, self._end(f"lost {node.call}: {command.reason}"))

    def _left(self, node: JoinedNode, leave: RendezvousLeave | None, stamp: int, woken: list[Call]) -> Step:
        """After a node left: close the run if it failed and too few are left, else form the next round if due."""
        failed = leave.failed if leave is not None else ""
        if failed and self.closed is None and 0 < self._count() < self.limits.min_nodes:
            few_left = f"{self._count()} of at least {self.limits.min_nodes} nodes are left"
            closed = self._close(RendezvousClose("failed", f"{node.call} ended in failure, {few_left}: {failed}"))
            return closed._replace(outcome=Done(self._count()), woken=[*woken, *closed.woken])
        return self._form_if_due(Done(self._count()), stamp, woken)

    def _count(self) -> int:
        return len(self.nodes) + len(self.waiting)

    def _close(self, command: RendezvousClose) -> Step:
        if self.closed is not None:
            return Step(Done(False))
        self.closed = (command.result, command.reason)
        self.waited = {node.call.id: None for node in self.waiting.values()}
        woken = self._end(f"the run was closed: {command.result}: {command.reason}")
        for node in list(self.waiting.values()):
            self._remove(node)
            woken.append(node.call)
        self.last_call = 0
        return Step(Done(True), True, woken)

    def _open(self, stamp: int) -> Step:
        """Begin a new run; nodes of the closed run learn of its end when they join."""
        if self.closed is None:
            return Step(Done(False))
        dropped = [node.call for node in self.nodes.values()]
        fresh = RendezvousMachine(
            run=stamp, scope=self.scope, over="the last run was closed, and this one had no round yet"
        )
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))
        return Step(Done(True), True, dropped=dropped)

    def _end(self, reason: str) -> list[Call]:
        """End the standing round; return the watchers to wake."""
        if not self.over:
            self.over = reason
        woken, self.watchers = list(self.watchers.values()), {}
        return woken

    def _form_if_due(
        self,
        outcome: Outcome,
        stamp: int,
        woken: list[Call],
        newcomer: JoinedNode | None = None,
        last_call_over: bool = False,
    ) -> Step:
        """After a change: form a round if it is time, else set or stop last call; return the resulting step."""
        if not self.nodes and not self.waiting:  # the next node starts afresh
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
        """Form a round. A live node of the last round that has not rejoined is left out."""
        self.past = self._remembered()
        nodes = choose_nodes(list(self.waiting.values()), self.ranks, self.limits.max_nodes)
        for node in list(self.nodes.values()):
            self._remove(node)
        self.ranks = assign_ranks(nodes, self.ranks, self.past)
        self.nodes, self.finished = {node.name: node for node in nodes}, {}
        self.waiting = {name: node for name, node in self.waiting.items() if name not in self.nodes}
        self.spares = dict.fromkeys(self.waiting)
        head = self.nodes[next(iter(self.ranks))]
        self.first = (head.name, head.address or head.host)
        self.number += 1
        self.before, self.scope = self.scope, stamp
        self.over, self.reason, self.last_call = "", reason, 0

    def _remembered(self) -> dict[str, int]:
        """Return the ranks of the nodes of recent rounds."""
        past = {name: rank for name, rank in self.past.items() if name not in self.ranks} | self.ranks
        return dict(list(past.items())[-2 * self.limits.max_nodes :])

    def _round(self, name: str) -> list[Any]:
        rank = self.ranks[name]
        return [self.run, self.number, self.scope, rank, len(self.ranks), self.first, self.before, self.reason]

    def _table(self, scope: int) -> list[list[str]]:
        """Return the nodes of a round by rank: name, host, location; the last two are empty for nodes that are gone."""
        if scope != self.scope:
            return []
        nodes = {**self.waiting, **self.nodes}
        rows = []
        for name in self.ranks:
            node = nodes.get(name)
            rows.append([name, node.host, node.call.where] if node else [name, "", ""])
        return rows

    def _status(self) -> dict[str, Any]:
        """Return the whole status as plain data."""
        latest = next(reversed(self.waiting.values()), None)
        if self.closed is not None:
            phase, reason = "closed", f"{self.closed[0]}: {self.closed[1]}"
        elif not self.over:
            phase, reason = "formed", self.reason
        else:
            phase, reason = "gathering", self.over if latest is None else self.explain(latest.call).reason
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


for _command in (
    RendezvousJoin,
    RendezvousWithdraw,
    RendezvousLeave,
    RendezvousWatch,
    RendezvousClose,
    RendezvousReopen,
    RendezvousQuery,
    RendezvousEvict,
):
    _command.machine = RendezvousMachine


def _describe_limits(limits: NodeLimits) -> dict[str, str]:
    return {name: f"{getattr(limits, name):g}" for name in limits.__struct_fields__}
