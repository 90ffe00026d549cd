"""Entries, one by one: what a state promises beside what random histories show, and cases that those have found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rallypoint.core import entries, exchange, lock, ops, rendezvous, roster
from rallypoint.core import state as state_module
from rallypoint.core.entries import (
    Attach,
    CloseNamespace,
    Detach,
    End,
    Entry,
    Fire,
    GoOn,
    Lapse,
    Open,
    OpenNamespace,
    Request,
    Start,
    TimeOut,
    Visit,
)
from rallypoint.core.gathering import Limits
from rallypoint.core.machine import Done, Refused, Waiting
from rallypoint.core.records import LATER, InternalError, TimedOut, Turn
from rallypoint.core.session import Session
from rallypoint.core.snapshot import fold, read, write
from rallypoint.core.state import MAX_RESTARTS, UNKNOWN_SESSION, Namespace, OtherVersion, State
from rallypoint.errors import StoreFull

from .fakes import items_of, value_of
from .logged_state import Server

# The log and the snapshot


def test_a_log_of_another_version_is_refused() -> None:
    with pytest.raises(OtherVersion, match="version 99"):
        State().apply(Start(99, b"", 1, 1, 1, 1))


def test_a_snapshot_of_another_version_is_refused() -> None:
    head, *rest = write(State())
    kind, _, *facts = msgspec.msgpack.decode(head)
    with pytest.raises(OtherVersion, match="version 99"):
        read([msgspec.msgpack.encode([kind, 99, *facts]), *rest])


def test_a_snapshot_that_is_cut_off_is_refused() -> None:
    *chunks, _ = write(Server(sessions=1).state)
    with pytest.raises(ValueError, match="no end"):
        read(chunks)


def test_a_snapshot_and_more_records_fold_into_the_next() -> None:
    server = Server(sessions=2)
    server.ask(1, ops.Set(1, b"/k", b"v"))
    server.ask(2, ops.Take(1, b"/q", 9.0))
    cut = len(server.log)
    half = list(fold(None, server.log))
    server.ask(1, ops.Push(2, b"/q", b"item"))
    assert list(fold(half, server.log[cut:])) == list(fold(None, server.log)) == list(write(server.state))


def test_an_entry_that_fails_is_an_answer_and_the_state_goes_on() -> None:
    """What raised once would raise at every replay."""
    state = State()
    before = list(write(state))
    answer = state.apply(Fire(0, "no such kind", b"/o", 1))
    assert isinstance(answer, InternalError) and "please report" in str(answer) and "KeyError in _fire" in str(answer)
    assert "no such kind" in state.namespaces[0].engine.bugs[0], "the server logs more than it tells"
    assert list(write(state)) == before


def test_records_are_the_requests_as_they_came() -> None:
    """The server makes the record of a request from the bytes that it got."""
    op = ops.Add(300, b"/n", -5)
    for serial in (1, 127, 128, 255, 256, 65_535, 65_536, 1 << 32):
        assert entries.decode(entries.encode(Request(serial, op))) == Request(serial, op)


# Owners that are gone, and entries that were overtaken


@pytest.mark.parametrize(
    "entry",
    [
        Request(9, ops.Set(1, b"/k", b"v")),
        Visit(-1, 9, ops.Set(0, b"/k", b"v")),
        Detach(9),
        Detach(-9),
        End(9),
        End(1),
        TimeOut(9, 1),
        TimeOut(-9, 1),
        TimeOut(1, 9),
        Lapse(9, b"/k", 1),
        Lapse(1, b"/k", 1),
        Fire(0, "rendezvous", b"/o", 1),
        Fire(9, "rendezvous", b"/o", 1),
        GoOn(0),
        GoOn(9),
        CloseNamespace(9),
        CloseNamespace(0),
    ],
    ids=repr,
)
def test_an_entry_that_was_overtaken_changes_nothing(entry: Entry) -> None:
    server = Server(sessions=1)
    before = list(write(server.state))
    assert server.apply(entry) in (LATER, None, False)
    assert list(write(server.state)) == before and server.told() == []


def test_a_session_that_came_back_in_time_is_not_ended() -> None:
    server = Server(sessions=1)
    server.apply(Detach(1))
    server.apply(Attach(b"id 1", 0, 0))
    server.apply(End(1))
    assert list(server.state.sessions) == [1]
    server.apply(Detach(1))
    server.apply(End(1))
    assert server.state.sessions == {} and "unknown session" in server.apply(Attach(b"id 1", 0, 0))


def test_a_session_belongs_to_its_namespace_and_ends_with_it() -> None:
    server = Server()
    opened = server.apply(OpenNamespace("run", 5, 1))
    assert isinstance(opened, Namespace) and opened.id == 1
    assert isinstance(server.open(namespace=1), Session)
    server.ask(1, ops.Set(1, b"/k", b"v"))
    assert value_of(server.engine, b"/k") is None and "unknown session" in server.apply(Attach(b"id 1", 0, 0))
    assert server.apply(OpenNamespace("run", 5, 1)) is opened, "the same round"
    assert server.apply(OpenNamespace("run", 4, 1)) is None, "an earlier one"
    later = server.apply(OpenNamespace("run", 6, 2))
    assert later.id == 2 and list(server.state.namespaces) == [0, 2] and server.state.sessions == {}
    assert "over" in server.open(namespace=1) and server.apply(CloseNamespace(2)) is True


def test_a_session_may_miss_so_many_restarts() -> None:
    server = Server(sessions=2)
    for _ in range(MAX_RESTARTS):
        server.start()
        server.apply(Attach(b"id 2", 0, 0))
    assert list(server.state.sessions) == [1, 2]
    server.start()
    assert list(server.state.sessions) == [2], "and no more, or a crash loop would keep the dead alive"


def test_a_restart_ends_visitors_and_cuts_sessions() -> None:
    server = Server(sessions=1)
    server.visit(-1, ops.Arrive(1, b"/b", 2, 9.0))
    server.ask(1, ops.Take(1, b"/q", 9.0))
    server.start()
    assert server.state.visitors == {} and value_of(server.engine, b"/b") == b"0"
    session = server.state.sessions[1]
    assert not session.attached and list(session.suspended) == [1]


# What random histories have found


def test_a_wait_of_a_visitor_that_only_reads_is_not_replayed() -> None:
    """It is logged because it ended another wait. Replayed, it would stay, and drop the visitor's next one."""
    server = Server()
    server.visit(-1, ops.Await(1, b"/a"))
    server.visit(-1, ops.Wait(2, [b"/b", b"/c"], 9.0))
    assert server.engine.parked == 0 and server.state.visitors == {}
    server.visit(-1, ops.Await(3, b"/q"))
    server.visit(-2, ops.MultiSet(0, [(b"/b", b""), (b"/c", b"")]))
    assert list(server.state.visitors) == [-1]
    server.visit(-2, ops.Push(0, b"/q", b"item"))
    assert [(owner, number, type(answer)) for owner, number, answer in server.told()] == [(-1, 3, Turn)]


def test_visitors_end_in_one_order_however_they_came() -> None:
    """What they had arrived at is counted down key by key, and a watch sees that."""
    server = Server(sessions=1)
    server.ask(1, ops.Watch(1, b"/"))
    server.visit(-1, ops.Arrive(1, b"/a", 2, 9.0))
    server.visit(-2, ops.Arrive(1, b"/b", 2, 9.0))
    server.told()
    restored = read(list(write(server.state)))
    server.start()
    restored.apply(entries.decode(server.log[-1]))
    assert list(write(restored)) == list(write(server.state))


def test_items_that_go_back_do_not_go_to_the_session_that_ends() -> None:
    server = Server(sessions=2, max_kept_bytes=1000)
    server.ask(1, ops.Watch(1, b"/"))
    server.ask(2, ops.Push(1, b"/q", b"item"))
    assert server.ask(1, ops.Take(2, b"/q", 9.0)) == b"item"
    assert server.ask(1, ops.Take(3, b"/q", 9.0)) is LATER
    while not server.state.sessions[1].over:  # it confirms nothing
        server.ask(2, ops.Set(server.state.sessions[2].highest + 1, b"/k", b"v"))
        server.ask(2, ops.Confirm(0, server.state.sessions[2].highest, [], 0))
    server.apply(Detach(1))
    assert list(server.state.sessions) == [2] and items_of(server.engine, b"/q") == [b"item"]


def test_an_item_on_its_way_to_one_that_is_cut_goes_back() -> None:
    """A restart ends the visitor whose turn it was; the session behind it is cut by the same entry."""
    server = Server(sessions=1)
    server.visit(-1, ops.Await(1, b"/q"))
    server.ask(1, ops.Take(1, b"/q", 9.0))
    server.visit(-2, ops.Push(0, b"/q", b"item"))
    server.start()
    assert items_of(server.engine, b"/q") == [b"item"] and list(server.state.sessions[1].suspended) == [1]


def read_aside(server: Server, session: int, op: ops.Op) -> Any:
    """Carry out a read, which no log has."""
    answer = server.state.sessions[session].execute(op)
    server.state.settle(server.engine)
    server.state.outputs.clear()
    return answer


def test_a_read_that_waits_makes_no_difference_to_changes_of_its_number() -> None:
    """No client of ours uses a number twice, but the server cannot know."""
    server = Server(sessions=1)
    assert read_aside(server, 1, ops.Get(1, b"/k", 9.0)) is LATER
    server.ask(1, ops.Take(1, b"/q", 9.0))
    server.ask(1, ops.Watch(2, b"/w"))
    assert read_aside(server, 1, ops.Get(2, b"/k", 9.0)) is LATER
    server.ask(1, ops.Drop(3, 2))
    server.ask(1, ops.Push(4, b"/q", b"item"))
    server.ask(1, ops.Set(5, b"/k", b"v"))
    assert list(fold(None, server.log)) == list(write(server.state))
    assert server.engine.parked == 0 and server.engine.statistics().watches == 0


def test_a_read_that_times_out_leaves_the_turn_of_its_number_alone() -> None:
    """And a turn that is taken back leaves the read alone: the one is in no log, the other is."""
    server = Server(sessions=1)
    server.ask(1, ops.Push(1, b"/q", b""))
    server.ask(1, ops.Await(2, b"/q"))
    session = server.state.sessions[1]
    for _ in range(2):
        assert read_aside(server, 1, ops.Get(2, b"/k", 9.0)) is LATER
        assert session.time_out(2) == TimedOut((b"/k",)) and list(session.turns) == [2]
    read_aside(server, 1, ops.Get(2, b"/k", 9.0))
    server.apply(TimeOut(1, 2))
    assert session.turns == {} and list(session.waiting) == [2] and server.told() == []
    assert list(fold(None, server.log)) == list(write(server.state))


def test_a_number_that_is_used_again_names_one_thing() -> None:
    server = Server(sessions=1)
    server.ask(1, ops.Watch(1, b"/a"))
    server.ask(1, ops.Confirm(0, 1, [], 0))
    server.ask(1, ops.Watch(1, b"/b"))
    server.ask(1, ops.Push(2, b"/q", b""))
    server.ask(1, ops.Confirm(0, 2, [], 0))
    server.ask(1, ops.Await(1, b"/q"))
    assert server.engine.statistics().watches == 0 and list(server.state.sessions[1].turns) == [1]


def test_a_call_that_is_dropped_waits_no_more() -> None:
    server = Server(sessions=2)
    first = server.act(1, 1, 1, lock.Acquire())
    assert server.act(2, 1, 1, lock.Acquire()) is LATER
    server.ask(2, ops.Drop(2, 1))
    assert server.objects.waiting == 0
    server.act(1, 2, 2, lock.Release(1))
    second = server.act(2, 3, 1, lock.Acquire())
    assert second.answer > first.answer, "but it is in line until it is taken back"


def test_a_dropped_call_that_was_in_doubt_is_in_doubt_no_more() -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, roster.Join())
    server.apply(Detach(1))
    assert server.act(2, 1, 1, roster.Join()) is LATER
    server.ask(2, ops.Drop(2, 1))
    server.apply(Attach(b"id 1", 0, 0))
    assert server.told() == []


def test_a_call_whose_place_its_own_process_took_hears_of_it() -> None:
    """A node joins, loses its session, and joins again by a new one, before the old one has ended."""
    server = Server(sessions=1)
    join = rendezvous.Join(Limits(2, 2))
    assert server.act(1, 1, 1, join) is LATER
    server.apply(Detach(1))
    server.open(former=[b"id 1"])
    assert server.act(2, 1, 1, join) is LATER
    ((owner, number, answer),) = server.told()
    assert (owner, number) == (1, 1) and isinstance(answer, Waiting)
    server.apply(End(1))
    assert server.objects.waiting == 1


def test_taking_a_call_back_is_never_in_doubt() -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, exchange.Give(3, 0, b"a", "all_gather"))
    server.act(1, 2, 2, exchange.Give(3, 0, b"b", "all_gather"))
    server.act(2, 1, 1, exchange.Give(3, 1, b"c", "all_gather"), "1")
    server.apply(Detach(2))
    answer = server.act(1, 3, 3, exchange.TakeBack(1))
    assert isinstance(answer, Refused) and answer.error == "NameTaken"


@pytest.mark.parametrize("timeout_s", [0.0, 9.0])
def test_a_call_that_is_made_twice_at_once_waits_once(timeout_s: float) -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, lock.Acquire())
    server.act(2, 1, 1, lock.Acquire())
    again = server.act(2, 2, 1, lock.Acquire(), timeout_s=timeout_s)
    assert again is LATER if timeout_s else isinstance(again, Waiting)
    ((owner, number, told),) = server.told()
    assert (owner, number) == (2, 1) and isinstance(told, Waiting), "the earlier request may look again"
    server.act(1, 2, 2, lock.Release(1))
    answers = server.told()
    assert [(owner, number, type(answer)) for owner, number, answer in answers] == ([(2, 2, Done)] if timeout_s else [])
    assert isinstance(server.act(2, 3, 1, lock.Acquire()), Done)


def test_a_call_in_doubt_that_is_made_again_and_refused_is_over() -> None:
    server = Server(sessions=2)
    server.act(1, 1, 1, roster.Join())
    server.apply(Detach(1))
    assert server.act(2, 1, 1, roster.Join()) is LATER
    answer = server.act(2, 2, 1, roster.Join(), timeout_s=0.0)
    assert isinstance(answer, Refused) and answer.error == "NameTaken"
    ((owner, number, told),) = server.told()
    assert (owner, number) == (2, 1) and isinstance(told, Waiting)
    server.apply(End(1))
    assert server.objects._calls == {}


def test_a_call_that_was_replaced_and_forgotten_is_counted_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange remembers so many calls whose place was taken; those before come again when they look."""
    monkeypatch.setattr(exchange, "REPLACED", 1)
    server = Server(sessions=1)
    for call, data in enumerate((b"a", b"a", b"b"), 1):
        server.act(1, call, call, exchange.Give(2, 0, data, "all_gather"))
    server.apply(Detach(1))
    server.apply(End(1))
    assert server.objects.waiting == 0 and server.engine.size == 0


def test_a_call_for_which_there_was_room_is_not_refused_half_way() -> None:
    """It takes the place of an earlier call that has yet to look how it ended, which is counted from then on."""
    server = Server(sessions=1)
    server.act(1, 1, 1, exchange.Give(2, 0, b"", "all_gather"), timeout_s=0.0)
    for spare in range(0, 700, 20):
        server.state.set_limits(server.state.limits._replace(max_bytes=server.engine.size + spare))
        before = list(write(server.state))[1:]
        answer = server.act(1, 2, 2, exchange.Give(2, 0, b"x", "all_gather"))
        if answer is LATER:
            break
        assert isinstance(answer, StoreFull)
        server.state.sessions[1]._forget([2])
        server.state.sessions[1].highest = 1
        assert list(write(server.state))[1:] == before
    assert answer is LATER and server.objects.waiting == 1


def test_a_wait_that_was_answered_cannot_time_out() -> None:
    server = Server(sessions=2)
    server.ask(1, ops.Take(1, b"/q", 9.0))
    server.ask(2, ops.Push(1, b"/q", b"item"))
    server.apply(TimeOut(1, 1))
    assert server.told() == [(1, 1, b"item")]
    server.ask(1, ops.Take(2, b"/q", 9.0))
    server.apply(TimeOut(1, 2))
    assert server.told() == [(1, 2, TimedOut((b"/q",)))]
    assert server.ask(1, ops.Take(2, b"/q", 9.0)) == TimedOut((b"/q",)), "and repeated, it has"


def test_a_session_whose_client_chose_its_id_is_opened_once() -> None:
    state = State()
    state.apply(OpenNamespace("run", 1, None))
    session = state.apply(Open(b"i" * 16, "host", 0, []))
    state.apply(Detach(session.serial))
    assert state.apply(Open(b"i" * 16, "host", 0, [])) is session and session.attached
    assert state.opened == len(state.sessions) == 1
    refusal = state.apply(Open(b"i" * 16, "host", 1, []))
    assert refusal == UNKNOWN_SESSION, "it is another namespace's"
    session.execute(ops.Bye(1))
    assert state.apply(Open(b"i" * 16, "host", 0, [])) == UNKNOWN_SESSION, "it is about to end"


def test_an_ended_session_whose_last_leases_others_delete_can_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SLICE_KEYS", 2)
    server = Server(sessions=2)
    for number in (1, 2, 3):
        server.apply(Request(1, ops.Lease(number, b"/%d" % number, b"", 0.0)))
    server.apply(Detach(1))
    server.apply(End(1))
    for number in (1, 2, 3):
        server.apply(Request(2, ops.Delete(number, b"/%d" % number)))  # each is checked to be readable
    server.apply(GoOn(0))
    assert not server.engine.clearing
