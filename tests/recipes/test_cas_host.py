"""The loop that hosts objects by compare-and-set, with fake parts: a cell in a dict, and named sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from rallypoint import SessionLost
from rallypoint.core.machines.lock import LockAcquire, LockMachine, LockQuery, LockRelease
from rallypoint.core.machines.machine import Command, Done, Machine, Waiting
from rallypoint.deadline import Deadline
from rallypoint.recipes.hosting.cas_host import CasHost, HostedState, StoredState, decode_state, place_of

PLACE = place_of(LockMachine, "l")
EMPTY = msgspec.json.encode(HostedState(0, "", [], msgspec.Raw(b"{}")))


class DictCell:
    """States in a dict shared by several hosts; a test may act before a write, or while a member waits."""

    label = "a dict"

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.before_write: list[Callable[[], object]] = []
        self.while_waiting: list[Callable[[], object]] = []
        self.woke: list[bool] = []
        self.lost: list[int] = []
        self.waits: list[float] = []

    def fetch(self, place: str) -> StoredState:
        data = self.values.get(place, EMPTY)
        return data, data

    def decode(self, data: bytes, kind: type[Machine]) -> tuple[HostedState, Any]:
        return decode_state(data, HostedState, kind)

    def swap(self, place: str, token: Any, state: HostedState, wakes: bool) -> StoredState | None:
        if self.before_write:
            self.before_write.pop(0)()
        if self.fetch(place)[1] != token:
            return self.fetch(place)
        self.values[place] = msgspec.json.encode(state)
        self.woke.append(wakes)
        return None

    def patience(self, command: Command | None) -> Deadline:
        return Deadline(float("inf"))

    def back_off(self, place: str, present: StoredState, machine: Any, lost: int, patience: Deadline) -> StoredState:
        self.lost.append(lost)
        return present

    def await_change(self, place: str, state: HostedState, machine: Any, within_s: float) -> bool:
        self.waits.append(within_s)
        if not self.while_waiting:
            return False
        self.while_waiting.pop(0)()
        return True


class NamedLiveness:
    """A session with a name; the test sets which others are dead or revived."""

    former: tuple[str, ...] = ()

    def __init__(self, session: str) -> None:
        self.session = session
        self.dead: list[str] = []
        self.revived: set[str] = set()
        self.forgotten: list[str] = []
        self.wanted_pauses: tuple[float, ...] = (1.0,)

    def replace_session(self, session: str) -> str:
        self.session = f"after {session}"
        return f"{session} slept"

    def observe(self, state: HostedState) -> None:
        """Do nothing: the state has no heartbeats."""

    def record(self, state: HostedState, machine: Machine) -> None:
        """Do nothing: the state has no heartbeats."""

    def pauses(self, state: HostedState, machine: Machine, within_s: float) -> Iterable[float]:
        return self.wanted_pauses

    def dead_in(self, state: HostedState, machine: Machine) -> Iterable[str]:
        return [session for session in self.dead if session in machine.sessions()]

    def is_alive_in(self, state: HostedState, session: str) -> bool:
        return session in self.revived

    def forget(self, session: str) -> None:
        self.forgotten.append(session)


class Node:
    """One member with its own host."""

    def __init__(self, name: str, values: dict[str, bytes]) -> None:
        self.name = name
        self.cell, self.liveness = DictCell(values), NamedLiveness(name)
        self.host = CasHost(self.cell, self.liveness)

    def act(self, call: int, command: Command, wait_s: float = 0.0) -> Any:
        return self.host.act("l", self.name, call, command, wait_s)

    def state(self) -> HostedState:
        return self.host.read(PLACE, LockMachine)[0]

    def sessions(self) -> set[str]:
        machine: LockMachine = self.host.read(PLACE, LockMachine)[1]
        return machine.sessions()


@pytest.fixture
def nodes() -> tuple[Node, Node, Node]:
    values: dict[str, bytes] = {}
    return Node("ann", values), Node("bob", values), Node("eve", values)


def test_a_lost_race_is_retried_on_the_winning_state(nodes: tuple[Node, Node, Node]) -> None:
    ann, bob, eve = nodes
    ann.cell.before_write = [lambda: bob.act(1, LockAcquire()), lambda: eve.act(1, LockAcquire())]
    assert isinstance(ann.act(1, LockAcquire()), Waiting), "bob was faster"
    assert ann.cell.lost == [1, 2]
    assert ann.sessions() == {"ann", "bob", "eve"}
    assert (ann.state().version, ann.state().writer) == (3, "ann")


def test_only_a_change_that_others_wait_for_wakes_them(nodes: tuple[Node, Node, Node]) -> None:
    ann, bob, _ = nodes
    ann.act(1, LockAcquire())
    bob.act(1, LockAcquire())
    assert (ann.cell.woke, bob.cell.woke) == ([False], [False])
    ann.act(2, LockRelease(1))
    assert ann.cell.woke == [False, True]


def test_a_query_writes_nothing(nodes: tuple[Node, Node, Node]) -> None:
    ann, _, _ = nodes
    assert isinstance(ann.act(1, LockQuery()), Done)
    assert ann.cell.values == {}


def test_a_wakeup_ends_a_wait(nodes: tuple[Node, Node, Node]) -> None:
    ann, bob, _ = nodes
    ann.act(1, LockAcquire())
    bob.cell.while_waiting = [lambda: ann.act(2, LockRelease(1))]
    bob.liveness.wanted_pauses = (0.25, 0.5)
    assert isinstance(bob.act(1, LockAcquire(), 60.0), Done)
    assert bob.cell.waits == [0.25], "the second pause is not needed"


def test_dead_sessions_are_evicted_after_the_pauses(nodes: tuple[Node, Node, Node]) -> None:
    ann, bob, eve = nodes
    ann.act(1, LockAcquire())
    eve.act(1, LockAcquire())
    bob.liveness.dead = ["ann", "eve"]
    bob.liveness.wanted_pauses = (0.25, 0.5)
    assert isinstance(bob.act(1, LockAcquire(), 60.0), Done)
    assert bob.cell.waits == [0.25, 0.5]
    assert bob.state().ended == bob.liveness.forgotten == ["ann", "eve"]
    assert bob.state().version == 6, "two joins, bob's own, one for each eviction, and one for their write"


def test_a_session_whose_heartbeat_moved_is_not_evicted(nodes: tuple[Node, Node, Node]) -> None:
    ann, bob, _ = nodes
    ann.act(1, LockAcquire())
    bob.liveness.dead, bob.liveness.revived = ["ann"], {"ann"}
    assert isinstance(bob.act(1, LockAcquire()), Waiting)
    assert bob.sessions() == {"ann", "bob"} and bob.state().ended == []


def test_an_evicted_member_gets_session_lost_and_then_a_new_session(nodes: tuple[Node, Node, Node]) -> None:
    ann, bob, _ = nodes
    ann.act(1, LockAcquire())
    bob.host.evict(PLACE, LockMachine, ["ann"])
    with pytest.raises(SessionLost, match=r"a dict.*ann slept"):
        ann.act(2, LockQuery())
    assert isinstance(ann.act(3, LockAcquire()), Done)
    assert ann.sessions() == {"after ann"}
