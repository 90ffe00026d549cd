"""Real processes at a barrier, a lock and a group, of which one is killed: the others hear of it, by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rallypoint

AMPLE_S = 60.0

SCRIPT = """
import sys, rallypoint
url, what, member = sys.argv[1:]
store = rallypoint.connect(url, timeout=60)
if what == "barrier":
    try:
        rallypoint.Barrier(store, "b", 8).wait(int(member))
        print("opened")
    except rallypoint.MembersLost as error:
        print("lost", *error.lost)
elif what == "hold":
    rallypoint.Lock(store, "l", member=member).acquire()
    print("holds", flush=True)
    sys.stdin.read()
elif what == "join":
    rallypoint.Group(store, "g").join(member)
    print("joined", flush=True)
    sys.stdin.read()
"""

Start = Callable[[str, str, str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []

    def run(url: str, what: str, member: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, url, what, member]
        children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture(params=["server", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "server":
        with rallypoint.Server(grace=0.5) as server:
            yield server.url
    else:
        with rallypoint.FileStore(str(tmp_path / "store")):  # so that the file outlives each process
            yield f"file://{tmp_path}/store"


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def until_missing(url: str, missing: set[str]) -> None:
    """Wait until exactly these are missing at the barrier, as a member that comes and goes is told."""
    while True:
        try:
            rallypoint.Barrier(rallypoint.connect(url), "b", 8).wait(0, 0.2)
        except rallypoint.MembersMissing as error:
            if set(error.missing) == missing:
                return


def test_seven_hear_that_the_eighth_was_killed(url: str, start: Start) -> None:
    children = {member: start(url, "barrier", str(member)) for member in range(1, 7)}
    until_missing(url, {"7"})
    os.kill(children[3].pid, signal.SIGKILL)
    for member, child in children.items():
        if member != 3:
            said = line(child)
            assert said.startswith("lost 3 (") and str(children[3].pid) in said


def test_the_lock_of_a_killed_holder_goes_to_the_next(url: str, start: Start) -> None:
    holder = start(url, "hold", "ann")
    assert line(holder) == "holds"
    lock = rallypoint.Lock(rallypoint.connect(url), "l")
    with pytest.raises(rallypoint.MembersMissing, match="held by ann"):
        lock.acquire(0.1)
    holder.send_signal(signal.SIGKILL)
    assert lock.acquire(AMPLE_S) > 0


def test_a_group_is_told_of_a_killed_member(url: str, start: Start) -> None:
    membership = rallypoint.Group(rallypoint.connect(url), "g").join("ann")
    bob = start(url, "join", "bob")
    assert line(bob) == "joined"
    membership.wait_for(["bob"], AMPLE_S)
    bob.send_signal(signal.SIGKILL)
    events = list(zip(range(2), membership.events(AMPLE_S), strict=False))
    assert [(event.what, event.member) for _, event in events] == [("joined", "bob"), ("lost", "bob")]
    again = start(url, "join", "bob")
    assert line(again) == "joined"


def pass_barriers(stores: list[Any], times: int) -> None:
    """Have as many members as there are stores pass a barrier again and again."""

    def run(member: int) -> None:
        barrier = rallypoint.Barrier(stores[member], "b", len(stores))
        for _ in range(times):
            barrier.wait(member, AMPLE_S)

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(run, range(len(stores))))


def test_ten_thousand_barriers_leave_nothing_behind() -> None:
    with rallypoint.Server() as server:
        stores = [rallypoint.connect(server.url) for _ in range(4)]
        pass_barriers(stores, 10)
        before = server.statistics()
        pass_barriers(stores, 10_000)
        after = server.statistics()
        assert (after["keys"], after["queues"], after["waiting"], after["objects"]) == (0, 0, 0, {})
        assert after["bytes"] <= before["bytes"] + 4096 * len(stores), "what is not yet confirmed is little"


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_hundreds_of_barriers_that_members_host_leave_no_more_keys(kind: str, tmp_path: Path) -> None:
    store = rallypoint.HashStore() if kind == "memory" else rallypoint.FileStore(str(tmp_path / "store"))
    stores = [store.clone() for _ in range(4)]
    pass_barriers(stores, 50)
    keys = store.num_keys()
    pass_barriers(stores, 300)
    assert store.num_keys() == keys
