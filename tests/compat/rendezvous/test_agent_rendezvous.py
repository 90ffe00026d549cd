"""AgentRendezvous, which both handlers share, with a scripted node: rounds that end early, leaving, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rallypoint import HashStore, PrefixStore, net
from rallypoint.compat.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rallypoint.compat.rendezvous.agent_rendezvous import LAST_MEMBER, AgentRendezvous
from rallypoint.deadline import Timeout
from rallypoint.errors import MembersMissing, RallypointError, RunClosed, SessionLost
from rallypoint.launch.stores.round_port import RoundOver
from rallypoint.recipes.hosting.shared_object import SharedObject
from rallypoint.recipes.rendezvous import Round, Status

PLACE = net.Endpoint("node-a", 4711)


class ScriptedNode:
    """A node that joins a new round each time and records all calls; every call raises `fails` if it is set."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.joined = 0
        self.calls: list[tuple[Any, ...]] = []
        self.fails: Exception | None = None
        self.phase = "formed"

    def join(self, timeout: Timeout | None = None) -> Round:
        self._record("join", timeout)
        self.joined += 1
        round_data = [0, self.joined, self.joined, 0, 1, ("a", "node-a"), self.joined - 1, "full"]
        shared = SharedObject("rendezvous", self.store, "run")
        return Round(shared, round_data, PrefixStore(str(self.joined), self.store))

    def status(self) -> Status:
        self._record("status")
        return Status(self.phase, "", self.joined, {}, (), (), 1, 1, "", None)

    def close(self, result: str, reason: str = "") -> bool:
        self._record("close", result)
        return True

    def leave(self, *, failed: str = "", done: bool = False) -> bool:
        self._record("leave", failed, done)
        return True

    def _record(self, *call: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.calls.append(call)


def find_store_from(first: int) -> Callable[[Round], net.Endpoint]:
    """Return a function that finds the workers' store from that round on; earlier rounds are over."""

    def find(found: Round) -> net.Endpoint:
        if found.number < first:
            raise RoundOver("too late")
        return PLACE

    return find


def refuse(closed: RunClosed) -> BaseException:
    return RendezvousClosedError(f"ended: {closed.result}")


def agent_from(first: int = 1, join_timeout: float = 60.0) -> AgentRendezvous[ScriptedNode]:
    return AgentRendezvous(ScriptedNode(), join_timeout, find_store_from(first), refuse)


def test_a_round_that_ends_before_the_node_starts_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    agent = agent_from(3)
    found, place = agent.next_round()
    assert (found.number, place) == (3, PLACE) and agent.round is found
    assert agent.node.calls == [("join", 60.0)] * 3, "each join gets the whole timeout"
    assert [line for line in caplog.messages if "was over before this node could start: too late" in line][1:]


def test_skipping_rounds_ends_at_the_join_timeout() -> None:
    agent = agent_from(3, join_timeout=0.0)
    with pytest.raises(RendezvousError, match="too late"), agent.torch_errors():
        agent.next_round()
    assert agent.node.joined == 1


def test_leaving_does_not_close_the_run() -> None:
    agent = agent_from()
    then: list[bool] = []
    agent.next_round()
    assert agent.leave(failed="a worker", done=True, then=lambda: then.append(agent.round is not None))
    assert agent.node.calls[1:] == [("leave", "a worker", True)] and then == [True] and agent.round is None


def test_the_run_has_succeeded_when_the_last_agent_has_passed_the_exit_barrier() -> None:
    agent = agent_from()
    found, _ = agent.next_round()
    found.store.set(LAST_MEMBER, "")
    assert agent.leave()
    assert agent.node.calls[1:] == [("close", "succeeded"), ("leave", "", False)]


@pytest.mark.parametrize("error", [SessionLost(peer="s", why="w"), RuntimeError("of one of torch's stores")])
def test_a_failed_leave_is_logged_and_not_raised(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    agent = agent_from()
    found, _ = agent.next_round()
    agent.node.fails = error
    assert agent.leave() is False and agent.round is found
    assert f"could not leave {agent.node!r}: {error}" in caplog.messages


def test_close_closes_the_run() -> None:
    agent = agent_from()
    assert not agent.is_closed()
    agent.close("why not")
    agent.node.phase = "closed"
    assert agent.is_closed() and ("close", "closed") in agent.node.calls


MISSING = MembersMissing(thing="t", member="a", missing=["b"], timeout_s=1.0, reason="1 of 2")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MISSING, RendezvousTimeoutError),
        (SessionLost(peer="s", why="w"), RendezvousConnectionError),
        (RunClosed(thing="t", result="failed", reason="r"), RendezvousClosedError),
        (RallypointError("r"), RendezvousError),
        (RendezvousStateError("r"), RendezvousStateError),
    ],
)
def test_errors_have_torchs_names(error: RallypointError, kind: type[RendezvousError]) -> None:
    agent = agent_from()
    agent.node.fails = error
    for call in (agent.is_closed, lambda: agent.close("why not")):
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value).__name__ == kind.__name__, "not a subclass of it"
        assert caught.value is error or caught.value.__cause__ is error


def test_other_errors_stay_as_they_are() -> None:
    agent = agent_from()
    agent.node.fails = ValueError("misuse")
    with pytest.raises(ValueError, match="misuse"):
        agent.is_closed()
