"""The examples are run, and what the pages list exists. tests/docs runs the code of the pages and builds the site."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import cases, table

import rallypoint

ROOT = Path(__file__).resolve().parents[1]

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
    "count.py": "docs/tutorial/one-node.md",
    "ddp_elastic.py": "tests/interop/test_ddp_elastic.py",
    "jax_elastic.py": "tests/launch/test_jax_elastic.py",
}
"""Examples for `rallypoint run`, and the tests or pages that run them."""


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*SAYS, *LAUNCHED}
    for name, test in LAUNCHED.items():
        assert re.search(rf'"{name}[" ]|/{name}', (ROOT / test).read_text())


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


def test_the_page_of_the_relay_names_every_option() -> None:
    page = (ROOT / "docs" / "relay.md").read_text()
    asked = subprocess.run([sys.executable, "-m", "rallypoint", "relay", "--help"], capture_output=True, text=True)
    options = set(re.findall(r"--[a-z-]+", asked.stdout)) - {"--help"}
    assert "--upstream" in options and not {option for option in options if option not in page}


def test_the_page_of_the_launcher_names_every_option() -> None:
    page = (ROOT / "docs" / "run.md").read_text()
    asked = subprocess.run([sys.executable, "-m", "rallypoint", "run", "--help"], capture_output=True, text=True)
    options = set(re.findall(r"--[a-z-]+", asked.stdout)) - {"--help"}
    assert len(options) > 20
    assert not {option for option in options if option not in page}
    (row,) = re.findall(r"^\| `(--nnodes .*?)`", (ROOT / "docs" / "from-torchrun.md").read_text(), re.M)
    assert set(row.split()) <= options


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_and_make_targets_exist(page: str) -> None:
    """The links of docs/ are checked when the site is built."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / target).exists(), f"{page} links to {target}"
    for command in re.findall(r"`make (\w+)", text):
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.M), f"{page} mentions make {command}"


def test_the_table_of_frameworks_is_that_of_the_last_results() -> None:
    """`make frameworks` writes both; what it installs has the versions that the table names."""
    results = table.read()
    assert table.shown() == table.render(results)
    pinned = {name: version for name, version in cases.pins().items() if name != "torch"}
    assert {name: row["version"] for name, row in results.items()} == pinned


def test_every_example_is_listed() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"examples/(\w+\.py)\)", page)) == {*SAYS, *LAUNCHED}


def test_the_listed_operations_exist() -> None:
    (listed,) = re.findall(r"`(set get add.*?)`", (ROOT / "docs" / "stores.md").read_text(), re.S)
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
