"""`rallypoint run` on several hosts, one of which is cut off: when it starts, while it waits, works, and is done.

A cut of 4 s is noticed by nobody. In a longer one both sides say what they see: those who have the server go on without
the other host, which stops its workers, looks for the server, and returns under its name when the cut is over. The
hosts are network namespaces; `a` has the server. A cut on the side of `a` is a lost carrier, on that of `b` silence.

All cuts last at the same time, a few of them: each test waits for the result of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from tests.hosts import Host, hosts
from tests.launch.runs import PRELUDE, Node, gone
from tests.raw_peer import AMPLE_S, until

from rallypoint import Rendezvous, TCPStore

pytestmark = pytest.mark.needs("netns")

AT_ONCE = 8
PORT = 29400
SHORT_S, LONG_S, LONGER_S = 4.0, 15.0, 60.0
BACK = "reconnected; this node rejoins the run"


class Cut(NamedTuple):
    """One cut: when it begins, how long it lasts, and which host it is."""

    when: str
    seconds: float
    side: str

    def __str__(self) -> str:
        return f"{self.when}-{self.seconds:g}s-{self.side}"


CUTS = [
    Cut(when, seconds, side)
    for seconds in (LONGER_S, LONG_S, SHORT_S)
    for when in ("starting", "waiting", "working", "done")
    for side in "ab"
] + [Cut("failing", LONG_S, "b")]


class Scene:
    """Three hosts, of which `a` has the server, and the agents on them."""

    def __init__(self, where: Path, places: tuple[Host, ...], cut: Cut) -> None:
        self.cut = cut
        self._where = where
        self._places = dict(zip("abc", places, strict=True))
        (where / "script.py").write_text(f"{PRELUDE}\nstay()\n")

    def start(self, name: str, nodes: str) -> Node:
        """Start an agent."""
        words = ["--nnodes", nodes, "--rdzv-endpoint", f"host-a:{PORT}", "--rdzv-id=job", "--rdzv-conf"]
        command = [sys.executable, "-m", "rallypoint", "run", *words, "last_call_timeout=60", "--json", "script.py"]
        return Node(self._places[name].command(command), self._where, {})

    def off(self) -> None:
        """Begin the cut."""
        if self.cut.side == "a":
            self._places["a"].carrier_lost()
        else:
            self._places["b"].cut()

    def on(self) -> None:
        """End the cut."""
        self._places[self.cut.side].mend()

    def last(self, *noticed: tuple[Node, str]) -> None:
        """Have the cut last as long as it is to, and if it can be noticed, until these nodes have said these words."""
        self.off()
        time.sleep(self.cut.seconds)
        for node, words in noticed if self.noticed else ():
            node.until(words)
        self.on()

    def both_wait(self) -> None:
        """Return when two nodes wait for a third."""
        place = self._places["a"]
        with place.inside(), TCPStore(place.address, PORT, timeout=AMPLE_S) as store:
            until(Rendezvous(store, "job", 3).status, lambda status: len(status.waiting) == 2)

    @property
    def noticed(self) -> bool:
        """Whether it is long enough to be noticed."""
        return self.cut.seconds > SHORT_S


def starting(scene: Scene) -> None:
    """The host has no network yet when its agent starts, and the other waits for it, or has no other to wait for."""
    scene.off()
    a, b = scene.start("a", "2"), scene.start("b", "2")
    scene.last((b, f"no server answers at host-a:{PORT} yet"), (a, "1 of at least 2 nodes"))
    for node in (a, b):
        node.until(r"^up \d 2 0 ")
    end(a, b)


def waiting(scene: Scene) -> None:
    """Two of three nodes wait for the third."""
    a, b = scene.start("a", "3"), scene.start("b", "3")
    scene.both_wait()
    scene.last()
    if scene.noticed:
        b.until(BACK)
    c = scene.start("c", "3")
    for node in (a, b, c):
        node.until(r"^up \d 3 0 ")
    assert ("disconnected" in b.err) == scene.noticed and "disconnected" not in a.err + c.err
    end(a, b, c)


def working(scene: Scene) -> None:
    """Both hosts work."""
    a, b = scene.start("a", "1:2"), scene.start("b", "1:2")
    before = [int(node.until(r"^up \d 2 0 (\d+)")[0][1]) for node in (a, b)]
    scene.last()
    if scene.noticed:
        a.until(r"^up 0 1 0 ")
        assert "lost host-b (host-b:" in a.err, "it goes on alone, and says why"
        b.until("stopping the workers; reconnecting")
        b.until(BACK)
        for node in (a, b):
            node.until(r"^up \d 2 0 ", 2)
        gone(*before)
    end(a, b)
    if not scene.noticed:
        assert [node.out.count("up") for node in (a, b)] == [1, 1], "nobody was started again"


def done(scene: Scene) -> None:
    """The host whose side is cut is done, and waits for the other, which still works."""
    a, b = scene.start("a", "2"), scene.start("b", "2")
    for node in (a, b):
        node.until(r"^up \d 2 0 ")
    finished, works = (a, b) if scene.cut.side == "a" else (b, a)
    finished.signal("SIGUSR1")
    finished.until('"event": "done"')
    scene.last()
    if scene.noticed:
        b.until(BACK)
    if scene.noticed and works is b:  # its part of the result was lost with it: both do it again
        for node in (a, b):
            node.until(r"^up \d 2 0 ", 2)
        finished.signal("SIGUSR1")
    works.signal("SIGUSR1")
    assert [a.end(), b.end()] == [0, 0], a.text() + b.text()
    again = 2 if scene.noticed and works is b else 1
    assert [node.out.count("up") for node in (a, b)] == [again, again]


def failing(scene: Scene) -> None:
    """A worker fails, and its host is cut off before that could end the run: it may have failed of the cut."""
    a, b = scene.start("a", "2"), scene.start("b", "2")
    pids = [int(node.until(r"^up \d 2 0 (\d+)")[0][1]) for node in (a, b)]
    os.kill(pids[1], signal.SIGKILL)
    scene.last()
    b.until(BACK)
    for node in (a, b):
        node.until(r"^up \d 2 0 ", 2)
    end(a, b)


def end(*nodes: Node) -> None:
    """Have the workers of all nodes succeed."""
    for node in nodes:
        node.signal("SIGUSR1")
    assert [node.end() for node in nodes] == [0] * len(nodes), "\n".join(node.text() for node in nodes)


def play(cut: Cut, where: Path) -> None:
    """Play one cut, from the making of its hosts to their end."""
    where.mkdir()
    with hosts(3) as places:
        SCENES[cut.when](Scene(where, places, cut))


SCENES = {"starting": starting, "waiting": waiting, "working": working, "done": done, "failing": failing}


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Cut, Future[None]]]:
    """Play the cuts that were asked for, several at a time."""
    here = [item for item in request.session.items if item.path == request.path]
    chosen = [cast(Cut, item.callspec.params["cut"]) for item in here if isinstance(item, pytest.Function)]
    where = tmp_path_factory.mktemp("cuts")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {cut: pool.submit(play, cut, where / str(cut)) for cut in chosen}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_host_that_is_cut_off(cut: Cut, played: dict[Cut, Future[None]]) -> None:
    played[cut].result()
