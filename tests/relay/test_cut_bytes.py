"""Cut the relay's connection to its server at every byte of every request and answer: all happens exactly once.

The cases are those of a client without a relay (`tests/session/test_cuts.py`), asked by a client of ours, whose session
has a channel of its own, and by PyTorch's, whose requests the relay repeats for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.conformance.calls import Call
from tests.cutter import DOWN, UP, Cutter
from tests.session.test_cuts import BLOCKED, CASES, DEADLINE_S, Case, await_waiting, connect, measure
from tests.wire import Peer

import rallypoint
from rallypoint import Store
from rallypoint.protocol.c10d import Opcode, encode

from .relays import RelayThread

OURS_ONLY = {"swap", "delete_prefix", "lease"}
"""What PyTorch's client cannot ask."""

CLIENTS = ["ours", pytest.param("torch", marks=pytest.mark.needs("torch"))]


@pytest.fixture(scope="module")
def server() -> Iterator[rallypoint.Server]:
    with rallypoint.Server() as server:
        yield server


@pytest.fixture(scope="module")
def cutter(server: rallypoint.Server) -> Iterator[Cutter]:
    with Cutter(server.port) as cutter:
        yield cutter


@pytest.fixture(scope="module")
def relay(cutter: Cutter) -> Iterator[RelayThread]:
    with RelayThread(cutter.port) as relay:
        yield relay


@pytest.fixture(scope="module", params=CLIENTS)
def store(request: pytest.FixtureRequest, relay: RelayThread) -> Iterator[Any]:
    """A store by way of the relay."""
    if request.param == "ours":
        with connect(relay.port) as store:
            yield store
    else:
        from torch.distributed import TCPStore

        yield TCPStore("127.0.0.1", relay.port, timeout=timedelta(seconds=DEADLINE_S))


@pytest.fixture
def plain(server: rallypoint.Server) -> Iterator[Store]:
    """A client of the server itself."""
    with connect(server.port) as plain:
        plain.delete_prefix("")
        yield plain


def cases(store: Any, name: str) -> Case | None:
    """Return a case for a client, or None where it cannot ask that; PyTorch's does not wait for its writes."""
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
    with Peer(("127.0.0.1", store.port)) as peer:
        peer.send(encode(Opcode.LIST_KEYS))
        return [peer.string().decode().removeprefix("/") for _ in range(peer.number())]


def queue_len(store: Any) -> int:
    with Peer(("127.0.0.1", store.port)) as peer:
        peer.send(encode(Opcode.QUEUE_LEN, b"/q"))
        return peer.number()


BY_WIRE = {"list_keys": list_keys, "queue_len": queue_len}
"""What PyTorch's client does not let go of the interpreter for, which the relay in this process needs."""


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str, store: Any, plain: Store, cutter: Cutter) -> None:
    case = cases(store, name)
    if case is None:
        assert not hasattr(store, name), "it can ask that now"
        return
    sizes = smallest([measure(case, plain, store, cutter) for _ in range(3)])
    before = cutter.connections
    for way in (UP, DOWN):
        for after in range(sizes[way] + 1):
            plain.delete_prefix("")
            case.prepare(plain)
            cutter.arm(way, after)
            assert case.act(store) == case.returns, f"cut after {after} bytes {way}"
            assert case.then(plain), f"cut after {after} bytes {way}"
            cutter.disarm()
    cuts = cutter.connections - before
    assert cuts > 0.7 * sum(sizes.values()), f"only {cuts} cuts at {sizes} bytes"


def smallest(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Return how many bytes an operation takes by itself: credit, confirmations or a greeting may come in between."""
    return {way: min(size[way] for size in sizes) for way in (UP, DOWN)}


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("while_away", [False, True])
def test_a_blocked_call_goes_on(
    name: str, while_away: bool, store: Any, plain: Store, cutter: Cutter, server: rallypoint.Server
) -> None:
    act: Callable[[Any], Any]
    act, release, returns = BLOCKED[name]
    call = Call(act, store)
    await_waiting(server, 1)
    if while_away:
        cutter.refusing = True
    cutter.cut_all()
    if while_away:
        release(plain)
        cutter.refusing = False
    else:
        await_waiting(server, 1)
        release(plain)
    assert call.result() == returns
    assert plain.queue_len("late") == 0
