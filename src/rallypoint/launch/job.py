"""The settings of `rallypoint run` on one node: nodes, workers, command, restarts, output; and parsers of its options.

Parsers raise ValueError or OSError with a message for the command line.
"""

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

from rallypoint.core.machines.machine import MAX_MEMBERS
from rallypoint.core.machines.rendezvous import MAX_TEXT
from rallypoint.core.policy.health_policy import HealthRules
from rallypoint.core.policy.restart_policy import RestartRules
from rallypoint.launch.output.output_settings import OutputSettings
from rallypoint.launch.signal_names import ENDING_SIGNALS
from rallypoint.recipes.join_args import node_name
from rallypoint.security.credentials import OPEN, Credentials

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
"""Id of a run of several nodes without --rdzv-id, as in torchrun."""

RELAYS = RANK0, LOCAL = "rank0", "local"
"""Which relay serves the store of a round: the one of rank 0's node, or each node's own."""

MAX_CODE = 255


class WorkerCommand(NamedTuple):
    """The command of a worker: a script, a module, or any program."""

    kind: str
    what: str
    arguments: tuple[str, ...]

    def argv(self) -> list[str]:
        """Return the argument vector."""
        start = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "command": []}[self.kind]
        return [*start, self.what, *self.arguments]

    def problem(self, environment: Mapping[str, str]) -> OSError | None:
        """Return why Python is certain to fail to run this, or None; other programs are left to the kernel.

        `environment` holds the variables that workers get in addition: they may change Python's search path.
        """
        if self.kind == "script" and self.what != "-":
            return _unreadable(self.what)
        if self.kind == "module" and not any(name.startswith("PYTHON") for name in environment):
            return _unknown(self.what.partition(".")[0])
        return None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a job on one node; durations are in seconds."""

    command: WorkerCommand
    min_nodes: int = 1
    max_nodes: int = 1
    workers: int = 1
    run_id: str = ""
    endpoint: str | None = None
    """Address of the server; the node with that address starts it. None: a private server on a free port."""

    is_host: bool | None = None
    """Whether this node starts the server of the endpoint; None: if the address is its own."""

    store: str | None = None
    """URL of a store that is running already."""

    data_dir: str | None = None
    """Where the server keeps its state if this node starts it; None: in memory."""

    credentials: Credentials = OPEN
    """The token of the store, and the files for TLS."""

    relay: str = RANK0
    node: str | None = None
    node_rank: int | None = None
    local_address: str | None = None
    role: str = "default"
    rules: RestartRules = RestartRules()
    health: HealthRules = HealthRules()
    grace_s: float = 30.0
    """Grace period of workers between SIGTERM and SIGKILL."""

    preempt_signals: tuple[str, ...] = ()
    """Signals that preempt this node: all ranks stop at a step that they agree on."""

    preempt_timeout_s: float = 300.0
    """Time that ranks may take to reach that step and to end."""

    hang_timeout_s: float = 0.0
    """Time without progress after which a worker hangs; 0: hangs are not looked for."""

    agent_timeout_s: float = 60.0
    """Time after which the other nodes continue without this one if its agent is stopped; 0: they wait for it."""

    exit_timeout_s: float = 300.0
    """Time that a node that is done waits for the others."""

    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    shown_ranks: frozenset[int] | None = None
    """Local ranks whose output is shown on the console; None: all."""

    output: OutputSettings = OutputSettings()
    line_prefix: str = ""
    """Template of the prefix of teed lines ($role_name, $rank, $local_rank); empty: the prefix of all other lines."""

    environment: dict[str, str] = {}
    virtual_local_rank: bool = False
    """Whether each worker sees only its own GPU, as device 0."""

    cpus: tuple[frozenset[int], ...] | None = None
    """The CPUs of each worker, by local rank; None: those of the agent."""

    signals: tuple[str, ...] = ENDING_SIGNALS
    """Signals that end the workers and this agent."""

    quiet: bool = False
    json: bool = False
    notes: tuple[str, ...] = ()
    """What was detected, and which options are ignored; printed first."""

    @property
    def alone(self) -> bool:
        """Whether the run has a private server, so that no other node can join."""
        return self.max_nodes == 1 and self.endpoint is None and self.store is None

    def settings(self) -> dict[str, object]:
        """Return the settings that all nodes must share; without an id, a run is identified by its command."""
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
    """Return why a script cannot be read, or None. Does not open it: reading from a pipe would consume the script."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return error
    if stat.S_ISDIR(mode) and not os.path.exists(os.path.join(path, "__main__.py")):
        return IsADirectoryError(errno.EISDIR, "is a directory without __main__.py")
    if stat.S_ISREG(mode) and not os.access(path, os.R_OK):
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return None


def _unknown(module: str) -> OSError | None:
    """Return an error if there is no such module or package, installed or in the working directory."""
    try:
        found = importlib.util.find_spec(module) or importlib.machinery.PathFinder.find_spec(module, [os.getcwd()])
    except (ImportError, ValueError, OSError):
        return None  # Python will report it
    return None if found else FileNotFoundError(errno.ENOENT, f"no module named {module!r}")


def node_range(text: str) -> tuple[int, int]:
    """Parse `N` or `MIN:MAX`."""
    least, colon, most = text.partition(":")
    try:
        numbers = int(least), int(most if colon else least)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of nodes: use N or MIN:MAX") from None
    if not 1 <= numbers[0] <= numbers[1] <= MAX_MEMBERS:
        raise ValueError(f"{text!r} is not a number of nodes: 1 to {MAX_MEMBERS}, with MIN <= MAX")
    return numbers


def workers_here(text: str) -> int:
    """Parse a number of workers; `cpu`, `gpu` and `auto` count the devices of this machine."""
    if text == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if text in ("gpu", "auto"):
        found = gpus()
        if found or text == "auto":
            return found or workers_here("cpu")
        raise ValueError("no GPU found: use a number, or cpu")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of workers: use a number, auto, cpu or gpu")
    return int(text)


def gpus() -> int:
    """Return the number of GPUs that workers may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def env_file(path: str) -> dict[str, str]:
    """Parse `NAME=value` lines; skip empty lines and lines that begin with #. A # in a value is part of it."""
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
    """Parse --final-codes."""
    numbers = [number.strip() for number in text.split(",") if number.strip()]
    for number in numbers:
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= MAX_CODE):
            raise ValueError(f"{number!r} is not the exit code of a failure: use 1 to {MAX_CODE}")
    return tuple(map(int, numbers))


def directory(text: str) -> str:
    """Create a directory if it is missing; raise ValueError if it is not writable."""
    os.makedirs(text, exist_ok=True)
    if not os.access(text, os.W_OK | os.X_OK):
        raise ValueError(f"{text!r} is not a writable directory")
    return text


def printable_name(text: str) -> str:
    """Check a name that is sent to other nodes and shown to users."""
    if not text.isprintable():
        raise ValueError(f"{text!r} contains unprintable characters")
    return node_name(text, "the value")


def run_name(text: str) -> str:
    """Check the id of a run."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"{len(text)} characters long; the limit is {MAX_TEXT}")
    text.encode()
    return text
