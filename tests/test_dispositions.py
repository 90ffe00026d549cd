"""The suite may be started in the background or by nohup: the processes of its tests then ignore no signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.raw_peer import AMPLE_S

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SHOW = f"import signal; print([signal.getsignal(n) is signal.SIG_IGN for n in {[int(n) for n in NUMBERS]}])"


def test_children_ignore_no_signal() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, timeout=AMPLE_S)
    assert done.stdout.strip() == "[False, False, False]"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_suite_that_was_started_with_signals_ignored_passes(workers: str) -> None:
    tests = ["tests/test_dispositions.py", "tests/test_cli_store.py", "-k", "ignore_no_signal or ctrl_c"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, *tests]
    shell = ["sh", "-c", 'trap "" INT HUP QUIT; exec "$@"', "sh", *command]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=AMPLE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
