"""What no client of ours does, and one that is broken may: it harms itself at most, and the log is still replayed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, on_log
from tests.server.peers import Ours

from rallypoint.core import barrier, engine, entries, lock, ops, rendezvous, roster, session, watch_table
from rallypoint.core.entries import Attach, Detach, End, GoOn, Lapse, OpenNamespace, TimeOut
from rallypoint.core.gathering import Limits
from rallypoint.core.machine import Done, Refused, Waiting
from rallypoint.core.records import LATER, InternalError, Push
from rallypoint.core.snapshot import fold, read, write
from rallypoint.core.state import State
from rallypoint.errors import LimitExceeded, StoreFull
from rallypoint.protocol.client import Reply
from rallypoint.protocol.native import GARBLED, decode_request
from rallypoint.protocol.reported_errors import error_of
from rallypoint.server.server import StoreServer

from .fakes import value_of
from .logged_state import Server

JOIN = rendezvous.Join(Limits(2, 3, 5.0))


# Bytes


def nested(number: int, depth: int) -> bytes:
    """Make a `Set` with an extra field, which is skipped, of so many arrays in each other."""
    return b"\x95\x01\xcd" + number.to_bytes(2, "big") + b"\xc4\x01k\xc4\x01v" + b"\x91" * depth + b"\xc0"


@on_log
async def test_a_request_that_was_read_can_be_read_from_the_log(server: StoreServer, log: FakeLog) -> None:
    """Its fields are logged, not its bytes: in the log they are one array deeper, which may be one too many."""
    peer = Ours(server)
    await peer.greets(b"")
    for number, depth in enumerate(range(1005, 0, -1), 1):
        peer.says(struct.pack("<I", len(nested(number, depth))) + nested(number, depth))
        _, status, _ = await peer.reads()
        if not status:
            break
    assert not status and 500 < depth < 1005
    assert log.records[-1] == entries.encode(entries.Request(1, ops.Set(number, b"k", b"v")))


def test_what_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(GARBLED):
        decode_request(nested(1, 10_000))


# Calls on shared objects


def test_a_call_number_in_doubt_that_is_also_a_watch_harms_nobody() -> None:
    """One number is used for a watch and for a join that is in doubt; then the watch wakes."""
    server = Server(sessions=4)
    server.act(2, 1, 1, roster.Join(), "x")
    epoch = server.objects._machines[roster.Roster, b"/o"].epoch
    assert server.act(1, 1, 1, roster.Watch(epoch), "x") is LATER
    server.apply(Detach(2))
    assert server.act(1, 2, 1, roster.Join(), "x") is LATER
    assert isinstance(server.act(3, 1, 1, roster.Join(), "y"), Done)
    assert all(server.objects._calls[held[1].split("/")[0]][held].waits for held in server.objects.doubts)
    server.apply(Attach(b"id 2", 0, 0))
    server.apply(Detach(4))
    server.apply(End(4))
    assert list(server.state.sessions) == [1, 2, 3]


def test_a_call_number_of_another_member_is_refused() -> None:
    server = Server(sessions=2)
    assert server.act(1, 1, 1, JOIN, "x") is LATER
    refused = server.act(1, 2, 1, JOIN, "y")
    assert isinstance(refused, Refused) and refused.error == "Disagreement" and refused.fields["theirs"] == "x"
    server.apply(Detach(1))
    server.apply(End(1))
    assert server.act(2, 1, 1, rendezvous.Look(), "z").answer["waiting"] == [], "nobody of the dead is in it"
    assert server.objects._calls == {} and server.engine.size == 0


def test_a_call_that_is_counted_looks_again_in_a_full_store() -> None:
    server = Server(sessions=2, max_bytes=2000)
    assert server.act(1, 1, 1, barrier.Arrive(2)) is LATER
    server.apply(TimeOut(1, 1))
    number = 0
    while not isinstance(server.ask(2, ops.Set(number := number + 1, b"%d" % number, b"")), StoreFull):
        pass
    assert isinstance(server.told()[0][2], Waiting)
    assert server.act(1, 2, 1, barrier.Arrive(2)) is LATER, "it has arrived, and waits on"


# Bugs


def broken(*arguments: Any) -> Any:
    raise KeyError(arguments)


def test_a_bug_in_one_machine_is_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, barrier.Arrive(2))
    server.act(1, 2, 2, lock.Acquire())
    assert server.act(2, 1, 1, lock.Acquire()) is LATER
    monkeypatch.setattr(barrier.Barrier, "lost", broken)
    state = server.state
    state.apply(Detach(1))
    assert state.apply(End(1)) is None
    assert [number for owner, number, answer in state.take_outputs() if isinstance(answer, Done)] == [1]
    (bug,) = server.engine.bugs
    assert "KeyError" in bug and "barrier /o" in bug


@pytest.mark.parametrize("op", [ops.Act(1, b"/o", "0", 1, lock.Acquire(), 9.0), ops.Push(1, b"q", b"")], ids=["a", "b"])
def test_a_bug_is_an_answer_that_is_kept(op: ops.Op, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=1)
    monkeypatch.setattr(lock.Lock, "apply", broken)
    monkeypatch.setitem(session.EXECUTE, ops.Push, broken)
    state = read(list(write(server.state)))
    one, other = server.state.sessions[1], state.sessions[1]
    answer = one.execute(op)
    assert isinstance(answer, InternalError) and one.execute(op) is answer
    assert other.execute(op).why == answer.why, "and every replay says the same"
    assert answer.why == f"KeyError in broken, during {op.__class__.__name__}"
    error = error_of(Reply(1, 2, ["InternalError", {"why": answer.why}]), "store")
    assert isinstance(error, InternalError) and str(error) == str(answer)
    assert len(server.engine.bugs) == 1 and "KeyError((" in server.engine.bugs[0]


def test_a_bug_of_a_visitor_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    monkeypatch.setitem(session.EXECUTE, ops.Push, broken)
    answer = state.apply(entries.Visit(-1, 0, ops.Push(0, b"q", b"")))
    assert isinstance(answer, InternalError) and "KeyError in broken, during Push" in str(answer)


def test_a_bug_in_an_answer_is_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=3)
    for serial in (1, 2):
        server.ask(serial, ops.Arrive(1, b"/b", 3))
    whole = session.Session.answer
    monkeypatch.setattr(
        session.Session, "answer", lambda self, *answer: (broken if self.serial == 1 else whole)(self, *answer)
    )
    server.state.apply(entries.Request(3, ops.Arrive(1, b"/b", 3)))
    told = {owner.serial: answer for owner, _, answer in server.state.take_outputs()}
    assert isinstance(told[1], InternalError) and told[2] is None


# Watches


def test_a_session_that_is_over_has_no_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_PUSHES", 2)
    server = Server(sessions=2)
    for number in (1, 2):
        server.ask(1, ops.Watch(number, b""))
    server.ask(2, ops.MultiSet(1, [(b"%d" % number, b"") for number in range(5)]))
    one = server.state.sessions[1]
    assert one.over and one.watches == {} and server.engine.statistics().watches == 0
    assert len(one.pushes) == 3 and len(server.told()) == 3


def test_a_session_that_said_goodbye_has_no_watches() -> None:
    server = Server(sessions=1)
    server.ask(1, ops.Watch(1, b""))
    server.ask(1, ops.Bye(2))
    assert server.engine.statistics().watches == 0 and server.engine.size == 0


MANY: dict[str, Callable[[Server], Any]] = {
    "multi_set": lambda server: server.ask(2, ops.MultiSet(9, [(b"%d" % n, b"new") for n in range(50)])),
    "delete_prefix": lambda server: server.ask(2, ops.DeletePrefix(9, b"")),
    "end": lambda server: (server.apply(Detach(2)), server.apply(End(2))),
}


@pytest.mark.parametrize("how", MANY)
def test_the_events_of_a_large_change_are_delivered_as_they_come(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "OUTBOX_EVENTS", 6)
    server = Server(sessions=2)
    for number in range(1, 4):
        server.ask(1, ops.Watch(number, b""))
    for number in range(50):
        server.ask(2, ops.Lease(number + 10, b"%d" % number, b"", 0.0))
    server.told()
    longest = 0

    def relieve(relieved: engine.Engine) -> None:
        nonlocal longest
        longest = max(longest, len(relieved.outbox))
        server.state.settle(relieved)

    server.engine.relieve = relieve
    MANY[how](server)
    pushes = [(push.push, push.watch, push.event) for _, _, push in server.told() if isinstance(push, Push)]
    assert len(pushes) == 150 and [number for number, *_ in pushes] == list(range(151, 301)), "all, and in order"
    assert [watch for _, watch, _ in pushes] == [1, 2, 3] * 50
    assert 0 < longest <= 9


def test_a_session_has_so_many_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_WATCHES", 2)
    server = Server(sessions=2)
    assert [server.ask(1, ops.Watch(number, b"")) for number in (1, 2)] == [None, None]
    refused = server.ask(1, ops.Watch(3, b"/mine"))
    assert isinstance(refused, LimitExceeded) and "3 watches of one session, with that of '/mine'" in str(refused)
    assert server.ask(2, ops.Watch(1, b"")) is None
    server.ask(1, ops.Drop(4, 1))
    assert server.ask(1, ops.Watch(5, b"")) is None


def test_watched_prefixes_have_so_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write looks once for each of them."""
    monkeypatch.setattr(watch_table, "MAX_LENGTHS", 2)
    server = Server(sessions=1)
    for number, prefix in enumerate((b"a", b"bb", b"c", b"dd"), 1):
        assert server.ask(1, ops.Watch(number, prefix)) is None
    refused = server.ask(1, ops.Watch(5, b"eee"))
    assert isinstance(refused, LimitExceeded) and "'eee'" in str(refused) and server.engine.statistics().watches == 4
    for target in (1, 3):
        server.ask(1, ops.Drop(5 + target, target))
    assert server.ask(1, ops.Watch(9, b"eee")) is None


# Leases, and items


def test_the_end_of_an_earlier_lease_is_not_that_of_a_later_one() -> None:
    """The heartbeat has stopped, and before that is in the log, the key is leased anew."""
    server = Server(sessions=1)
    server.ask(1, ops.Lease(1, b"k", b"old", 1.0))
    server.ask(1, ops.Lease(2, b"k", b"new", 1.0))
    server.apply(Lapse(1, b"k", 1))
    assert value_of(server.engine, b"k") == b"new"
    server.apply(Lapse(1, b"k", 2))
    assert value_of(server.engine, b"k") is None


def test_many_leases_of_a_session_end_in_slices() -> None:
    server = Server(sessions=2)
    server.engine.slice_keys = 3
    for number in range(8):
        server.ask(1, ops.Lease(number + 1, b"%d" % number, b"", 0.0))
    server.apply(Detach(1))
    server.apply(End(1))
    assert server.engine.statistics().keys == 5 and server.engine.clearing
    server.ask(2, ops.Set(1, b"7", b"mine"))
    assert "unknown session" in server.apply(Attach(b"id 1", 0, 0))
    middle = list(write(server.state))
    assert server.engine.statistics().leased_keys == 4
    for left in (2, 1):
        server.apply(GoOn(0))
        assert server.engine.statistics().keys == left
    assert not server.engine.clearing and value_of(server.engine, b"7") == b"mine"
    assert list(fold(middle, server.log[-2:])) == list(write(server.state))


def test_an_item_that_is_dropped_while_away_is_not_remembered() -> None:
    server = Server(sessions=1)
    server.ask(1, ops.Take(1, b"q", 9.0))
    server.apply(Detach(1))
    server.apply(Attach(b"id 1", 0, 0))
    server.ask(1, ops.Drop(2, 1))
    assert server.state.sessions[1].suspended == {}


# Size


def test_no_chunk_of_a_snapshot_grows_with_what_there_is_many_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.core.snapshot.CHUNK_BYTES", 2000)
    state = State()
    state.apply(entries.Start(entries.VERSION, b"", *(1 << 62,) * 4))
    for serial in (1, 2):
        state.apply(entries.Open(b"%d" % serial, "", 0, []))
    number = 0
    for key in (b"key %d" % key for key in range(300)):
        for op in (
            ops.Lease(0, key, b"", 5.0),
            ops.Take(0, b"q" + key, 9.0),
            ops.Arrive(0, b"b" + key, 2),
            ops.Watch(0, b"w" + key[-1:]),
            ops.Push(0, b"p" + key, b""),
            ops.Pop(0, b"p" + key),
            ops.Act(0, b"/" + key, "me", number, lock.Acquire(), 9.0),
        ):
            op.number = number = number + 1
            state.apply(entries.Request(1, op))
            state.apply(entries.Request(2, op))
    state.apply(Detach(2))
    chunks = list(write(state))
    assert max(map(len, chunks)) < 3500 and list(write(read(chunks))) == chunks


def test_an_entry_costs_the_same_with_many_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is to deliver is looked for in one place."""
    state = State()
    for name in "abc":
        state.apply(OpenNamespace(name, 1, 1))
    assert len({id(one.engine.outbox) for one in state.namespaces.values()}) == 1
    state.apply(entries.Open(b"1", "", 2, []))
    state.apply(entries.Request(1, ops.Watch(1, b"")))
    state.apply(entries.Visit(-1, 2, ops.Set(0, b"k", b"")))
    assert [type(push) for _, _, push in state.take_outputs()] == [Push]
