"""Histories of a gang: what happened to the workers of one node, and what was decided about it.

`new node budget=3 young=5 final=42` makes a gang by its rules. `start 0 1` notes who runs; `exit 1 9 2.5 used=1` that
rank 1 ended with code 9 after 2.5 s, when the job has used one restart; `over lost b | members | here | waiting | done`
that the round is over; `signal`, `closed`, `elsewhere`, `unstartable` and `excused` are the other news. `hurried` asks
whether signals that wait mean to hurry, and `running` who counts as running.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rallypoint.core.gang import Act, Decision, Exit, Gang, Rules, Standing

from .transcript import check

HERE = Path(__file__).parent / "gangs"


def words_for(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class GangScript:
    """A gang that takes its news as lines of text."""

    reached: set[str]

    def __init__(self) -> None:
        self.gang = Gang(rules=Rules())
        self.reached = set()

    def __call__(self, line: str) -> list[str]:
        verb, _, rest = line.partition(" ")
        words = rest.split()
        match verb:
            case "new":
                said = dict(word.split("=") for word in words[1:])
                rules = Rules(
                    restart=words[0],
                    budget=int(said.get("budget", 0)),
                    min_uptime_s=float(said.get("young", 0)),
                    final_codes=tuple(map(int, filter(None, said.get("final", "").split(",")))),
                )
                self.gang = Gang(rules=rules)
                return []
            case "start":
                self.gang.started(list(map(int, words)))
                return []
            case "regrouped":
                self.gang.regrouped()
                return []
            case "hurried":
                return [f"{line} -> {'yes' if self.gang.hurried(words) else 'no'}"]
            case "running":
                return [f"running -> {' '.join(map(str, sorted(self.gang.running))) or 'nobody'}"]
        decision = self.decide(verb, words, rest)
        self.reached.add(decision.act)
        to = f" {list(decision.ranks)}" if decision.ranks else ""
        after = f" after {decision.after_s:g} s" if decision.after_s else ""
        return [f"{line} -> {decision.act}{to}{after}: {decision.reason}"]

    def decide(self, verb: str, words: list[str], rest: str) -> Decision:
        match verb:
            case "exit":
                rank, code, uptime_s, *more = words
                used = int(more[0].removeprefix("used=")) if more else 0
                return self.gang.exited(Exit(int(rank), int(code), words_for(int(code)), float(uptime_s)), used)
            case "over":
                reason, *groups = (part.strip() for part in rest.split("|"))
                return self.gang.changed(reason, Standing(*(group.split() for group in groups)))
            case "elsewhere":
                return self.gang.failed_elsewhere(rest)
            case "unstartable":
                return self.gang.unstartable(rest)
            case "excused":
                return self.gang.excused(rest)
            case "closed":
                return self.gang.closed(words[0], " ".join(words[1:]))
            case "signal":
                return self.gang.signal(words[0])
        raise ValueError(verb)


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check(path, GangScript())


def test_the_histories_reach_every_act() -> None:
    script = GangScript()
    for path in HERE.glob("*.txt"):
        check(path, script)
    acts = {value for name, value in vars(Act).items() if name.isupper()}
    assert script.reached == acts
