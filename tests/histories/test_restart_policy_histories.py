"""Histories of the restart policy: events of one node's workers, and the decisions.

`new node budget=3 young=5 final=42 limit=2` makes a policy with these rules. `start 0 1`: these ranks run; `exit 1 9
2.5 used=1 stalled=1`: rank 1 ended with code 9 after 2.5 s, when the job has used one restart, and one without
progress; `stopped 1`: rank 1 stopped because it was told to; `over lost b | members | present | waiting | done`: the
round is over; `signal`, `closed`, `elsewhere`, `unstartable` and `excused` are the other events. `hurried` asks whether
the pending signals mean to kill at once, and `running` which ranks count as running.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rallypoint.core.policy.restart_policy import (
    Action,
    Decision,
    RestartPolicy,
    RestartRules,
    RoundProgress,
    WorkerExit,
)
from rallypoint.testing import check_transcript

HERE = Path(__file__).parent / "restart_policy"


def words_for(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class RestartPolicyScript:
    """A restart policy with events as lines of text."""

    reached: set[str]

    def __init__(self) -> None:
        self.policy = RestartPolicy(rules=RestartRules())
        self.reached = set()

    def __call__(self, line: str) -> list[str]:
        verb, _, rest = line.partition(" ")
        words = rest.split()
        match verb:
            case "new":
                options = dict(word.split("=") for word in words[1:])
                rules = RestartRules(
                    restart=words[0],
                    budget=int(options.get("budget", 0)),
                    min_uptime_s=float(options.get("young", 0)),
                    no_progress_limit=int(options.get("limit", 0)),
                    final_codes=tuple(map(int, filter(None, options.get("final", "").split(",")))),
                )
                self.policy = RestartPolicy(rules=rules)
                return []
            case "start":
                self.policy.started(list(map(int, words)))
                return []
            case "regrouped":
                self.policy.reset()
                return []
            case "hurried":
                return [f"{line} -> {'yes' if self.policy.must_kill(words) else 'no'}"]
            case "running":
                return [f"running -> {' '.join(map(str, sorted(self.policy.running))) or 'nobody'}"]
        decision = self.decide(verb, words, rest)
        self.reached.add(decision.action)
        to = f" {list(decision.ranks)}" if decision.ranks else ""
        after = f" after {decision.after_s:g} s" if decision.after_s else ""
        return [f"{line} -> {decision.action}{to}{after}: {decision.reason}"]

    def decide(self, verb: str, words: list[str], rest: str) -> Decision:
        match verb:
            case "exit":
                rank, code, uptime_s, *more = words
                counts = {name: int(count) for name, _, count in (word.partition("=") for word in more)}
                end = WorkerExit(int(rank), int(code), words_for(int(code)), float(uptime_s))
                return self.policy.exited(end, counts.get("used", 0), counts.get("stalled", 0))
            case "over":
                reason, *groups = (part.strip() for part in rest.split("|"))
                return self.policy.changed(reason, RoundProgress(*(group.split() for group in groups)))
            case "elsewhere":
                return self.policy.failed_elsewhere(rest)
            case "unstartable":
                return self.policy.start_failed(rest)
            case "excused":
                return self.policy.retract_failure(rest)
            case "stopped":
                return self.policy.stopped(int(words[0]), "it was told to")
            case "closed":
                return self.policy.closed(words[0], " ".join(words[1:]))
            case "signal":
                return self.policy.signal(words[0])
        raise ValueError(verb)


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check_transcript(path, RestartPolicyScript())


def test_the_histories_reach_every_action() -> None:
    script = RestartPolicyScript()
    for path in HERE.glob("*.txt"):
        check_transcript(path, script)
    made_elsewhere = {Action.PREEMPTED}
    assert script.reached == {value for name, value in vars(Action).items() if name.isupper()} - made_elsewhere
