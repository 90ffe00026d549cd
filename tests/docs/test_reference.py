"""The lists of the reference that are written by hand are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from msgspec import inspect

import rallypoint
from rallypoint import cli
from rallypoint.cli import lock, store_command
from rallypoint.core.ops import Commands, Operation
from rallypoint.launch.workers import worker_group
from rallypoint.protocol import challenge, channels, native

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


# The wire protocol

PROTOCOL_PAGE = (REFERENCE / "wire-protocol.md").read_text()


def described(structure: type) -> Any:
    """Return what msgspec knows of a structure: its tag and its fields."""
    return inspect.type_info(structure)


def fields_of(structure: type) -> str:
    names = [field.name for field in described(structure).fields if field.name != "number"]
    return ", ".join(f"`{name}`" for name in names)


def test_the_structures_on_the_wire_are_those_of_the_code() -> None:
    for structure in (native.Hello, native.Welcome, native.Standby, native.Notice):
        assert f"\n| `{structure.__name__}` | {fields_of(structure)} |\n" in PROTOCOL_PAGE


def test_the_operations_on_the_wire_are_those_of_the_code() -> None:
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*?) ?\| (yes|no) \|$", PROTOCOL_PAGE, re.M)
    assert listed == [
        (str(described(op).tag), op.__name__, fields_of(op), "yes" if op.changes else "no")
        for op in get_args(Operation)
    ]


def test_the_commands_on_the_wire_are_those_of_the_code() -> None:
    tags = [described(command).tag for command in get_args(Commands)]
    assert re.findall(r"`(\w+\.\w+)`", PROTOCOL_PAGE.partition("| object | commands |")[2].partition("\n\n")[0]) == tags


def test_the_codes_on_the_wire_are_those_of_the_code() -> None:
    codes = [
        challenge.CHALLENGE,
        challenge.NEEDS_TLS,
        challenge.NO_TLS.strip(),
        challenge.NO_CHANNELS,
        challenge.DENIED,
    ]
    for code in [*codes, native.ACCEPTED, native.STANDBY, channels.ACCEPTED]:
        assert f"`{code.decode()}`" in PROTOCOL_PAGE
    for preface in (native.PREFACE, channels.PREFACE, challenge.HTTP_PREFACE):
        assert f"`{preface[:6].hex(' ')}` `{preface[6:].decode()}`" in PROTOCOL_PAGE
    kinds = ["DATA", "CREDIT", "CLOSE", "SHARED", "GATHERED", "CREDITS"]
    assert re.findall(r"^\| (\d) \| `([A-Z]+)` ", PROTOCOL_PAGE, re.M) == [
        (str(getattr(channels, one)), one) for one in kinds
    ]
    assert f"{channels.WINDOW:,}" in PROTOCOL_PAGE and f"{channels.MAX_CHUNK:,}" in PROTOCOL_PAGE
    assert f"version {native.VERSION}\n" in PROTOCOL_PAGE
