"""What a launcher was told: how many nodes and workers, what to run, when to start again, where output goes."""

from __future__ import annotations

import errno
import hashlib
import importlib.machinery
import importlib.util
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from rallypoint.core.gang import Rules
from rallypoint.core.machine import MAX_MEMBERS
from rallypoint.core.rendezvous import MAX_TEXT
from rallypoint.elastic.card import node_name

__all__ = [
    "LOCAL",
    "RANK0",
    "RELAYS",
    "UNNAMED",
    "Job",
    "directory",
    "env_file",
    "exit_codes",
    "gpus",
    "node_range",
    "printable_name",
    "run_name",
    "workers_here",
]


UNNAMED = "none"
"""The name of a run of several nodes that nobody has named, as torchrun calls it."""

RELAYS = RANK0, LOCAL = "rank0", "local"
"""Whose relay the store of a round is: that of rank 0's node, or every node's own."""

MAX_CODE = 255


class Command(NamedTuple):
    """What a worker runs: a script, a module, or any command."""

    kind: str
    what: str
    arguments: tuple[str, ...]

    def words(self) -> list[str]:
        """Return it as a list of words."""
        start = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "command": []}[self.kind]
        return [*start, self.what, *self.arguments]

    def problem(self, environment: Mapping[str, str]) -> OSError | None:
        """Say why Python cannot run this, where that is sure without trying; a command is left to the kernel.

        `environment` is what workers get beside this process's own: it may tell Python to look elsewhere.
        """
        if self.kind == "script" and self.what != "-":
            return _unreadable(self.what)
        if self.kind == "module" and not any(name.startswith("PYTHON") for name in environment):
            return _unknown(self.what.partition(".")[0])
        return None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job as one node was told of it; durations are in seconds."""

    command: Command
    min_nodes: int = 1
    max_nodes: int = 1
    workers: int = 1
    run_id: str = ""
    endpoint: str | None = None
    """Where the server is, or will be started by whoever has that address; None: one of our own, on a free port."""

    is_host: bool | None = None
    """Whether this node starts the server of the endpoint; None: if it has that address."""

    store: str | None = None
    """The URL of a server that runs already."""

    data_dir: str | None = None
    """Where the server keeps its state if this node starts it; None: in its memory."""

    relay: str = RANK0
    node: str | None = None
    node_rank: int | None = None
    local_address: str | None = None
    role: str = "default"
    rules: Rules = Rules()
    grace_s: float = 30.0
    """How long workers have between TERM and KILL."""

    exit_timeout_s: float = 300.0
    """How long a node that is done waits for the others."""

    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    shown_ranks: frozenset[int] | None = None
    line_prefix: str = ""
    """What lines begin with that are teed, with $role_name, $rank and $local_rank in it; empty: as all others do."""

    environment: dict[str, str] = {}
    quiet: bool = False
    json: bool = False
    notes: tuple[str, ...] = ()
    """What to say of options that do not matter."""

    @property
    def alone(self) -> bool:
        """Whether this is all on one node, which nobody else is to join."""
        return self.max_nodes == 1 and self.endpoint is None and self.store is None

    def settings(self) -> dict[str, object]:
        """Return what all nodes must have alike; a run that has no name is known only by what it runs."""
        settings = {"restart": self.rules.restart, "restart_budget": self.rules.budget, "relay": self.relay}
        if self.run_id != UNNAMED:
            return settings
        command, variables = self.command, sorted(self.environment.items())
        path = os.path.abspath(command.what) if command.kind == "script" else command.what
        return {
            **settings,
            "command": f"{command.kind} {path}",
            "arguments": list(command.arguments),
            "env_file": hashlib.sha256(repr(variables).encode()).hexdigest() if variables else "none",
            "working_directory": os.getcwd(),
        }


def _unreadable(path: str) -> OSError | None:
    """Say why a script cannot be read. Pipes and such are not opened: there is one reader too many for them here."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return error
    if stat.S_ISDIR(mode) and not os.path.exists(os.path.join(path, "__main__.py")):
        return IsADirectoryError(errno.EISDIR, "it is a directory, and has no __main__.py")
    if stat.S_ISREG(mode) and not os.access(path, os.R_OK):
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return None


def _unknown(module: str) -> OSError | None:
    """Say that there is no such module or package, here or among what Python has installed."""
    try:
        found = importlib.util.find_spec(module) or importlib.machinery.PathFinder.find_spec(module, [os.getcwd()])
    except (ImportError, ValueError, OSError):
        return None  # Python will say
    return None if found else FileNotFoundError(errno.ENOENT, f"no module named {module!r}")


def node_range(text: str) -> tuple[int, int]:
    """Read `N` or `MIN:MAX`."""
    least, colon, most = text.partition(":")
    try:
        numbers = int(least), int(most if colon else least)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of nodes: write N, or MIN:MAX") from None
    if not 1 <= numbers[0] <= numbers[1] <= MAX_MEMBERS:
        raise ValueError(f"{text!r} is not a number of nodes: 1 to {MAX_MEMBERS}, and MIN not above MAX")
    return numbers


def workers_here(text: str) -> int:
    """Read a number of workers: a number, or `cpu`, `gpu` or `auto` for what this machine has."""
    if text == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if text in ("gpu", "auto"):
        found = gpus()
        if found or text == "auto":
            return found or workers_here("cpu")
        raise ValueError("there is no GPU here: give a number, or cpu")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of workers: write a number, auto, cpu or gpu")
    return int(text)


def gpus() -> int:
    """Count the GPUs that workers may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def env_file(path: str) -> dict[str, str]:
    """Read `NAME=value` lines; empty ones and those that begin with # say nothing. All of the value is the value."""
    read: dict[str, str] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier() or "\0" in value:
            raise ValueError(f"{path}, line {number}: {line!r} is not NAME=value")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        read[name.strip()] = value
    return read


def exit_codes(text: str) -> tuple[int, ...]:
    """Read --final-codes."""
    numbers = [number.strip() for number in text.split(",") if number.strip()]
    for number in numbers:
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= MAX_CODE):
            raise ValueError(f"{number!r} is not the exit code of a failure, which is a number from 1 to {MAX_CODE}")
    return tuple(map(int, numbers))


def directory(text: str) -> str:
    """Make a directory, if it is not there; it must be one to write in."""
    os.makedirs(text, exist_ok=True)
    if not os.access(text, os.W_OK | os.X_OK):
        raise ValueError(f"{text!r} is not a directory that this user may write in")
    return text


def printable_name(text: str) -> str:
    """Check a name that goes over the network and is shown to people."""
    if not text.isprintable():
        raise ValueError(f"{text!r} has characters that cannot be printed")
    return node_name(text, "it")


def run_name(text: str) -> str:
    """Check the name of a run."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"it is {len(text)} characters long, and {MAX_TEXT} is the limit")
    text.encode()
    return text
