"""PyTorch's clients on our server, in memory or in etcd: every operation, many processes, same results as PyTorch's."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rallypoint
from rallypoint import net

from .operations import AMPLE, BASIC, EVERYTHING, SOON, TIMEOUTS, Transcript, Truth, keys_of, transcribe
from .torch_processes import TorchProcesses

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.needs("etcd"))])
def server(request: pytest.FixtureRequest) -> Iterator[rallypoint.Server]:
    storage = request.getfixturevalue("etcd_url") if request.param == "etcd" else None
    with rallypoint.Server(storage=storage) as server:
        yield server


def client(port: int, **options: Any) -> Any:
    dist = importlib.import_module("torch.distributed")

    return dist.TCPStore("127.0.0.1", port, timeout=AMPLE, **options)


# Every operation


def on_our_server(port: int, mark: str) -> tuple[Transcript, list[str]]:
    store = client(port)
    return transcribe(store, EVERYTHING, mark), keys_of(store, mark)


def through_prefixes(port: int, mark: str) -> tuple[Transcript, list[str]]:
    dist = importlib.import_module("torch.distributed")

    store = dist.PrefixStore(mark, dist.PrefixStore("deep", client(port)))
    return transcribe(store, EVERYTHING), keys_of(client(port), f"deep/{mark}/")


def test_every_operation_from_four_processes_at_once(
    torch_processes: TorchProcesses, server: rallypoint.Server, truth: Truth
) -> None:
    lines, keys = truth
    marks = [f"{n}:" for n in range(4)]
    assert torch_processes.run(on_our_server, [(server.port, mark) for mark in marks]) == [(lines, keys)] * 4
    ours = rallypoint.TCPStore("127.0.0.1", server.port)
    assert {(mark, key) for mark in marks for key in keys_of(ours, mark)} == {(m, k) for m in marks for k in keys}
    assert ours.num_keys() == 4 * (len(keys) + 1), "and the key of the barrier that timed out"


def test_every_operation_through_torchs_prefix_store(
    torch_processes: TorchProcesses, server: rallypoint.Server, truth: Truth
) -> None:
    lines, keys = truth
    (seen, left), (seen_too, left_too) = torch_processes.run(through_prefixes, [(server.port, "a"), (server.port, "b")])
    assert seen == seen_too == lines
    barrier_keys = {"full/num_members", "full/last_member"}  # torch's PrefixStore makes a barrier of two plain keys
    assert set(left) == set(left_too) == {key for key in keys if key != "full"} | barrier_keys


def use_a_clone(port: int) -> tuple[Any, ...]:
    store = client(port)
    store.set_timeout(SOON)
    copy = store.clone()
    copy.set("from", "the clone")
    seen = store.get("from")
    del store
    return seen, copy.get("from"), copy.num_keys(), transcribe(copy, TIMEOUTS[:2])[:2]


def test_a_clone_is_a_client_of_its_own(torch_processes: TorchProcesses, server: rallypoint.Server) -> None:
    late = [("wait", "DistStoreError")] * 2
    assert torch_processes.start(use_a_clone, server.port).result() == (b"the clone", b"the clone", 1, late)


# Waiting


def wait_for(port: int, keys: list[str]) -> list[bytes]:
    store = client(port)
    store.wait(keys)
    return [store.get(key) for key in keys]


def write(port: int, key: str, value: str) -> None:
    client(port).set(key, value)


def test_a_wait_is_woken_by_another_process(
    torch_processes: TorchProcesses, server: rallypoint.Server, until_waiting: Callable[[int], None]
) -> None:
    waiting = [torch_processes.start(wait_for, server.port, ["x", "y"]) for _ in range(4)]
    until_waiting(4)
    torch_processes.start(write, server.port, "x", "1").result()
    until_waiting(4)
    torch_processes.start(write, server.port, "y", "2").result()
    assert [member.result() for member in waiting] == [[b"1", b"2"]] * 4


def time_out_and_go_on(port: int) -> Transcript:
    store = client(port)
    again = [("wait", ["never"], SOON), ("barrier", "b", 2, SOON), ("add", "n", 1)] * 5
    return transcribe(store, again)


def test_a_client_that_timed_out_stays_usable(torch_processes: TorchProcesses, server: rallypoint.Server) -> None:
    late = "DistStoreError"
    expected = [line for n in range(1, 6) for line in (("wait", late), ("barrier", late), ("add", n))]
    assert torch_processes.start(time_out_and_go_on, server.port).result() == [*expected, ("has_extended_api", True)]


def meet(port: int, rounds: int, prefixed: bool) -> list[int]:
    """Count, meet at the barrier, and read: after the barrier, all must have been counted."""
    dist = importlib.import_module("torch.distributed")

    store = dist.PrefixStore("p", client(port)) if prefixed else client(port)
    seen = []
    for n in range(rounds):
        store.add(f"in{n}", 1)
        store.barrier(f"barrier{n}", 8)
        seen.append(store.add(f"in{n}", 0))
    return seen


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_barrier_of_eight_processes(
    torch_processes: TorchProcesses, server: rallypoint.Server, prefixed: bool
) -> None:
    assert torch_processes.run(meet, [(server.port, 5, prefixed)] * 8) == [[8] * 5] * 8


# Queues


def consume(port: int) -> list[int]:
    """Pop items until the item `stop`; a blocking pop must never find the queue empty."""
    store = client(port)
    taken = []
    while (item := store.queue_pop("jobs")) != b"stop":
        taken.append(int(item))
    return taken


def produce(port: int, first: int, count: int) -> None:
    store = client(port)
    for n in range(first, first + count):
        store.queue_push("jobs", str(n))
    assert store.queue_len("absent") == 0  # when this returns, all pushes have arrived


def test_four_consumers_get_every_item_once(
    torch_processes: TorchProcesses, server: rallypoint.Server, until_waiting: Callable[[int], None]
) -> None:
    consumers = [torch_processes.start(consume, server.port) for _ in range(4)]
    until_waiting(4)
    torch_processes.run(produce, [(server.port, 0, 500), (server.port, 500, 500)])
    ours = rallypoint.TCPStore("127.0.0.1", server.port)
    for _ in consumers:
        ours.queue_push("jobs", "stop")
    taken = [consumer.result() for consumer in consumers]
    assert sorted(item for items in taken for item in items) == list(range(1000))
    assert ours.queue_len("jobs") == 0


# A world size


def join(port: int, world_size: int) -> int:
    store = client(port, world_size=world_size, is_master=False)
    store.set("joined", "torch")
    return int(store.num_keys())


def test_torch_joins_our_master_that_waits_for_workers(torch_processes: TorchProcesses) -> None:
    sock = net.bound_socket("127.0.0.1")
    port = sock.getsockname()[1]
    masters = []

    def open_master() -> None:
        masters.append(rallypoint.TCPStore("127.0.0.1", port, 3, True, AMPLE, master_listen_fd=sock.detach()))

    opening = threading.Thread(target=open_master)
    opening.start()
    first = torch_processes.start(join, port, 3)
    assert first.result() == 2, "the counter of clients, and what it wrote"
    assert not masters, "one of three is still missing"
    torch_processes.start(join, port, 3).result()
    opening.join(AMPLE.total_seconds())
    (master,) = masters
    assert master.get("joined") == b"torch"
    master.close()


def test_a_master_without_all_its_workers_reports_how_many_joined(torch_processes: TorchProcesses) -> None:
    sock = net.bound_socket("127.0.0.1")
    port = sock.getsockname()[1]
    member = torch_processes.start(join, port, 3)
    with pytest.raises(rallypoint.WorkersMissing, match="2 of 3") as caught:
        rallypoint.TCPStore("127.0.0.1", port, 3, True, 3, master_listen_fd=sock.detach())
    assert member.result() in (1, 2)
    assert (caught.value.joined, caught.value.world_size) == (2, 3)


def master_of_ours(board_port: int) -> bytes:
    """Run a torch master that waits for three clients, and write its port to another store."""
    dist = importlib.import_module("torch.distributed")

    with net.bound_socket("127.0.0.1") as sock:
        rallypoint.TCPStore("127.0.0.1", board_port).set("master", str(sock.getsockname()[1]))
        store = dist.TCPStore(
            "127.0.0.1", sock.getsockname()[1], 3, True, timeout=AMPLE, master_listen_fd=sock.detach()
        )
        store.wait(["from ours"])
        return bytes(store.get("from ours"))


def test_ours_joins_torchs_master_that_waits_for_workers(
    torch_processes: TorchProcesses, server: rallypoint.Server
) -> None:
    master = torch_processes.start(master_of_ours, server.port)
    port = int(rallypoint.TCPStore("127.0.0.1", server.port).get("master"))
    first, second = (rallypoint.TCPStore("127.0.0.1", port, 3, timeout=AMPLE) for _ in range(2))
    first.set("from ours", "hello")
    assert master.result() == b"hello"
    with pytest.raises(rallypoint.NetworkError):
        second.set("k", "v")


def test_the_list_of_calls_has_every_operation() -> None:
    dist = importlib.import_module("torch.distributed")

    public = {name for name in dir(dist.Store) if not name.startswith("_")}
    assert public - {name for name, *_ in EVERYTHING} == {
        "clone",
        "has_extended_api",
        "list_keys",
        "num_keys",
        "timeout",
    }
    assert {name for name, *_ in BASIC}.isdisjoint({"queue_push"}), "the older server has no queues"
