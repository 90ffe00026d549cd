"""Many followers of one log, in one thread: random writes, slow readers, compactions, and deaths in any system call.

Every follower opens the file itself, so its locks are those of a separate process. All must agree with a model: one
replica that gets each effect when it is committed. A failure names its seed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core import ops
from rallypoint.core.records import Event
from rallypoint.filestore.follower import OWNERS_PER_LOOK, ReplicaFollower, ReplicaWaiter
from rallypoint.filestore.log_file import LogFile
from rallypoint.filestore.replica import (
    AppendEffect,
    ArriveEffect,
    DeleteEffect,
    DeletePrefixEffect,
    Effect,
    EndOwnerEffect,
    PopEffect,
    PushEffect,
    Replica,
    SetEffect,
    WithdrawEffect,
    encode,
)

FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))


class Died(BaseException):
    """The process was killed here."""


class Process:
    """A follower with one member, and a watch of all keys."""

    def __init__(self, path: str) -> None:
        self.follower = ReplicaFollower(LogFile(path), lambda: None)
        assert self.follower.log.try_mutex()
        self.follower.enter()
        self.follower.log.free_mutex()
        self.member = self.follower.add_member()
        self.seen = self.follower.replica.values()
        self.waiter = ReplicaWaiter(self, ops.WatchPrefix(0, b""))
        self.follower.add_waiter(self.waiter)
        self.tickets = 0

    def look(self) -> None:
        if not self.follower.look() or self.follower.dead():
            self.sync()
        while self.waiter.answers:
            event = self.waiter.answers.popleft()
            assert isinstance(event, Event) and event.revision <= self.follower.replica.revision
            if event.value is None:
                del self.seen[event.key]  # it must exist
            else:
                self.seen[event.key] = event.value
        assert self.seen == self.follower.replica.values()

    def sync(self) -> None:
        assert self.follower.log.try_mutex()
        self.follower.sync()
        self.follower.log.free_mutex()

    def commit(self, effect: Effect) -> None:
        assert self.follower.log.try_mutex()
        self.follower.sync()
        self.follower.commit(effect)
        self.follower.log.free_mutex()

    def compact(self) -> bool:
        assert self.follower.log.try_mutex()
        self.follower.sync()
        self.follower.log.compact([encode(effect) for effect in self.follower.replica.snapshot()])
        self.follower.log.free_mutex()
        return self.follower.log.peek() is None


def state(replica: Replica) -> dict[str, Any]:
    return {
        "values": list(replica.values().items()),
        "queues": {key: list(queue) for key, queue in replica._queues.items()},
        "leases": dict(replica._lease_owner),
        "arrivals": {ticket: (waiter.keys[0], waiter.arrived) for ticket, waiter in replica.arrivals.items()},
        "owners": set(replica.owners),
        "revision": replica.revision,
    }


class FollowerSimulation:
    """Processes on one file, a model of what all should see, and deaths in random system calls."""

    def __init__(self, path: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.chance = path, random.Random(seed)
        self.model = Replica()
        self.processes = [Process(path) for _ in range(3)]
        self.calls_to_live = -1
        self._pwrite, self._ftruncate = os.pwrite, os.ftruncate
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "ftruncate", self.ftruncate)

    def pwrite(self, fd: int, data: memoryview, at: int) -> int:
        self.calls_to_live -= 1
        if self.calls_to_live == 0:
            done = self.chance.randint(0, len(data)) if at else self.chance.choice([0, len(data)])  # see test_log_file
            self._pwrite(fd, data[:done], at)
            raise Died
        return self._pwrite(fd, data, at)

    def ftruncate(self, fd: int, size: int) -> None:
        self.calls_to_live -= 1
        if self.calls_to_live == 0:
            raise Died
        self._ftruncate(fd, size)

    def applied(self, effect: Effect) -> None:
        effect.apply(self.model)
        self.model.take()

    def effect(self, process: Process) -> Effect:
        chance = self.chance
        key = chance.choice([b"", b"a", b"a/b", b"c"])
        gate = chance.choice([b"a/gate", b"gate"])
        value = chance.randbytes(chance.choice([0, 1, 300]))
        process.tickets += 1
        mine = [ticket for ticket in self.model.arrivals if ticket[0] == process.member]
        return chance.choice(
            [
                SetEffect(key, value),
                SetEffect(key, value, process.member),
                AppendEffect(key, b"+"),
                DeleteEffect(key),
                DeletePrefixEffect(chance.choice([b"a", b"none"])),
                PushEffect(key, value),
                PopEffect(key),
                DeleteEffect(gate),
                ArriveEffect(gate, chance.randint(1, 4), process.member, process.tickets),
                WithdrawEffect(*mine[0]) if mine else SetEffect(gate, b"1"),
            ]
        )

    def step(self) -> None:
        process = self.chance.choice(self.processes)
        what = self.chance.choices(["commit", "compact", "look", "die", "come"], [60, 5, 20, 5, 5])[0]
        if what == "commit":
            effect = self.effect(process)
            process.commit(effect)
            self.applied(effect)
        elif what == "compact":
            process.compact()
        elif what == "look":
            process.look()
            assert state(process.follower.replica) == state(self.model)
        elif what == "come" and len(self.processes) < 5:
            self.processes.append(Process(self.path))
            assert state(self.processes[-1].follower.replica) == state(self.model)
        elif what == "die" and len(self.processes) > 1:
            self.kill(process)

    def kill(self, process: Process) -> None:
        """Let a process die, perhaps in a write or a compaction, which must be complete or without effect."""
        self.calls_to_live = self.chance.randint(1, 7)
        effect: Effect | None = None
        try:
            if self.chance.random() < 0.5:
                process.compact()
            else:
                effect = self.effect(process)
                process.commit(effect)
                self.applied(effect)
                effect = None
        except Died:
            pass
        self.calls_to_live = -1
        process.follower.log.close()
        self.processes.remove(process)
        witness = Process(self.path)  # ends the dead member
        self.processes.append(witness)
        before = state(witness.follower.replica)
        if before != state(self.without(process.member)):
            assert effect is not None, "it died outside a write"
            self.applied(effect)
        self.model = self.without(process.member)
        assert before == state(self.model)

    def without(self, member: int) -> Replica:
        """Return the model after the end of a member."""
        copy = Replica()
        for known in (*self.model.snapshot(), *([EndOwnerEffect(member)] if member in self.model.owners else [])):
            known.apply(copy)
        copy.take()
        return copy


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 60))
def test_all_followers_agree_after_deaths_in_any_system_call(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = FollowerSimulation(str(tmp_path / "log"), seed, monkeypatch)
    for _ in range(150):
        simulation.step()
    for process in simulation.processes:
        process.look()
        assert state(process.follower.replica) == state(simulation.model)


def test_a_watch_that_missed_a_compaction_gets_each_difference_once(tmp_path: Path) -> None:
    writer, reader = Process(str(tmp_path / "log")), Process(str(tmp_path / "log"))
    for key in (b"kept", b"goes", b"comes and goes"):
        writer.commit(SetEffect(key, b"1"))
    reader.look()
    writer.commit(DeleteEffect(b"comes and goes"))
    for number in (b"2", b"3"):
        writer.commit(SetEffect(b"kept", number))
    writer.commit(DeleteEffect(b"goes"))
    writer.commit(SetEffect(b"comes and goes", b"1"))
    writer.commit(SetEffect(b"new", b"x" * 999))
    assert writer.compact()
    reader.sync()
    events = list(reader.waiter.answers)
    assert {(event.key, event.value) for event in events} == {(b"goes", None), (b"kept", b"3"), (b"new", b"x" * 999)}
    assert len(events) == 3 and {event.revision for event in events} == {writer.follower.replica.revision}
    reader.look()
    assert not reader.waiter.answers
    writer.commit(SetEffect(b"kept", b"4"))
    reader.follower.look()
    assert [(event.key, event.value) for event in reader.waiter.answers] == [(b"kept", b"4")]


def test_the_compacting_process_sees_each_event_once(tmp_path: Path) -> None:
    process = Process(str(tmp_path / "log"))
    process.commit(SetEffect(b"a", b"1"))
    process.commit(SetEffect(b"a", b"2" * 99))
    assert process.compact()
    process.commit(SetEffect(b"a", b"3"))
    assert [event.value for event in process.waiter.answers] == [b"1", b"2" * 99, b"3"]
    assert [event.revision for event in process.waiter.answers] == [1, 2, 3]


def test_a_wait_continues_over_a_compaction(tmp_path: Path) -> None:
    writer, reader = Process(str(tmp_path / "log")), Process(str(tmp_path / "log"))
    waiters = [ReplicaWaiter(reader, ops.MultiGet(0, [key], 1.0)) for key in (b"a", b"b")]
    for waiter in waiters:
        reader.follower.add_waiter(waiter)
    writer.commit(SetEffect(b"a", b"1"))
    writer.commit(SetEffect(b"c", b"x" * 500))
    writer.commit(DeleteEffect(b"c"))
    assert writer.compact()
    reader.look()
    assert [list(waiter.answers) for waiter in waiters] == [[[b"1"]], []]
    writer.commit(SetEffect(b"b", b"2"))
    reader.look()
    assert list(waiters[1].answers) == [[b"2"]]


def test_each_look_ends_some_of_many_dead_owners(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    observer = Process(path)
    others = [Process(path) for _ in range(3 * OWNERS_PER_LOOK)]
    for number, other in enumerate(others):
        other.commit(SetEffect(b"%d" % number, b"", other.member))
    for number, other in enumerate(others):
        if number % 3:
            other.follower.log.close()
    looks = 0
    while len(observer.follower.replica.values()) > OWNERS_PER_LOOK or not looks:
        observer.look()
        looks += 1
        assert looks < 20
    assert sorted(map(int, observer.follower.replica.values())) == list(range(0, 3 * OWNERS_PER_LOOK, 3))


def test_an_interrupt_while_an_effect_is_applied_does_not_apply_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(str(tmp_path / "log"))
    process.commit(PushEffect(b"q", b"1"))

    def interrupted(self: PushEffect, to: Replica) -> None:
        to.push(self.key, self.value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PushEffect, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.commit(PushEffect(b"q", b"2"))
    process.follower.log.free_mutex()
    process.look()
    assert process.follower.replica.execute(ops.QueueLen(0, b"q")) == 2
