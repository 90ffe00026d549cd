"""The frameworks, and the ways in which a job of each is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from tests.hosts import Host, hosts

from frameworks.jobs import AMPLE_S, PYTHON, ROOT, Outcome, Victim, follow, start

__all__ = ["CASES", "WAYS", "Case", "Way", "pins", "run"]

SCRIPTS = ROOT / "frameworks" / "scripts"
RALLYPOINT = [str(PYTHON), "-m", "rallypoint", "run"]
TORCHRUN = [str(PYTHON), "-m", "torch.distributed.run"]
PORT = 29400


class Case(NamedTuple):
    """A framework's script, and how to read what it prints."""

    framework: str
    script: Path
    arguments: Callable[[int], list[str]] = lambda nodes: []
    """Further arguments of the script, for a number of nodes."""

    options: tuple[str, ...] = ()
    """What `rallypoint run` must be told for this framework."""

    victim: Victim | None = Victim(1, 42)
    """The worker that is killed; None for a script that kills one of its own workers."""

    resumed: str = r"resumes after step (\d+)"
    result: str = r"^result: (.*)"
    torchrun: bool = True
    """Whether the script also runs under torchrun."""

    def command(self, nodes: int, out: Path, killed: bool) -> list[str]:
        """Return the words after the launcher's options."""
        own = ["--kill-half-way"] if killed and self.victim is None else []
        return [str(self.script), "--out", str(out), *self.arguments(nodes), *own]


CASES = (
    Case("accelerate", SCRIPTS / "with_accelerate.py"),
    Case("lightning", SCRIPTS / "with_lightning.py", lambda nodes: [f"--nodes={nodes}", f"--devices={2 // nodes}"]),
    Case("transformers", SCRIPTS / "with_transformers.py"),
    Case("deepspeed", SCRIPTS / "with_deepspeed.py"),
    Case(
        "jax",
        ROOT / "examples" / "jax_elastic.py",
        options=("--grace", "5"),
        victim=None,
        resumed=r"goes on after step (\d+)",
        result=r"^(y = .*)",
        torchrun=False,
    ),
)


class Way(NamedTuple):
    """A way to start two workers."""

    name: str
    nodes: int
    launcher: list[str]
    within_s: float = AMPLE_S


WAYS = (
    Way("one node", 1, [*RALLYPOINT, "--nproc-per-node=2"]),
    Way("two nodes, rank0", 2, [*RALLYPOINT, "--nnodes=2", "--relay=rank0"]),
    Way("two nodes, local", 2, [*RALLYPOINT, "--nnodes=2", "--relay=local"]),
    Way("torchrun", 1, [*TORCHRUN, "--nproc-per-node=2"], 300.0),
)
"""Columns of the table. Two nodes are two network namespaces with one worker each."""


def run(case: Case, way: Way, out: Path, killed: bool) -> Outcome:
    """Run a case to its end, with or without a kill, and return the outcome."""
    words = [*way.launcher, "--max-restarts=3"]
    if way.launcher[: len(RALLYPOINT)] == RALLYPOINT:
        words += case.options
    with _nodes(way.nodes) as nodes:
        if nodes:
            words += ["--rdzv-id=job", f"--rdzv-endpoint={nodes[0].name}:{PORT}"]
        words += case.command(way.nodes, out, killed)
        commands = [node.command(words) for node in nodes] or [words]
        return follow([start(command) for command in commands], case.victim if killed else None, way.within_s)


def pins() -> dict[str, str]:
    """Return the version of each package that the suite installs."""
    text = (ROOT / "frameworks" / "requirements.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.M))


@contextmanager
def _nodes(count: int) -> Iterator[tuple[Host, ...]]:
    with hosts(count) if count > 1 else nullcontext(()) as made:
        yield made
