"""`TorchStore`: any of our stores as one of torch's, used from Python and, through torch's PrefixStore, from C++."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint import errors
from rallypoint.deadline import Deadline

from .operations import AMPLE, BASIC, EVERYTHING, QUEUES, SOON, TIMEOUTS, Truth, keys_of, transcribe

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(params=["memory", "file", "tcp", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> rallypoint.Store:
    if request.param == "file":
        store: rallypoint.Store = rallypoint.FileStore(tmp_path / "store")
    elif request.param == "tcp":
        store = rallypoint.TCPStore("127.0.0.1", request.getfixturevalue("server").port)
    else:
        store = rallypoint.HashStore()
    return rallypoint.PrefixStore("p", store) if request.param == "prefix" else store


@pytest.fixture
def torch_store(store: rallypoint.Store) -> Iterator[Any]:
    adapter = adapt(store)
    yield adapter
    adapter.close()


def adapt(store: rallypoint.Store) -> Any:
    from rallypoint.torch import TorchStore

    return TorchStore(store)


def from_cpp(adapter: Any) -> Any:
    """Return a store whose every call goes through C++ to the adapter."""
    dist = importlib.import_module("torch.distributed")

    return dist.PrefixStore("cpp", adapter)


def test_every_operation(torch_store: Any, store: rallypoint.Store, truth: Truth) -> None:
    lines, keys = truth
    assert transcribe(torch_store, EVERYTHING) == lines
    assert keys_of(torch_store) == keys_of(store) == keys
    assert torch_store.num_keys() == store.num_keys() == len(keys) + 1, "and the key of the barrier that timed out"


def test_every_operation_that_cpp_can_call(torch_store: Any, store: rallypoint.Store, truth: Truth) -> None:
    lines, keys = truth
    store.set("beside", "")
    assert transcribe(from_cpp(torch_store), BASIC + TIMEOUTS) == [*lines[: -len(QUEUES) - 1], lines[-1]]
    barrier_keys = {"full/num_members", "full/last_member"}
    assert set(keys_of(store, "cpp/")) == {key for key in keys if key != "full"} | barrier_keys
    assert from_cpp(torch_store).num_keys() == store.num_keys(), "of the whole store, as with torch's own"


def test_operations_missing_in_cpp_are_refused_by_torch_and_work_directly(truth: Truth) -> None:
    lines, _ = truth
    outside = from_cpp(adapt(rallypoint.HashStore()))
    for call in (("queue_push", "q", "v"), ("queue_pop", "q"), ("queue_len", "q"), ("list_keys",)):
        assert transcribe(outside, [call])[0] == (call[0], "NotImplementedError")
    beneath = adapt(rallypoint.PrefixStore("p", rallypoint.HashStore()))
    assert transcribe(beneath, EVERYTHING) == lines


def test_python_and_cpp_share_the_timeout() -> None:
    dist = importlib.import_module("torch.distributed")

    adapter = adapt(rallypoint.HashStore(timeout=7))
    outside = from_cpp(adapter)
    assert adapter.timeout == outside.timeout == timedelta(seconds=7)
    outside.set_timeout(SOON)
    assert adapter.timeout == SOON
    for waits in (adapter, outside):
        with pytest.raises(dist.DistStoreError, match=r"after 0\.06 s"):
            waits.get("never")
    assert adapter.underlying_store.timeout == timedelta(seconds=7), "the store beneath keeps its own"
    assert adapter.clone().timeout == SOON


# Errors


def leaves(kind: type[Exception]) -> set[type[Exception]]:
    below = [cls for cls in kind.__subclasses__() if cls.__module__ == errors.__name__]
    return {leaf for cls in below for leaf in leaves(cls)} or {kind}


RAISED = {
    "StoreTimeout": lambda store: store.wait(["never"], SOON),
    "QueueEmpty": lambda store: store.queue_pop("jobs", False),
    "NotAnInteger": lambda store: store.set("text", "x") or store.add("text", 1),
    "LimitExceeded": lambda store: store.set("k" * 9000, ""),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_error_is_ours_and_torchs_and_pickles_as_ours(torch_store: Any, name: str) -> None:
    dist = importlib.import_module("torch.distributed")

    with pytest.raises(getattr(rallypoint, name)) as caught:
        RAISED[name](torch_store)
    error = caught.value
    assert isinstance(error, dist.QueueEmptyError if name == "QueueEmpty" else dist.DistStoreError)
    revived = pickle.loads(pickle.dumps(error))
    assert type(revived) is getattr(rallypoint, name)
    assert (str(revived), vars(revived)) == (str(error), vars(error))
    assert str(error) and error.__suppress_context__, "the message has no duplicate context"


def test_an_error_comes_through_cpp_unharmed() -> None:
    dist = importlib.import_module("torch.distributed")

    outside = from_cpp(adapt(rallypoint.HashStore()))
    with pytest.raises(dist.DistStoreError) as caught:
        outside.wait(["never"], SOON)
    assert isinstance(caught.value, rallypoint.StoreTimeout) and isinstance(caught.value, TimeoutError)
    assert caught.value.missing == ("cpp/never",)
    with pytest.raises(ValueError, match="not a 64-bit decimal"):
        outside.set("text", "x") or outside.add("text", 1)


def test_a_lost_server_is_torchs_network_error() -> None:
    dist = importlib.import_module("torch.distributed")

    with rallypoint.Server() as server:
        outside = from_cpp(adapt(rallypoint.TCPStore("127.0.0.1", server.port)))
        outside.set("k", "v")
    with pytest.raises(dist.DistNetworkError) as caught:
        outside.get("k")
    assert isinstance(caught.value, rallypoint.SessionLost) and isinstance(caught.value, ConnectionError)


def test_every_error_of_ours_has_a_torch_side() -> None:
    dist = importlib.import_module("torch.distributed")

    from rallypoint.torch import _both

    both: Any = _both  # a cached function, whose arguments mypy does not know
    for ours in leaves(errors.StoreError):
        assert issubclass(both(ours), ours) and issubclass(both(ours), dist.DistStoreError)
    for ours in leaves(errors.NetworkError):
        assert issubclass(both(ours), ours) and issubclass(both(ours), dist.DistNetworkError)


# Life


def test_it_lives_while_only_torch_refers_to_it() -> None:
    outside = from_cpp(adapt(rallypoint.HashStore()))
    copied = outside.clone()
    gc.collect()
    copied.set("k", "v")
    assert outside.get("k") == b"v"


def test_a_closed_adapter_is_freed() -> None:
    closed = adapt(rallypoint.HashStore())
    gone = weakref.ref(closed)
    closed.close()
    with pytest.raises(rallypoint.StoreClosed):
        closed.get("k")
    del closed
    gc.collect()
    assert gone() is None


def test_a_clone_shares_the_store(torch_store: Any) -> None:
    copied = torch_store.clone()
    copied.set("k", "v")
    assert torch_store.get("k") == b"v" and type(copied) is type(torch_store)
    copied.close()
    assert torch_store.get("k") == b"v"


def test_it_cannot_be_pickled_or_copied(torch_store: Any) -> None:
    for leave in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError):
            leave(torch_store)


def test_only_a_store_of_ours_is_adapted() -> None:
    dist = importlib.import_module("torch.distributed")

    with pytest.raises(TypeError, match="HashStore"):
        adapt(dist.HashStore())


def test_threads_that_wait_in_cpp_do_not_block_others() -> None:
    store = rallypoint.HashStore()
    outside = from_cpp(adapt(store))
    seen: list[bytes] = []
    waiting = [threading.Thread(target=lambda: seen.append(outside.get("late"))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    deadline = Deadline(AMPLE)
    while store.statistics().waiters < 4 and not deadline.expired():
        outside.check(["late"])
    assert not seen
    outside.set("late", "now")
    for thread in waiting:
        thread.join(AMPLE.total_seconds())
    assert seen == [b"now"] * 4


def test_torchs_own_recipes_run_on_it(torch_store: Any) -> None:
    from torch.distributed.elastic.utils import store as recipes

    got: dict[int, list[bytes]] = {}

    def take_part(rank: int) -> None:
        mine = torch_store.clone()
        recipes.barrier(mine, 3, "first", barrier_timeout=60, rank=rank)
        got[rank] = recipes.synchronize(mine, str(rank).encode(), rank, 3, "all", timeout=60)
        mine.close()

    ranks = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(AMPLE.total_seconds())
    assert got == {rank: [b"0", b"1", b"2"] for rank in range(3)}
    with pytest.raises(rallypoint.StoreError), recipes.store_timeout(torch_store, 0.05):
        recipes.barrier(torch_store, 2, "second", barrier_timeout=0.05)


def be_interrupted(port: int) -> str:
    outside = from_cpp(adapt(rallypoint.TCPStore("127.0.0.1", port)))
    try:
        outside.wait(["never"])
    except KeyboardInterrupt:
        outside.set("after", "")
        return "interrupted"
    return "not interrupted"


def test_ctrl_c_interrupts_a_wait_in_cpp(server: rallypoint.Server, interrupted: Callable[..., Any]) -> None:
    assert interrupted(be_interrupted, server.port) == "interrupted"
    assert rallypoint.TCPStore("127.0.0.1", server.port).list_keys() == ["cpp/after"]


def test_without_torch_it_says_what_to_install() -> None:
    hide = "import sys; sys.modules['torch'] = None; import rallypoint.torch"
    run = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "ImportError: rallypoint.torch needs PyTorch" in run.stderr and "pip install torch" in run.stderr
