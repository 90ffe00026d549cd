"""Many followers of one log, in one thread: random writes, readers that lag, compactions, deaths at any system call.

Every follower has an opening of its own, and so is a process as far as locks go. What all must agree on is a model: one
replica that gets each effect when it was committed. A failure names its seed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core import ops
from rallypoint.core.records import Event
from rallypoint.core.replica import (
    Append,
    Arrive,
    Delete,
    DeletePrefix,
    Effect,
    End,
    Pop,
    Push,
    Replica,
    Set,
    Withdraw,
    encode,
)
from rallypoint.store.filelog import LogFile
from rallypoint.store.follower import OWNERS_PER_LOOK, Follower, Seat

FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))


class Died(BaseException):
    """The process was killed here."""


class Process:
    """A follower with one member, and a watch of all that happens."""

    def __init__(self, path: str) -> None:
        self.follower = Follower(LogFile(path), lambda: None)
        assert self.follower.log.try_mutex()
        self.follower.enter()
        self.follower.log.free_mutex()
        self.member = self.follower.admit()
        self.seen = self.follower.replica.values()
        self.seat = Seat(self, ops.Watch(0, b""))
        self.follower.sit(self.seat)
        self.tickets = 0

    def look(self) -> None:
        if not self.follower.look() or self.follower.dead():
            self.sync()
        while self.seat.answers:
            event = self.seat.answers.popleft()
            assert isinstance(event, Event) and event.revision <= self.follower.replica.revision
            if event.value is None:
                del self.seen[event.key]  # it must have been there
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
        "leases": dict(replica._lessee),
        "arrivals": {ticket: (waiter.keys[0], waiter.arrived) for ticket, waiter in replica.arrivals.items()},
        "owners": set(replica.owners),
        "revision": replica.revision,
    }


class World:
    """Processes on one file, a model of what they should all see, and a chance to die in every system call."""

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
            done = self.chance.randint(0, len(data)) if at else self.chance.choice([0, len(data)])  # see test_filelog
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
                Set(key, value),
                Set(key, value, process.member),
                Append(key, b"+"),
                Delete(key),
                DeletePrefix(chance.choice([b"a", b"none"])),
                Push(key, value),
                Pop(key),
                Delete(gate),
                Arrive(gate, chance.randint(1, 4), process.member, process.tickets),
                Withdraw(*mine[0]) if mine else Set(gate, b"1"),
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
        """Let a process die in a write or a compaction, if not just so; what it was doing is done or it is not."""
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
        witness = Process(self.path)  # buries it
        self.processes.append(witness)
        before = state(witness.follower.replica)
        if before != state(self.without(process.member)):
            assert effect is not None, "it was not writing"
            self.applied(effect)
        self.model = self.without(process.member)
        assert before == state(self.model)

    def without(self, member: int) -> Replica:
        """What the model will be when a member is buried."""
        copy = Replica()
        for known in (*self.model.snapshot(), *([End(member)] if member in self.model.owners else [])):
            known.apply(copy)
        copy.take()
        return copy


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 60))
def test_all_followers_agree_whoever_dies_wherever(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(str(tmp_path / "log"), seed, monkeypatch)
    for _ in range(150):
        world.step()
    for process in world.processes:
        process.look()
        assert state(process.follower.replica) == state(world.model)


def test_a_watch_that_missed_a_compaction_gets_what_differs_and_nothing_twice(tmp_path: Path) -> None:
    writer, reader = Process(str(tmp_path / "log")), Process(str(tmp_path / "log"))
    for key in (b"kept", b"goes", b"comes and goes"):
        writer.commit(Set(key, b"1"))
    reader.look()
    writer.commit(Delete(b"comes and goes"))
    for number in (b"2", b"3"):
        writer.commit(Set(b"kept", number))
    writer.commit(Delete(b"goes"))
    writer.commit(Set(b"comes and goes", b"1"))
    writer.commit(Set(b"new", b"x" * 999))
    assert writer.compact()
    reader.sync()
    events = list(reader.seat.answers)
    assert {(event.key, event.value) for event in events} == {(b"goes", None), (b"kept", b"3"), (b"new", b"x" * 999)}
    assert len(events) == 3 and {event.revision for event in events} == {writer.follower.replica.revision}
    reader.look()
    assert not reader.seat.answers
    writer.commit(Set(b"kept", b"4"))
    reader.follower.look()
    assert [(event.key, event.value) for event in reader.seat.answers] == [(b"kept", b"4")]


def test_the_one_that_compacts_loses_no_event_and_sees_none_twice(tmp_path: Path) -> None:
    process = Process(str(tmp_path / "log"))
    process.commit(Set(b"a", b"1"))
    process.commit(Set(b"a", b"2" * 99))
    assert process.compact()
    process.commit(Set(b"a", b"3"))
    assert [event.value for event in process.seat.answers] == [b"1", b"2" * 99, b"3"]
    assert [event.revision for event in process.seat.answers] == [1, 2, 3]


def test_a_wait_goes_on_over_a_compaction(tmp_path: Path) -> None:
    writer, reader = Process(str(tmp_path / "log")), Process(str(tmp_path / "log"))
    seats = [Seat(reader, ops.MultiGet(0, [key], 1.0)) for key in (b"a", b"b")]
    for seat in seats:
        reader.follower.sit(seat)
    writer.commit(Set(b"a", b"1"))
    writer.commit(Set(b"c", b"x" * 500))
    writer.commit(Delete(b"c"))
    assert writer.compact()
    reader.look()
    assert [list(seat.answers) for seat in seats] == [[[b"1"]], []]
    writer.commit(Set(b"b", b"2"))
    reader.look()
    assert list(seats[1].answers) == [[b"2"]]


def test_of_many_dead_owners_each_look_buries_some_until_all_are(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    observer = Process(path)
    others = [Process(path) for _ in range(3 * OWNERS_PER_LOOK)]
    for number, other in enumerate(others):
        other.commit(Set(b"%d" % number, b"", other.member))
    for number, other in enumerate(others):
        if number % 3:
            other.follower.log.close()
    looks = 0
    while len(observer.follower.replica.values()) > OWNERS_PER_LOOK or not looks:
        observer.look()
        looks += 1
        assert looks < 20
    assert sorted(map(int, observer.follower.replica.values())) == list(range(0, 3 * OWNERS_PER_LOOK, 3))


def test_an_interrupt_between_any_two_lines_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(str(tmp_path / "log"))
    process.commit(Push(b"q", b"1"))

    def interrupted(self: Push, to: Replica) -> None:
        to.push(self.key, self.value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Push, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.commit(Push(b"q", b"2"))
    process.follower.log.free_mutex()
    process.look()
    assert process.follower.replica.execute(ops.QueueLen(0, b"q")) == 2
