"""Our client on PyTorch's servers, and both kinds of clients on one server."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import rallypoint

from .operations import AMPLE, BASIC, EVERYTHING, QUEUES, SOON, TIMEOUTS, Truth, keys_of, transcribe
from .torch_processes import TorchProcesses

pytestmark = pytest.mark.needs("torch")


def serve(board_port: int, libuv: bool) -> list[str]:
    """Run one of torch's servers until asked to stop; return the keys that it holds then."""
    dist = importlib.import_module("torch.distributed")

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=AMPLE, use_libuv=libuv)
    board = rallypoint.TCPStore("127.0.0.1", board_port)
    board.set("port", str(store.port))
    board.get("stop")
    return sorted(store.list_keys())


class TorchServer:
    """One of torch's servers, in its own process."""

    def __init__(self, torch_processes: TorchProcesses, board: rallypoint.TCPStore, libuv: bool) -> None:
        self._board = board
        self._member = torch_processes.start(serve, board.port, libuv)
        self.port = int(board.get("port"))

    def stop(self) -> list[str]:
        self._board.set("stop", "")
        keys: list[str] = self._member.result()
        return keys

    def client(self) -> rallypoint.TCPStore:
        return rallypoint.TCPStore("127.0.0.1", self.port, timeout=AMPLE)


@pytest.fixture
def board(server: rallypoint.Server) -> rallypoint.TCPStore:
    return rallypoint.TCPStore("127.0.0.1", server.port)


@pytest.fixture
def torch_server(torch_processes: TorchProcesses, board: rallypoint.TCPStore) -> TorchServer:
    return TorchServer(torch_processes, board, libuv=True)


@pytest.fixture
def older_server(torch_processes: TorchProcesses, board: rallypoint.TCPStore) -> TorchServer:
    return TorchServer(torch_processes, board, libuv=False)


def test_every_operation_on_torchs_server(torch_server: TorchServer, truth: Truth) -> None:
    lines, keys = truth
    store = torch_server.client()
    assert transcribe(store, EVERYTHING, "a:") == lines
    assert transcribe(rallypoint.PrefixStore("b", store.clone()), EVERYTHING) == lines
    assert keys_of(store, "a:") == keys
    seen = torch_server.stop()
    assert {f"a:{key}" for key in keys} | {f"b/{key}" for key in keys} <= set(seen)


def test_every_operation_that_torchs_older_server_has(older_server: TorchServer, truth: Truth) -> None:
    lines, _ = truth
    store = older_server.client()
    assert transcribe(store, BASIC + TIMEOUTS, "a:") == [*lines[: -len(QUEUES) - 1], lines[-1]]
    with pytest.raises(rallypoint.RallypointError, match="queue_push"):
        store.queue_push("jobs", "one")
    assert "a:count" in older_server.stop()


def test_operations_missing_in_torchs_protocol_are_refused_by_name(torch_server: TorchServer) -> None:
    store = torch_server.client()
    calls: dict[str, Callable[[], object]] = {
        "swap": lambda: store.swap("k", None, "v"),
        "lease": lambda: store.lease("k", "v"),
        "watch": lambda: store.watch("k"),
        "delete_prefix": lambda: store.delete_prefix("k"),
    }
    for name, call in calls.items():
        with pytest.raises(rallypoint.Unsupported) as caught:
            call()
        assert caught.value.operation == name and f":{torch_server.port}" in caught.value.store
    store.set("still", "usable")
    assert torch_server.stop() == ["still"]


def test_a_timeout_names_the_missing_key(torch_server: TorchServer) -> None:
    store = torch_server.client()
    store.set("here", "")
    with pytest.raises(rallypoint.StoreTimeout) as caught:
        store.wait(["here", "not here"], SOON)
    assert caught.value.missing == ("not here",)
    assert store.get("here") == b""


def test_a_stopped_server_is_noticed(torch_server: TorchServer) -> None:
    store = torch_server.client()
    torch_server.stop()
    with pytest.raises(rallypoint.ConnectionLost):
        store.get("never")


# Both on one server


def play_with_ours(port: int) -> list[Any]:
    """Use torch's client in turn with ours, which is in another process."""
    dist = importlib.import_module("torch.distributed")

    store = dist.TCPStore("127.0.0.1", port, timeout=AMPLE)
    below = dist.PrefixStore("job/7", store)
    store.set("torch was here", b"\xff")
    below.set("rank0", "torch")
    store.queue_push("to ours", "ping")
    seen = [store.queue_pop("to torch"), below.get("rank1"), store.add("count", 10)]
    store.barrier("both", 2)
    store.multi_set(["t1", "t2"], ["1", "2"])
    return [
        *seen,
        store.multi_get(["o1", "o2"]),
        store.compare_set("turn", "ours", "torch's"),
        sorted(below.list_keys()),
    ]


def play_with_torch(store: rallypoint.TCPStore) -> list[Any]:
    below = rallypoint.PrefixStore("job/7", store)
    seen: list[Any] = [store.get("torch was here"), below.get("rank0"), store.queue_pop("to ours")]
    store.set("turn", "ours")
    below.set("rank1", "ours")
    store.add("count", 1)
    store.queue_push("to torch", "pong")
    store.barrier("both", 2)
    store.multi_set(["o1", "o2"], ["1", "2"])
    return [*seen, store.multi_get(["t1", "t2"]), sorted(below.list_keys())]


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_both_clients_on_one_server_see_each_other(
    torch_processes: TorchProcesses, server: rallypoint.Server, whose: str, request: pytest.FixtureRequest
) -> None:
    place = server if whose == "ours" else request.getfixturevalue("torch_server")
    store = rallypoint.TCPStore("127.0.0.1", place.port, timeout=AMPLE)
    torch = torch_processes.start(play_with_ours, place.port)
    ours = play_with_torch(store)
    assert ours == [b"\xff", b"torch", b"ping", [b"1", b"2"], ["rank0", "rank1"]]
    assert torch.result() == [b"pong", b"ours", 11, [b"1", b"2"], b"torch's", ["rank0", "rank1"]]
    assert store.get("turn") == b"torch's"


def share_a_queue(port: int, whose: str) -> list[int]:
    dist = importlib.import_module("torch.distributed")

    kind = dist.TCPStore if whose == "torch's" else rallypoint.TCPStore
    store = kind("127.0.0.1", port, timeout=AMPLE)
    store.barrier("ready", 4)
    mine = {"torch's": range(200), "ours": range(200, 400)}[whose]
    taken = []
    for n in mine:
        store.queue_push("shared", str(n))
        taken.append(int(store.queue_pop("shared")))
    return taken


def test_both_clients_share_a_queue(torch_processes: TorchProcesses, server: rallypoint.Server) -> None:
    taken = torch_processes.run(share_a_queue, [(server.port, whose) for whose in ("torch's", "ours") * 2])
    assert sorted(item for items in taken for item in items) == sorted([*range(400)] * 2)


def meet_mixed(port: int, n: int) -> int:
    dist = importlib.import_module("torch.distributed")

    store = (dist.TCPStore if n % 2 else rallypoint.TCPStore)("127.0.0.1", port, timeout=AMPLE)
    store.add("came", 1)
    store.barrier("all", 8)
    return int(store.add("came", 0))


def test_both_clients_meet_at_one_barrier(torch_processes: TorchProcesses, server: rallypoint.Server) -> None:
    assert torch_processes.run(meet_mixed, [(server.port, n) for n in range(8)]) == [8] * 8
