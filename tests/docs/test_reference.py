"""The lists of the reference that are written by hand are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import pytest

import rallypoint
from rallypoint import cli
from rallypoint.cli import lock, store_command
from rallypoint.launch.workers import worker_group

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PREFIXES = {"RALLYPOINT_HEALTH"}
"""Texts with which the names of several variables begin."""

VARIABLE = re.compile(r"RALLYPOINT_[A-Z0-9_]*[A-Z0-9]")


def first_cells(text: str) -> list[str]:
    """Return the first cell of each row of all tables."""
    return [cell.strip("` ") for cell in re.findall(r"^\| ([^|]+) \|", text, re.M)]


def variables_of_options(command: click.Command) -> set[str]:
    """Return the variables of a command's options, and of those below it."""
    found = {str(option.envvar) for option in command.params if VARIABLE.fullmatch(str(option.envvar))}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found |= variables_of_options(below)
    return found


def variables_of_the_code() -> set[str]:
    """Return the variables of options, and all texts in the package that are names of variables as a whole."""
    found = variables_of_options(cli.main)
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                found.add(node.value)
    return {name for name in found if not any(other.startswith(f"{name}_") and name in PREFIXES for other in found)}


def test_the_environment_variables_are_those_of_the_code() -> None:
    listed = [cell for cell in first_cells((REFERENCE / "environment.md").read_text()) if cell.startswith("RALLY")]
    assert len(listed) == len(set(listed))
    assert set(listed) == variables_of_the_code()


def test_the_exit_codes_are_those_of_the_code() -> None:
    run, store, _ = re.split(r"^## ", (REFERENCE / "exit-codes.md").read_text(), flags=re.M)[1:]
    ours = {0, cli.FAILED, 2, cli.TIMED_OUT, cli.UNREACHABLE, cli.INTERRUPTED, store_command.BY_SIGNAL + 15}
    assert {cell for cell in first_cells(store) if cell.isdigit()} == set(map(str, ours))
    assert (lock.NOT_FOUND, lock.NOT_EXECUTABLE) == (127, 126) and "127 if it was not found, 126 if" in store
    listed = dict(re.findall(r"^\| (\d+) \| (.*?) \|$", run, re.M))
    assert "was not found" in listed[str(worker_group.NOT_FOUND)]
    assert "could not be run" in listed[str(worker_group.NOT_EXECUTABLE)]


@pytest.mark.parametrize("page", ["failures.md"])
def test_the_named_errors_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for name in re.findall(r"`([A-Z][a-zA-Z]+)`", text):
        assert hasattr(rallypoint, name), name
