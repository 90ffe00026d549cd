"""The model of a server's status: everything that `/status`, the page, `rallypoint status` and `/metrics` show.

All times are durations in seconds, by the server's own monotonic clock, as of the moment the model was built; `None`
means unknown. Lists are bounded; a `more_…` field counts what is left out. Names and reasons are those of peers, as
they sent them: whoever shows them escapes them (`text.py`, `html`, `textContent`).

The fields are an interface for programs (docs/status.md): new ones may come, existing ones stay.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from rallypoint.core.run_report import FailureReport, HealthReport, RankReport
from rallypoint.server.status.object_model import GroupStatus, LockStatus, MeetingStatus, WorkStatus

__all__ = [
    "FollowerStatus",
    "LeaseStatus",
    "NodeStatus",
    "PastFailure",
    "PastRound",
    "RunStatus",
    "ServerStatus",
    "StragglerStatus",
    "decode_status",
    "encode_status",
]


class NodeStatus(Struct, kw_only=True):
    """One node of a run: its place in the rendezvous, and the report of its agent, if there is one."""

    node: str
    host: str = ""
    address: str = ""
    rank: int | None = None
    """The rank of the node in the round; None if it is not in one."""

    state: str = "waiting"
    """As reported (`core/run_report.py`); without a report: running, waiting, or lost."""

    reason: str = ""
    spare: bool = False
    since_s: float | None = None
    """Time since it joined this round, or began to wait for one."""

    pid: int = 0
    """Process id of the agent; 0 if unknown."""

    report_age_s: float | None = None
    """Time since its last report arrived; None if there is none."""

    silent: bool = False
    """Whether the next report is overdue: the agent hangs, is stopped, or cannot reach this server."""

    health: HealthReport | None = None
    """Why it is out of the run since when, if its health check fails; as of now."""

    ranks: list[RankReport] = []
    """Its workers; `progress_age_s` is as of the report, `report_age_s` ago."""


class RunStatus(Struct, kw_only=True):
    """One run: its rendezvous and its nodes."""

    run: str
    phase: str = "gathering"
    """gathering, running, closed, or unknown (there are reports, but no rendezvous)."""

    reason: str = ""
    result: str = ""
    """The result of a closed run."""

    round: int = 0
    round_s: float | None = None
    """Time since the round formed, if one stands."""

    min_nodes: int = 0
    max_nodes: int = 0
    nodes: list[NodeStatus] = []
    more_nodes: int = 0
    missing: list[str] = []
    """Nodes of the last round that are gone."""

    ranks: int = 0
    rank_states: dict[str, int] = {}
    more_ranks: int = 0
    """Workers that are counted, but not listed at their nodes."""

    restarts: int | None = None
    restart_budget: int | None = None
    """Restarts that the job has used, and how many it may use; None without a report."""

    failure: FailureReport | None = None
    """The first failure that the nodes report."""


class LeaseStatus(Struct, kw_only=True):
    """A key that goes with the session of its owner."""

    key: str
    owner: str
    run: str = ""


class StragglerStatus(Struct, kw_only=True):
    """A member that came last to a barrier or an exchange."""

    kind: str
    name: str
    run: str = ""
    member: str
    rounds: int
    """Rounds of that object that were seen."""

    times_last: int
    late_s: float
    """How long after half of the members it came, in total over the rounds in which it was last."""

    worst_s: float
    """The longest of these times."""


class PastRound(Struct, kw_only=True):
    """A round that formed since the server started."""

    run: str
    round: int
    nodes: int
    reason: str
    formed_s: float
    """Time since it formed."""

    lasted_s: float | None = None
    """None: it stands."""

    over: str = ""
    """Why it is over."""


class PastFailure(Struct, kw_only=True):
    """A failure that a node has reported since the server started."""

    run: str
    round: int | None
    failure: FailureReport


class FollowerStatus(Struct, kw_only=True):
    """A standby, as of its last report, about a second ago."""

    url: str
    index: int
    """The last log index that it has applied."""

    behind: int
    """Commits that it has not applied yet; one of more than 1 MiB counts several times."""


class ServerStatus(Struct, kw_only=True):
    """Everything that a server shows of itself."""

    role: str
    """server, leader, standby, or relay."""

    version: str
    pid: int
    uptime_s: float
    leader: str = ""
    """The address of the leader, if this server is a standby and knows it."""

    servers: list[str] = []
    """The servers of a replicated store."""

    followers: list[FollowerStatus] = []
    """The standbys that follow the log of this leader."""

    upstream: str = ""
    """The store of a relay."""

    trouble: str = ""
    """Why the server cannot answer, or a relay cannot reach its server; empty if all is well."""

    connections: int = 0
    max_connections: int | None = None
    refused_connections: int = 0
    denied_connections: int = 0
    sessions: int = 0
    refused_sessions: int = 0
    watchers: int = 0
    """Live pages that are open."""

    bytes: int = 0
    max_bytes: int = 0
    keys: int = 0
    waiting: int = 0
    """Requests that wait."""

    leased_keys: int = 0
    namespaces: int = 0
    """Namespaces of rounds."""

    storage: dict[str, int | float | bool] = {}
    counters: dict[str, int | float] = {}
    """Further counts, by name."""

    runs: list[RunStatus] = []
    more_runs: int = 0
    meetings: list[MeetingStatus] = []
    more_meetings: int = 0
    locks: list[LockStatus] = []
    more_locks: int = 0
    groups: list[GroupStatus] = []
    more_groups: int = 0
    work_queues: list[WorkStatus] = []
    more_work_queues: int = 0
    leases: list[LeaseStatus] = []
    stragglers: list[StragglerStatus] = []
    rounds: list[PastRound] = []
    """Recent rounds, the latest first."""

    failures: list[PastFailure] = []
    """Recent failures, the latest first."""


_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(ServerStatus)


def encode_status(status: ServerStatus) -> bytes:
    """Return the model as JSON, in one line."""
    return _encoder.encode(status)


def decode_status(data: bytes) -> ServerStatus:
    """Return the model in JSON that a server sent; raise msgspec.DecodeError if it is none."""
    return _decoder.decode(data)
