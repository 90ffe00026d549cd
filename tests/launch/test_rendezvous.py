"""Rendezvous wherever it lives: rounds form, break, and form again; nobody waits without a reason, or for the dead."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from tests.store_kinds import AMPLE_S, Open, together

from rallypoint import (
    Disagreement,
    HashStore,
    MeetingError,
    MembersMissing,
    NameTaken,
    RankTaken,
    Rendezvous,
    Round,
    RunClosed,
)
from rallypoint.core.machines.machine import Waiting
from rallypoint.deadline import Deadline
from rallypoint.recipes.hosting import shared_object


class Nodes:
    """Nodes of one run, each with a store of its own; joins run in threads."""

    def __init__(self, open_store: Open, pool: ThreadPoolExecutor) -> None:
        self.open_store = open_store
        self._pool = pool
        self.made: list[Rendezvous] = []

    def node(self, name: str | None, least: int = 2, most: int = 3, **more: Any) -> Rendezvous:
        more = {"last_call": AMPLE_S, **more}
        self.made.append(Rendezvous(self.open_store(), "run", least, most, node=name, **more))
        return self.made[-1]

    def join(self, node: Rendezvous, timeout: float = AMPLE_S) -> Future[Round]:
        return self._pool.submit(node.join, timeout)

    def round_of(self, *nodes: Rendezvous) -> dict[str, Round]:
        """Have these nodes join together, and return the round as each of them sees it."""
        joins = {node.node: self.join(node) for node in nodes}
        return {name: join.result(AMPLE_S) for name, join in joins.items()}

    def until(self, condition: Callable[[Any], bool]) -> Any:
        """Wait until the status is as asked for; return it."""
        deadline = Deadline(AMPLE_S)
        while not condition(status := self.made[0].status()):
            assert not deadline.expired(), status
        return status


@pytest.fixture
def nodes(open_store: Open, quick_heartbeat: None) -> Any:
    with ThreadPoolExecutor(16) as pool:
        made = Nodes(open_store, pool)
        yield made
        for node in made.made:
            node.close("over", "the test has ended")


def test_all_nodes_of_a_round_agree_on_it(nodes: Nodes) -> None:
    rounds = nodes.round_of(*(nodes.node(name) for name in "abc"))
    assert sorted(one.rank for one in rounds.values()) == [0, 1, 2]
    assert {(one.number, one.world_size, one.scope) for one in rounds.values()} == {(1, 3, rounds["a"].scope)}
    listed = rounds["a"].nodes
    assert {node.name: rank for rank, node in enumerate(listed)} == {name: one.rank for name, one in rounds.items()}
    assert all(node.host == socket.gethostname() for node in listed)
    assert {one.first.name for one in rounds.values()} == {listed[0].name}


def test_the_store_of_a_round_is_for_it_alone(nodes: Nodes) -> None:
    a, b, c = (nodes.node(name) for name in "abc")
    first = nodes.round_of(a, b, c)
    first["a"].store.set("key", "of the first")
    assert first["b"].store.get("key") == b"of the first"
    again = nodes.round_of(a, b, c)
    assert not again["a"].store.check(["key"])
    assert not first["b"].store.check(["key"]), "what a round has stored is dropped after it"


def test_a_waiting_node_with_room_changes_the_round(nodes: Nodes) -> None:
    a, b, c = (nodes.node(name, last_call=0.05) for name in "abc")
    nodes.round_of(a, b)
    changed = a.changed
    joined = nodes.join(c)
    assert changed.wait(AMPLE_S) and "c (" in changed.reason and "free place" in changed.reason
    again = nodes.round_of(a, b)
    assert {one.world_size for one in (*again.values(), joined.result(AMPLE_S))} == {3}
    assert again["a"].number == 2


def test_leaving_changes_the_round_and_does_not_close_the_run(nodes: Nodes) -> None:
    a, b, c = (nodes.node(name) for name in "abc")
    before = nodes.round_of(a, b, c)
    changed = b.changed
    c.leave()
    assert changed.wait(AMPLE_S) and changed.reason.startswith("c (") and changed.reason.endswith("left")
    after = nodes.round_of(a, b)
    assert "all nodes of the last round are back" in after["a"].reason
    assert after["a"].world_size == 2
    kept = [name for name in "ab" if before[name].rank < 2]
    assert all(after[name].rank == before[name].rank for name in kept)


def test_a_callback_receives_the_reason_of_a_change(nodes: Nodes) -> None:
    changes: queue.Queue[str] = queue.Queue()
    a = nodes.node("a", on_change=changes.put)
    b = nodes.node("b", last_call=AMPLE_S)
    c = nodes.node("c")
    nodes.round_of(a, b, c)
    b.leave()
    assert "left" in changes.get(timeout=AMPLE_S)


def test_a_spare_waits_beyond_its_time_out_and_steps_in(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    told: list[Waiting] = []
    a, b, c = (nodes.node(name) for name in "abc")
    nodes.round_of(a, b, c)
    spare = nodes.node("spare", progress=told.append)
    waits = nodes.join(spare, 0.1)
    status = nodes.until(lambda _: len(told) >= 10)
    assert told[-1].is_spare and told[-1].waited_s > 0.1 and "spare" in told[-1].reason
    assert status.spares == ("spare",)
    changed = a.changed
    c.leave()
    assert changed.wait(AMPLE_S)
    rounds = nodes.round_of(a, b)
    assert waits.result(AMPLE_S).world_size == rounds["a"].world_size == 3


def test_closing_reaches_everybody(nodes: Nodes) -> None:
    a, b, c = (nodes.node(name) for name in "abc")
    nodes.round_of(a, b, c)
    spare = nodes.join(nodes.node("spare"))
    nodes.until(lambda status: status.spares)
    changed = b.changed
    assert a.close("succeeded", "all is computed") and not a.close("failed", "too late")
    with pytest.raises(RunClosed, match="all is computed") as caught:
        spare.result(AMPLE_S)
    assert caught.value.result == "succeeded"
    assert changed.wait(AMPLE_S) and "all is computed" in changed.reason
    for late in (b, nodes.node("late")):
        with pytest.raises(RunClosed):
            late.join(AMPLE_S)
    assert (status := a.status()).phase == "closed" and status.result == "succeeded"
    fresh = [nodes.node(name) for name in "xyz"]
    assert fresh[0].open() and not fresh[1].open()
    assert {one.world_size for one in nodes.round_of(*fresh).values()} == {3}
    with pytest.raises(RunClosed):
        b.join(AMPLE_S)


def test_time_out_says_why_and_withdraws(nodes: Nodes) -> None:
    a = nodes.node("a")
    with pytest.raises(MembersMissing, match="1 of at least 2 nodes: waiting for 1; last joined a ") as caught:
        a.join(0.1)
    assert caught.value.member == "a"
    assert a.status().waiting == ()
    nodes.round_of(a, nodes.node("b"), nodes.node("c"))


def test_last_call_is_over_after_its_time(nodes: Nodes) -> None:
    rounds = nodes.round_of(nodes.node("a", last_call=0.2), nodes.node("b", last_call=0.2))
    assert "last call of 0.2 s" in rounds["a"].reason


def test_what_does_not_fit_is_refused_by_name(nodes: Nodes) -> None:
    waits = nodes.join(nodes.node("a", rank=1, settings={"batch": 8}))
    nodes.until(lambda status: status.waiting == ("a",))
    with pytest.raises(Disagreement, match=r"batch is 16 \(b .* here, but 8 at a ") as odd:
        nodes.node("b", settings={"batch": 16}).join(AMPLE_S)
    assert odd.value.what == "batch"
    with pytest.raises(Disagreement, match=r"max_nodes is 4 .*here"):
        nodes.node("b", 2, 4, settings={"batch": 8}).join(AMPLE_S)
    with pytest.raises(RankTaken, match="rank 1, which a ") as taken:
        nodes.node("b", rank=1, settings={"batch": 8}).join(AMPLE_S)
    assert (taken.value.member, taken.value.rank) == ("b", 1)
    told: list[Waiting] = []
    with pytest.raises(NameTaken):
        nodes.node("a", settings={"batch": 8}, progress=told.append).join(AMPLE_S)
    assert "waiting up to 3 s for its name" in told[0].reason, "the progress callback receives it, not the log"
    others = nodes.round_of(nodes.node("b", settings={"batch": 8}), nodes.node("c", settings={"batch": 8}))
    assert waits.result(AMPLE_S).rank == 1 and {one.rank for one in others.values()} == {0, 2}


def test_nodes_without_a_name_go_by_their_host(nodes: Nodes) -> None:
    made = [nodes.node(None) for _ in range(3)]
    together([partial(node.join, AMPLE_S) for node in made])
    host = socket.gethostname()
    assert sorted(node.node for node in made) == [host, f"{host}#2", f"{host}#3"]


def test_a_node_whose_store_is_closed_is_lost(open_store: Open, nodes: Nodes) -> None:
    a, gone = nodes.node("a", 2, 2), [open_store()]
    together([lambda: a.join(AMPLE_S), lambda: Rendezvous(gone[0], "run", 2, 2, node="b", last_call=AMPLE_S).join()])
    changed = a.changed
    if hasattr(gone[0], "close"):  # torch's stores close when nobody has them any more
        gone[0].close()
    gone.clear()
    assert changed.wait(AMPLE_S) and changed.reason.startswith("lost b (")


def test_a_node_that_reads_changed_while_joining_sees_changes_of_the_next_round(nodes: Nodes) -> None:
    changes: queue.Queue[str] = queue.Queue()
    a = nodes.node("a", 2, 2, on_change=changes.put)
    b = nodes.node("b", 2, 2)
    nodes.round_of(a, b)
    again = nodes.join(a)
    nodes.until(lambda status: status.waiting == ("a",))
    assert not a.changed.is_set(), "there is no round now"
    nodes.join(b).result(AMPLE_S)
    again.result(AMPLE_S)
    while not changes.empty():
        changes.get()
    b.leave()
    assert changes.get(timeout=AMPLE_S).startswith("b (")


def test_a_join_that_is_interrupted_leaves_nobody_behind(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_object, "PROGRESS_S", 0.05)
    b = nodes.node("b", 2, 2)

    def interrupt(_: Waiting) -> None:
        b.join(AMPLE_S)  # so the round is formed, and nobody is there to take it
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nodes.node("a", 2, 2, progress=interrupt).join(AMPLE_S)
    changed = b.changed
    assert changed.wait(AMPLE_S) and changed.reason.startswith("a (")
    assert "a" not in b.status().nodes


def test_leaving_while_another_thread_joins(nodes: Nodes) -> None:
    a = nodes.node("a")
    joining = nodes.join(a)
    nodes.until(lambda status: status.waiting == ("a",))
    a.leave()
    assert a.status().waiting == ()
    with pytest.raises((MeetingError, MembersMissing)):
        joining.result(AMPLE_S)


def test_nobody_waits_for_a_change_of_a_round_that_was_left(nodes: Nodes) -> None:
    a, b = nodes.node("a", 2, 2), nodes.node("b", 2, 2)
    nodes.round_of(a, b)
    waiting = [threading.Thread(target=a.changed.wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    a.leave()
    for thread in waiting:
        thread.join(AMPLE_S)
        assert not thread.is_alive()


def test_a_callback_that_fails_changes_nothing(nodes: Nodes) -> None:
    called: list[str] = []

    def fail(reason: str) -> None:
        called.append(reason)
        raise RuntimeError("boom")

    a, b = nodes.node("a", 2, 2, on_change=fail), nodes.node("b", 2, 2)
    nodes.round_of(a, b)
    changed = a.changed
    b.leave()
    assert changed.wait(AMPLE_S) and changed.reason.startswith("b (")
    nodes.until(lambda _: bool(called))
    assert called == [changed.reason]


def test_a_long_reason_is_cut_and_not_made_unreadable(nodes: Nodes) -> None:
    a = nodes.node("a")
    a.close("failed", "Traceback" + "x" * 5000 + "ValueError: boom")
    with pytest.raises(RunClosed, match=r"Traceback.* \.\.\. .*boom"):
        a.join(AMPLE_S)


def test_settings_that_are_called_as_limits_do_not_hide_them(nodes: Nodes) -> None:
    told = {"min_nodes": 1, "max_nodes": 2}
    waits = nodes.join(nodes.node("a", 2, 3, settings=told))
    nodes.until(lambda status: status.waiting == ("a",))
    with pytest.raises(Disagreement, match=r"max_nodes is 4 .*here"):
        nodes.node("b", 2, 4, settings=told).join(AMPLE_S)
    nodes.made[0].close("over", "enough seen")
    with pytest.raises(RunClosed):
        waits.result(AMPLE_S)


def test_two_nodes_of_one_process_and_store_have_two_names() -> None:
    store = HashStore()
    first, second = Rendezvous(store, "run", 2), Rendezvous(store, "run", 2)
    assert (first.node, second.node) == (socket.gethostname(), f"{socket.gethostname()}#2")
    assert {one.rank for one in together([first.join, second.join])} == {0, 1}


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"min_nodes": 0}, ValueError, "min_nodes must be 1 to 65536, not 0"),
        ({"min_nodes": 3, "max_nodes": 2}, ValueError, "3 is more than 2"),
        ({"max_nodes": True}, TypeError, "max_nodes must be a number of nodes, not True"),
        ({"rank": -1}, ValueError, "rank must be 0 to 65535, not -1"),
        ({"rank": "0"}, TypeError, "rank must be a number, not '0'"),
        ({"node": ""}, ValueError, "node must have 1 to 256 characters, not 0"),
        ({"node": "x" * 257}, ValueError, "1 to 256 characters"),
        ({"last_call": -1}, ValueError, "last_call must not be negative"),
        ({"last_call": float("inf")}, ValueError, "last_call must be at most"),
        ({"node": b"x"}, TypeError, "node must be a string, not b'x'"),
        ({"settings": {"a": {1, 2}}}, ValueError, "'a' is a set"),
        ({"settings": [1]}, TypeError, "settings must be a mapping"),
        ({"settings": dict.fromkeys(map(str, range(300)))}, ValueError, "too many settings: 300, limit 256"),
        ({"run_id": ""}, ValueError, "the name of a rendezvous must be a non-empty string, not ''"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(wrong: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Rendezvous(HashStore(), **{"run_id": "run", "min_nodes": 1, **wrong})
