"""Round trips: how often a job asks its server in a row, until its workers run and until it has ended.

A job runs through a line that delays each direction, and through one that does not. The difference of the two times,
divided by the round trip, is how many requests waited for the one before them. It is not a whole number: what a node
does meanwhile, such as starting its relay, hides a part of a trip.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.rig import CORES, pin, say, team
from benchmarks.table import Line, Target
from rallypoint import Server
from rallypoint.security.credentials import Credentials
from rallypoint.testing import CuttingProxy

TITLE = "Round trips of a job, over a line of 50 ms in each direction"
NOTES = (
    "One job after the other, each with a server that runs already, behind a proxy that forwards every byte 50 ms "
    "after it came, and behind one that forwards it at once. A figure is the difference of the two times in units of "
    "100 ms. *Workers up* is from the command until the last worker has begun; the worker writes the time as its "
    "first act and ends. *Job ended* is from the command until the last agent has ended. A connection that TCP itself "
    "has to make costs a further trip on a real line, once. *Before* is the checkout that RALLYPOINT_BEFORE names."
)
LOOPBACK = "127.0.0.1"
DELAY_S = 0.05
LIMIT_S = 60.0
SCRIPT = """
import time
with open({place!r} + "/" + __import__("os").environ["RANK"], "w") as file:
    file.write(str(time.monotonic()))
"""
START = "import sys; sys.path.insert(0, {!r}); from rallypoint.__main__ import main; main(prog_name='rallypoint')"
OURS = str(Path(__file__).resolve().parents[1] / "src")
TOKEN = "0123456789abcdef0123456789abcdef"
UP, ENDED = "workers up", "job ended"
TARGETS = {UP: Target(at_most=5, unit="trips"), ENDED: Target(at_most=10, unit="trips")}
_runs = itertools.count()


class Case(NamedTuple):
    """A way to run a job; `{port}` in the options is the port of the line."""

    name: str
    options: str
    nodes: int = 1
    token: str = ""

    def commands(self, source: str, port: int, script: str) -> Iterator[list[str]]:
        """Yield the command of each agent."""
        run = [sys.executable, "-c", START.format(source), "run", "--quiet", f"--rdzv-id=run{next(_runs)}"]
        options = self.options.format(address=f"{LOOPBACK}:{port}").split()
        for node in range(self.nodes):
            named = [f"--node=node{node}"] if self.nodes > 1 else []
            yield [*run, f"--nnodes={self.nodes}", *named, *options, script]


CASES = (
    Case("--store, one node", "--store=tcp://{address}"),
    Case("--rdzv-endpoint, one node", "--rdzv-endpoint={address}"),
    Case("--store and a token, one node", "--store=tcp://{address}", token=TOKEN),
    Case("--store, two nodes", "--store=tcp://{address}", nodes=2),
)


class SlowLine:
    """A proxy in front of a port; each byte takes `delay_s` in either direction, and connecting takes no time."""

    def __init__(self, target: int, delay_s: float) -> None:
        self._proxy = CuttingProxy(target)
        self._proxy.delay(delay_s)

    def port(self) -> int:
        """Return the port on which it listens."""
        return self._proxy.port


class Took(NamedTuple):
    """The times of one job, from its command."""

    up_s: float
    ended_s: float


def run(quick: bool) -> list[Line]:
    """Measure each case, beside the same job of an earlier checkout, if one is named."""
    sources = {"ours": OURS}
    if "RALLYPOINT_BEFORE" in os.environ:
        sources["before"] = os.environ["RALLYPOINT_BEFORE"] + "/src"
    try:
        os.sched_setaffinity(0, CORES)  # agents, relays and workers of one job run at the same time
        return [line for case in CASES for line in _lines(case, sources, 1 if quick else 9)]
    finally:
        pin(os.getpid(), CORES[-1])


def _lines(case: Case, sources: dict[str, str], rounds: int) -> list[Line]:
    say(f"  {case.name}")
    trips: dict[str, list[Took]] = {name: [] for name in sources}
    with _lines_to_server(case.token) as ports:
        for turn in range(rounds + 1):  # the first round is for warming up
            for name in list(sources) if turn % 2 else reversed(sources):
                near, far = (_measured(case, sources[name], port) for port in ports)
                took = Took(*((slow - quick) / (2 * DELAY_S) for slow, quick in zip(far, near, strict=True)))
                say(f"    {name}: {took.up_s:.2f} and {took.ended_s:.2f} trips; {far.up_s:.2f} and {far.ended_s:.2f} s")
                if turn:
                    trips[name].append(took)
    return [_line(what, case, index, trips) for index, what in enumerate((UP, ENDED))]


def _line(what: str, case: Case, index: int, trips: dict[str, list[Took]]) -> Line:
    ours, *others = ([took[index] for took in trips[name]] for name in trips)
    before = ("before", others[0]) if others else ()
    plain = case.nodes == 1 and not case.token
    return Line(what, case.name, "trips", ours, *before)._replace(target=TARGETS[what] if plain else None)


@contextlib.contextmanager
def _lines_to_server(token: str) -> Iterator[Sequence[int]]:
    """Run a server, and two lines to it in a process of their own; yield their ports, without delay and with it."""
    with (
        Server(credentials=Credentials(token=token)) as server,
        team(1, SlowLine, server.port, 0.0) as near,
        team(1, SlowLine, server.port, DELAY_S) as far,
    ):
        yield [near.ask("port")[0], far.ask("port")[0]]


def _measured(case: Case, source: str, port: int) -> Took:
    """Run one job; return its times."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "script.py"
        script.write_text(SCRIPT.format(place=place))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        if case.token:
            environment["RALLYPOINT_TOKEN"] = case.token
        began_at = time.monotonic()
        agents = [
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            for command in case.commands(source, port, str(script))
        ]
        try:
            for agent in agents:
                if agent.wait(LIMIT_S):
                    raise RuntimeError(f"{case.name}: exit code {agent.returncode}")
            ended_at = time.monotonic()
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        up_at = max(float((Path(place) / str(rank)).read_text()) for rank in range(case.nodes))
        return Took(up_at - began_at, ended_at - began_at)
