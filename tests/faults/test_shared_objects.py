"""Real processes at a barrier, a lock and a group, of which one is killed: the others are notified, with its name."""

from __future__ import annotations

import itertools
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
import os, sys, rallypoint
url, what, member = sys.argv[1:]
store = rallypoint.connect(url, timeout=60)
if what == "barrier":
    try:
        rallypoint.Barrier(store, "b", 8).wait(int(member))
        print("opened")
    except rallypoint.MembersLost as error:
        print("lost", *error.lost)
elif what == "leave":
    barrier = rallypoint.Barrier(store, "b", 3)
    barrier.enter(int(member))
    print("in", flush=True)
    sys.stdin.readline()
    barrier.leave(int(member), last=0)
    print("out", flush=True)
    os._exit(0)
elif what == "hold":
    rallypoint.Lock(store, "l", member=member).acquire()
    print("holds", flush=True)
    sys.stdin.read()
elif what == "give":
    from rallypoint.recipes.hosting import shared_object
    shared_object.PROGRESS_S = 0.05
    said = lambda waiting: print("earlier process" in waiting.reason and "held" or "given", flush=True)
    exchange = rallypoint.Exchange(store, "e", 4, progress=said)
    print("ready", flush=True)
    sys.stdin.readline()
    given = exchange.all_gather(int(member), str(os.getpid()).encode())
    print("got", *(data.decode() for data in given), flush=True)
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


@pytest.fixture
def grace_s() -> float:
    """How long the server keeps the session of a killed process."""
    return 0.5


@pytest.fixture(params=["server", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, grace_s: float) -> Iterator[str]:
    if request.param == "server":
        with rallypoint.Server(grace=grace_s) as server:
            yield server.url
    else:
        with rallypoint.FileStore(str(tmp_path / "store")):  # so that the file outlives each process
            yield f"file://{tmp_path}/store"


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def until_missing(url: str, missing: set[str]) -> None:
    """Wait until exactly these members are missing at the barrier, by its error for a member with a short timeout."""
    while True:
        try:
            rallypoint.Barrier(rallypoint.connect(url), "b", 8).wait(0, 0.2)
        except rallypoint.MembersMissing as error:
            if set(error.missing) == missing:
                return


def test_seven_members_are_notified_that_the_eighth_was_killed(url: str, start: Start) -> None:
    children = {member: start(url, "barrier", str(member)) for member in range(1, 7)}
    until_missing(url, {"7"})
    os.kill(children[3].pid, signal.SIGKILL)
    for member, child in children.items():
        if member != 3:
            said = line(child)
            assert said.startswith("lost 3 (") and str(children[3].pid) in said


def until(child: subprocess.Popen[str], word: str) -> str:
    """Wait for a line that starts with a word; skip others."""
    while not (said := line(child)).startswith(word):
        assert said, f"it exited before it printed {word!r}"
    return said


def give(child: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Let a child that is ready contribute to the exchange."""
    assert child.stdin
    child.stdin.write("\n")
    child.stdin.flush()
    return child


@pytest.mark.parametrize("grace_s", [3.0])
def test_a_rank_killed_and_restarted_at_once_rejoins_the_exchange(url: str, start: Start) -> None:
    """The new process contributes other bytes; all ranks get these, and not those of the dead process."""
    others = [start(url, "give", str(rank)) for rank in range(3)]
    lives = [start(url, "give", "3") for _ in range(4)]  # started early, so that they are ready when needed
    for child in [*others, *lives]:
        until(child, "ready")
    for child in others[:2]:
        until(give(child), "given")
    until(give(lives[0]), "given")
    for before, after in itertools.pairwise(lives):
        before.send_signal(signal.SIGKILL)
        until(give(after), "held")
    ranks = [*others[:2], give(others[2]), lives[-1]]
    expected = " ".join(["got", *(str(child.pid) for child in ranks)])
    assert [until(child, "got") for child in ranks] == [expected] * 4


def test_a_second_process_of_a_live_rank_times_out_and_names_the_first(url: str, start: Start) -> None:
    first = give(start(url, "give", "3"))
    until(first, "given")
    exchange = rallypoint.Exchange(rallypoint.connect(url), "e", 4)
    with pytest.raises(rallypoint.MembersMissing, match=rf"rank 3's earlier process .*{first.pid}.* still holds"):
        exchange.all_gather(3, b"other", 0.2)
    others = [give(start(url, "give", str(rank))) for rank in range(3)]
    expected = " ".join(["got", *(str(child.pid) for child in [*others, first])])
    assert until(first, "got") == expected, "the second process has no effect"


def test_the_lock_of_a_killed_holder_goes_to_the_next(url: str, start: Start) -> None:
    holder = start(url, "hold", "ann")
    assert line(holder) == "holds"
    lock = rallypoint.Lock(rallypoint.connect(url), "l")
    with pytest.raises(rallypoint.MembersMissing, match="held by ann"):
        lock.acquire(0.1)
    holder.send_signal(signal.SIGKILL)
    assert lock.acquire(AMPLE_S) > 0


def test_a_group_reports_a_killed_member(url: str, start: Start) -> None:
    membership = rallypoint.Group(rallypoint.connect(url), "g").join("ann")
    bob = start(url, "join", "bob")
    assert line(bob) == "joined"
    membership.wait_for(["bob"], AMPLE_S)
    bob.send_signal(signal.SIGKILL)
    events = list(zip(range(2), membership.events(AMPLE_S), strict=False))
    assert [(event.what, event.member) for _, event in events] == [("joined", "bob"), ("lost", "bob")]
    again = start(url, "join", "bob")
    assert line(again) == "joined"


WITHOUT_LEASES = pytest.mark.parametrize("url", ["server", "file"], indirect=True)
"""Stores on which a dead process is detected before its session ends; with a lease, it is not."""


@WITHOUT_LEASES
def test_a_member_killed_and_restarted_at_once_rejoins_under_its_name(url: str, start: Start) -> None:
    bob = start(url, "join", "bob")
    assert line(bob) == "joined"
    bob.send_signal(signal.SIGKILL)
    bob.wait(AMPLE_S)
    assert rallypoint.Group(rallypoint.connect(url), "g").join("bob").id


@WITHOUT_LEASES
def test_a_job_killed_and_restarted_with_fewer_members_passes_its_barrier(url: str, start: Start) -> None:
    """The killed members had declared 8 members."""
    killed = [start(url, "barrier", str(member)) for member in range(1, 4)]
    until_missing(url, set("4567"))
    for child in killed:
        child.send_signal(signal.SIGKILL)
        child.wait(AMPLE_S)
    with ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(rallypoint.Barrier(rallypoint.connect(url), "b", 2).wait, member, AMPLE_S)
            for member in range(2)
        ]
        for wait in waits:
            wait.result(AMPLE_S)


def test_a_member_that_dies_right_after_leaving_has_left(url: str, start: Start) -> None:
    """The last member leaves last, in every order of arrival."""
    for late in range(3):
        children = [start(url, "leave", str(member)) for member in range(3)]
        for child in children:
            assert child.stdout and child.stdout.readline() == "in\n"
        for member in [member for member in range(3) if member != late] + [late]:
            stdin = children[member].stdin
            assert stdin
            stdin.write("\n")
            stdin.flush()
        assert [child.communicate(timeout=AMPLE_S)[0] for child in children] == ["out\n"] * 3


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
        assert after["bytes"] <= before["bytes"] + 4096 * len(stores), "only a few replies are unconfirmed"


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_hundreds_of_barriers_that_members_host_leave_no_more_keys(kind: str, tmp_path: Path) -> None:
    store = rallypoint.HashStore() if kind == "memory" else rallypoint.FileStore(str(tmp_path / "store"))
    stores = [store.clone() for _ in range(4)]
    pass_barriers(stores, 50)
    keys = store.num_keys()
    pass_barriers(stores, 300)
    assert store.num_keys() == keys


def gather_all(url: str, ranks: int, size: int) -> list[Any]:
    """Let ranks exchange bytes, twice; return each rank's result or error."""

    def run(rank: int) -> Any:
        with rallypoint.connect(url) as store:
            exchange = rallypoint.Exchange(store, "e", ranks)
            try:
                return [list(map(len, exchange.all_gather(rank, bytes(size), AMPLE_S))) for _ in range(2)]
            except rallypoint.RallypointError as error:
                return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def test_an_exchange_result_for_all_ranks_is_held_once() -> None:
    """A copy for each rank would be 8 times 24 MiB, and the server may hold 64."""
    with rallypoint.Server(max_memory=64 << 20) as server:
        assert gather_all(server.url, 8, 3 << 20) == [[[3 << 20] * 8] * 2] * 8


def test_an_exchange_over_the_reply_limit_is_an_error_on_all_ranks() -> None:
    with rallypoint.Server(max_connection_memory=32 << 20) as server:
        for error in gather_all(server.url, 5, 7 << 20):
            assert isinstance(error, rallypoint.LimitExceeded), error
            assert (error.what, error.key, error.limit) == ("answer", "e", 32 << 20)
        assert server.statistics()["objects"] == {}
