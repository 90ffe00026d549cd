"""Completion in the shell: what bash really completes, and that completing a name imports no command."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete
from tests.raw_peer import AMPLE_S

from rallypoint.cli import COMMANDS, main
from rallypoint.deadline import Deadline
from rallypoint.readiness import wait_readable

BASH = shutil.which("bash") or ""
COMPLETE = """
source <(rallypoint completion bash)
compopt() { COMPREPLY+=("from $2"); }
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_rallypoint_completion rallypoint
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Calls the function that bash calls at a Tab. `compopt`, which works only there, reports what it is asked for."""


def environ() -> dict[str, str]:
    """Return the variables of a shell that finds the command."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def in_bash(*words: str) -> list[str]:
    """Return what bash completes the last word to."""
    command = [BASH, "--norc", "-c", COMPLETE, "bash", "rallypoint", *words]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=AMPLE_S)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


def items(*words: str) -> list[CompletionItem]:
    """Return the completions of the last word, whatever the shell."""
    *before, last = words
    return ShellComplete(main, {}, "rallypoint", "_RALLYPOINT_COMPLETE").get_completions(before, last)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], ["stacks", "status"]),
        (["etcd", ""], ["down", "status", "up"]),
        (["run", "--nproc"], ["--nproc-per-node"]),
        (["run", "--nproc_"], ["--nproc_per_node"]),
        (["run", "--restart", ""], ["group", "node", "worker"]),
        (["run", "--restart="], ["group", "node", "worker"]),
        (["run", "--log-dir", "d"], ["from dirnames"]),
        (["run", "--token-file", "d"], ["from default"]),
        (["run", "--nnodes", "2", "tr"], ["from default"]),
        (["run", "train.py", "--data", "d"], ["from default"]),
        (["serve", "--data-dir", ""], ["from dirnames"]),
        (["put", "--sto"], ["--store"]),
        (["get", "--store", "tcp", ":", "//node-0", ":", "29400", "--tim"], ["--timeout"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["no-command", "--x"], []),
    ],
)
def test_bash_completes(words: list[str], expected: list[str]) -> None:
    """It splits a URL at its colons."""
    assert [line for line in in_bash(*words) if line] == expected


def test_every_command_is_offered_with_its_line_of_help() -> None:
    assert {item.value: item.help for item in items("")} == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_offered(name: str) -> None:
    context = click.Context(main)
    command = main.get_command(context, name)
    assert command is not None
    options = [param for param in command.get_params(context) if isinstance(param, click.Option) and not param.hidden]
    assert {option.opts[-1].replace("_", "-") for option in options} <= {
        item.value.replace("_", "-") for item in items(name, "-")
    }


def test_completing_a_name_imports_no_command() -> None:
    """Else every Tab would take as long as importing all of them."""
    code = (
        "import os, sys\n"
        "os.environ.update(_RALLYPOINT_COMPLETE='bash_complete', COMP_WORDS='rallypoint s', COMP_CWORD='1')\n"
        "from rallypoint.__main__ import main\n"
        "try: main(prog_name='rallypoint')\n"
        "except SystemExit: pass\n"
        "print(*[name for name in sys.modules if name.startswith('rallypoint.cli.')], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=AMPLE_S)
    assert done.stdout.splitlines() == [f"plain,{name}" for name in COMMANDS if name.startswith("s")]
    assert done.stderr == "\n"


def test_commands_do_not_import_the_completion() -> None:
    code = "import sys; from rallypoint.cli import main, run, lock; sys.exit('click.shell_completion' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=AMPLE_S).returncode == 0


def test_a_tab_at_a_prompt(tmp_path: Path) -> None:
    """Bash at a terminal completes a command, and the name of a script."""
    (tmp_path / "train_a_model.py").write_text("print('it ran')\n")
    terminal, stdin = pty.openpty()
    command = [BASH, "--norc", "--noprofile", "-i"]
    variables = {**environ(), "TERM": "dumb", "PS1": "ready> "}
    shell = subprocess.Popen(command, cwd=tmp_path, env=variables, stdin=stdin, stdout=stdin, stderr=stdin)
    try:
        until(terminal, "ready> ")
        os.write(terminal, b"source <(rallypoint completion bash); echo the script is $?\n")
        until(terminal, r"the script is 0\r?\n.*ready> ")
        os.write(terminal, b"rallypoint comple\t")
        until(terminal, "completion ")
        os.write(terminal, b"\x15rallypoint run train\t")
        until(terminal, "train_a_model.py ")
        os.write(terminal, b"\n")
        until(terminal, "it ran")
    finally:
        shell.kill()
        shell.wait(AMPLE_S)
        os.close(stdin)
        os.close(terminal)


def until(terminal: int, pattern: str) -> None:
    """Read from a terminal until the pattern has come."""
    deadline, said = Deadline(AMPLE_S), ""
    while not re.search(pattern, said, re.S):
        assert wait_readable(terminal, timeout_s=deadline.remaining()), said
        said += os.read(terminal, 4096).decode(errors="replace")


@pytest.mark.parametrize(
    ("shell", "first"), [("zsh", "#compdef rallypoint"), ("fish", "function _rallypoint_completion;")]
)
def test_the_scripts_for_other_shells(shell: str, first: str) -> None:
    """These shells are not installed where rallypoint is tested: what they ask is answered."""
    command = [sys.executable, "-m", "rallypoint"]
    for asked, variables in (
        ([*command, "completion", shell], {}),
        ([*command, "completion"], {"SHELL": f"/bin/{shell}"}),
    ):
        done = subprocess.run(asked, env={**environ(), **variables}, capture_output=True, text=True, timeout=AMPLE_S)
        assert done.stdout.splitlines()[0] == first and done.stderr == ""
    words = {
        "_RALLYPOINT_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "rallypoint sta",
        "COMP_CWORD": "1" if shell == "zsh" else "sta",
    }
    done = subprocess.run(command, env={**environ(), **words}, capture_output=True, text=True, timeout=AMPLE_S)
    assert "stacks" in done.stdout and COMMANDS["stacks"] in done.stdout and "status" in done.stdout


def test_an_unknown_shell_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "rallypoint", "completion"]
    done = subprocess.run(
        command, env={**environ(), "SHELL": "/bin/dash"}, capture_output=True, text=True, timeout=AMPLE_S
    )
    assert done.returncode == 2 and "$SHELL is 'dash': name one of bash, zsh, fish" in done.stderr
