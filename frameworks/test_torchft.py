"""torchft: two replica groups, each a job of its own. The worker of one is killed, and heals from the other.

A quiet run is no measure here, for a group that is alone for some steps sees other data. The groups must end with the
same parameters, and the one that nobody killed must not have restarted.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Sequence

import pytest
from tests.hosts import Host, hosts
from tests.ports import reserve_port

from frameworks.cases import RALLYPOINT, SCRIPTS, TORCHRUN
from frameworks.jobs import PYTHON, Victim, follow, start
from frameworks.table import record

LAUNCHERS = {"one node": RALLYPOINT, "two nodes, rank0": RALLYPOINT, "torchrun": TORCHRUN}
VICTIM = Victim(0, 30, 1)


def job(launcher: Sequence[str], group: int, *words: str) -> list[str]:
    script = str(SCRIPTS / "with_torchft.py")
    options = ["--nproc-per-node=1", "--max-restarts=3"]
    return [*launcher, *options, script, f"--group={group}", *words]


@contextlib.contextmanager
def lighthouse(port: int, host: Host | None) -> Iterator[str]:
    """Run a lighthouse, on a host or on this machine; give its address."""
    program = str(PYTHON.with_name("torchft_lighthouse"))
    words = [program, f"--bind=[::]:{port}", "--min_replicas=1", "--join_timeout_ms=1000"]
    process = subprocess.Popen(
        host.command(words) if host else words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://{host.name if host else 'localhost'}:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "way",
    ["one node", pytest.param("two nodes, rank0", marks=pytest.mark.needs("netns")), "torchrun"],
)
def test_a_killed_group_heals_from_the_other(way: str) -> None:
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(2)) if way.startswith("two") else None
        address = stack.enter_context(lighthouse(reserve_port(), places[0] if places else None))
        words = [job(LAUNCHERS[way], group, *(["--own-store"] if places else [])) for group in (0, 1)]
        if places:
            words = [place.command(each) for place, each in zip(places, words, strict=True)]
        done = follow([start(each, TORCHFT_LIGHTHOUSE=address) for each in words], VICTIM)
    assert done.codes == (0, 0), done.output
    assert done.killed == 1, done.output
    assert re.findall(r"^group (\d) resumes at \d+", done.output, re.M) == ["1"], done.output
    ended = re.findall(r"^result: (step 80, .*)", done.output, re.M)
    assert len(ended) == 2 and len(set(ended)) == 1, done.output
    record("torchft", way, "healed from the other group")
