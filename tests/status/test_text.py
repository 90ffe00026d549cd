"""The status as text: what comes first, what is folded, and that it fits."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.core.run_report import FailureReport, HealthReport, RankReport
from rallypoint.server.status.model import (
    FollowerStatus,
    NodeStatus,
    PastRound,
    RunStatus,
    ServerStatus,
    StragglerStatus,
    decode_status,
    encode_status,
)
from rallypoint.server.status.object_model import (
    GroupStatus,
    HeldItemStatus,
    LockStatus,
    MeetingStatus,
    QueuedStatus,
    WorkStatus,
)
from rallypoint.server.status.text import duration, fold_ranks, render_text, size_text

HOSTILE = "<script>\x1b[31m\u202e\n\"'%s"


def rank(number: int, **more: Any) -> RankReport:
    return RankReport(rank=number, local_rank=0, pid=1000 + number, **more)


def status(**more: Any) -> ServerStatus:
    return ServerStatus(role="server", version="1.0", pid=1, uptime_s=5.0, **more)


def full(name: str) -> ServerStatus:
    """Return a model in which everything has this name."""
    failure = FailureReport(rank=3, node=name, host=name, pid=7, how=name, message=name, traceback=f"{name}\n{name}")
    ranks = [rank(0, step=3, progress_age_s=1.0), rank(1, state="hung", reason=name), rank(2, state=name)]
    node = NodeStatus(node=name, host=name, address=name, reason=name, ranks=ranks, silent=True, report_age_s=60.0)
    run = RunStatus(run=name, reason=name, nodes=[node], failure=failure, missing=[name], max_nodes=2, ranks=3)
    return status(
        trouble=name,
        servers=[name],
        followers=[FollowerStatus(url=name, index=1, behind=2)],
        runs=[run],
        meetings=[MeetingStatus(kind="barrier", name=name, size=2, arrived=1, missing=[name], waited_s=1.0,
                                last_arrival_s=1.0, withdrawn=[name], reason=name)],
        locks=[LockStatus(name=name, holder=name, held_s=1.0, fence=1, queue=[QueuedStatus(name=name, waited_s=1.0)])],
        groups=[GroupStatus(name=name, size=1, epoch=1, members=[name])],
        work_queues=[WorkStatus(name=name, ready=1, taken=1, dead=0, done=0, waiting=0, held=[
            HeldItemStatus(holder=name, item="1-1", held_s=1.0)])],
        stragglers=[StragglerStatus(kind="barrier", name=name, member=name, rounds=2, times_last=1, late_s=1.0,
                                    worst_s=1.0)],
        rounds=[PastRound(run=name, round=1, nodes=2, reason=name, formed_s=9.0, lasted_s=4.0, over=name)],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["x" * 300, "word " * 60, HOSTILE])
@pytest.mark.parametrize("width", [40, 80])
def test_every_line_fits_and_is_printable(name: str, width: int) -> None:
    text = render_text(full(name), width)
    assert max(map(len, text.splitlines())) <= width
    assert all(char.isprintable() for char in text.replace("\n", ""))


def test_a_hostile_name_is_shown_escaped() -> None:
    assert r"\x1b[31m\u202e\n" in render_text(full(HOSTILE), 2000)


def test_equal_ranks_are_folded_and_odd_ones_come_first() -> None:
    ranks = [(rank(number, step=118 + number % 3, progress_age_s=1.0), 2.0) for number in range(64) if number != 17]
    ranks.append((rank(17, state="hung", reason="no progress", step=98, progress_age_s=30.0), 2.0))
    assert fold_ranks(ranks) == [
        "rank 17 hung: no progress, step 98, last progress 32 s ago (pid 1017)",
        "ranks 0-16,18-63 running, step 118 to 120, last progress 3.0 s ago",
    ]
    assert fold_ranks([(rank(1, restarts=2), 0.0), (rank(2), 0.0)]) == ["ranks 1-2 running, restarted 2 times"]


def test_a_run_of_many_nodes_lists_only_those_that_need_attention() -> None:
    nodes = [NodeStatus(node=f"n{number}", state="running") for number in range(100)]
    nodes[40].silent, nodes[40].report_age_s = True, 60.0
    text = render_text(status(runs=[RunStatus(run="demo", phase="running", nodes=nodes, max_nodes=100, min_nodes=100)]))
    assert "node n40: running; silent: no report for 1 min" in text
    assert "and 99 more nodes" in text and "n41" not in text


def test_a_node_that_is_out_says_why_since_when_and_until_when() -> None:
    health = HealthReport(failed=3, out_s=75.0, next_check_s=45.0)
    node = NodeStatus(
        node="n1", host="gpu-7", state="unhealthy", reason="health check failed: exit code 3", health=health
    )
    run = RunStatus(run="job", nodes=[*(NodeStatus(node=f"n{at + 2}") for at in range(20)), node])
    (line,) = [line for line in render_text(status(runs=[run]), 200).splitlines() if "n1" in line.split(" ")]
    assert line.strip() == (
        "node n1 (gpu-7): unhealthy, out for 1 min 15 s, checked again in 45 s: health check failed: exit code 3"
    )


def test_a_failure_shows_its_traceback_as_it_is_indented() -> None:
    failure = FailureReport(rank=3, node="n0", host="h", pid=7, how="exit code 1", message="m",
                            traceback="Traceback:\n  File x\nValueError: y", age_s=61.0)  # fmt: skip
    text = render_text(status(runs=[RunStatus(run="demo", failure=failure)]))
    assert "first failure: rank 3 on n0 (h, pid 7), 1 min 1 s ago: exit code 1" in text
    assert "    Traceback:\n      File x\n    ValueError: y\n" in text


def test_standbys_and_relays_say_what_they_are() -> None:
    standby = ServerStatus(role="standby", version="1", pid=1, uptime_s=1.0, leader="tcp://b:1", servers=["tcp://b:1"])
    assert "the leader is at tcp://b:1" in render_text(standby)
    relay = ServerStatus(role="relay", version="1", pid=1, uptime_s=1.0, upstream="tcp://c:1", trouble="gone")
    assert "relays tcp://c:1\n  trouble: gone" in render_text(relay)


def test_followers_say_how_far_they_are_behind() -> None:
    followers = [FollowerStatus(url=f"tcp://b:{behind}", index=9, behind=behind) for behind in (0, 1, 12)]
    shown = render_text(status(servers=["tcp://b:1"], followers=followers))
    assert [line.strip() for line in shown.splitlines() if "follower" in line] == [
        "follower tcp://b:0: up to date",
        "follower tcp://b:1: 1 commit behind",
        "follower tcp://b:12: 12 commits behind",
    ]


def test_the_model_survives_its_encoding() -> None:
    assert decode_status(encode_status(full(HOSTILE))) == full(HOSTILE)


def test_durations_and_sizes() -> None:
    seconds = (0.0123, 1.0, 9.94, 59.6, 61.0, 3600.0, 7500.0, 90_000.0, 1e300)
    texts = [duration(one) for one in seconds]
    assert texts[:8] == ["12 ms", "1.0 s", "9.9 s", "1 min", "1 min 1 s", "1 h", "2 h 5 min", "1 d 1 h"]
    assert [size_text(one) for one in (5, 2048, 5 << 30)] == ["5 B", "2.0 KiB", "5.0 GiB"]
