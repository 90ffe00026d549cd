"""examples/pi.py is right to the last digit, however often its workers are killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kill_workers import AMPLE_S, KILLING_S, ROOT, run_and_kill


def points(seconds: float) -> str:
    """Return how many points a batch must have for the job to last about so long; a million a second is a slow core."""
    return str(max(2_000, int(seconds * 30_000)))


def result(said: str) -> set[str]:
    """Return what was said of pi, once however often it was."""
    return set(re.findall(r"pi is about.*", said))


@pytest.mark.parametrize("restart", ["group", "node", "worker"])
def test_killed_at_random_it_counts_every_batch_once(restart: str, tmp_path: Path) -> None:
    batch = points(KILLING_S + 1)
    kills, said = run_and_kill(
        *f"pi.py --out {tmp_path} --points {batch}".split(),
        workers=4,
        begun=lambda: any(tmp_path.glob("batch-*")),
        between_s=(0.5, 1.5),
        restart=restart,
    )
    print(f"{kills} kills")
    assert kills and "restart 1 of" in said
    command = f"-m rallypoint run -q --nproc-per-node=2 {ROOT / 'examples' / 'pi.py'} --out {tmp_path} --points {batch}"
    again = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=AMPLE_S)
    assert again.returncode == 0, again.stderr
    assert result(said) == result(again.stdout) != set(), "two workers find every batch of the four"
    count = sum(int(file.read_text()) for file in tmp_path.glob("batch-*"))
    assert f"about {4 * count / (200 * int(batch)):.5f}" in said


def test_one_worker_alone_is_started_again(tmp_path: Path) -> None:
    script = ROOT / "examples" / "pi.py"
    options = f"--nproc-per-node=4 --restart=worker --max-restarts=1 {script} --kill-half-way --points=2000"
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", *options.split(), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=AMPLE_S,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"rank (\d): goes on after (\d+) of", done.stdout) == [("2", "25")]
    assert len(result(done.stdout)) == 1
