"""Signs of life on stores that keep leases: a death is heard, nobody asks for it, and nothing is left of who ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.kinds import AMPLE_S, with_leases

from rallypoint import Barrier, Group, Lock, MembersLost, MembersMissing, Server, SessionLost, TCPStore
from rallypoint.core import barrier as machines
from rallypoint.core import ops
from rallypoint.core.machine import Call
from rallypoint.deadline import Deadline
from rallypoint.recipes import hosting, leasehost, storehost, vigil
from rallypoint.recipes.blob import ENDED
from rallypoint.recipes.life import key_of
from rallypoint.store.base import Store
from rallypoint.store.memory import Hub, MemoryBackend


class Observed(MemoryBackend):
    """A backend that keeps leases, and writes down what is asked of it, by the test's thread or by others."""

    keeps_leases = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self.calls: list[str] = []
        self.waits = threading.Event()

    def execute(self, op: ops.Op) -> Any:
        self.calls.append(op.verb)
        if isinstance(op, ops.Wait):
            self.waits.set()
        return super().execute(op)

    def watch(self, prefix: bytes) -> Any:
        self.calls.append("watch")
        return super().watch(prefix)


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture(autouse=True)
def nobody_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whoever is not told of something wait for ever."""
    monkeypatch.setattr(hosting, "PROGRESS_S", 1e6)
    monkeypatch.setattr(leasehost, "FIRST_LOOK_S", 1e6)


@pytest.fixture
def open_one(hub: Hub) -> Iterator[Callable[[], Any]]:
    """Return what opens one more handle on a store; all are closed at the end."""
    stores: list[Store] = []

    def run() -> Store:
        stores.append(Store(Observed(hub), b""))
        return stores[-1]

    yield run
    for store in stores:
        store.close()


Open = Callable[[], Any]


def pulses(store: Any) -> list[str]:
    return [key for key in store.list_keys() if key.startswith("pulse:")]


def session_of(store: Any) -> str:
    return vigil.vigil_of(store).session


# Nobody polls


FIRST = ["lease", "multi_get", "compare_set", "compare_set", "watch", "list_keys", "wait"]
"""What is asked for one that comes first to an object, and waits: its sign of life, the state, its change, the ear."""


def test_whoever_waits_asks_for_nothing_until_it_is_told(open_one: Open) -> None:
    first, last = open_one(), open_one()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Barrier(first, "b", 2).wait, 0, AMPLE_S)
        assert first._backend.waits.wait(AMPLE_S)
        Barrier(last, "b", 2).wait(1, AMPLE_S)
        waiting.result(AMPLE_S)
    assert first._backend.calls == [*FIRST, "multi_get"]
    calls = ["lease", "multi_get", "compare_set", "set", "delete_key"]
    assert last._backend.calls == calls, "who need not wait has no ear"


def test_who_is_heard_of_is_not_asked_for(open_one: Open) -> None:
    """However many there are, and however often one waits."""
    members = [Group(open_one(), "g").join(str(number)) for number in range(3 * vigil.FEW)]
    watcher = open_one()
    events, backend = Group(watcher, "g").join("watcher").events(AMPLE_S), watcher._backend
    with ThreadPoolExecutor(1) as pool:
        for member in members:
            backend.waits.clear()
            told = pool.submit(next, events)
            assert backend.waits.wait(AMPLE_S)
            member.leave()
            told.result(AMPLE_S)
    assert [backend.calls.count(call) for call in ("wait", "list_keys", "check")] == [len(members), 1, 0]


def test_a_death_is_buried_by_one_change_and_wakes_who_waits(open_one: Open) -> None:
    first, dies = open_one(), open_one()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(Barrier(first, "b", 3).wait, 0, AMPLE_S)
        assert first._backend.waits.wait(AMPLE_S)
        lost = pool.submit(Barrier(dies, "b", 3).wait, 1, AMPLE_S)
        assert dies._backend.waits.wait(AMPLE_S)
        dies.close()
        with pytest.raises(MembersLost, match="1"):
            waiting.result(AMPLE_S)
        assert lost.exception(AMPLE_S) is not None
    burial = ["multi_get", "multi_get", "compare_set", "set", "delete_key", "multi_get"]
    assert sorted(first._backend.calls[len(FIRST) :]) == sorted(burial)


def test_many_deaths_are_one_change(open_one: Open) -> None:
    store = open_one()
    host: Any = Barrier(store, "b", 4)._object._host
    dead = [f"dead {number}" for number in range(3)]

    def arrive(state: Any, machine: Any) -> Any:
        for number, session in enumerate(dead):
            step = machine.apply(Call(str(number), session, 1), machines.Arrive(4), state.version + 1)
        return step

    host._change("barrier:b", machines.Barrier, arrive, Deadline(AMPLE_S))
    store._backend.calls.clear()
    host._bury("barrier:b", machines.Barrier, host._vigil.ask(dead))
    assert store._backend.calls == ["check", "list_keys", "multi_get", "compare_set", "set", "delete_key"]
    state, machine = host._open(host._fetch("barrier:b")[0], machines.Barrier)
    assert (state.ended, machine.sessions(), state.version) == (dead, set(), 5)
    host._bury("barrier:b", machines.Barrier, [str(number) for number in range(ENDED)])
    state, _ = host._open(host._fetch("barrier:b")[0], machines.Barrier)
    assert len(state.ended) == ENDED and state.ended[-1] == str(ENDED - 1)


def test_looks_come_less_and_less_often(open_one: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasehost, "FIRST_LOOK_S", 1.0)
    host: Any = Lock(open_one(), "l")._object._host
    assert [host._look_s("lock:l", bell) for bell in (1, 1, 1, 2, 2, 3)] == [1.0, 2.0, 4.0, 1.0, 2.0, 1.0]


def test_a_ring_that_was_missed_is_made_up_for(open_one: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasehost, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(storehost, "BELLS", 0)  # none is kept
    first, last = open_one(), open_one()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Barrier(first, "b", 2).wait, 0, AMPLE_S)
        assert first._backend.waits.wait(AMPLE_S)
        Barrier(last, "b", 2).wait(1, AMPLE_S)
        waiting.result(AMPLE_S)


# Who is dead


def test_what_was_dead_before_is_found_by_who_comes(open_one: Open) -> None:
    dies, comes, looks = (open_one() for _ in range(3))
    Lock(dies, "l").acquire()
    Group(dies, "g").join("ann")
    dies.close()
    assert Lock(comes, "l").acquire(AMPLE_S) > 0
    assert list(Group(looks, "g").members().members) == []


def test_one_listener_hears_of_all_members(open_one: Open) -> None:
    stores = [open_one() for _ in range(20)]
    for number, store in enumerate(stores):
        Group(store, "g").join(str(number))
    events = Group(open_one(), "g").join("listener").events(AMPLE_S)
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(lambda store: store.close(), stores))
    seen = [next(events) for _ in stores]
    assert {(event.what, event.member) for event in seen} == {("lost", str(number)) for number in range(20)}


def test_the_one_before_the_dead_goes_first(open_one: Open) -> None:
    store = open_one()
    ear = vigil._Ear(vigil.vigil_of(store), "d", store, lambda: None)
    ear._alive = set("abdfh")
    turns = {dead: round(ear._turn_s(dead) / vigil.TURN_S) for dead in "eginc"}
    assert turns == {"e": 1, "g": 2, "i": 3, "n": 3, "c": 5}
    ear._alive |= {f"e{number:04}" for number in range(1000)}
    assert ear._turn_s("g") == vigil.LAST_TURN_S


# Who has lost its lease


def test_who_was_taken_for_dead_is_told_and_goes_on_as_another(open_one: Open) -> None:
    store, other = open_one(), open_one()
    lock = Lock(store, "l")
    lock.acquire()
    lost, keeper = session_of(store), vigil.vigil_of(store)._keeper
    store.delete_key(key_of(lost))
    with Lock(other, "l"):
        with pytest.raises(SessionLost, match="lease was gone"):
            lock.release()
        assert session_of(store) != lost
        with pytest.raises(MembersMissing):
            Lock(store, "l").acquire(0)
        assert keeper is not None
        keeper.join(AMPLE_S)
        assert sorted(pulses(other)) == sorted(key_of(session_of(one)) for one in (store, other))
    assert Lock(store, "l").acquire(AMPLE_S) > 0


def test_whose_key_vanishes_unseen_leases_it_again(open_one: Open) -> None:
    store = open_one()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Barrier(store, "b", 2).wait, 0, AMPLE_S)
        assert store._backend.waits.wait(AMPLE_S)
        key, other = key_of(session_of(store)), open_one()
        for _ in range(2):
            with other.watch(key) as watch:
                other.delete_key(key)
                assert [watch.next(AMPLE_S).value for _ in range(2)] == [None, b""]
        Barrier(other, "b", 2).wait(1, AMPLE_S)
        waiting.result(AMPLE_S)


def test_whose_key_vanished_before_it_listened_leases_it_again(open_one: Open) -> None:
    store, other = open_one(), open_one()
    with Lock(store, "l"):
        other.delete_key(key_of(session_of(store)))
        with vigil.vigil_of(store).mourning("", print), pytest.raises(MembersMissing):
            Lock(other, "l").acquire(0.01)


def test_whose_key_has_vanished_does_not_come_in_without_one(open_one: Open) -> None:
    store, other = open_one(), open_one()
    with Lock(store, "before"):
        pass
    other.delete_key(key_of(session_of(store)))
    with Lock(store, "l"), pytest.raises(MembersMissing):
        Lock(other, "l").acquire(0.01)


# Real processes

PROCESS = """
import os, sys, threading, rallypoint
def open_store():
    store = rallypoint.TCPStore("127.0.0.1", int(sys.argv[1]))
    store._backend.hosts_objects, store._backend.keeps_leases = False, True
    return store
def listen(store):
    from rallypoint.recipes import vigil
    with vigil.vigil_of(store).mourning("", print):
        pass
store = open_store()
"""

FORKED = """
rallypoint.Lock(store, "warm").acquire()
listen(store)
barrier = rallypoint.Barrier(store, "b", 2)
ready, go = os.pipe()
child = os.fork()
lock = rallypoint.Lock(store, "l")
def pulses():
    return sum(key.startswith("pulse:") for key in store.list_keys())
if child == 0:
    os.read(ready, 1)
    try:
        lock.acquire(0.2)
    except rallypoint.MembersMissing:
        print("taken", pulses(), flush=True)
    barrier.wait(1)
    store.close()
    os._exit(0)
with lock:
    os.write(go, b"!")
    barrier.wait(0)
    os.waitpid(child, 0)
    print("lost", lock.lost, pulses(), flush=True)
"""

STUCK = """
from rallypoint.recipes import life
life.EXIT_S = 0.1
execute = store._backend.execute
def stuck(op):
    return threading.Event().wait() if op.__class__.__name__ == "Unlease" else execute(op)
store._backend.execute = stuck
rallypoint.Lock(store, "l").acquire()
print("end")
"""

AT_EXIT = """
import atexit
from rallypoint.recipes import life
def tell():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("pulse of")])
atexit.unregister(life._end)
atexit.register(tell)  # called after all that are registered later
atexit.register(life._end)
rallypoint.Lock(store, "l").acquire()
listen(store)
"""


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """Return a server that holds a session for long when its process is gone without a word."""
    with Server(grace=AMPLE_S) as server:
        yield server


def run(server: Server, script: str) -> list[str]:
    """Run a script in a process of its own; return the lines that it prints."""
    command = [sys.executable, "-c", PROCESS + script, str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_forked_child_is_a_session_of_its_own(patient: Server) -> None:
    assert run(patient, FORKED) == ["taken 2", "lost False 1"]


@pytest.mark.parametrize("listens", ["", "listen(store)"])
@pytest.mark.parametrize("end", ["", "store.close()", "del store", "raise SystemExit(0)"])
def test_a_process_that_ends_takes_its_sign_of_life_with_it(patient: Server, listens: str, end: str) -> None:
    run(patient, f"rallypoint.Lock(store, 'l').acquire()\n{listens}\n{end}")
    store = with_leases(TCPStore("127.0.0.1", patient.port))
    assert pulses(store) == []
    with Lock(store, "l"):
        pass
    store.close()


def test_a_store_that_hangs_does_not_keep_a_process_from_ending() -> None:
    with Server() as server:
        assert run(server, STUCK) == ["end"]


def test_no_sign_of_life_is_kept_while_the_interpreter_ends(patient: Server) -> None:
    assert run(patient, AT_EXIT) == ["[]"]


def test_a_dropped_store_leaves_no_thread(patient: Server) -> None:
    dropped = """
listen(store)
threads = [one for one in threading.enumerate() if "of" in one.name]
print(len(threads))
del store
for one in threads:
    one.join()
other = open_store()
print([key for key in other.list_keys() if key.startswith("pulse:")])
"""
    assert run(patient, dropped) == ["2", "[]"]
