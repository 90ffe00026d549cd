"""What the agents of a run report through the store, for `rallypoint status`, the live page and the metrics.

    run:RUN/node:NODE     lease of the agent of that node: a `NodeReport` in JSON

An agent writes its report when something changes, and from time to time while it waits, so that durations in it stay
true: they are those of the moment of the report, by the agent's own clock. Instants never cross the wire. A reader
takes reports as untrusted input: `decode_report` returns None for anything else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "MAX_REPORT_BYTES",
    "FailureReport",
    "HealthReport",
    "NodeReport",
    "RankReport",
    "decode_report",
    "encode_report",
]

MAX_REPORT_BYTES = 1024 * 1024
"""The longest report that is read."""

MAX_RANKS = 4096
"""The most workers of one node."""

_Text = Annotated[str, Meta(max_length=512)]
_LongText = Annotated[str, Meta(max_length=16 * 1024)]
_Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]


class RankReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker of a node."""

    rank: _Number
    local_rank: _Number
    pid: _Number
    state: _Text = "running"
    """starting, running, stopped (by SIGSTOP), hung, succeeded, failed, or ended (by the agent)."""

    restarts: _Number = 0
    """How often this node has started it again in this round."""

    step: _Number | None = None
    """The last step that it passed to `progress`; None if it never called it."""

    progress_age_s: _Seconds | None = None
    """Time since its last progress; None if it never called it."""

    reason: _Text = ""
    """Why it is in this state, if that needs an explanation."""


class FailureReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first failure of the last round that failed on this node."""

    rank: _Number
    node: _Text
    host: _Text
    pid: _Number
    how: _Text
    message: _LongText
    traceback: _LongText = ""
    age_s: _Seconds = 0.0
    """Time since it was seen."""


class HealthReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that is out of the run, because its health check fails."""

    failed: _Number
    """Failed checks in a row."""

    out_s: _Seconds
    """Time since the first of them."""

    next_check_s: _Seconds | None = None
    """Time until it is checked again; None if a check is running."""


class NodeReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node of a run, as its agent sees it."""

    run: _Text
    node: _Text
    host: _Text
    address: _Text = ""
    pid: _Number = 0
    """Process id of the agent."""

    round: _Number | None = None
    """The round that it has joined last."""

    state: _Text = "waiting"
    """waiting, running, stopping, done, draining, failed, checking (its health), or unhealthy (and out of the run)."""

    reason: _Text = ""
    """Why it is in this state."""

    uptime_s: _Seconds = 0.0
    """Time since the agent started."""

    restarts: _Number = 0
    """Restarts that the job has used."""

    restart_budget: _Number = 0
    failure: FailureReport | None = None
    health: HealthReport | None = None
    """None if the node is well, or has no health check."""

    ranks: Annotated[list[RankReport], Meta(max_length=MAX_RANKS)] = []
    interval_s: _Seconds = 5.0
    """The agent writes the next report within this time; one that is much older is of an agent that hangs."""


_decoder = msgspec.json.Decoder(NodeReport)


def encode_report(report: NodeReport) -> bytes:
    """Return a report as JSON."""
    return msgspec.json.encode(report)


def decode_report(data: bytes) -> NodeReport | None:
    """Return the report in the data; None if it is none, or too long."""
    if len(data) > MAX_REPORT_BYTES:
        return None
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:  # includes ValidationError
        return None
