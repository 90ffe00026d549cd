"""Signs of life on stores that only have bytes: who is dead is noticed, who is not is left alone, nothing is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kinds import AMPLE_S, Open

from rallypoint import Barrier, FileStore, Group, HashStore, Lock, MembersMissing, SessionLost
from rallypoint.core import lock as machines
from rallypoint.recipes import pulse
from rallypoint.recipes.blob import Felt
from rallypoint.recipes.life import key_of

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
    """Return what starts a process that holds a lock, or joins a group."""
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
    """Run a script in a process of its own; return the lines that it prints."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=AMPLE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def pulses(store: Any) -> list[str]:
    return [key for key in store.list_keys() if key.startswith("pulse:")]


# Who is dead


def test_waits_on_two_objects_do_not_make_each_other_forget(path: str, start: Start, quick_pulse: None) -> None:
    holder = start("hold")
    store, other = FileStore(path), FileStore(path)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(Barrier(one, "b", 3).wait, member, AMPLE_S) for member, one in enumerate((store, other))]
        kill(holder)
        assert Lock(store, "l").acquire(AMPLE_S / 4) > 0
        Barrier(FileStore(path), "b", 3).wait(2, AMPLE_S)
        assert [future.result(AMPLE_S) for future in waiting] == [None, None]


def test_the_view_of_a_group_has_no_dead(path: str, start: Start, quick_pulse: None) -> None:
    group = Group(FileStore(path), "g")
    with group.join("ann"):
        bob = start("join")
        assert list(group.members().members) == ["ann", "bob"]
        kill(bob)
        assert list(Group(FileStore(path), "g").members().members) == ["ann"], "who asks only once is told the truth"


def test_who_looks_often_does_not_wait(path: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("join")
    group = Group(FileStore(path), "g")
    group.members()
    monkeypatch.setattr(pulse.Pulse, "rest_s", None)
    assert list(group.members().members) == ["bob"]


def test_waiters_who_give_up_soon_bury_the_dead_together(path: str, start: Start, quick_pulse: None) -> None:
    kill(start("hold"))
    for _ in range(20):  # each of them another process, as far as others can tell
        try:
            assert Lock(FileStore(path), "l").acquire(pulse.GRACE_S / 3) > 0
            return
        except MembersMissing:
            pass
    pytest.fail("nobody ever was sure")


def test_a_living_holder_outlasts_waiters_who_give_up_soon(path: str, start: Start, quick_pulse: None) -> None:
    start("hold")
    for _ in range(6):
        with pytest.raises(MembersMissing):
            Lock(FileStore(path), "l").acquire(pulse.GRACE_S / 4)


@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
def test_a_death_is_known_as_soon_as_the_grace_is_over(phase_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: clock.now))
    store = HashStore()
    watcher, last_beat_at = pulse.Pulse(store), 110.0 + phase_s

    def is_dead() -> bool:
        beats = (min(clock.now, last_beat_at) - phase_s) / pulse.BEAT_S
        store.set(key_of("other"), str(int(beats)))
        return watcher.still(["other"], {}) == ["other"]

    while not is_dead():
        clock.now += watcher.rest_s(["other"])
    assert pulse.GRACE_S <= clock.now - last_beat_at < pulse.GRACE_S + 0.5


def test_what_others_watched_counts() -> None:
    felt = Felt(gap_s=4.0)
    assert not felt.feel("a", 7, now=100.0, grace_s=4.0, still_s=3.0)
    assert not felt.feel("a", 7, now=100.9, grace_s=4.0)
    assert felt.feel("a", 7, now=101.0, grace_s=4.0)
    assert not felt.feel("a", 8, now=101.1, grace_s=4.0)


def test_a_counter_is_known_to_move_since_it_was_felt_before() -> None:
    felt = Felt(gap_s=4.0)
    felt.feel("a", 7, now=100.0, grace_s=4.0)
    assert not felt.moved("a", 100.0, 4.0), "nothing is known of one that was felt once"
    felt.feel("b", 1, now=101.0, grace_s=4.0)
    felt.feel("a", 8, now=103.0, grace_s=4.0)
    assert felt.moved("a", 104.0, 4.0) and not felt.moved("a", 104.1, 4.0)
    felt.forget(106.0)
    assert felt.last("a", 106.0) is not None and felt.last("b", 106.0) is None


# Who has lost its session


def lose(store: Any) -> None:
    """Take the lock away from whoever holds it, as others do who find its pulse still."""
    lock = Lock(store.clone(), "l")
    host: Any = lock._object._host
    _, machine = host._open(host._fetch("lock:l")[0], machines.Lock)
    host._bury("lock:l", type(machine), machine.sessions())


@pytest.mark.parametrize("asked", [True, False])
def test_a_block_whose_lock_was_lost_ends_with_an_error(asked: bool) -> None:
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


def test_a_forked_child_is_a_session_of_its_own(path: str) -> None:
    assert run(FORKED, path) == ["taken True", "lost False"]


# What is left


def test_feeling_a_pulse_that_is_gone_neither_waits_nor_writes(open_store: Open) -> None:
    store = open_store()
    assert pulse._count(store, "nobody") == -1
    assert not store.check([key_of("nobody")])
    store.add(key_of("nobody"), 3)
    assert pulse._count(store, "nobody") == 3


TAKES_PART = """
import sys, rallypoint
store = rallypoint.FileStore(sys.argv[1])
rallypoint.Lock(store, "l").acquire()
"""


@pytest.mark.parametrize("end", ["", "store.close()", "del store", "raise SystemExit(0)"])
def test_a_process_that_ends_takes_its_pulse_with_it(path: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "GRACE_S", 1e6)  # nobody waits for that
    run(f"{TAKES_PART}\n{end}", path)
    store = FileStore(path)
    assert pulses(store) == []
    assert Lock(store, "l").acquire(AMPLE_S) > 0, "what it held is free at once"


def test_whoever_buries_the_dead_deletes_their_pulse(path: str, start: Start, quick_pulse: None) -> None:
    kill(start("hold"))
    store = FileStore(path)
    assert len(pulses(store)) == 1
    with Lock(store, "l"):
        assert pulses(store) == [key_of(pulse.pulse_of(store).session)]


AT_EXIT = """
import atexit, threading
def tell():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("pulse of")])
atexit.register(tell)  # called after all that are registered later
import rallypoint
store = rallypoint.HashStore()
rallypoint.Lock(store, "l").acquire()
"""


def test_no_pulse_beats_while_the_interpreter_ends() -> None:
    assert run(AT_EXIT) == ["[]"]


STUCK = """
import threading
import rallypoint
from rallypoint.recipes import life
class Stuck:
    def __init__(self):
        self.store = rallypoint.HashStore()
    def __getattr__(self, name):
        return getattr(self.store, name)
    def delete_key(self, key):
        threading.Event().wait()
life.EXIT_S = 0.1
store = Stuck()
rallypoint.Lock(store, "l").acquire()
print("end")
"""


def test_a_store_that_hangs_does_not_keep_a_process_from_ending() -> None:
    assert run(STUCK) == ["end"]


def test_stopping_twice_ends_one_session() -> None:
    store = HashStore()
    ours = pulse.pulse_of(store)
    first = ours.start()
    ours.stop(first)
    second = ours.start()
    ours.stop(first)
    assert first != second == ours.start()
