"""How a round forms: which nodes may join, when the round forms, which nodes are in it, and their ranks.

`decide` is the policy: from the known facts it forms a round, holds, or refuses a newcomer, always with a reason. Ranks
are stable: a node that requested a rank gets it, a node of the last round keeps its rank, a returning node gets its old
rank back if it is free, and the remaining nodes fill the gaps in the order of joining.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from rallypoint.core.machines.machine import MAX_MEMBERS, Call

__all__ = [
    "Form",
    "Hold",
    "NodeLimits",
    "JoinedNode",
    "Refuse",
    "RoundSituation",
    "choose_nodes",
    "decide",
    "list_few",
    "assign_ranks",
    "wait_s",
]

ABSENT_S = 3.0
"""The minimum wait for live nodes of the last round that have not rejoined."""

SHOWN = 20
"""How many names a reason lists."""

MAX_LAST_CALL_S = 1e7
Count = Annotated[int, Meta(ge=1, le=MAX_MEMBERS)]


class NodeLimits(Struct, frozen=True, array_like=True):
    """The minimum and maximum number of nodes of a round, and how long it waits for more once it has enough."""

    min_nodes: Count = 1
    max_nodes: Count = 1
    last_call_s: Annotated[float, Meta(ge=0, le=MAX_LAST_CALL_S)] = 0.0


class JoinedNode(Struct, frozen=True, array_like=True):
    """One node: its join call, and its description of itself."""

    call: Call
    rank: int = -1
    host: str = ""
    address: str = ""
    loopback: bool = False

    @property
    def name(self) -> str:
        """The node's name."""
        return self.call.member


class Form(NamedTuple):
    """Form a round now."""

    reason: str


class Hold(NamedTuple):
    """Form no round yet; `last_call`: a round forms when last call ends."""

    reason: str
    last_call: bool = False


class Refuse(NamedTuple):
    """Refuse a newcomer: the name of an error, and its fields."""

    error: str
    fields: dict[str, Any]


class RoundSituation(NamedTuple):
    """The facts that a decision depends on."""

    limits: NodeLimits
    joined: int
    """The number of nodes that wait for a round, the newcomer included."""

    last: bool = False
    """Whether there was an earlier round."""

    absent: Collection[str] = ()
    """Live nodes of the last round that have not rejoined."""

    highest: int = -1
    """The highest rank that a waiting node requested."""

    last_call_over: bool = False
    newcomer: JoinedNode | None = None
    origin: JoinedNode | None = None
    """The first node, to whose settings and host the newcomer is compared."""

    differs: tuple[str, str, str] | None = None
    """A setting in which the newcomer differs: its name, the newcomer's value, and the first node's value."""

    rival: JoinedNode | None = None
    """The node that requested the newcomer's rank before it."""


def decide(situation: RoundSituation) -> Form | Hold | Refuse:
    """Decide whether a newcomer may wait for a round, and whether the waiting nodes form one."""
    refusal = _refuse(situation)
    if refusal is not None:
        return refusal
    here, limits = situation.joined, situation.limits
    least, most, last_call_s = limits.min_nodes, limits.max_nodes, limits.last_call_s
    back = f"; not back yet: {list_few(situation.absent)}" if situation.absent else ""
    if here >= most and not situation.absent:
        return Form(f"all {most} nodes joined")
    if here < least:
        return Hold(f"{here} of at least {least} nodes: waiting for {least - here}{back}")
    if situation.last_call_over:
        return Form(
            f"{min(here, most)} of at most {most} nodes joined before the last call of "
            f"{wait_s(limits, situation.absent):g} s ended"
        )
    if situation.last and not situation.absent and situation.highest < here:
        return Form(f"all nodes of the last round are back: {here} of at most {most} nodes")
    if not last_call_s and not situation.absent:
        return Form(f"{here} of at most {most} nodes joined; there is no last call")
    asked = f"; rank {situation.highest} was requested" if situation.highest >= here else ""
    enough = f"{here} nodes " + (f"are enough, up to {most} may join" if here < most else f"joined for {most} places")
    return Hold(f"{enough}: last call of {wait_s(limits, situation.absent):g} s{back}{asked}", last_call=True)


def wait_s(limits: NodeLimits, absent: Collection[str]) -> float:
    """Return the length of last call; absent nodes get at least `ABSENT_S`."""
    return max(limits.last_call_s, ABSENT_S) if absent else limits.last_call_s


def choose_nodes(waiting: Sequence[JoinedNode], last: Mapping[str, int], most: int) -> Sequence[JoinedNode]:
    """Choose the nodes: first those of the last round, then those with a requested rank, then the earliest to join."""
    if len(waiting) <= most:
        return waiting
    return sorted(waiting, key=lambda node: (node.name not in last, node.rank == -1))[:most]


def assign_ranks(nodes: Sequence[JoinedNode], last: Mapping[str, int], past: Mapping[str, int]) -> dict[str, int]:
    """Assign a rank to each node; return the ranks by name, in rank order.

    `past` has the ranks of earlier rounds, latest last: of two nodes that had the same rank, the later one gets it
    back.
    """
    free = dict.fromkeys(range(len(nodes)))
    ranks: dict[str, int] = {}
    asked = {node.name: node.rank for node in nodes}
    returned = [name for name in reversed(list(past)) if name in asked]
    for names, wished in ((asked, asked), (asked, last), (returned, past)):
        for name in names:
            rank = wished.get(name, -1)
            if rank in free and name not in ranks:
                ranks[name] = rank
                del free[rank]
    gaps = iter(free)
    for node in nodes:
        if node.name not in ranks:
            ranks[node.name] = next(gaps)
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _refuse(situation: RoundSituation) -> Refuse | None:
    """Refuse a newcomer that cannot be in a round with the waiting nodes, and name the mismatch."""
    newcomer, origin, limits = situation.newcomer, situation.origin, situation.limits
    if newcomer is None:
        return None
    if limits.min_nodes > limits.max_nodes:
        members = f"no nodes: min_nodes {limits.min_nodes} is greater than max_nodes {limits.max_nodes}"
        return Refuse("NotAMember", {"member": newcomer.name, "members": members})
    if newcomer.rank >= limits.max_nodes:
        members = f"ranks 0 to {limits.max_nodes - 1}"
        return Refuse("NotAMember", {"member": f"{newcomer.name} as rank {newcomer.rank}", "members": members})
    if situation.rival is not None:
        return Refuse("RankTaken", {"rank": newcomer.rank, "member": newcomer.name, "other": str(situation.rival.call)})
    if origin is None:
        return None
    what, mine, theirs = situation.differs or ("", "", "")
    if not what and newcomer.host != origin.host and (newcomer.loopback or origin.loopback):
        what = "endpoint (use an address that every node can reach, not localhost)"
        mine, theirs = (f"{node.host}, {'loopback' if node.loopback else 'network'}" for node in (newcomer, origin))
    if not what:
        return None
    fields = {"what": what, "mine": f"{mine} ({newcomer.call})", "theirs": theirs, "other": str(origin.call)}
    return Refuse("Disagreement", fields)


def list_few(names: Collection[str]) -> str:
    """Return names as text, at most `SHOWN` of them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(islice(names, SHOWN))}{more}"
