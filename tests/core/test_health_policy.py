"""When a node is checked, and what follows: a table of situations, and what is decided about them."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.core.policy.health_policy import (
    MAX_COOLDOWN_S,
    CheckResult,
    CoolDown,
    GiveUp,
    HealthDecision,
    HealthRules,
    HealthSituation,
    JoinRound,
    LeaveRound,
    RunCheck,
    WaitForCheck,
    decide,
    failed_in_row,
)

RULES = HealthRules(command="check", timeout_s=60.0, cooldown_s=30.0)
FAILED = CheckResult(3, "exit code 3", ("GPU 0 is lost", "reboot"))
HUNG = CheckResult(None, "no end after 60 s, killed")
MISSING = CheckResult(127, "exit code 127", ("sh: check: not found",))
REASON = "exit code 3: GPU 0 is lost; reboot"


def facts(**more: Any) -> HealthSituation:
    return HealthSituation(**{"due": "before it joins", "left_s": 600.0, "failed": 1, "max_nodes": 2, **more})


CASES: list[tuple[str, HealthSituation, HealthDecision]] = [
    ("nothing is due", facts(due=""), JoinRound("no health check is due")),
    ("due", facts(), RunCheck("before it joins")),
    ("runs", facts(running_s=20.0), WaitForCheck("checking the health of this node, before it joins")),
    (
        "runs, and others wait for this node",
        facts(running_s=20.0, has_place=True, others=1),
        WaitForCheck("checking the health of this node, before it joins"),
    ),
    (
        "has just begun, and a spare waits",
        facts(running_s=1.9, has_place=True, others=2),
        WaitForCheck("checking the health of this node, before it joins"),
    ),
    (
        "takes long, and a spare waits",
        facts(running_s=2.0, has_place=True, others=2),
        LeaveRound("a spare takes its place: its health check has been running for 2.0 s"),
    ),
    (
        "takes long, a spare has the place",
        facts(running_s=9.0, others=2),
        WaitForCheck("checking the health of this node, before it joins"),
    ),
    ("passed", facts(result=CheckResult(0, "exit code 0")), JoinRound("the health check passed")),
    ("failed", facts(result=FAILED), CoolDown(f"health check failed: {REASON}", 30.0)),
    (
        "failed again",
        facts(result=FAILED, failed=3),
        CoolDown(f"health check failed 3 times in a row: {REASON}", 120.0),
    ),
    (
        "failed often",
        facts(result=FAILED, failed=1000, left_s=1e6),
        CoolDown(f"health check failed 1000 times in a row: {REASON}", MAX_COOLDOWN_S),
    ),
    ("hung", facts(result=HUNG), CoolDown("health check failed: no end after 60 s, killed", 30.0)),
    (
        "the time to join ends in the cool-down",
        facts(result=FAILED, left_s=5.0),
        CoolDown(f"health check failed: {REASON}", 5.0),
    ),
    ("the time to join is over", facts(result=FAILED, left_s=0.0), GiveUp(f"health check failed: {REASON}", 1)),
    (
        "passed in the end",
        facts(result=CheckResult(0, "exit code 0"), left_s=0.0),
        JoinRound("the health check passed"),
    ),
    (
        "there is no such command",
        facts(result=MISSING),
        GiveUp("the health check cannot be run: exit code 127: sh: check: not found", 127),
    ),
    (
        "the command is gone, which did run",
        facts(result=MISSING, has_run=True),
        CoolDown("health check failed: exit code 127: sh: check: not found", 30.0),
    ),
]


@pytest.mark.parametrize(("situation", "decision"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_decided(situation: HealthSituation, decision: HealthDecision) -> None:
    found = decide(RULES, situation)
    assert (type(found), found) == (type(decision), decision)


def test_without_a_command_nothing_holds_a_node_back() -> None:
    assert isinstance(decide(HealthRules(), facts()), JoinRound)


def test_a_cool_down_doubles_up_to_the_longest_or_to_its_own_if_that_is_longer() -> None:
    assert [RULES.cooldown_after(failed) for failed in range(1, 8)] == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    long, none = HealthRules(command="check", cooldown_s=3600.0), HealthRules(command="check", cooldown_s=0.0)
    assert [long.cooldown_after(1), long.cooldown_after(10**6)] == [3600.0, 3600.0]
    assert none.cooldown_after(10**6) == 0.0


def test_a_node_that_fails_again_soon_after_it_was_well_continues_its_row() -> None:
    assert failed_in_row(0, None) == 1
    assert failed_in_row(4, None) == 5
    assert failed_in_row(4, MAX_COOLDOWN_S) == 5
    assert failed_in_row(4, MAX_COOLDOWN_S + 1) == 1
