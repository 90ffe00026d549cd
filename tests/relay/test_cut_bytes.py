"""Cut the relay's connection to its server at every byte of every request and reply: each is executed exactly once.

The cases are those of a client without a relay (`tests/client/test_cuts.py`), for a native client, whose session has
its own channel, and for PyTorch's, whose requests are repeated by the relay.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.client.test_cuts import (
    BLOCKED,
    CASES,
    Case,
    await_waiting,
    check_every_byte,
    connect,
    cut,
    measure,
)
from tests.conformance.calls import Call
from tests.outage_log import DEADLINE_S
from tests.raw_peer import RawPeer
from tests.served import server_fixture

import rallypoint
from rallypoint import Store
from rallypoint.protocol.c10d import Opcode, encode
from rallypoint.testing import DOWN, UP, CuttingProxy

from .relays import RelayThread

OURS_ONLY = {"swap", "delete_prefix", "lease"}
"""Operations that PyTorch's client lacks."""

CLIENTS = ["ours", pytest.param("torch", marks=pytest.mark.needs("torch"))]


server = server_fixture("module")


@pytest.fixture(scope="module")
def cutter(server: rallypoint.Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(server.port) as cutter:
        yield cutter


@pytest.fixture(scope="module")
def relay(cutter: CuttingProxy) -> Iterator[RelayThread]:
    with RelayThread(cutter.port) as relay:
        yield relay


@pytest.fixture(scope="module", params=CLIENTS)
def store(request: pytest.FixtureRequest, relay: RelayThread) -> Iterator[Any]:
    """A store reached through the relay."""
    if request.param == "ours":
        with connect(relay.port) as store:
            yield store
    else:
        dist = importlib.import_module("torch.distributed")
        yield dist.TCPStore("127.0.0.1", relay.port, timeout=timedelta(seconds=DEADLINE_S))


@pytest.fixture
def plain(server: rallypoint.Server) -> Iterator[Store]:
    """A client of the server itself."""
    with connect(server.port) as plain:
        plain.delete_prefix("")
        yield plain


def cases(store: Any, name: str) -> Case | None:
    """Return a case for a client, or None if it lacks the operation; PyTorch's client does not wait for its writes."""
    case = CASES[name]
    if isinstance(store, Store):
        return case
    if name in OURS_ONLY:
        return None

    def act(store: Any) -> Any:
        answer = case.act(store)
        store.check(["afterwards"])
        return answer

    return case._replace(act=BY_WIRE.get(name, act))


def list_keys(store: Any) -> list[str]:
    with RawPeer(("127.0.0.1", store.port)) as peer:
        peer.send(encode(Opcode.LIST_KEYS))
        return [peer.string().decode().removeprefix("/") for _ in range(peer.number())]


def queue_len(store: Any) -> int:
    with RawPeer(("127.0.0.1", store.port)) as peer:
        peer.send(encode(Opcode.QUEUE_LEN, b"/q"))
        return peer.number()


BY_WIRE = {"list_keys": list_keys, "queue_len": queue_len}
"""Operations in which PyTorch's client keeps the interpreter lock, which the relay in this process needs."""


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str, store: Any, plain: Store, cutter: CuttingProxy) -> None:
    case = cases(store, name)
    if case is None:
        assert not hasattr(store, name), "PyTorch's client has this operation now"
        return
    sizes = smallest([measure(case, plain, store, cutter) for _ in range(3)])
    before = cutter.connections
    check_every_byte(case, plain, store, cutter, sizes)
    cuts = cutter.connections - before
    assert cuts > 0.7 * sum(sizes.values()), f"only {cuts} cuts at {sizes} bytes"


def smallest(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Return the bytes of an operation alone, without credit, confirmations or greetings that happen to be sent."""
    return {way: min(size[way] for size in sizes) for way in (UP, DOWN)}


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("while_away", [False, True])
def test_a_blocked_call_continues(
    name: str, while_away: bool, store: Any, plain: Store, cutter: CuttingProxy, server: rallypoint.Server
) -> None:
    act, release, returns = BLOCKED[name]
    call = Call(act, store)
    await_waiting(server, 1)
    with cut(cutter, while_away, lambda: await_waiting(server, 1)):
        release(plain)
    assert call.result() == returns
    assert plain.queue_len("late") == 0
