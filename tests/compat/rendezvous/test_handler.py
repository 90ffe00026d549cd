"""The dynamic handler, with nodes in threads, on every kind of store and on an injected backend.

A node is lost here by cutting it off from its backend, so that its keep-alive stalls. Keep-alives are frequent, and
the grace period is two seconds: long enough for a busy machine.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.ports import reserve_port
from tests.store_kinds import AMPLE_S, Open, together

from rallypoint import HashStore, PrefixStore, Server, TCPStore
from rallypoint.compat.rendezvous import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeout,
    RendezvousTimeoutError,
    backend_host,
    create_handler,
    get_rendezvous_handler,
    round_server,
)
from rallypoint.compat.rendezvous.agent_rendezvous import LAST_MEMBER
from rallypoint.deadline import Deadline
from rallypoint.recipes.hosting.stall_detector import StallDetector

HOST = "127.0.0.1"
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
Make = Callable[..., DynamicRendezvousHandler]


class Memory(RendezvousBackend):
    """A backend as a user would write it: the state is the end of a shared list, the token is its length."""

    name = "memory"

    def __init__(self, states: list[bytes]) -> None:
        self.states = states
        self.cut = False
        self.loses = False

    def get_state(self) -> tuple[bytes, int] | None:
        self._must_reach()
        return (self.states[-1], len(self.states)) if self.states else None

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool] | None:
        self._must_reach()
        with LOCK:
            won = (token or 0) == len(self.states) and not self.loses
            if won:
                self.states.append(state)
            return self.states[-1] if self.states else b"", len(self.states), won

    def _must_reach(self) -> None:
        if self.cut:
            raise RendezvousConnectionError("disconnected")


LOCK = threading.Lock()


class Nodes:
    """Handlers of one run, on one store; the backend is in memory unless another is given."""

    def __init__(self) -> None:
        self.made: list[DynamicRendezvousHandler] = []
        self.store = HashStore()
        self.states: list[bytes] = []

    def make(
        self,
        least: int,
        most: int,
        *,
        store: Any = None,
        backend: Any = None,
        last_call_s: float = 0.001,
        **options: Any,
    ) -> DynamicRendezvousHandler:
        """Create one more node."""
        times = {name: timedelta(seconds=options.pop(name)) for name in ("join", "close") if name in options}
        timeout = RendezvousTimeout(last_call=timedelta(seconds=last_call_s), **times)
        backend = Memory(self.states) if backend is None else backend
        store = self.store if store is None else store
        address = options.pop("address", HOST)
        options = {"keep_alive_interval": 0.1, "keep_alive_max_attempt": 20, **options}
        handler = DynamicRendezvousHandler.from_backend("run", store, backend, least, most, address, timeout, **options)
        self.made.append(handler)
        return handler


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Return a factory of nodes, none of which starts a server for workers."""
    monkeypatch.setenv(UNSHARED, "1")
    nodes = Nodes()
    yield nodes
    for handler in nodes.made:
        handler.shutdown()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def until(true: Callable[[], Any], what: str) -> None:
    """Poll until the condition holds: there is no event to wait for."""
    deadline, pause = Deadline(AMPLE_S), threading.Event()
    while not true():
        assert not deadline.expired(), f"never: {what}"
        pause.wait(0.005)


def meet(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """Let all nodes join at once; return the round of each."""
    return together([handler.next_rendezvous for handler in handlers])


def ranks(infos: list[RendezvousInfo]) -> list[int]:
    assert len({info.world_size for info in infos}) == 1
    return [info.rank for info in infos]


def until_round_over(*handlers: RendezvousHandler) -> None:
    until(lambda: all(handler.num_nodes_waiting() > 0 for handler in handlers), "the round is over")


def start_of(info: RendezvousInfo) -> tuple[str, int]:
    """Return the address and the port at which workers of the round find their store."""
    assert info.bootstrap_store_info is not None
    return info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port


def spares_seen_by(handler: DynamicRendezvousHandler) -> list[str]:
    return list(handler._agent.node.status().spares)


# Rounds


def test_nodes_meet_on_every_kind_of_store(nodes: Nodes, open_store: Open) -> None:
    stores = [open_store() for _ in range(4)]
    handlers = [nodes.make(4, 4, store=store, backend=C10dRendezvousBackend(store, "run")) for store in stores]
    infos = meet(*handlers)
    assert sorted(ranks(infos)) == [0, 1, 2, 3] and infos[0].world_size == 4
    assert len({repr(info.bootstrap_store_info) for info in infos}) == 1
    assert start_of(infos[0])[0] == HOST
    infos[0].store.set("k", "first")
    assert all(info.store.get("k") == b"first" for info in infos)
    assert [handler.num_nodes_waiting() for handler in handlers] == [0] * 4
    again = meet(*handlers)
    assert ranks(again) == ranks(infos), "nodes keep their ranks"
    assert not again[0].store.check(["k"]), "a round has a store of its own"


def test_nodes_meet_on_a_backend_of_a_users_own(nodes: Nodes) -> None:
    handlers = [nodes.make(8, 8) for _ in range(8)]
    assert sorted(ranks(meet(*handlers))) == list(range(8))
    assert handlers[0].get_backend() == "memory" and handlers[0].get_run_id() == "run"
    assert handlers[0].settings.max_nodes == 8 and handlers[0].settings.keep_alive_max_attempt == 20
    tag, version, *_ = json.loads(nodes.states[-1])
    assert (tag, version) == ("rallypoint.rendezvous", len(nodes.states))


@pytest.mark.needs("torch")
def test_nodes_meet_on_torchs_own_backend(nodes: Nodes) -> None:
    from torch.distributed import HashStore as Torchs
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend as Backend

    store = Torchs()
    handlers = [nodes.make(3, 3, store=store, backend=Backend(store, "run")) for _ in range(3)]
    assert sorted(ranks(meet(*handlers))) == [0, 1, 2]


def test_enough_nodes_form_a_round_when_last_call_is_over(nodes: Nodes) -> None:
    infos = meet(*[nodes.make(2, 9, last_call_s=0.05) for _ in range(2)])
    assert sorted(ranks(infos)) == [0, 1] and infos[0].world_size == 2


def test_a_full_round_does_not_wait_for_last_call(nodes: Nodes) -> None:
    assert meet(*[nodes.make(1, 2, last_call_s=10 * AMPLE_S) for _ in range(2)])[0].world_size == 2


def test_a_late_node_joins_in_the_next_round(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    first, second, late = (nodes.make(2, 3) for _ in range(3))
    before = ranks(meet(first, second))
    waiting = pool.submit(late.next_rendezvous)
    until_round_over(first, second)
    assert first.num_nodes_waiting() == 1
    infos = [*meet(first, second), waiting.result(AMPLE_S)]
    assert ranks(infos) == [*before, 2]
    assert first.num_nodes_waiting() == 0


def test_a_spare_steps_in_when_a_node_leaves(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    first, second, spare = nodes.make(2, 2), nodes.make(2, 2), nodes.make(2, 2, join=0.01)
    before = ranks(meet(first, second))
    waiting = pool.submit(spare.next_rendezvous)
    until(lambda: spares_seen_by(first), "the third is a spare")
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0, "the round is full"
    assert first.shutdown()
    until_round_over(second)
    assert not second.is_closed(), "leaving is not closing"
    assert ranks([*meet(second), waiting.result(AMPLE_S)]) == [before[1], before[0]], "the spare gets the free rank"


def test_a_host_that_returns_gets_its_rank_back(nodes: Nodes) -> None:
    first, *others = (nodes.make(3, 3, address=name) for name in ("a", "b", "c"))
    before = ranks(meet(first, *others))
    assert [handler.shutdown() for handler in others] == [True, True]
    again = [nodes.make(3, 3, address=name) for name in ("c", "b")]
    infos = together([handler.next_rendezvous for handler in (*again, first)])
    assert ranks(infos) == [before[2], before[1], before[0]]


# Closing and leaving


def test_closing_reaches_all_nodes_and_a_spare_exits_gracefully(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    first, second, spare = (nodes.make(2, 2) for _ in range(3))
    meet(first, second)
    waiting = pool.submit(spare.next_rendezvous)
    until(lambda: spare._host.is_spare, "the third knows that it is a spare")
    assert not second.is_closed()
    first.set_closed()
    first.set_closed()
    assert second.is_closed() and second.num_nodes_waiting() == 0
    with pytest.raises(RendezvousGracefulExitError, match=r"the rendezvous 'run' has closed: by 127\.0\.0\.1_"):
        waiting.result(AMPLE_S)
    for handler in (first, second, nodes.make(2, 2)):
        with pytest.raises(RendezvousClosedError, match=r"the rendezvous 'run' has closed: by 127\.0\.0\.1_"):
            handler.next_rendezvous()


def test_closing_ends_the_wait_for_a_first_round(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    lonely, other = nodes.make(2, 2), nodes.make(2, 2)
    waiting = pool.submit(lonely.next_rendezvous)
    until(other.num_nodes_waiting, "one waits")
    other.set_closed()
    with pytest.raises(RendezvousClosedError):
        waiting.result(AMPLE_S)


def test_closing_has_a_timeout(nodes: Nodes) -> None:
    backend = Memory(nodes.states)
    handler = nodes.make(1, 1, backend=backend, close=0.01)
    handler.next_rendezvous()
    backend.loses = True
    with pytest.raises(
        RendezvousTimeoutError,
        match=r"could not be changed within the timeout of 0.01 s: other nodes were faster \d+ times",
    ):
        handler.set_closed()
    assert handler.shutdown() is False


class Forgetful(Memory):
    """A backend that loses every change, and returns None, once `forgets` is set."""

    def __init__(self, states: list[bytes]) -> None:
        super().__init__(states)
        self.forgets = False
        self.lost = 0
        self.changing = threading.Event()

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool] | None:
        if not self.forgets:
            return super().set_state(state, token)
        self.lost += 1
        self.changing.set()
        return None


def test_changes_lost_by_the_backend_are_retried_with_backoff(nodes: Nodes) -> None:
    backend = Forgetful(nodes.states)
    backend.forgets = True
    with pytest.raises(RendezvousTimeoutError, match=r"within the timeout of 0.5 s: the backend lost it \d+ times"):
        nodes.make(1, 1, backend=backend, join=0.5, keep_alive_interval=60).next_rendezvous()
    assert 3 < backend.lost < 100, "retries have growing pauses between them"


def test_a_last_call_lost_by_the_backend_ends_the_join(nodes: Nodes) -> None:
    # The timer of the last call is not bounded by the timeout of the join.
    backend = Forgetful(nodes.states)
    node = nodes.make(1, 2, backend=backend, last_call_s=0.05, close=0.1, keep_alive_interval=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.next_rendezvous)
        until(lambda: nodes.states, "the node has joined")
        backend.forgets = True
        with pytest.raises(RendezvousTimeoutError, match="the backend lost it"):
            waiting.result(AMPLE_S)


def test_stopping_heartbeats_interrupts_a_keep_alive_in_backoff(nodes: Nodes) -> None:
    backend = Forgetful(nodes.states)
    node = nodes.make(1, 1, backend=backend, keep_alive_interval=0.01)
    node.next_rendezvous()
    backend.forgets = True
    assert backend.changing.wait(AMPLE_S)
    node._stop_heartbeats()
    lost = backend.lost
    backend.forgets = False
    assert node.num_nodes_waiting() == 0 and backend.lost == lost, "keep-alives have stopped"


def test_a_node_without_heartbeats_is_taken_for_lost(nodes: Nodes) -> None:
    silent, other = (nodes.make(2, 2, keep_alive_max_attempt=5) for _ in range(2))
    meet(silent, other)
    silent._stop_heartbeats()
    until_round_over(other)


def test_a_join_times_out_when_nodes_are_missing(nodes: Nodes) -> None:
    lonely = nodes.make(2, 2, join=0.05)
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes: waiting for 1"):
        lonely.next_rendezvous()
    assert lonely.num_nodes_waiting() == 0, "it has left"
    assert sorted(ranks(meet(nodes.make(2, 2, join=AMPLE_S), nodes.make(2, 2)))) == [0, 1]


def test_the_run_succeeds_after_the_exit_barrier(nodes: Nodes) -> None:
    first, second = nodes.make(2, 2), nodes.make(2, 2)
    info, _ = meet(first, second)
    info.store.set(LAST_MEMBER, "all are here")
    assert first.shutdown() and second.is_closed() and second.shutdown()
    with pytest.raises(RendezvousClosedError, match="has succeeded: all agents have passed the exit barrier"):
        first.next_rendezvous()


def test_all_nodes_may_leave_and_rejoin(nodes: Nodes) -> None:
    handlers = [nodes.make(2, 2) for _ in range(2)]
    before = meet(*handlers)
    assert all(handler.shutdown() for handler in handlers)
    assert all(handler.shutdown() for handler in handlers), "leaving twice is harmless"
    after = meet(*handlers)
    assert ranks(after) == ranks(before) and after[0].world_size == 2


# Nodes that are lost


def test_survivors_of_a_lost_node_meet_again_and_it_may_rejoin(nodes: Nodes) -> None:
    backends = [Memory(nodes.states) for _ in range(3)]
    handlers = [nodes.make(2, 3, backend=backend, last_call_s=1.0) for backend in backends]  # time for all three
    infos = meet(*handlers)
    by_rank = sorted(range(3), key=lambda number: infos[number].rank)
    stays, keeps, goes = (handlers[number] for number in by_rank)
    backends[by_rank[2]].cut = True
    until_round_over(stays, keeps)
    infos = meet(stays, keeps)
    assert ranks(infos) == [0, 1] and infos[0].world_size == 2
    assert stays.num_nodes_waiting() == 0

    with pytest.raises(RendezvousConnectionError, match="disconnected"):
        goes.num_nodes_waiting()
    backends[by_rank[2]].cut = False
    assert goes.num_nodes_waiting() > 0, "its round is over"
    with ThreadPoolExecutor(1) as pool:
        returns = pool.submit(goes.next_rendezvous)
        until_round_over(stays, keeps)
        assert ranks([*meet(stays, keeps), returns.result(AMPLE_S)]) == [0, 1, 2], "it has its rank back"


def test_a_failed_keep_alive_is_logged_and_repeated(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    backend = Memory(nodes.states)
    handler = nodes.make(1, 1, backend=backend, keep_alive_interval=0.01)
    handler.next_rendezvous()
    with caplog.at_level(logging.WARNING, "rallypoint.rendezvous"):
        backend.cut = True
        until(lambda: "a keep-alive of 'run' failed: disconnected" in caplog.messages, "a keep-alive fails")
        backend.cut = False
    beats = len(nodes.states)
    until(lambda: len(nodes.states) > beats, "another keep-alive is written")
    assert handler.num_nodes_waiting() == 0


def test_a_waiting_node_taken_for_dead_joins_again(
    nodes: Nodes, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    asleep, other, third = (nodes.make(3, 3, keep_alive_max_attempt=5) for _ in range(3))
    waiting = [pool.submit(asleep.next_rendezvous)]
    until(other.num_nodes_waiting, "one waits")
    asleep._host.stop()
    waiting.append(pool.submit(other.next_rendezvous))
    until(lambda: any("its keep-alive stalled" in line for line in caplog.messages), "the first is taken for dead")
    assert sorted(ranks([*meet(third), *(future.result(AMPLE_S) for future in waiting)])) == [0, 1, 2]


def test_a_counter_is_stalled_after_the_grace_period() -> None:
    stalls = StallDetector()
    assert stalls.stalled({"a": 1, "b": 1}, 0.0, 15.0) == []
    assert stalls.stalled({"a": 2, "b": 1}, 10.0, 15.0) == []
    assert stalls.stalled({"a": 2, "b": 1}, 15.0, 15.0) == ["b"]
    assert stalls.stalled({"a": 2}, 25.0, 15.0) == ["a"]
    assert stalls.stalled({"a": 2, "b": 1}, 26.0, 15.0) == ["a"], "a counter that returns gets the whole grace period"


def test_an_outage_restarts_every_grace_period() -> None:
    stalls = StallDetector(gap_s=10.0)
    assert stalls.stalled({"a": 1}, 0.0, 15.0) == []
    assert stalls.stalled({"a": 1}, 10.0, 15.0) == []
    assert stalls.stalled({"a": 1}, 100.0, 15.0) == [], "during an outage nobody could write"
    assert stalls.stalled({"a": 1}, 110.0, 15.0) == []
    assert stalls.stalled({"a": 1}, 115.0, 15.0) == ["a"]


def test_polls_slow_down_without_arrivals_and_follow_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda *_: 1.0)
    pace, now = backend_host.PollBackoff(), 0.0
    pauses = []
    for _ in range(20):
        now += 1.0
        pauses.append(pace.next_s(60, now))
    assert pauses == sorted(pauses) and pauses[0] < 0.02 and pauses[-1] == 1.0
    assert pace.next_s(40, now + 0.1) == pytest.approx(0.2), "20 joined in 0.1 s, and 40 are missing"
    assert pace.next_s(20, now + 0.2) == pytest.approx(0.1)
    assert pace.next_s(20, now + 0.3) == pytest.approx(0.15)


# Failures and invalid input


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "blob", [b"", b"{}", b"null", b"[1, 2]", b'["rallypoint.rendezvous", 1]', b"\xff\xfe", b"[" * 9]
)
def test_a_foreign_state_is_refused(nodes: Nodes, blob: bytes) -> None:
    nodes.states.append(blob)
    handler = nodes.make(1, 1)
    for call in (handler.next_rendezvous, handler.is_closed, handler.num_nodes_waiting, handler.set_closed):
        with pytest.raises(RendezvousStateError, match=r"the state of the rendezvous 'run' .* is not rallypoint's"):
            call()
    assert nodes.states == [blob], "the foreign state is not overwritten"


def test_a_pickled_state_is_not_unpickled(nodes: Nodes, tmp_path: Path) -> None:
    nodes.states.append(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(RendezvousStateError, match="All nodes of a run must use the same handler"):
        nodes.make(1, 1).next_rendezvous()
    assert not (tmp_path / "exploded").exists()
    pickle.loads(nodes.states[-1])
    assert (tmp_path / "exploded").exists(), "unpickling does create the folder"


@pytest.mark.needs("torch")
def test_a_state_of_torch_s_handler_is_refused(nodes: Nodes) -> None:
    from torch.distributed import HashStore as Torchs
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler as Theirs

    store = Torchs()
    backend: Any = C10dRendezvousBackend(store, "run")  # no subclass of torch's RendezvousBackend
    theirs = Theirs.from_backend("run", store, backend, 1, 1, HOST)
    theirs.next_rendezvous()
    with pytest.raises(RendezvousStateError, match="found a pickle, as PyTorch's own handler writes"):
        nodes.make(1, 1, store=store, backend=C10dRendezvousBackend(store, "run")).next_rendezvous()
    assert theirs.shutdown()


def test_a_lost_connection_ends_all_calls(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    with Server() as server:
        store = TCPStore(HOST, server.port, timeout=2.0)
        handler = nodes.make(2, 2, store=store, backend=C10dRendezvousBackend(store, "run"))
        waiting = pool.submit(handler.next_rendezvous)
        until(lambda: handler._host._timer, "the join has begun")
    with pytest.raises(RendezvousConnectionError):
        waiting.result(AMPLE_S)
    for call in (handler.is_closed, handler.set_closed, handler.num_nodes_waiting):
        with pytest.raises(RendezvousConnectionError):
            call()


def test_leaving_over_a_lost_connection_does_not_raise(nodes: Nodes) -> None:
    backend = Memory(nodes.states)
    handler = nodes.make(1, 1, backend=backend)
    handler.next_rendezvous()
    backend.cut = True
    assert handler.shutdown() is False


def test_nodes_rejoin_after_the_state_was_deleted(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    first, second = (nodes.make(2, 2, backend=C10dRendezvousBackend(nodes.store, "run")) for _ in range(2))
    waiting = pool.submit(first.next_rendezvous)
    until(second.num_nodes_waiting, "one waits")
    nodes.store.delete_key("torch.rendezvous.run")
    C10dRendezvousBackend(nodes.store, "run")
    assert sorted(ranks([*meet(second), waiting.result(AMPLE_S)])) == [0, 1]


def test_a_round_is_over_for_a_node_missing_in_the_new_state(nodes: Nodes) -> None:
    first, second = (nodes.make(1, 1, address=name, keep_alive_interval=60) for name in ("a", "b"))
    first.next_rendezvous()
    nodes.states.clear()
    second.next_rendezvous()
    assert first.num_nodes_waiting() > 0 and second.num_nodes_waiting() == 0, "both rounds have the number 1"


def test_a_node_with_other_limits_is_refused(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    first = nodes.make(2, 2)
    waiting = pool.submit(first.next_rendezvous)
    odd = nodes.make(2, 3)
    until(odd.num_nodes_waiting, "one waits")
    with pytest.raises(RendezvousError, match="max_nodes"):
        odd.next_rendezvous()
    meet(nodes.make(2, 2))
    assert waiting.result(AMPLE_S).world_size == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"run_id": ""}, "run id"),
        ({"min_nodes": 0}, "min_nodes"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"max_nodes": 10**6}, "max_nodes"),
        ({"keep_alive_interval": 0}, "keep_alive_interval"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt"),
    ],
)
def test_invalid_handler_arguments_are_refused(wrong: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "run_id": "run",
        "store": HashStore(),
        "backend": Memory([]),
        "min_nodes": 1,
        "max_nodes": 1,
    }
    with pytest.raises(ValueError, match=words):
        DynamicRendezvousHandler.from_backend(**{**given, **wrong})


def parameters(endpoint: str, least: int = 1, most: int = 1, **options: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, "run", least, most, HOST, **options)


def test_options_become_settings() -> None:
    options: dict[str, Any] = {"join_timeout": "7", "last_call_timeout": 8, "close_timeout": 9, "heartbeat_timeout": 10}
    params = parameters("", **options, keep_alive_interval="11", keep_alive_max_attempt=12)
    settings = create_handler(HashStore(), Memory([]), params).settings
    timeout = settings.timeout
    times = (timeout.join, timeout.last_call, timeout.close, timeout.heartbeat, settings.keep_alive_interval)
    assert times == tuple(timedelta(seconds=seconds) for seconds in (7, 8, 9, 10, 11))
    assert settings.keep_alive_max_attempt == 12
    with pytest.raises(ValueError, match="join timeout must be positive"):
        create_handler(HashStore(), Memory([]), parameters("", join_timeout=0))
    with pytest.raises(TypeError, match="keep_alive_interval"):
        create_handler(HashStore(), Memory([]), parameters("", keep_alive_interval=None))


# The workers' store


def test_workers_of_every_round_find_a_new_store(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNSHARED)
    handlers = [nodes.make(2, 2) for _ in range(2)]
    assert all(handler.use_agent_store for handler in handlers)
    ports = []
    for _ in range(2):
        infos = meet(*handlers)
        ((address, port),) = {start_of(info) for info in infos}
        with TCPStore(address, port) as worker, TCPStore(address, port) as other:
            worker.set("k", "v")
            assert other.get("k") == b"v" and worker.add("count", 1) == 1, "keys of the earlier round are not visible"
        ports.append(port)
    assert ports[0] != ports[1]
    monkeypatch.setenv(UNSHARED, "1")
    assert not handlers[0].use_agent_store


def test_a_rank_0_that_leaves_before_publishing_its_server_is_not_awaited(
    nodes: Nodes, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UNSHARED)
    monkeypatch.setattr(round_server, "SLICE_S", 0.01)
    handlers = [nodes.make(1, 2, last_call_s=AMPLE_S) for _ in range(2)]
    fails, tried = threading.Lock(), threading.Event()

    def fail(open_server: Callable[[int], int], scope: int) -> int:
        if fails.acquire(blocking=False):
            tried.set()
            raise RendezvousError("the server does not start")
        return open_server(scope)

    for handler in handlers:
        holder = handler._round_server
        monkeypatch.setattr(holder, "open", functools.partial(fail, holder.open))
    waiting = [pool.submit(handler.next_rendezvous) for handler in handlers]
    assert tried.wait(AMPLE_S)
    until(lambda: any(future.done() for future in waiting), "one has failed")
    failed = [future.done() for future in waiting].index(True)
    with pytest.raises(RendezvousError, match="the server does not start"):
        waiting[failed].result()
    handlers[failed].shutdown()
    info = waiting[1 - failed].result(AMPLE_S)
    assert (info.rank, info.world_size) == (0, 1)


# As torchrun uses it


def test_the_registry_creates_a_dynamic_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNSHARED, "1")
    endpoint = f"{HOST}:{reserve_port()}"
    handlers = [get_rendezvous_handler(parameters(endpoint, 2, 2)) for _ in range(2)]
    assert handlers[0].get_backend() == "c10d"
    infos = meet(*handlers)
    assert sorted(ranks(infos)) == [0, 1] and isinstance(infos[0].store, PrefixStore)
    assert [handler.shutdown() for handler in handlers] == [True, True]
    for handler in handlers:
        assert isinstance(handler, DynamicRendezvousHandler)
        handler._store.close()


@pytest.mark.needs("torch")
def test_torchs_agents_launch_workers_with_it() -> None:
    """Two agents with a worker each, which add up their ranks by gloo; an agent that hangs is killed."""
    program, endpoint = Path(__file__).with_name("agent.py"), f"{HOST}:{reserve_port()}"
    command = [sys.executable, str(program), endpoint]
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=2 * AMPLE_S) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, 9)
                agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    results = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert sorted(result["0" if "0" in result else "1"] for result in results) == [[0, 2, 3], [1, 2, 3]]
