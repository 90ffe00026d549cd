"""The lock around changes of an RPC group, and the peers that an agent knows afterwards."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import rallypoint
from rallypoint.compat.rpc import (
    Agent,
    Peer,
    WorkerInfo,
    current_agent,
    group_membership,
    set_current_agent,
    update_group_membership,
)

AMPLE_S = 60.0


@pytest.fixture
def agent() -> Iterator[Agent]:
    set_current_agent(Agent("ann", ["cuda:0", "cuda:1"]))
    yield current_agent()
    set_current_agent(None)


@pytest.mark.needs("torch")
def test_signatures_are_torchs() -> None:
    from torch.distributed.rpc import _utils

    for ours, theirs in (
        (group_membership, _utils._group_membership_management),
        (update_group_membership, _utils._update_group_membership),
    ):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("hosted", [False, True])
def test_the_token_is_exclusive_and_released_on_any_exit(hosted: bool) -> None:
    with rallypoint.Server() as server:
        store = rallypoint.connect(server.url) if hosted else rallypoint.HashStore()
        inside: list[str] = []

        def change(name: str) -> None:
            for number in range(10):
                try:
                    with group_membership(store.clone(), name, is_join=number % 2 == 0):
                        inside.append(name)
                        assert inside == [name]
                        inside.remove(name)
                        raise KeyError(name)
                except KeyError:
                    pass

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(change, name) for name in "abcd"]:
                future.result(AMPLE_S)


def test_a_timeout_names_the_holder_of_the_token() -> None:
    store = rallypoint.HashStore()
    with group_membership(store, "ann", is_join=True):
        other = store.clone()
        other.set_timeout(0.1)
        with (
            pytest.raises(rallypoint.MembersMissing, match="held by ann, which joins"),
            group_membership(other, "bob", is_join=True),
        ):
            raise AssertionError("two members hold the token")


def test_a_killed_holder_blocks_nobody() -> None:
    script = """
import sys, rallypoint
from rallypoint.compat.rpc import group_membership
with group_membership(rallypoint.connect(sys.argv[1]), "ann", True):
    print("in", flush=True)
    sys.stdin.read()
"""
    with rallypoint.Server(grace=0.5) as server:
        command = [sys.executable, "-c", script, server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == "in\n"
            holder.send_signal(signal.SIGKILL)
            with group_membership(rallypoint.connect(server.url, timeout=AMPLE_S), "bob", is_join=True):
                pass


def test_the_agent_tracks_joined_and_left_peers(agent: Agent) -> None:
    update_group_membership(WorkerInfo("bob", 1), ["cuda:3"], {"cuda:0": "cuda:3"}, True)
    assert agent.peers == {"bob": Peer(WorkerInfo("bob", 1), ("cuda:3",), {"cuda:0": "cuda:3"})}
    update_group_membership(WorkerInfo("bob", 2), [], {}, True)
    update_group_membership(WorkerInfo("bob", 1), [], {}, False)
    assert agent.peers["bob"].info.id == 2, "a leave of the old id does not remove the peer that has rejoined"
    update_group_membership(WorkerInfo("bob", 2), [], {}, False)
    assert agent.peers == {}


@pytest.mark.parametrize(
    ("back", "device"),
    [
        ({"cuda:0": "cuda:9"}, "cuda:9"),
        ({"cuda:7": "cuda:3"}, "cuda:3"),
        ({"cuda:0": "cuda:3", "cuda:1": "cuda:3"}, "cuda:3"),
    ],
)
def test_an_invalid_device_map_changes_nothing(agent: Agent, back: dict[str, str], device: str) -> None:
    with pytest.raises(rallypoint.BadDeviceMap) as caught:
        update_group_membership(WorkerInfo("bob", 1), ["cuda:3"], back, True)
    assert (caught.value.member, caught.value.device) == ("bob", device)
    assert agent.peers == {}


def test_an_agent_follows_the_view_of_a_group(agent: Agent) -> None:
    store = rallypoint.HashStore()
    ann = rallypoint.Group(store, "rpc").join("ann", devices=agent.devices)
    bob = rallypoint.Group(store.clone(), "rpc").join(
        "bob", devices=["cuda:3"], device_maps={"ann": {"cuda:3": "cuda:0"}}
    )
    agent.follow(ann.view)
    assert agent.peers == {"bob": Peer(WorkerInfo("bob", bob.id), ("cuda:3",), {"cuda:0": "cuda:3"})}
    bob.leave()
    agent.follow(ann.view)
    assert agent.peers == {}


def test_updating_without_a_current_agent_is_refused() -> None:
    with pytest.raises(RuntimeError, match="set_current_agent"):
        update_group_membership(WorkerInfo("bob", 1), [], {}, True)
