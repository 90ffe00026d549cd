"""Heartbeats on stores of bytes: dead members are evicted, living ones are not, and no key is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.store_kinds import AMPLE_S, Open

from rallypoint import Barrier, FileStore, Group, HashStore, Lock, MembersMissing, SessionLost
from rallypoint.core.machines.lock import LockMachine
from rallypoint.recipes.hosting import heartbeat
from rallypoint.recipes.hosting.cas_host import CasHost, place_of
from rallypoint.recipes.hosting.local_session import BEAT_S, LocalSession, heartbeat_key
from rallypoint.recipes.hosting.stall_detector import StallDetector
from rallypoint.recipes.hosting.store_cell import StoreCell
from rallypoint.recipes.hosting.store_host import HeartbeatLiveness

CHILD = """
import sys, rallypoint
store = rallypoint.FileStore(sys.argv[1])
if sys.argv[2] == "hold":
    rallypoint.Lock(store, "l").acquire()
else:
    rallypoint.Group(store, "g").join("bob")
print("in", flush=True)
sys.stdin.read()
"""

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with FileStore(tmp_path / "store"):  # so that the file outlives each process
        yield str(tmp_path / "store")


@pytest.fixture
def start(path: str) -> Iterator[Start]:
    """Return a function that starts a process that holds a lock or joins a group."""
    children: list[subprocess.Popen[str]] = []

    def run(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, path, what]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "in\n"
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


def run(script: str, *arguments: str) -> list[str]:
    """Run a script in another process; return the lines that it prints."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=AMPLE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def heartbeat_keys(store: Any) -> list[str]:
    return [key for key in store.list_keys() if key.startswith("pulse:")]


# Dead members


def test_waits_on_two_objects_do_not_disturb_each_other(path: str, start: Start, quick_heartbeat: None) -> None:
    holder = start("hold")
    store, other = FileStore(path), FileStore(path)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(Barrier(one, "b", 3).wait, member, AMPLE_S) for member, one in enumerate((store, other))]
        kill(holder)
        assert Lock(store, "l").acquire(AMPLE_S / 4) > 0
        Barrier(FileStore(path), "b", 3).wait(2, AMPLE_S)
        assert [future.result(AMPLE_S) for future in waiting] == [None, None]


def test_the_view_of_a_group_has_no_dead_members(path: str, start: Start, quick_heartbeat: None) -> None:
    group = Group(FileStore(path), "g")
    with group.join("ann"):
        bob = start("join")
        assert list(group.members().members) == ["ann", "bob"]
        kill(bob)
        assert list(Group(FileStore(path), "g").members().members) == ["ann"], "even a single query evicts the dead"


def test_frequent_queries_do_not_wait_for_a_heartbeat(path: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("join")
    group = Group(FileStore(path), "g")
    group.members()
    monkeypatch.setattr(heartbeat.HeartbeatReader, "next_read_s", None)
    assert list(group.members().members) == ["bob"]


def test_successive_short_waits_evict_a_dead_holder(path: str, start: Start, quick_heartbeat: None) -> None:
    kill(start("hold"))
    for _ in range(20):  # each store acts as another process
        try:
            assert Lock(FileStore(path), "l").acquire(heartbeat.GRACE_S / 3) > 0
            return
        except MembersMissing:
            pass
    pytest.fail("the dead holder was never evicted")


def test_successive_short_waits_do_not_evict_a_living_holder(path: str, start: Start, quick_heartbeat: None) -> None:
    start("hold")
    for _ in range(6):
        with pytest.raises(MembersMissing):
            Lock(FileStore(path), "l").acquire(heartbeat.GRACE_S / 4)


@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
def test_a_death_is_detected_when_the_grace_is_over(phase_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    store = HashStore()
    watcher, last_beat_at = heartbeat.HeartbeatReader(LocalSession(store)), 110.0 + phase_s

    def is_dead() -> bool:
        beats = (min(clock.now, last_beat_at) - phase_s) / BEAT_S
        store.set(heartbeat_key("other"), str(int(beats)))
        return watcher.dead_among(["other"], {}) == ["other"]

    while not is_dead():
        clock.now += watcher.next_read_s(["other"])
    assert heartbeat.GRACE_S <= clock.now - last_beat_at < heartbeat.GRACE_S + 0.5


def test_the_stall_detector_counts_the_time_others_have_watched() -> None:
    stalls = StallDetector(gap_s=4.0)
    assert not stalls.read("a", 7, now=100.0, grace_s=4.0, still_s=3.0)
    assert not stalls.read("a", 7, now=100.9, grace_s=4.0)
    assert stalls.read("a", 7, now=101.0, grace_s=4.0)
    assert not stalls.read("a", 8, now=101.1, grace_s=4.0)


def test_the_stall_detector_sees_movement_after_two_readings() -> None:
    stalls = StallDetector(gap_s=4.0)
    stalls.read("a", 7, now=100.0, grace_s=4.0)
    assert not stalls.moved("a", 100.0, 4.0), "one reading shows no movement"
    stalls.read("b", 1, now=101.0, grace_s=4.0)
    stalls.read("a", 8, now=103.0, grace_s=4.0)
    assert stalls.moved("a", 104.0, 4.0) and not stalls.moved("a", 104.1, 4.0)
    stalls.forget(106.0)
    assert stalls.last("a", 106.0) is not None and stalls.last("b", 106.0) is None


# Lost sessions


def lose(store: Any) -> None:
    """Evict the holder of the lock, as another member does that finds its heartbeat stalled."""
    other = store.clone()
    objects = CasHost(StoreCell(other), HeartbeatLiveness(other, heartbeat.heartbeat_reader_of(other)))
    place = place_of(LockMachine, "l")
    _, machine = objects.read(place, LockMachine)
    objects.evict(place, LockMachine, machine.sessions())


@pytest.mark.parametrize("asked", [True, False])
def test_a_with_block_raises_session_lost_when_its_lock_was_lost(asked: bool) -> None:
    store = HashStore()

    def hold(error: Exception | None = None) -> None:
        with Lock(store, "l") as lock:
            lose(store)
            assert not asked or lock.lost
            if error is not None:
                raise error

    with pytest.raises(SessionLost):
        hold()
    with pytest.raises(KeyError, match="of the block itself"):
        hold(KeyError("of the block itself"))
    with Lock(store, "l"):
        pass


# Forked children

FORKED = """
import os, sys, threading
import rallypoint
path, = sys.argv[1:]
store = rallypoint.FileStore(path)
rallypoint.Lock(store, "warm").acquire()
barrier = rallypoint.Barrier(store, "b", 2)
ready, go = os.pipe()
child = os.fork()
lock = rallypoint.Lock(store, "l")
if child == 0:
    os.read(ready, 1)
    try:
        lock.acquire(0.2)
    except rallypoint.MembersMissing:
        print("taken", any(thread.name.startswith("pulse of") for thread in threading.enumerate()), flush=True)
    barrier.wait(1)
    os._exit(0)
with lock:
    os.write(go, b"!")
    barrier.wait(0)
    os.waitpid(child, 0)
    print("lost", lock.lost, flush=True)
"""


def test_a_forked_child_has_its_own_session(path: str) -> None:
    assert run(FORKED, path) == ["taken True", "lost False"]


# Cleaning up


def test_reading_a_missing_heartbeat_neither_waits_nor_writes(open_store: Open) -> None:
    store = open_store()
    assert heartbeat._count(store, "nobody") == -1
    assert not store.check([heartbeat_key("nobody")])
    store.add(heartbeat_key("nobody"), 3)
    assert heartbeat._count(store, "nobody") == 3


TAKES_PART = """
import sys, rallypoint
store = rallypoint.FileStore(sys.argv[1])
rallypoint.Lock(store, "l").acquire()
"""


@pytest.mark.parametrize("end", ["", "store.close()", "del store", "raise SystemExit(0)"])
def test_an_ending_process_deletes_its_heartbeat(path: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "GRACE_S", 1e6)  # too long to wait for
    run(f"{TAKES_PART}\n{end}", path)
    store = FileStore(path)
    assert heartbeat_keys(store) == []
    assert Lock(store, "l").acquire(AMPLE_S) > 0, "its lock is free at once"


def test_an_eviction_deletes_the_heartbeat(path: str, start: Start, quick_heartbeat: None) -> None:
    kill(start("hold"))
    store = FileStore(path)
    assert len(heartbeat_keys(store)) == 1
    with Lock(store, "l"):
        assert heartbeat_keys(store) == [heartbeat_key(heartbeat.heartbeat_reader_of(store).local.session)]


AT_EXIT = """
import atexit, threading
def show():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("pulse of")])
atexit.register(show)  # called after all functions registered later
import rallypoint
store = rallypoint.HashStore()
rallypoint.Lock(store, "l").acquire()
"""


def test_heartbeats_stop_before_the_interpreter_ends() -> None:
    assert run(AT_EXIT) == ["[]"]


STUCK = """
import threading
import rallypoint
from rallypoint.recipes.hosting import local_session
class Stuck:
    def __init__(self):
        self.store = rallypoint.HashStore()
    def __getattr__(self, name):
        return getattr(self.store, name)
    def delete_key(self, key):
        threading.Event().wait()
local_session.EXIT_S = 0.1
store = Stuck()
rallypoint.Lock(store, "l").acquire()
print("end")
"""


def test_a_hanging_store_does_not_keep_a_process_alive() -> None:
    assert run(STUCK) == ["end"]


def test_stopping_an_old_session_again_does_not_end_the_new_one() -> None:
    store = HashStore()
    ours = heartbeat.heartbeat_reader_of(store).local
    first = ours.start()
    ours.stop(first)
    second = ours.start()
    ours.stop(first)
    assert first != second == ours.start()
