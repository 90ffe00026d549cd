"""Requests that only a broken client sends: they harm at most that client, and the log can still be replayed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.fake_log import FakeLog, on_log
from tests.server.peers import NativePeer

from rallypoint.core import engine, entries, ops, session
from rallypoint.core.entries import (
    AttachSession,
    ContinueDelete,
    DetachOwner,
    EndSession,
    ExpireLease,
    OpenNamespace,
    TimeOutRequest,
)
from rallypoint.core.index import watch_table
from rallypoint.core.machines import barrier, lock, membership, rendezvous
from rallypoint.core.machines.machine import Done, Refused, Waiting
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.core.records import LATER, InternalError, PushedEvent
from rallypoint.core.snapshot import fold, read, write
from rallypoint.core.state import State
from rallypoint.errors import LimitExceeded, StoreFull
from rallypoint.protocol.native import GARBLED, decode_request
from rallypoint.protocol.native_client import Reply
from rallypoint.protocol.reported_errors import error_of
from rallypoint.server.server import StoreServer

from .fake_server import value_of
from .logged_state import Server

DEEPER_THAN_ANY = 100_000
JOIN = rendezvous.RendezvousJoin(NodeLimits(2, 3, 5.0))


# Bytes


def nested(number: int, depth: int) -> bytes:
    """Make a `Set` with an extra field, which is skipped: arrays nested that deep."""
    return b"\x95\x01\xcd" + number.to_bytes(2, "big") + b"\xc4\x01k\xc4\x01v" + b"\x91" * depth + b"\xc0"


@on_log
async def test_every_accepted_request_can_be_decoded_from_the_log(server: StoreServer, log: FakeLog) -> None:
    """Fields are logged, not bytes: the log nests them one array deeper, which must not exceed the decoder's limit."""
    peer = NativePeer(server)
    await peer.greets(b"")
    taken, refused, number, last = 1, DEEPER_THAN_ANY, 0, 0
    while refused - taken > 1:  # the limit depends on Python
        number, depth = number + 1, (taken + refused) // 2
        peer.says(struct.pack("<I", len(nested(number, depth))) + nested(number, depth))
        _, status, _ = await peer.reads()
        taken, refused, last = (taken, depth, last) if status else (depth, refused, number)
    assert 500 < taken < DEEPER_THAN_ANY - 1
    assert log.records[-1] == entries.encode(entries.SessionRequest(1, ops.Set(last, b"k", b"v")))
    assert entries.decode(log.records[-1]) == entries.SessionRequest(1, ops.Set(last, b"k", b"v"))


def test_a_request_nested_too_deep_is_refused() -> None:
    with pytest.raises(GARBLED):
        decode_request(nested(1, DEEPER_THAN_ANY))


# Calls on shared objects


def test_a_contested_call_number_that_is_also_a_watch_harms_no_other_session() -> None:
    """One number is used for a watch and for a contested join; then the watch wakes."""
    server = Server(sessions=4)
    server.act(2, 1, 1, membership.MembershipJoin(), "x")
    epoch = server.objects.machines[membership.MembershipMachine, b"/o"].epoch
    assert server.act(1, 1, 1, membership.MembershipWatch(epoch), "x") is LATER
    server.apply(DetachOwner(2))
    assert server.act(1, 2, 1, membership.MembershipJoin(), "x") is LATER
    assert isinstance(server.act(3, 1, 1, membership.MembershipJoin(), "y"), Done)
    assert all(server.objects._calls[held[1].split("/")[0]][held].waits for held in server.objects.contested)
    server.apply(AttachSession(b"id 2", 0, 0))
    server.apply(DetachOwner(4))
    server.apply(EndSession(4))
    assert list(server.state.sessions) == [1, 2, 3]


def test_a_call_number_of_another_member_is_refused() -> None:
    server = Server(sessions=2)
    assert server.act(1, 1, 1, JOIN, "x") is LATER
    refused = server.act(1, 2, 1, JOIN, "y")
    assert isinstance(refused, Refused) and refused.error == "Disagreement" and refused.fields["theirs"] == "x"
    server.apply(DetachOwner(1))
    server.apply(EndSession(1))
    assert server.act(2, 1, 1, rendezvous.RendezvousQuery(), "z").answer["waiting"] == [], "the ended session is gone"
    assert server.objects._calls == {} and server.engine.size == 0


def test_a_counted_call_may_be_repeated_in_a_full_store() -> None:
    server = Server(sessions=2, max_bytes=5000)
    assert server.act(1, 1, 1, barrier.BarrierArrive(2)) is LATER
    server.apply(TimeOutRequest(1, 1))
    number = 0
    while not isinstance(server.ask(2, ops.Set(number := number + 1, b"%d" % number, b"")), StoreFull):
        pass
    assert isinstance(server.take_outputs()[0][2], Waiting)
    assert server.act(1, 2, 1, barrier.BarrierArrive(2)) is LATER, "it is counted already, and goes on waiting"


# Bugs


EXECUTE: dict[Any, Any] = engine.EXECUTE


def broken(*arguments: Any) -> Any:
    raise KeyError(arguments)


def test_a_bug_in_one_machine_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, barrier.BarrierArrive(2))
    server.act(1, 2, 2, lock.LockAcquire())
    assert server.act(2, 1, 1, lock.LockAcquire()) is LATER
    monkeypatch.setattr(barrier.BarrierMachine, "session_ended", broken)
    state = server.state
    state.apply(DetachOwner(1))
    assert state.apply(EndSession(1)) is None
    assert [number for owner, number, answer in state.take_outputs() if isinstance(answer, Done)] == [1]
    (bug,) = server.engine.bugs
    assert "KeyError" in bug and "barrier /o" in bug


@pytest.mark.parametrize(
    "op", [ops.Act(1, b"/o", "0", 1, lock.LockAcquire(), 9.0), ops.Push(1, b"q", b"")], ids=["a", "b"]
)
def test_a_bug_becomes_an_answer_that_is_kept(op: ops.Op, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=1)
    monkeypatch.setattr(lock.LockMachine, "apply", broken)
    monkeypatch.setitem(EXECUTE, ops.Push, broken)
    state = read(list(write(server.state)))
    one, other = server.state.sessions[1], state.sessions[1]
    answer = one.execute(op)
    assert isinstance(answer, InternalError) and one.execute(op) is answer
    assert other.execute(op).why == answer.why, "every replay has the same answer"
    assert answer.why == f"KeyError in broken, during {op.__class__.__name__}"
    error = error_of(Reply(1, 2, ["InternalError", {"why": answer.why}]), "store")
    assert isinstance(error, InternalError) and str(error) == str(answer)
    assert len(server.engine.bugs) == 1 and "KeyError((" in server.engine.bugs[0]


def test_a_bug_in_a_connection_s_request_becomes_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    monkeypatch.setitem(EXECUTE, ops.Push, broken)
    answer = state.apply(entries.ConnectionRequest(-1, 0, ops.Push(0, b"q", b"")))
    assert isinstance(answer, InternalError) and "KeyError in broken, during Push" in str(answer)


def test_a_bug_in_one_answer_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(sessions=3)
    for serial in (1, 2):
        server.ask(serial, ops.Arrive(1, b"/b", 3))
    whole = session.Session.answer
    monkeypatch.setattr(
        session.Session, "answer", lambda self, *answer: (broken if self.serial == 1 else whole)(self, *answer)
    )
    server.state.apply(entries.SessionRequest(3, ops.Arrive(1, b"/b", 3)))
    answers = {owner.serial: answer for owner, _, answer in server.state.take_outputs()}
    assert isinstance(answers[1], InternalError) and answers[2] is None


# Watches


def test_a_session_that_is_over_has_no_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_PUSHES", 2)
    server = Server(sessions=2)
    for number in (1, 2):
        server.ask(1, ops.WatchPrefix(number, b""))
    server.ask(2, ops.MultiSet(1, [(b"%d" % number, b"") for number in range(5)]))
    one = server.state.sessions[1]
    assert one.over and one.watches == {} and server.engine.statistics().watches == 0
    assert len(one.pushes) == 3 and len(server.take_outputs()) == 3


def test_a_session_has_no_watches_after_bye() -> None:
    server = Server(sessions=1)
    server.ask(1, ops.WatchPrefix(1, b""))
    server.ask(1, ops.Bye(2))
    assert server.engine.statistics().watches == 0 and server.engine.size == 0


MANY: dict[str, Callable[[Server], Any]] = {
    "multi_set": lambda server: server.ask(2, ops.MultiSet(9, [(b"%d" % n, b"new") for n in range(50)])),
    "delete_prefix": lambda server: server.ask(2, ops.DeletePrefix(9, b"")),
    "end": lambda server: (server.apply(DetachOwner(2)), server.apply(EndSession(2))),
}


@pytest.mark.parametrize("how", MANY)
def test_events_of_a_large_change_are_delivered_in_batches(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "OUTBOX_EVENTS", 6)
    server = Server(sessions=2)
    for number in range(1, 4):
        server.ask(1, ops.WatchPrefix(number, b""))
    for number in range(50):
        server.ask(2, ops.SetLease(number + 10, b"%d" % number, b"", 0.0))
    server.take_outputs()
    longest = 0

    def relieve(relieved: engine.Engine) -> None:
        nonlocal longest
        longest = max(longest, len(relieved.outbox))
        server.state.settle(relieved)

    server.engine.on_pressure = relieve
    MANY[how](server)
    pushes = [
        (push.push, push.watch, push.event) for _, _, push in server.take_outputs() if isinstance(push, PushedEvent)
    ]
    assert len(pushes) == 150 and [number for number, *_ in pushes] == list(range(151, 301)), "all of them, in order"
    assert [watch for _, watch, _ in pushes] == [1, 2, 3] * 50
    assert 0 < longest <= 9


def test_the_watches_of_a_session_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_WATCHES", 2)
    server = Server(sessions=2)
    assert [server.ask(1, ops.WatchPrefix(number, b"")) for number in (1, 2)] == [None, None]
    refused = server.ask(1, ops.WatchPrefix(3, b"/mine"))
    assert isinstance(refused, LimitExceeded)
    assert "3 watches of one session, counting the one on '/mine'" in str(refused)
    assert server.ask(2, ops.WatchPrefix(1, b"")) is None
    server.ask(1, ops.Drop(4, 1))
    assert server.ask(1, ops.WatchPrefix(5, b"")) is None


def test_the_lengths_of_watched_prefixes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write does one lookup for each length."""
    monkeypatch.setattr(watch_table, "MAX_LENGTHS", 2)
    server = Server(sessions=1)
    for number, prefix in enumerate((b"a", b"bb", b"c", b"dd"), 1):
        assert server.ask(1, ops.WatchPrefix(number, prefix)) is None
    refused = server.ask(1, ops.WatchPrefix(5, b"eee"))
    assert isinstance(refused, LimitExceeded) and "'eee'" in str(refused) and server.engine.statistics().watches == 4
    for target in (1, 3):
        server.ask(1, ops.Drop(5 + target, target))
    assert server.ask(1, ops.WatchPrefix(9, b"eee")) is None


# Leases, and items


def test_the_expiry_of_an_earlier_lease_does_not_end_a_later_one() -> None:
    """The key is leased again after a heartbeat was missed, before the expiry is logged."""
    server = Server(sessions=1)
    server.ask(1, ops.SetLease(1, b"k", b"old", 1.0))
    server.ask(1, ops.SetLease(2, b"k", b"new", 1.0))
    server.apply(ExpireLease(1, b"k", 1))
    assert value_of(server.engine, b"k") == b"new"
    server.apply(ExpireLease(1, b"k", 2))
    assert value_of(server.engine, b"k") is None


def test_many_leases_of_a_session_end_in_slices() -> None:
    server = Server(sessions=2)
    server.engine.slice_keys = 3
    for number in range(8):
        server.ask(1, ops.SetLease(number + 1, b"%d" % number, b"", 0.0))
    server.apply(DetachOwner(1))
    server.apply(EndSession(1))
    assert server.engine.statistics().keys == 5 and server.engine.clearing
    server.ask(2, ops.Set(1, b"7", b"mine"))
    assert "unknown session" in server.apply(AttachSession(b"id 1", 0, 0))
    middle = list(write(server.state))
    assert server.engine.statistics().leased_keys == 4
    for left in (2, 1):
        server.apply(ContinueDelete(0))
        assert server.engine.statistics().keys == left
    assert not server.engine.clearing and value_of(server.engine, b"7") == b"mine"
    assert list(fold(middle, server.log[-2:])) == list(write(server.state))


def test_a_suspended_pop_that_is_dropped_is_forgotten() -> None:
    server = Server(sessions=1)
    server.ask(1, ops.BlockingPop(1, b"q", 9.0))
    server.apply(DetachOwner(1))
    server.apply(AttachSession(b"id 1", 0, 0))
    server.ask(1, ops.Drop(2, 1))
    assert server.state.sessions[1].suspended == {}


# Size


def test_chunks_of_a_snapshot_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.core.snapshot.CHUNK_BYTES", 2000)
    state = State()
    state.apply(entries.StartServer(entries.VERSION, b"", *(1 << 62,) * 4))
    for serial in (1, 2):
        state.apply(entries.OpenSession(b"%d" % serial, "", 0, []))
    number = 0
    for key in (b"key %d" % key for key in range(300)):
        for op in (
            ops.SetLease(0, key, b"", 5.0),
            ops.BlockingPop(0, b"q" + key, 9.0),
            ops.Arrive(0, b"b" + key, 2),
            ops.WatchPrefix(0, b"w" + key[-1:]),
            ops.Push(0, b"p" + key, b""),
            ops.Pop(0, b"p" + key),
            ops.Act(0, b"/" + key, "me", number, lock.LockAcquire(), 9.0),
        ):
            op.number = number = number + 1
            state.apply(entries.SessionRequest(1, op))
            state.apply(entries.SessionRequest(2, op))
    state.apply(DetachOwner(2))
    chunks = list(write(state))
    assert max(map(len, chunks)) < 3500 and list(write(read(chunks))) == chunks


def test_an_entry_costs_the_same_with_many_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All namespaces share one outbox."""
    state = State()
    for name in "abc":
        state.apply(OpenNamespace(name, 1, 1))
    assert len({id(one.engine.outbox) for one in state.namespaces.values()}) == 1
    state.apply(entries.OpenSession(b"1", "", 2, []))
    state.apply(entries.SessionRequest(1, ops.WatchPrefix(1, b"")))
    state.apply(entries.ConnectionRequest(-1, 2, ops.Set(0, b"k", b"")))
    assert [type(push) for _, _, push in state.take_outputs()] == [PushedEvent]
