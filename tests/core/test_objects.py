"""The shared objects of a server on a bare engine: calls that are taken back, refused, late or left behind.

Whatever happens to them, at the end there is no machine, no call, and not one byte counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.core.barrier import Arrive, Withdraw
from rallypoint.core.client import CONFIRM_EVERY, Client, Reply
from rallypoint.core.engine import ENTRY_BYTES, Engine
from rallypoint.core.exchange import Give, TakeBack
from rallypoint.core.lock import Acquire, Release
from rallypoint.core.machine import Call, Command, Done, Refused, Waiting
from rallypoint.core.native import Add, Confirm, Drop, Frames, Pop, Request, Status, frame
from rallypoint.core.objects import Objects
from rallypoint.core.records import TimedOut, Waiter
from rallypoint.core.session import decode_request
from rallypoint.errors import StoreFull


class Host:
    """What a server does around its objects. A session is named as its one member is: 0 or 1."""

    def __init__(self, max_bytes: int = 1 << 62) -> None:
        self.engine = Engine(max_bytes)
        self.objects = Objects(self.engine)

    def act(self, session: str, number: int, command: Command, name: bytes = b"/o") -> Any:
        return self.objects.act(name, Call(session, session, number), command, session, 0.0, 9.0, number)

    def look_away(self, waiter: Waiter) -> Waiting:
        """Let a wait end by its deadline; its call is then between two looks."""
        self.engine.drop(waiter)
        return self.objects.why(waiter)

    def end(self, session: str) -> None:
        self.engine.end(session)
        self.objects.end(session, 0.0)

    def answers(self) -> list[tuple[Any, Any]]:
        return [(waiter.tag, answer) for waiter, answer in self.engine.take()]

    def expect_nothing_left(self) -> None:
        left = self.objects
        assert (left._machines, left._pending, left._held, left._late) == ({}, {}, {}, {})
        assert self.engine.size == 0 and self.engine.statistics().waiters == 0
        assert self.answers() == [] and left.statistics() == {}


UNDONE: dict[str, tuple[Command, Callable[[int], Command]]] = {
    "barrier": (Arrive(2), Withdraw),
    "exchange": (Give(2, 0, b"x" * 1000, "all_gather"), TakeBack),
}


@pytest.mark.parametrize("kind", UNDONE)
def test_a_wait_that_is_undone_is_answered_and_leaves_nothing(kind: str) -> None:
    host = Host()
    command, undo = UNDONE[kind]
    assert isinstance(host.act("0", 1, command), Waiter)
    assert not isinstance(host.act("0", 2, undo(1)), Waiter)
    assert host.answers() == [(1, Refused("Undone", {}))]
    host.expect_nothing_left()


def test_a_wait_for_a_lock_that_is_undone_is_answered_and_the_holder_holds() -> None:
    host = Host()
    fence = host.act("0", 1, Acquire())
    assert isinstance(host.act("1", 1, Acquire()), Waiter)
    assert host.act("1", 2, Release(1)) == Done(False)
    assert host.answers() == [(1, Refused("Undone", {}))]
    assert host.act("0", 1, Acquire()) == fence
    assert host.act("0", 2, Release(1)) == Done(True)
    host.expect_nothing_left()


def test_why_has_an_answer_when_the_machine_has_gone() -> None:
    """The wait ends by its deadline, and before its host asks why, the call is taken back."""
    host = Host()
    waiter = host.act("0", 1, Arrive(2))
    host.engine.tick(10.0)
    ((_, answer),) = host.engine.take()
    assert isinstance(answer, TimedOut)
    host.act("0", 2, Withdraw(1))
    assert host.objects.statistics() == {}
    assert host.objects.why(waiter) == Waiting("it was taken back")
    host.engine.take()
    host.expect_nothing_left()


def test_one_call_number_at_two_places_is_counted_and_freed_at_both() -> None:
    host = Host()
    give = Give(2, 0, b"x" * 1000, "gather", 1)
    first = host.act("0", 1, give, b"/a")
    counted = host.engine.size
    second = host.act("0", 1, give, b"/b")
    assert isinstance(first, Waiter) and isinstance(second, Waiter)
    assert host.engine.size == 2 * counted >= 2000
    host.act("0", 2, TakeBack(1), b"/a")
    assert host.engine.size == counted
    host.end("0")
    host.engine.take()
    host.expect_nothing_left()


def test_one_call_number_at_two_places_waits_at_both() -> None:
    host = Host()
    for name in (b"/a", b"/b"):
        assert isinstance(host.act("0", 1, Arrive(2), name), Waiter)
    for name in (b"/a", b"/b"):
        assert isinstance(host.act("1", 1, Arrive(2), name), Done)
        ((tag, answer),) = host.answers()
        assert tag == 1 and isinstance(answer, Done)
    host.end("0")
    host.end("1")
    host.expect_nothing_left()


@pytest.mark.parametrize("spare", range(0, 3 * ENTRY_BYTES, 40))
def test_a_call_that_a_full_store_refuses_changes_nothing(spare: int) -> None:
    """There is room for none or some of what it needs to get in line and wait."""
    host = Host()
    host.act("0", 1, Acquire())
    size, revision = host.engine.size, host.engine.revision
    host.engine.max_bytes = size + spare
    with pytest.raises(StoreFull):
        host.act("1", 1, Acquire())
    assert (host.engine.size, host.engine.revision) == (size, revision)
    assert host.act("0", 2, Release(1)) == Done(True)
    host.expect_nothing_left()


def test_a_late_call_whose_session_ends_lets_the_machine_go() -> None:
    """The exchange ends while one call is between two looks, and its session never looks again."""
    host = Host()
    late = host.act("0", 1, Give(2, 0, b"x" * 1000, "all_gather"))
    assert host.look_away(late).missing
    assert isinstance(host.act("1", 1, Give(2, 1, b"", "all_gather")), Done)
    assert host.objects.statistics() == {"exchange": 1}, "the late one may still look"
    host.end("0")
    host.end("1")
    host.expect_nothing_left()


# What a client says of a call that it takes back


def said(data: bytes) -> list[Request]:
    return [decode_request(payload) for payload in Frames(1 << 20).feed(data)]


@pytest.mark.parametrize("answered", [CONFIRM_EVERY - 1, CONFIRM_EVERY, 3 * CONFIRM_EVERY])
def test_no_confirm_before_a_drop_forgets_what_is_dropped(answered: int) -> None:
    """An item may have been taken for a call that was interrupted: confirmed first, it could not go back."""
    client = Client("test")
    client.ask(Pop, b"/q")
    for number in range(2, answered + 2):
        client.ask(Add, b"/n", 1)
        (reply,) = client.receive(frame((number, Status.OK, 1)))
        client.settle(reply)
    client.forget(1)
    first, *others = said(client.ask(Drop, 1))
    assert isinstance(first, Drop) and first.target == 1
    assert [type(other) for other in others] == ([Confirm] if answered >= CONFIRM_EVERY else [])


def test_a_confirm_goes_before_any_other_request() -> None:
    client = Client("test")
    client.ask(Pop, b"/q")
    client.settle(Reply(1, Status.OK, b"an item, which is to be confirmed at once"))
    confirm, add = said(client.ask(Add, b"/n", 1))
    assert (type(confirm), type(add)) == (Confirm, Add)
    assert isinstance(confirm, Confirm) and confirm.last == 1 and confirm.open == []
