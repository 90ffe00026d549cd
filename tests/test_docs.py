"""What the README and the examples show is run, so that it stays true."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rallypoint

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

SAYS = {
    "meet.py": "4 workers x 500 steps = 2000, none lost",
    "store.py": "missing: rank2",
    "work_queue.py": "left over: 0",
    "watch.py": "worker/bob is gone",
    "barrier.py": "node-a: 2 of 3 members are here; missing: node-c",
    "exchange.py": "10.0.0.2:4711, 10.0.0.3:4711, seed 42",
    "lock.py": "the next one holds it, with a larger fence: True",
    "group.py": "bob lost: lost: its session ended",
    "rendezvous.py": "eve ends: succeeded",
}
"""Every example, and a line that it must print."""


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name):
    run = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / name], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert SAYS[name] in run.stdout


def test_examples_run_on_a_server_too():
    with rallypoint.Server() as server:
        for name in ("store.py", "work_queue.py"):
            run = subprocess.run(
                [sys.executable, ROOT / "examples" / name, server.url], capture_output=True, text=True, timeout=100
            )
            assert run.returncode == 0, run.stderr
            assert SAYS[name] in run.stdout


def test_readme_python():
    """The README's Python blocks run in order, and every `expression  # b'...'` gives what its comment says."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "torch" not in block]
    assert len(blocks) >= 3
    printed = io.StringIO()
    with rallypoint.Server() as server:
        names: dict[str, object] = {}
        for block in blocks:
            with contextlib.redirect_stdout(printed):
                exec(block.replace("tcp://127.0.0.1:29400", server.url), names)
            if 'store.add("epoch"' in block:
                store = names["store"]
                assert isinstance(store, rallypoint.Store)
                assert store.multi_get(["checkpoint", "epoch"]) == [b"step-1000.pt", b"1"]
                assert store.queue_len("shards") == 0
    assert "wait timed out after 0.5 s: still missing 'rank3/ready', 1 of 2 keys in <TCPStore" in printed.getvalue()
    assert "('rank3/ready',)" in printed.getvalue()
    assert "epoch' in <TCPStore" in printed.getvalue() and "missing: node-b, node-c" in printed.getvalue()


def test_the_rendezvous_page():
    """What its example prints is what its comments say."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rendezvous.md").read_text(), re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block, {})
    assert printed.getvalue().splitlines() == re.findall(r"print\(.*?\) +# (.*)", block)


def test_readme_names_what_exists():
    for target in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / target).exists(), f"README links to {target}"
    for command in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), f"README tells to run make {command}"


def test_readme_lists_every_operation():
    listed = set(re.search(r"`(set get add.*?)`", README, re.S)[1].split())
    missing = [name for name in listed if not hasattr(rallypoint.Store, name)]
    assert not missing
