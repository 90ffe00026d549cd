"""Single entries: guarantees that random histories do not show, and cases that they have found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rallypoint.core import entries, ops
from rallypoint.core import state as state_module
from rallypoint.core.machines import exchange, lock, membership, rendezvous
from rallypoint.core.machines.machine import Done, Refused, Waiting
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.core.records import LATER, InternalError, TimedOut, Turn
from rallypoint.core.session import Session
from rallypoint.core.snapshot import fold, read, write
from rallypoint.core.state import MAX_RESTARTS, UNKNOWN_SESSION, Namespace, OtherVersion, State
from rallypoint.errors import StoreFull

from .fake_server import items_of, value_of
from .logged_state import Server

# The log and the snapshot


def test_a_log_of_another_version_is_refused() -> None:
    with pytest.raises(OtherVersion, match="version 99"):
        State().apply(entries.StartServer(99, b"", 1, 1, 1, 1))


def test_a_snapshot_of_another_version_is_refused() -> None:
    head, *rest = write(State())
    kind, _, *facts = msgspec.msgpack.decode(head)
    with pytest.raises(OtherVersion, match="version 99"):
        read([msgspec.msgpack.encode([kind, 99, *facts]), *rest])


def test_a_truncated_snapshot_is_refused() -> None:
    *chunks, _ = write(Server(sessions=1).state)
    with pytest.raises(ValueError, match="incomplete snapshot"):
        read(chunks)


def test_a_snapshot_and_more_records_fold_into_the_next() -> None:
    server = Server(sessions=2)
    server.ask(1, ops.Set(1, b"/k", b"v"))
    server.ask(2, ops.BlockingPop(1, b"/q", 9.0))
    cut = len(server.log)
    half = list(fold(None, server.log))
    server.ask(1, ops.Push(2, b"/q", b"item"))
    assert list(fold(half, server.log[cut:])) == list(fold(None, server.log)) == list(write(server.state))


def test_an_entry_that_raises_becomes_an_answer_and_changes_nothing() -> None:
    """An entry that raises would raise in every replay."""
    state = State()
    before = list(write(state))
    answer = state.apply(entries.FireTimer(0, "no such kind", b"/o", 1))
    assert isinstance(answer, InternalError) and "please report" in str(answer) and "KeyError in _fire" in str(answer)
    assert "no such kind" in state.namespaces[0].engine.bugs[0], "the server's log has more details than the answer"
    assert list(write(state)) == before


def test_requests_survive_encoding_as_records() -> None:
    """The server builds the record of a request from the received bytes."""
    op = ops.Add(300, b"/n", -5)
    for serial in (1, 127, 128, 255, 256, 65_535, 65_536, 1 << 32):
        assert entries.decode(entries.encode(entries.SessionRequest(serial, op))) == entries.SessionRequest(serial, op)


# Ended owners, and overtaken entries


@pytest.mark.parametrize(
    "entry",
    [
        entries.SessionRequest(9, ops.Set(1, b"/k", b"v")),
        entries.ConnectionRequest(-1, 9, ops.Set(0, b"/k", b"v")),
        entries.DetachOwner(9),
        entries.DetachOwner(-9),
        entries.EndSession(9),
        entries.EndSession(1),
        entries.TimeOutRequest(9, 1),
        entries.TimeOutRequest(-9, 1),
        entries.TimeOutRequest(1, 9),
        entries.ExpireLease(9, b"/k", 1),
        entries.ExpireLease(1, b"/k", 1),
        entries.FireTimer(0, "rendezvous", b"/o", 1),
        entries.FireTimer(9, "rendezvous", b"/o", 1),
        entries.ContinueDelete(0),
        entries.ContinueDelete(9),
        entries.CloseNamespace(9),
        entries.CloseNamespace(0),
    ],
    ids=repr,
)
def test_an_entry_that_was_overtaken_changes_nothing(entry: entries.Entry) -> None:
    server = Server(sessions=1)
    before = list(write(server.state))
    assert server.apply(entry) in (LATER, None, False)
    assert list(write(server.state)) == before and server.take_outputs() == []


def test_a_session_resumed_in_time_is_not_ended() -> None:
    server = Server(sessions=1)
    server.apply(entries.DetachOwner(1))
    server.apply(entries.AttachSession(b"id 1", 0, 0))
    server.apply(entries.EndSession(1))
    assert list(server.state.sessions) == [1]
    server.apply(entries.DetachOwner(1))
    server.apply(entries.EndSession(1))
    assert server.state.sessions == {} and "unknown session" in server.apply(entries.AttachSession(b"id 1", 0, 0))


def test_a_session_belongs_to_its_namespace_and_ends_with_it() -> None:
    server = Server()
    opened = server.apply(entries.OpenNamespace("run", 5, 1))
    assert isinstance(opened, Namespace) and opened.id == 1
    assert isinstance(server.open(namespace=1), Session)
    server.ask(1, ops.Set(1, b"/k", b"v"))
    assert value_of(server.engine, b"/k") is None and "unknown session" in server.apply(
        entries.AttachSession(b"id 1", 0, 0)
    )
    assert server.apply(entries.OpenNamespace("run", 5, 1)) is opened, "the round exists"
    assert server.apply(entries.OpenNamespace("run", 4, 1)) is None, "an earlier round is over"
    later = server.apply(entries.OpenNamespace("run", 6, 2))
    assert later.id == 2 and list(server.state.namespaces) == [0, 2] and server.state.sessions == {}
    assert "over" in server.open(namespace=1) and server.apply(entries.CloseNamespace(2)) is True


def test_a_session_ends_after_missing_too_many_restarts() -> None:
    server = Server(sessions=2)
    for _ in range(MAX_RESTARTS):
        server.start()
        server.apply(entries.AttachSession(b"id 2", 0, 0))
    assert list(server.state.sessions) == [1, 2]
    server.start()
    assert list(server.state.sessions) == [2], "otherwise a crash loop would keep dead clients alive"


def test_a_restart_ends_connections_and_detaches_sessions() -> None:
    server = Server(sessions=1)
    server.connection_request(-1, ops.Arrive(1, b"/b", 2, 9.0))
    server.ask(1, ops.BlockingPop(1, b"/q", 9.0))
    server.start()
    assert server.state.connection_owners == {} and value_of(server.engine, b"/b") == b"0"
    session = server.state.sessions[1]
    assert not session.attached and list(session.suspended) == [1]


# Found by random histories


def test_a_logged_read_wait_of_a_connection_is_not_replayed() -> None:
    """It is logged because it ended another wait. Replayed, it would remain, and drop the connection's next wait."""
    server = Server()
    server.connection_request(-1, ops.WaitOrTurn(1, b"/a"))
    server.connection_request(-1, ops.Wait(2, [b"/b", b"/c"], 9.0))
    assert server.engine.memory.parked == 0 and server.state.connection_owners == {}
    server.connection_request(-1, ops.WaitOrTurn(3, b"/q"))
    server.connection_request(-2, ops.MultiSet(0, [(b"/b", b""), (b"/c", b"")]))
    assert list(server.state.connection_owners) == [-1]
    server.connection_request(-2, ops.Push(0, b"/q", b"item"))
    assert [(owner, number, type(answer)) for owner, number, answer in server.take_outputs()] == [(-1, 3, Turn)]


def test_connections_end_in_a_deterministic_order() -> None:
    """Their arrivals are withdrawn key by key, and a watch sees the order."""
    server = Server(sessions=1)
    server.ask(1, ops.WatchPrefix(1, b"/"))
    server.connection_request(-1, ops.Arrive(1, b"/a", 2, 9.0))
    server.connection_request(-2, ops.Arrive(1, b"/b", 2, 9.0))
    server.take_outputs()
    restored = read(list(write(server.state)))
    server.start()
    restored.apply(entries.decode(server.log[-1]))
    assert list(write(restored)) == list(write(server.state))


def test_returned_items_do_not_go_to_the_ending_session() -> None:
    server = Server(sessions=2, max_kept_bytes=1000)
    server.ask(1, ops.WatchPrefix(1, b"/"))
    server.ask(2, ops.Push(1, b"/q", b"item"))
    assert server.ask(1, ops.BlockingPop(2, b"/q", 9.0)) == b"item"
    assert server.ask(1, ops.BlockingPop(3, b"/q", 9.0)) is LATER
    while not server.state.sessions[1].over:  # it confirms nothing
        server.ask(2, ops.Set(server.state.sessions[2].highest + 1, b"/k", b"v"))
        server.ask(2, ops.Confirm(0, server.state.sessions[2].highest, [], 0))
    server.apply(entries.DetachOwner(1))
    assert list(server.state.sessions) == [2] and items_of(server.engine, b"/q") == [b"item"]


def test_an_item_for_a_session_detached_by_the_same_entry_is_returned() -> None:
    """A restart ends the connection that had the turn; the same entry disconnects the session behind it."""
    server = Server(sessions=1)
    server.connection_request(-1, ops.WaitOrTurn(1, b"/q"))
    server.ask(1, ops.BlockingPop(1, b"/q", 9.0))
    server.connection_request(-2, ops.Push(0, b"/q", b"item"))
    server.start()
    assert items_of(server.engine, b"/q") == [b"item"] and list(server.state.sessions[1].suspended) == [1]


def read_aside(server: Server, session: int, op: ops.Op) -> Any:
    """Execute a read, which is not logged."""
    answer = server.state.sessions[session].execute(op)
    server.state.settle(server.engine)
    server.state.outputs.clear()
    return answer


def test_a_waiting_read_does_not_affect_changes_with_its_number() -> None:
    """Our clients use no number twice, but the server cannot rely on it."""
    server = Server(sessions=1)
    assert read_aside(server, 1, ops.Get(1, b"/k", 9.0)) is LATER
    server.ask(1, ops.BlockingPop(1, b"/q", 9.0))
    server.ask(1, ops.WatchPrefix(2, b"/w"))
    assert read_aside(server, 1, ops.Get(2, b"/k", 9.0)) is LATER
    server.ask(1, ops.Drop(3, 2))
    server.ask(1, ops.Push(4, b"/q", b"item"))
    server.ask(1, ops.Set(5, b"/k", b"v"))
    assert list(fold(None, server.log)) == list(write(server.state))
    assert server.engine.memory.parked == 0 and server.engine.statistics().watches == 0


def test_a_read_that_times_out_leaves_the_turn_of_its_number_alone() -> None:
    """And ending the turn leaves the read alone: the turn is logged, the read is not."""
    server = Server(sessions=1)
    server.ask(1, ops.Push(1, b"/q", b""))
    server.ask(1, ops.WaitOrTurn(2, b"/q"))
    session = server.state.sessions[1]
    for _ in range(2):
        assert read_aside(server, 1, ops.Get(2, b"/k", 9.0)) is LATER
        assert session.time_out(2) == TimedOut((b"/k",)) and list(session.turns) == [2]
    read_aside(server, 1, ops.Get(2, b"/k", 9.0))
    server.apply(entries.TimeOutRequest(1, 2))
    assert session.turns == {} and list(session.waiting) == [2] and server.take_outputs() == []
    assert list(fold(None, server.log)) == list(write(server.state))


def test_a_reused_number_refers_only_to_the_latest_request() -> None:
    server = Server(sessions=1)
    server.ask(1, ops.WatchPrefix(1, b"/a"))
    server.ask(1, ops.Confirm(0, 1, [], 0))
    server.ask(1, ops.WatchPrefix(1, b"/b"))
    server.ask(1, ops.Push(2, b"/q", b""))
    server.ask(1, ops.Confirm(0, 2, [], 0))
    server.ask(1, ops.WaitOrTurn(1, b"/q"))
    assert server.engine.statistics().watches == 0 and list(server.state.sessions[1].turns) == [1]


def test_a_dropped_call_stops_waiting() -> None:
    server = Server(sessions=2)
    first = server.act(1, 1, 1, lock.LockAcquire())
    assert server.act(2, 1, 1, lock.LockAcquire()) is LATER
    server.ask(2, ops.Drop(2, 1))
    assert server.objects.waiting == 0
    server.act(1, 2, 2, lock.LockRelease(1))
    second = server.act(2, 3, 1, lock.LockAcquire())
    assert second.answer > first.answer, "a dropped call keeps its place in line until it is withdrawn"


def test_a_dropped_call_is_no_longer_contested() -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, membership.MembershipJoin())
    server.apply(entries.DetachOwner(1))
    assert server.act(2, 1, 1, membership.MembershipJoin()) is LATER
    server.ask(2, ops.Drop(2, 1))
    server.apply(entries.AttachSession(b"id 1", 0, 0))
    assert server.take_outputs() == []


def test_a_call_replaced_by_its_own_process_is_answered() -> None:
    """A node joins, loses its session, and joins again in a new one before the old one has ended."""
    server = Server(sessions=1)
    join = rendezvous.RendezvousJoin(NodeLimits(2, 2))
    assert server.act(1, 1, 1, join) is LATER
    server.apply(entries.DetachOwner(1))
    server.open(former=[b"id 1"])
    assert server.act(2, 1, 1, join) is LATER
    ((owner, number, answer),) = server.take_outputs()
    assert (owner, number) == (1, 1) and isinstance(answer, Waiting)
    server.apply(entries.EndSession(1))
    assert server.objects.waiting == 1


def test_a_withdrawal_is_never_contested() -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, exchange.ExchangeGive(3, 0, b"a", "all_gather"))
    server.act(1, 2, 2, exchange.ExchangeGive(3, 0, b"b", "all_gather"))
    server.act(2, 1, 1, exchange.ExchangeGive(3, 1, b"c", "all_gather"), "1")
    server.apply(entries.DetachOwner(2))
    answer = server.act(1, 3, 3, exchange.ExchangeWithdraw(1))
    assert isinstance(answer, Refused) and answer.error == "NameTaken"


@pytest.mark.parametrize("timeout_s", [0.0, 9.0])
def test_a_call_repeated_while_it_waits_waits_once(timeout_s: float) -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, lock.LockAcquire())
    server.act(2, 1, 1, lock.LockAcquire())
    again = server.act(2, 2, 1, lock.LockAcquire(), timeout_s=timeout_s)
    assert again is LATER if timeout_s else isinstance(again, Waiting)
    ((owner, number, earlier),) = server.take_outputs()
    assert (owner, number) == (2, 1) and isinstance(earlier, Waiting), "the earlier request must recheck"
    server.act(1, 2, 2, lock.LockRelease(1))
    answers = server.take_outputs()
    assert [(owner, number, type(answer)) for owner, number, answer in answers] == ([(2, 2, Done)] if timeout_s else [])
    assert isinstance(server.act(2, 3, 1, lock.LockAcquire()), Done)


def test_a_contested_call_that_is_repeated_and_refused_is_over() -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, membership.MembershipJoin())
    server.apply(entries.DetachOwner(1))
    assert server.act(2, 1, 1, membership.MembershipJoin()) is LATER
    answer = server.act(2, 2, 1, membership.MembershipJoin(), timeout_s=0.0)
    assert isinstance(answer, Refused) and answer.error == "NameTaken"
    ((owner, number, earlier),) = server.take_outputs()
    assert (owner, number) == (2, 1) and isinstance(earlier, Waiting)
    server.apply(entries.EndSession(1))
    assert server.objects._calls == {}


def test_a_forgotten_replaced_call_is_counted_when_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange remembers a limited number of replaced calls; an older one counts as new when it is repeated."""
    monkeypatch.setattr(exchange, "REPLACED", 1)
    server = Server(sessions=1)
    for call, data in enumerate((b"a", b"a", b"b"), 1):
        server.act(1, call, call, exchange.ExchangeGive(2, 0, data, "all_gather"))
    server.apply(entries.DetachOwner(1))
    server.apply(entries.EndSession(1))
    assert server.objects.waiting == 0 and server.engine.size == 0


def test_a_call_in_a_full_store_is_refused_without_effect() -> None:
    """It replaces an earlier call that has not fetched its result, which is counted from then on."""
    server = Server(sessions=1)
    server.act(1, 1, 1, exchange.ExchangeGive(2, 0, b"", "all_gather"), timeout_s=0.0)
    for spare in range(0, 3000, 50):
        server.state.set_limits(server.state.limits._replace(max_bytes=server.engine.size + spare))
        before = list(write(server.state))[1:]
        answer = server.act(1, 2, 2, exchange.ExchangeGive(2, 0, b"x", "all_gather"))
        if answer is LATER:
            break
        assert isinstance(answer, StoreFull)
        server.state.sessions[1]._forget([2])
        server.state.sessions[1].highest = 1
        assert list(write(server.state))[1:] == before
    assert answer is LATER and server.objects.waiting == 1


def test_a_wait_that_was_answered_cannot_time_out() -> None:
    server = Server(sessions=2)
    server.ask(1, ops.BlockingPop(1, b"/q", 9.0))
    server.ask(2, ops.Push(1, b"/q", b"item"))
    server.apply(entries.TimeOutRequest(1, 1))
    assert server.take_outputs() == [(1, 1, b"item")]
    server.ask(1, ops.BlockingPop(2, b"/q", 9.0))
    server.apply(entries.TimeOutRequest(1, 2))
    assert server.take_outputs() == [(1, 2, TimedOut((b"/q",)))]
    assert server.ask(1, ops.BlockingPop(2, b"/q", 9.0)) == TimedOut((b"/q",)), "repeated, it has timed out"


def test_a_session_with_a_chosen_id_is_opened_once() -> None:
    state = State()
    state.apply(entries.OpenNamespace("run", 1, None))
    session = state.apply(entries.OpenSession(b"i" * 16, "host", 0, []))
    state.apply(entries.DetachOwner(session.serial))
    assert state.apply(entries.OpenSession(b"i" * 16, "host", 0, [])) is session and session.attached
    assert state.opened == len(state.sessions) == 1
    refusal = state.apply(entries.OpenSession(b"i" * 16, "host", 1, []))
    assert refusal == UNKNOWN_SESSION, "it belongs to another namespace"
    session.execute(ops.Bye(1))
    assert state.apply(entries.OpenSession(b"i" * 16, "host", 0, [])) == UNKNOWN_SESSION, "it is about to end"


def test_an_ended_session_can_be_restored_after_others_deleted_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SLICE_KEYS", 2)
    server = Server(sessions=2)
    for number in (1, 2, 3):
        server.apply(entries.SessionRequest(1, ops.SetLease(number, b"/%d" % number, b"", 0.0)))
    server.apply(entries.DetachOwner(1))
    server.apply(entries.EndSession(1))
    for number in (1, 2, 3):
        server.apply(entries.SessionRequest(2, ops.Delete(number, b"/%d" % number)))  # each is checked to be readable
    server.apply(entries.ContinueDelete(0))
    assert not server.engine.clearing


@pytest.mark.parametrize("kind", ["turn", "arrive"])
def test_waits_that_are_over_and_not_answered_survive_a_snapshot(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SLICE_KEYS", 2)

    def op(number: int) -> ops.Op:
        return ops.WaitOrTurn(number, b"/k", 9) if kind == "turn" else ops.Arrive(number, b"/k", 8, 60.0)

    state = State()
    for serial in (1, 2):
        state.apply(entries.OpenSession(b"%016d" % serial, "", 0, []))
    for number in range(1, 8):
        assert state.apply(entries.SessionRequest(1, op(number))) is LATER  # type: ignore[arg-type]
    state.apply(entries.SessionRequest(2, ops.Set(1, b"/k", b"v") if kind == "turn" else op(1)))  # type: ignore[arg-type]
    state.apply(entries.SessionRequest(2, ops.Delete(2, b"/k")))
    state.apply(entries.SessionRequest(1, ops.Drop(8, 1)))
    restored = read(write(state))
    for one in (state, restored):
        while one.namespaces[0].engine.clearing:
            one.apply(entries.ContinueDelete(0))
    answers = [(number, answer) for _, number, answer in state.take_outputs()]
    rest = [(number, answer) for _, number, answer in restored.take_outputs()]
    assert sorted(answers) == [(number, b"v" if kind == "turn" else None) for number in range(2, 8)]
    assert rest == answers[-len(rest) :] and len(rest) == 4
    assert list(write(restored)) == list(write(state))
