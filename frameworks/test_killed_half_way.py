"""A worker of each framework's job is killed half-way: all restart, resume, and end with the result of a quiet run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from _pytest.mark import ParameterSet

from frameworks.cases import CASES, WAYS, Case, Way, run
from frameworks.jobs import Hung
from frameworks.table import record

SAME = "resumed, same result"
LOST = "failed to restart"
"""A restarted worker has waited for the address that another one had before it was restarted."""


@cache
def quiet(case: Case) -> str:
    """Return the result of a job of two workers that nobody kills."""
    with TemporaryDirectory() as directory:
        done = run(case, WAYS[0], Path(directory, "out"), killed=False)
    assert done.codes == (0,), done.output
    return done.last(case.result)


def parameters() -> Iterator[ParameterSet]:
    """Yield each case in each way that it has."""
    for case, way in itertools.product(CASES, WAYS):
        marks = [pytest.mark.needs("netns")] if way.nodes > 1 else []
        if case.torchrun or way.name != "torchrun":
            yield pytest.param(case, way, marks=marks, id=f"{case.framework}, {way.name}")


@pytest.mark.parametrize(("case", "way"), list(parameters()))
def test_killed_half_way(case: Case, way: Way, tmp_path: Path) -> None:
    try:
        done = run(case, way, tmp_path / "out", killed=True)
        lost = any(done.codes) and "connectFullMesh failed" in done.output
    except Hung as hung:
        lost = "init_process_group" in str(hung)
        if not lost or way.name != "torchrun":
            raise
    if lost and way.name == "torchrun":
        record(case.framework, way.name, LOST)  # PyTorch's own race: docs/frameworks.md
        return
    assert done.codes == (0,) * way.nodes, done.output
    assert done.killed == (case.victim is not None), f"the job was over before the kill\n{done.output}"
    assert int(done.last(case.resumed) or 0) > 0, done.output
    assert done.last(case.result) == quiet(case), done.output
    record(case.framework, way.name, SAME)
