"""The code and commands in the README, the examples and the docs are run, so that they stay true."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
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

LAUNCHED = {
    "pi.py": "tests/launch/test_pi.py",
    "ddp_elastic.py": "tests/interop/test_ddp_elastic.py",
    "jax_elastic.py": "tests/launch/test_jax_elastic.py",
}
"""Examples for `rallypoint run`, and the tests that run them."""

PAGES = ("README.md", "docs/run.md")
"""Pages that show what the launcher prints."""


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*SAYS, *LAUNCHED}
    for name, test in LAUNCHED.items():
        assert f'"{name}"' in (ROOT / test).read_text() or f'"{name} ' in (ROOT / test).read_text()


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / name], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert SAYS[name] in run.stdout


def test_examples_run_on_a_server_too() -> None:
    with rallypoint.Server() as server:
        for name in ("store.py", "work_queue.py"):
            run = subprocess.run(
                [sys.executable, ROOT / "examples" / name, server.url], capture_output=True, text=True, timeout=100
            )
            assert run.returncode == 0, run.stderr
            assert SAYS[name] in run.stdout


def test_readme_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's Python blocks run in order, and every `expression  # b'...'` gives what its comment says."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "torch" not in block]
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)  # one of them makes a directory
    printed = io.StringIO()
    with rallypoint.Server() as server:
        names: dict[str, object] = {}
        for block in blocks:
            with contextlib.redirect_stdout(printed):
                exec(block.replace("tcp://127.0.0.1:29400", server.url), names)
            if 'store.queue_pop("shards")' in block:
                store = names["store"]
                assert isinstance(store, rallypoint.Store)
                assert store.multi_get(["checkpoint", "epoch"]) == [b"step-1000.pt", b"1"]
                assert store.queue_len("shards") == 0
    assert "wait timed out after 0.5 s: still missing 'rank3/ready', 1 of 2 keys in <TCPStore" in printed.getvalue()
    assert "('rank3/ready',)" in printed.getvalue()
    assert "epoch' in <TCPStore" in printed.getvalue() and "missing: node-b, node-c" in printed.getvalue()


def test_the_page_of_the_relay_names_every_option() -> None:
    page = (ROOT / "docs" / "relay.md").read_text()
    asked = subprocess.run([sys.executable, "-m", "rallypoint", "relay", "--help"], capture_output=True, text=True)
    options = set(re.findall(r"--[a-z-]+", asked.stdout)) - {"--help"}
    assert "--upstream" in options and not {option for option in options if option not in page}


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_the_launcher_prints(page: str, tmp_path: Path) -> None:
    """A script whose first line is its name is written; `$ commands` are run, and print every line that is shown.

    Numbers may differ, and so may the order, for workers run at the same time.
    """
    text = (ROOT / page).read_text()
    (tmp_path / "rallypoint").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rallypoint "$@"\n')
    (tmp_path / "rallypoint").chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, script in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(script)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    shown = re.findall(r"^\$ (.*)\n((?:[^$`].*\n)+)", "".join(re.findall(r"```console\n.*?```", text, re.S)), re.M)
    assert shown
    for command, output in shown:
        done = subprocess.run(
            ["sh", "-c", f"({command}) 2>&1"], cwd=tmp_path, env=env, stdout=-1, text=True, timeout=100
        )
        said = {without_numbers(line) for line in [*done.stdout.splitlines(), "..."]}
        missing = [line for line in output.splitlines() if line.strip() and without_numbers(line) not in said]
        assert not missing, f"$ {command}\n{done.stdout}"


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.,]*", "0", line)


def test_the_page_of_the_launcher_names_every_option() -> None:
    page = (ROOT / "docs" / "run.md").read_text() + README
    asked = subprocess.run([sys.executable, "-m", "rallypoint", "run", "--help"], capture_output=True, text=True)
    options = set(re.findall(r"--[a-z-]+", asked.stdout)) - {"--help"}
    assert len(options) > 20
    assert not {option for option in options if option not in page}
    (row,) = re.findall(r"^\| `(--nnodes .*?)`", README, re.M)
    assert set(row.split()) <= options


@pytest.mark.parametrize("page", ["rendezvous.md", "queues.md", "relay.md", "launch.md", "testing.md"])
def test_the_examples_of_a_page(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each block prints is what its comments say."""
    monkeypatch.setenv("RALLYPOINT_RELAY", "")  # one of them sets it
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    assert blocks
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block, {"__name__": "__main__"})
        assert printed.getvalue().splitlines() == re.findall(r"print\(.*?\) +# (.*)", block)


def test_links_and_make_targets_of_the_readme_exist() -> None:
    for target in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / target).exists(), f"README links to {target}"
    for command in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), f"README mentions make {command}"


def test_operations_listed_in_the_readme_exist() -> None:
    (listed,) = re.findall(r"`(set get add.*?)`", README, re.S)
    missing = [name for name in listed.split() if not hasattr(rallypoint.Store, name)]
    assert not missing


WALK_STEP = re.compile(r"`([\w/]+\.py)` `(\w+(?:\.\w+)?)`")
WALK_MODULES = [12, 12, 12, 18, 12, 12]
"""Modules that each walk may name. The fourth crosses a client, a server and etcd: 12 of its modules are no storage."""


def test_the_walks_of_the_design_name_functions_that_exist() -> None:
    """Each walk has at most 20 steps in few modules, and names each step's module and function."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    walks = re.findall(r"\*\*\d\. .*?(?=\n\n\*\*\d\. |\n\n## )", text, re.DOTALL)
    for walk, modules in zip(walks, WALK_MODULES, strict=True):
        assert len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 20
        steps = WALK_STEP.findall(walk)
        assert len(steps) >= 8 and len({path for path, _ in steps}) <= modules
        for path, name in steps:
            tree = ast.parse((ROOT / "src" / "rallypoint" / path).read_text(encoding="utf-8"))
            assert name in _functions(tree), f"{path} has no {name}"


def _functions(tree: ast.Module) -> set[str]:
    """Return the names of all functions of a module, with those of their classes in front."""
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            inside = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{one.name}" for one in inside}
    return found
