"""`tools/soak.py` gives every round fresh seeds, and stops at a failure with the command that repeats the round."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).resolve().parents[1] / "tools" / "soak.py"
AMPLE_S = 120

NOTES = """
import os

def test_it(request):
    with open({path!r}, "a") as file:
        seed = request.config.getoption("--hypothesis-seed")
        print(os.environ["FIRST_SEED"], seed, os.environ["HISTORIES"], file=file)
    with open({path!r}) as file:
        assert len(file.readlines()) < {rounds}, "so many rounds are enough"
"""


def soak(tmp_path: Path, rounds: int, hours: float) -> tuple[int, str, list[list[str]]]:
    """Soak a test that fails in a given round; return the exit code, the output, and each round's seeds."""
    notes, test = tmp_path / "notes", tmp_path / "test_it.py"
    test.write_text(NOTES.format(path=str(notes), rounds=rounds))
    command = [sys.executable, str(SOAK), "--hours", str(hours), "--histories", "7", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S)
    return done.returncode, done.stdout, [line.split() for line in notes.read_text().splitlines()]


def test_it_stops_at_the_first_failure_and_prints_how_to_repeat_it(tmp_path: Path) -> None:
    code, said, rounds = soak(tmp_path, rounds=2, hours=1)
    assert code == 1 and len(rounds) == 2
    seeds = [first for first, _, _ in rounds]
    assert seeds == re.findall(r"first seed (\d+)", said) and len(set(seeds)) == 2, "fresh ones each round"
    assert rounds == [[seed, seed, "7"] for seed in seeds]
    again = re.search(r"round 2 failed; again: (.*)", said)
    assert again
    replayed = subprocess.run(again[1], shell=True, capture_output=True, text=True, timeout=AMPLE_S)
    assert replayed.returncode == 1 and "so many rounds are enough" in replayed.stdout
    assert (tmp_path / "notes").read_text().splitlines()[-1].split() == rounds[-1]


def test_it_runs_one_round_however_little_time_there_is(tmp_path: Path) -> None:
    code, said, rounds = soak(tmp_path, rounds=3, hours=0)
    assert code == 0 and len(rounds) == 1
    assert "1 rounds in 0 hours, no failure" in said
