"""Token files that others could read or have written, and files without a token: nothing starts with one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.raw_peer import AMPLE_S
from tests.security.other_user import NOBODY

import rallypoint
from rallypoint.cli import main

COMMAND = [sys.executable, "-m", "rallypoint"]
TOKEN = "0123456789abcdef0123456789abcdef"
USAGE_ERROR = 2

STORE_COMMANDS = {
    "get": ["key"], "set": ["key", "value"], "add": ["key", "1"], "wait": ["key"], "watch": [], "ls": [],
    "del": ["key"], "barrier": ["name", "--members", "1", "--member", "0"],
    "exchange": ["name", "--size", "1", "--rank", "0"], "lock": ["name", "--", "true"],
}  # fmt: skip
OTHERS = (
    ["serve", "--port", "0"],
    ["relay", "--upstream", "tcp://127.0.0.1:1"],
    ["run", "--nproc-per-node", "1"],
    ["run", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1"],
)


def readable_by_all(path: Path) -> str:
    path.write_text(TOKEN)
    path.chmod(0o644)
    return "has mode 644: other users can read or change it: chmod 600"


def readable_by_a_group(path: Path) -> str:
    path.write_text(TOKEN)
    path.chmod(0o640)
    return "has mode 640"


def of_another_user(path: Path) -> str:
    path.write_text(TOKEN)
    path.chmod(0o600)
    os.chown(path, NOBODY, -1)
    return f"belongs to user {NOBODY}; it must be your own, or root's"


def missing(path: Path) -> str:
    return "No such file or directory"


def empty(path: Path) -> str:
    path.touch(0o600)
    return "has 0 characters; it must have 16 to 1024, at random: make one with: rallypoint token new"


def no_file(path: Path) -> str:
    path.mkdir()
    return "is not a regular file"


FAULTS: dict[str, Callable[[Path], str]] = {
    fault.__name__: fault for fault in (readable_by_all, readable_by_a_group, of_another_user, missing, empty, no_file)
}


ROOTS = pytest.mark.needs("root")


@pytest.fixture(params=[pytest.param(name, marks=ROOTS if name == "of_another_user" else ()) for name in FAULTS])
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The path of an unusable token file, and what is said about it."""
    return str(tmp_path / "token"), FAULTS[request.param](tmp_path / "token")


def test_no_command_starts(bad: tuple[str, str], tmp_path: Path) -> None:
    path, why = bad
    (tmp_path / "script.py").write_text("open('started', 'w')\n")
    started = []
    for words in OTHERS:
        script = [str(tmp_path / "script.py")] if words[0] == "run" else []
        command = [*COMMAND, *words, "--token-file", path, *script]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, text=True, cwd=tmp_path, stdout=pipe, stderr=pipe))
    for child in started:
        out, said = child.communicate(timeout=AMPLE_S)
        assert child.returncode == USAGE_ERROR and not out, (child.args, said)
        assert path in said.splitlines()[-1] and why in said.splitlines()[-1], said
        assert TOKEN not in said and "Traceback" not in said
    assert not (tmp_path / "started").exists()


def test_no_store_command_connects(bad: tuple[str, str]) -> None:
    path, why = bad
    for name, words in STORE_COMMANDS.items():
        for given, env in ((["--token-file", path], {}), ([], {"RALLYPOINT_TOKEN_FILE": path})):
            command = [name, "--store", "tcp://127.0.0.1:1", "--connect-timeout", "0", *given, *words]
            done = CliRunner().invoke(main, command, env=env)
            assert done.exit_code == USAGE_ERROR and path in done.output and why in done.output, done.output
            assert TOKEN not in done.output


def test_no_program_starts_a_server_or_connects(bad: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, why = bad
    monkeypatch.setenv("RALLYPOINT_TOKEN_FILE", path)
    for use in (
        rallypoint.Server,
        lambda: rallypoint.Relay("tcp://127.0.0.1:1"),
        lambda: rallypoint.connect("tcp://127.0.0.1:1", AMPLE_S),
        lambda: rallypoint.TCPStore("127.0.0.1", 0, is_master=True),
    ):
        with pytest.raises(ValueError, match=why.split(";")[0]) as caught:
            use()
        assert path in str(caught.value) and TOKEN not in str(caught.value)


@pytest.mark.parametrize("option", ["--token", "--token=" + TOKEN])
def test_the_token_itself_is_no_option(option: str) -> None:
    for command in ("serve", "relay", "run", *STORE_COMMANDS):
        done = CliRunner().invoke(main, [command, option, TOKEN])
        assert done.exit_code == USAGE_ERROR and "Error: " in done.output, command
