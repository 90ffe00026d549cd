"""What a launcher was told: how many nodes and workers, what to run, when to start again, where output goes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from rallypoint.core.gang import Rules

__all__ = ["Job", "env_file", "gpus", "node_range", "workers_here"]


class Command(NamedTuple):
    """What a worker runs: a script, a module, or any command."""

    kind: str
    what: str
    arguments: tuple[str, ...]

    def words(self) -> list[str]:
        """Return it as a list of words."""
        start = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "command": []}[self.kind]
        return [*start, self.what, *self.arguments]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job as one node was told of it; durations are in seconds."""

    command: Command
    min_nodes: int = 1
    max_nodes: int = 1
    workers: int = 1
    run_id: str = ""
    endpoint: str | None = None
    """Where the server is, or will be started by whoever has that address; None: one of our own, on a free port."""

    store: str | None = None
    """The URL of a server that runs already."""

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
    shown_ranks: tuple[int, ...] | None = None
    environment: dict[str, str] = {}
    quiet: bool = False
    json: bool = False
    notes: tuple[str, ...] = ()
    """What to say of options that do not matter."""

    @property
    def alone(self) -> bool:
        """Whether this is all on one node, which nobody else is to join."""
        return self.max_nodes == 1 and self.endpoint is None and self.store is None


def node_range(text: str) -> tuple[int, int]:
    """Read `N` or `MIN:MAX`."""
    least, colon, most = text.partition(":")
    try:
        numbers = int(least), int(most if colon else least)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of nodes: write N, or MIN:MAX") from None
    if not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(f"{text!r} is not a number of nodes: 1 or more, and MIN not above MAX")
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
    """Read `NAME=value` lines; empty ones and those that begin with # say nothing."""
    read: dict[str, str] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ValueError(f"{path}, line {number}: {line!r} is not NAME=value")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        read[name.strip()] = value
    return read
