"""Nodes as real processes: two of eight are killed and three join; one has a wall clock that is an hour off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rallypoint
from rallypoint.recipes.rendezvous import Status

AMPLE_S = 60.0

SCRIPT = """
import sys, time, rallypoint
url, name, clock_off_s = sys.argv[1:]
real = time.time
time.time = lambda: real() + float(clock_off_s)
store = rallypoint.connect(url, timeout=60)
node = rallypoint.Rendezvous(store, "run", 4, 9, node=name, last_call=1.0)
try:
    while True:
        now = node.join()
        print("round", now.number, now.rank, now.world_size, now.reason, flush=True)
        node.changed.wait()
        print("over", node.changed.reason, flush=True)
except rallypoint.RunClosed as closed:
    print("closed", closed.result, flush=True)
"""


class Nodes:
    """Processes by name, and their output."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.children: dict[str, subprocess.Popen[str]] = {}
        self.said: dict[str, list[list[str]]] = {}
        self._news = threading.Condition()
        self._look = rallypoint.Rendezvous(rallypoint.connect(url), "run", 1)

    def start(self, name: str, clock_off_s: float = 0.0) -> None:
        command = [sys.executable, "-c", SCRIPT, self.url, name, str(clock_off_s)]
        child = self.children[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = self.said[name] = []

        def hear() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                with self._news:
                    said.append(line.split(maxsplit=4))
                    self._news.notify_all()

        threading.Thread(target=hear, daemon=True).start()

    def kill(self, name: str) -> None:
        os.kill(self.children.pop(name).pid, signal.SIGKILL)

    def in_one_round(self) -> dict[str, int]:
        """Wait until all processes that live are in one and the same round; return their ranks."""

        def last() -> dict[str, list[str]]:
            return {name: self.said[name][-1] for name in self.children if self.said[name]}

        def agree() -> bool:
            told, size = list(last().values()), str(len(self.children))
            return len(told) == len(self.children) and all(
                words[0] == "round" and words[1] == told[0][1] and words[3] == size for words in told
            )

        with self._news:
            assert self._news.wait_for(agree, AMPLE_S), f"no common round: {last()}; {self.status()}"
            return {name: int(words[2]) for name, words in last().items()}

    def status(self) -> Status:
        return self._look.status()

    def close(self) -> None:
        self._look.close("done", "the test has ended")
        for child in self.children.values():
            assert child.wait(AMPLE_S) == 0

    def heard(self, words: str) -> bool:
        return any(words in " ".join(line) for lines in self.said.values() for line in lines)


@pytest.fixture(params=["server", "file"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    with rallypoint.Server(grace=0.5) as server, rallypoint.FileStore(str(tmp_path / "store")):
        made = Nodes(server.url if request.param == "server" else f"file://{tmp_path}/store")
        try:
            yield made
        finally:
            for child in made.children.values():
                child.kill()
                child.wait()


def test_after_two_of_eight_nodes_are_killed_three_join(nodes: Nodes) -> None:
    names = [f"node-{number}" for number in range(8)]
    for name in names:
        nodes.start(name, 3600.0 if name == "node-5" else 0.0)
    before = nodes.in_one_round()
    assert sorted(before.values()) == list(range(8))

    victims = [name for name, rank in before.items() if rank in (2, 7)]
    for name in victims:
        nodes.kill(name)
    six = nodes.in_one_round()
    assert any(nodes.heard(f"over lost {name} (") for name in victims), "the first lost node is named"
    assert sorted(six.values()) == list(range(6))
    assert all(six[name] == before[name] for name in six if before[name] < 6), "ranks are kept where possible"

    for name in (victims[0], "node-8", "node-9"):
        nodes.start(name)
    nine = nodes.in_one_round()
    assert sorted(nine.values()) == list(range(9))
    assert all(nine[name] == six[name] for name in six)
    nodes.close()
    assert all(lines[-1][:2] == ["closed", "done"] for name, lines in nodes.said.items() if name in nodes.children)


def test_a_killed_lone_node_rejoins_under_its_name(nodes: Nodes) -> None:
    for name in ("a", "b", "c", "d"):
        nodes.start(name)
    before = nodes.in_one_round()
    for name in "abcd":
        nodes.kill(name)
    for name in "abcd":
        nodes.start(name)
    assert nodes.in_one_round() == before, "ranks are kept by name"
    nodes.close()
