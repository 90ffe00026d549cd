"""How a round comes together: who may join, when a round is formed, who is in it, and who has which rank.

`decide` is the policy: it gets what is known, and forms a round, or holds, or refuses a newcomer, always with a reason.
Ranks are kept: who asked for one has it, who was in the last round keeps it, who returns gets its own back if it is
free, and whoever is left fills the gaps in the order of joining.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from rallypoint.core.machine import MAX_MEMBERS, Call

__all__ = ["Form", "Hold", "Limits", "Node", "Refuse", "Situation", "chosen", "decide", "few", "ranks_for", "wait_s"]

ABSENT_S = 3.0
"""How long a round waits for those of the last one who live and have not come again, at least."""

SHOWN = 20
"""How many names a reason lists."""

MAX_LAST_CALL_S = 1e7
Count = Annotated[int, Meta(ge=1, le=MAX_MEMBERS)]


class Limits(Struct, frozen=True, array_like=True):
    """How many nodes a round needs and may have, and how long it waits for more when it has enough."""

    min_nodes: Count = 1
    max_nodes: Count = 1
    last_call_s: Annotated[float, Meta(ge=0, le=MAX_LAST_CALL_S)] = 0.0


class Node(Struct, frozen=True, array_like=True):
    """One node: the call by which it is here, and what it said of itself."""

    call: Call
    rank: int = -1
    host: str = ""
    address: str = ""
    loopback: bool = False

    @property
    def name(self) -> str:
        """What it goes by."""
        return self.call.member


class Form(NamedTuple):
    """Form a round now."""

    reason: str


class Hold(NamedTuple):
    """Form none yet; `last_call` says that one will be formed when that is over."""

    reason: str
    last_call: bool = False


class Refuse(NamedTuple):
    """Do not let a newcomer in: an error's name, and its fields."""

    error: str
    fields: dict[str, Any]


class Situation(NamedTuple):
    """What a decision depends on."""

    limits: Limits
    here: int
    """How many wait for a round, a newcomer included."""

    last: bool = False
    """Whether there has been a round before."""

    absent: Collection[str] = ()
    """Those of the last round who live and have not come again."""

    highest: int = -1
    """The highest rank that one of those here asked for."""

    last_call_over: bool = False
    newcomer: Node | None = None
    origin: Node | None = None
    """The first one, to whose settings and host the newcomer is compared."""

    differs: tuple[str, str, str] | None = None
    """A setting that the newcomer has otherwise: its name, the newcomer's value, and the first one's."""

    rival: Node | None = None
    """Who has asked for the newcomer's rank before."""


def decide(now: Situation) -> Form | Hold | Refuse:
    """Say whether a newcomer may be one of those who wait, and what becomes of them."""
    refusal = _refuse(now)
    if refusal is not None:
        return refusal
    here, limits = now.here, now.limits
    least, most, last_call_s = limits.min_nodes, limits.max_nodes, limits.last_call_s
    back = f"; not back yet: {few(now.absent)}" if now.absent else ""
    if here >= most and not now.absent:
        return Form(f"all {most} nodes are here")
    if here < least:
        return Hold(f"{here} of at least {least} nodes: waiting for {least - here}{back}")
    if now.last_call_over:
        return Form(
            f"{min(here, most)} of at most {most} nodes came before the last call of "
            f"{wait_s(limits, now.absent):g} s was over"
        )
    if now.last and not now.absent and now.highest < here:
        return Form(f"everybody of the last round is back: {here} of at most {most} nodes")
    if not last_call_s and not now.absent:
        return Form(f"{here} of at most {most} nodes are here, and there is no last call")
    asked = f"; rank {now.highest} is asked for" if now.highest >= here else ""
    enough = f"{here} nodes are " + (f"enough, and up to {most} may come" if here < most else f"here for {most} places")
    return Hold(f"{enough}: last call of {wait_s(limits, now.absent):g} s{back}{asked}", last_call=True)


def wait_s(limits: Limits, absent: Collection[str]) -> float:
    """Return how long last call is; those who have not come again get a while in any case."""
    return max(limits.last_call_s, ABSENT_S) if absent else limits.last_call_s


def chosen(waiting: Sequence[Node], last: Mapping[str, int], most: int) -> Sequence[Node]:
    """Choose who is in a round: first who was in the last, then who asked for a rank, then the others as they came."""
    if len(waiting) <= most:
        return waiting
    return sorted(waiting, key=lambda node: (node.name not in last, node.rank == -1))[:most]


def ranks_for(nodes: Sequence[Node], last: Mapping[str, int], past: Mapping[str, int]) -> dict[str, int]:
    """Give each node a rank; returns them by name, in the order of rank.

    `past` has the ranks of earlier rounds, the latest at its end: of two who had one rank, the later one gets it back.
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


def _refuse(now: Situation) -> Refuse | None:
    """Refuse a newcomer that cannot be in a round with those who are here, and say what is odd."""
    newcomer, origin, limits = now.newcomer, now.origin, now.limits
    if newcomer is None:
        return None
    if limits.min_nodes > limits.max_nodes:
        members = f"{limits.min_nodes} to {limits.max_nodes} nodes, which is nobody"
        return Refuse("NotAMember", {"member": newcomer.name, "members": members})
    if newcomer.rank >= limits.max_nodes:
        members = f"ranks 0 to {limits.max_nodes - 1}"
        return Refuse("NotAMember", {"member": f"{newcomer.name} as rank {newcomer.rank}", "members": members})
    if now.rival is not None:
        return Refuse("RankTaken", {"rank": newcomer.rank, "member": newcomer.name, "other": str(now.rival.call)})
    if origin is None:
        return None
    what, mine, theirs = now.differs or ("", "", "")
    if not what and newcomer.host != origin.host and (newcomer.loopback or origin.loopback):
        what = "endpoint (use an address that every node can reach, not localhost)"
        mine, theirs = (f"{node.host}, {'loopback' if node.loopback else 'network'}" for node in (newcomer, origin))
    if not what:
        return None
    fields = {"what": what, "mine": f"{mine} ({newcomer.call})", "theirs": theirs, "other": str(origin.call)}
    return Refuse("Disagreement", fields)


def few(names: Collection[str]) -> str:
    """List names, not too many of them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(islice(names, SHOWN))}{more}"
