"""Decide at which step all ranks of a round stop, when one node, or the run, is preempted.

A rank asks at each step whether to stop there (`Worker.should_stop`). It may not wait in that call for the work of
another rank: one that has passed the check of step s may be inside a collective of step s, which needs the rank that
waits. So a step is proposed first:

1. The proposed step is above every step that a rank is known to have passed.
2. A rank that has not passed it accepts it, and goes on until its first step that is not below. There it waits.
3. If a rank had passed it unseen, a higher step is proposed: ranks that wait accept that one, and go on. So does a rank
   that finds that it has passed the proposed step, and which waits for that. No proposal depends on the progress of a
   rank, so none of these waits can be part of a deadlock.
4. A step that all ranks that ask have accepted is committed: no rank can have passed it, and all of them stop there.

The proposals come to an end: the next time that a rank asks, it either accepts, or waits. Ranks that have never
asked get the signal when those that ask have ended: they may serve them, or may still be starting. A rank that asks for
the first time has passed no step, and stops at the committed one.

Rejected: a barrier in `should_stop`. It would cost a round trip at each step.
Rejected: a step some time ahead, by the rate of steps. A rank that is late would pass it, and the job would run on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from rallypoint.core.stacks import rank_list

__all__ = [
    "NONE",
    "PREEMPTED",
    "PREEMPTED_CODE",
    "Unchanged",
    "NodeStop",
    "RankStop",
    "StopPhase",
    "StopRequest",
    "StopState",
    "decide_stop",
    "node_stop",
]

PREEMPTED = "preempted"
"""The result of a run that was preempted."""

PREEMPTED_CODE = 75
"""Exit code of an agent that is preempted, and of a worker that has stopped: EX_TEMPFAIL, which means requeue."""

NONE = -(2**63)
"""No step, in the record of a rank."""

SHOWN = 8
"""How many nodes a reason lists."""

_Text = Annotated[str, Meta(max_length=1024)]
_Number = Annotated[int, Meta(ge=NONE, le=2**63 - 1)]


class StopRequest(Struct, frozen=True, kw_only=True):
    """The node that leaves the run, and why; `signal` is for ranks that do not ask."""

    node: _Text
    reason: _Text
    signal: _Text = "SIGTERM"


class StopPhase:
    """The phases of an agreement, in their order."""

    ASKED = "asked"
    PROPOSED = "proposed"
    COMMITTED = "committed"
    SIGNALLED = "signalled"
    """All ranks that ask have ended; the others get the signal."""

    OVER = "over"
    """No rank runs: the preempted nodes leave, and the others form a round without them."""


PHASES = (StopPhase.ASKED, StopPhase.PROPOSED, StopPhase.COMMITTED, StopPhase.SIGNALLED, StopPhase.OVER)


class StopState(Struct, frozen=True, kw_only=True):
    """The agreement of one round, and the reason for its phase; `step` is the proposed or the committed step."""

    phase: _Text
    request: StopRequest
    """The first request."""

    step: _Number | None = None
    reason: _Text = ""

    @property
    def order(self) -> tuple[int, int]:
        """Rises with each state of an agreement."""
        return PHASES.index(self.phase) if self.phase in PHASES else -1, NONE if self.step is None else self.step


class RankStop(NamedTuple):
    """The record of one running rank; NONE for a step that there is not."""

    rank: int
    passed: int
    """The highest step at which it was told to go on."""

    accepted: int
    """The step that it has accepted last."""

    stopped: bool
    """Whether it was told to stop."""

    @property
    def asks(self) -> bool:
        """Whether it has ever asked."""
        return self.stopped or self.passed != NONE or self.accepted != NONE


class NodeStop(Struct, frozen=True, kw_only=True):
    """What a node reports of its running ranks."""

    step: _Number | None = None
    """The step that is proposed to all of its ranks."""

    passed: _Number | None = None
    """The highest step that one of them has passed."""

    asking: list[_Number] = []
    """Those that ask."""

    unaccepted: list[_Number] = []
    """Those that ask, and have not accepted the step."""

    others: list[_Number] = []
    """Those that have never asked."""

    stopped: bool = False
    """Whether any rank of the node, running or not, has stopped at the step, or got the signal."""


class Unchanged(NamedTuple):
    """The state stays, and why."""

    reason: str


def node_stop(ranks: Sequence[RankStop], step: int | None, stopped: bool = False) -> NodeStop:
    """Return the report on the running ranks of a node, to all of which this step was proposed."""
    asking = [one for one in ranks if one.asks]
    return NodeStop(
        step=step,
        passed=max((one.passed for one in asking if one.passed != NONE), default=None),
        asking=[one.rank for one in asking],
        unaccepted=[one.rank for one in asking if not one.stopped and one.accepted != step],
        others=[one.rank for one in ranks if not one.asks],
        stopped=stopped or any(one.stopped for one in ranks),
    )


def decide_stop(state: StopState, nodes: Sequence[str], reports: Mapping[str, NodeStop]) -> StopState | Unchanged:
    """Return the next state of an agreement, or why it stays; `nodes` are the living nodes of the round."""
    found = {node: reports[node] for node in nodes if node in reports}
    if state.phase == StopPhase.OVER:
        return Unchanged(state.reason)
    if state.phase == StopPhase.PROPOSED:
        late = [one.passed for one in found.values() if one.passed is not None]
        if state.step is not None and late and max(late) >= state.step:
            return _propose(state, max(late), f"; a rank had passed step {state.step}")
    silent = [node for node in nodes if node not in found]
    if silent:
        return Unchanged(f"no report yet from {_listed(silent)}")
    if state.phase == StopPhase.ASKED and any(one.asking for one in found.values()):
        steps = [one.passed for one in found.values() if one.passed is not None]
        return _propose(state, max(steps, default=-1))
    if state.phase == StopPhase.PROPOSED:
        return _commit(state, found)
    return _end(state, found)


def _propose(state: StopState, passed: int, why: str = "") -> StopState:
    step = min(passed + 1, 2**63 - 1)
    return _next(state, StopPhase.PROPOSED, f"all ranks are to stop at step {step}{why}", step)


def _commit(state: StopState, found: Mapping[str, NodeStop]) -> StopState | Unchanged:
    """Commit the proposed step, if all ranks that ask have accepted it."""
    behind = [node for node, one in found.items() if one.step != state.step]
    if behind:
        return Unchanged(f"step {state.step} is not proposed yet on {_listed(behind)}")
    unaccepted = [rank for one in found.values() for rank in one.unaccepted]
    if unaccepted:
        return Unchanged(f"waiting for {rank_list(unaccepted)} to ask again, and to accept step {state.step}")
    if not any(one.asking for one in found.values()):
        return _end(state, found)
    return _next(state, StopPhase.COMMITTED, f"all ranks stop at step {state.step}", state.step)


def _end(state: StopState, found: Mapping[str, NodeStop]) -> StopState | Unchanged:
    """Go on when the ranks that ask have ended, and again when all have."""
    asking = [rank for one in found.values() for rank in one.asking]
    others = [rank for one in found.values() for rank in one.others]
    if asking and state.phase != StopPhase.SIGNALLED:
        return Unchanged(f"waiting for {rank_list(asking)} to end")
    if asking or (others and state.phase == StopPhase.SIGNALLED):
        return Unchanged(f"waiting for {rank_list([*asking, *others])} to end after {state.request.signal}")
    at = "" if state.step is None else f" at step {state.step}"
    if others:
        words = f"{state.request.signal} for {rank_list(others)}, which never asked whether to stop"
        return _next(state, StopPhase.SIGNALLED, words, state.step)
    if not any(one.stopped for one in found.values()):
        return Unchanged("all workers have ended by themselves")
    return _next(state, StopPhase.OVER, f"all ranks have stopped{at}", state.step)


def _next(state: StopState, phase: str, reason: str, step: int | None) -> StopState:
    return StopState(phase=phase, request=state.request, step=step, reason=reason)


def _listed(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    return f"{', '.join(nodes[:SHOWN])}{more}"
