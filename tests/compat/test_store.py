"""synchronize, get_all and barrier on our stores and PyTorch's, also mixed with callers of PyTorch's functions."""

from __future__ import annotations

import functools
import inspect
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.ports import reserve_port

import rallypoint
from rallypoint import compat
from rallypoint.compat import store as ours
from rallypoint.deadline import Deadline
from rallypoint.errors import NetworkError, StoreTimeout

AMPLE_S = 60.0
BRIEF_S = 0.3
START_S = 1.0
"""Timeout of callers that start together: long enough for all threads to arrive."""
ONLY_OURS = ["hash", "file", "tcp", "prefix"]
THEIRS = [
    pytest.param(kind, marks=pytest.mark.needs("torch"))
    for kind in ("torch-hash", "torch-file", "torch-tcp", "torch-prefix", "torch-on-ours")
]
KINDS = ONLY_OURS + THEIRS

Opener = Callable[[], Any]


def opener(kind: str, path: Path, stack: ExitStack) -> Opener:
    """Return a function that opens one more handle on the same new store."""
    if kind == "tcp":
        server = stack.enter_context(rallypoint.Server())
        return lambda: stack.enter_context(rallypoint.connect(server.url))
    if kind == "file":
        return lambda: stack.enter_context(rallypoint.FileStore(str(path / "store")))
    if kind in ("hash", "prefix"):
        store = rallypoint.HashStore()
        return lambda: rallypoint.PrefixStore("job", store) if kind == "prefix" else store
    return torch_opener(kind, path, stack)


def torch_opener(kind: str, path: Path, stack: ExitStack) -> Opener:
    import torch.distributed as dist

    if kind == "torch-file":
        return lambda: dist.FileStore(str(path / "store"), -1)
    if kind == "torch-on-ours":
        port = stack.enter_context(rallypoint.Server()).port
        return lambda: dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    if kind == "torch-tcp":
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stack.callback(lambda: host)  # it serves as long as it is referenced
        return lambda: dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False)
    store = dist.HashStore()
    return lambda: dist.PrefixStore("job", store) if kind == "torch-prefix" else store


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_store(request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack) -> Opener:
    return opener(request.param, tmp_path, stack)


on = pytest.mark.parametrize("open_store", KINDS, indirect=True)
on_hash = pytest.mark.parametrize("open_store", ["hash", THEIRS[0]], indirect=True)


def together(calls: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Make all calls at once, in threads; return each result or error."""
    outcomes: dict[Any, Any] = {}

    def run(name: Any, call: Callable[[], Any]) -> None:
        try:
            outcomes[name] = call()
        except Exception as error:
            outcomes[name] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE_S)
    assert len(outcomes) == len(calls), f"only {list(outcomes)} came back"
    return outcomes


def each(ranks: Iterable[int], call: Callable[[int], Any]) -> dict[int, Any]:
    """Make the call at once for every rank."""
    return together({rank: functools.partial(call, rank) for rank in ranks})


def until(true: Callable[[], bool]) -> None:
    """Poll until the condition holds: PyTorch's stores notify nobody of it."""
    deadline, pause = Deadline(AMPLE_S), threading.Event()
    while not true():
        assert not deadline.expired()
        pause.wait(0.005)


def missed(call: Callable[[], Any]) -> Any:
    """Return the BarrierTimeout that a call must raise."""
    with pytest.raises(ours.BarrierTimeout) as caught:
        call()
    return caught.value


def keys(store: Any) -> list[str]:
    return sorted(key for key in store.list_keys() if key != "efcount/")


# All ranks arrive


@on
def test_synchronize_returns_all_values_to_every_rank(open_store: Opener) -> None:
    stores = [open_store() for _ in range(4)]
    given = [b"0", b"\0\xff", b"2", b"three" * 1000]
    got = each(range(4), lambda r: ours.synchronize(stores[r], given[r], r, 4, "data", AMPLE_S))
    assert got == dict.fromkeys(range(4), given)
    assert keys(stores[0]) == [
        "data/finished/last_member",
        "data/finished/num_members",
        *(f"data{r}" for r in range(4)),
    ]


@on
def test_rank_0_returns_last(open_store: Opener) -> None:
    host, other = open_store(), open_store()
    host.set("v0", "a")
    host.set("v1", "b")
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(ours.get_all(host, 0, "v", 2)), daemon=True)
    thread.start()
    until(lambda: other.check(["v/finished/num_members"]))
    assert thread.is_alive() and not got
    assert ours.get_all(other, 1, "v", 2) == [b"a", b"b"]
    thread.join(AMPLE_S)
    assert got == [[b"a", b"b"]]


@on
def test_a_barrier_opens_when_all_have_arrived(open_store: Opener) -> None:
    stores = [open_store() for _ in range(3)]
    waiting = threading.Thread(target=ours.barrier, args=(stores[0], 3, "b", AMPLE_S, 0), daemon=True)
    waiting.start()
    until(lambda: stores[1].check(["b/num_members"]))
    assert waiting.is_alive() and not stores[1].check(["b/last_member"])
    calls = {
        1: lambda: ours.barrier(stores[1], 3, "b", AMPLE_S),
        2: lambda: ours.barrier(stores[2], 3, "b", AMPLE_S, 2),
    }
    assert together(calls) == {1: None, 2: None}
    waiting.join(AMPLE_S)
    assert not waiting.is_alive()
    ours.barrier(stores[0], 3, "b", 0)  # a later caller finds it open


# Some rank is missing


@on
def test_every_caller_names_all_missing_ranks(open_store: Opener) -> None:
    here, size = (0, 3, 4), 24
    stores = {rank: open_store() for rank in here}
    before = {rank: store.timeout for rank, store in stores.items()}
    errors = each(here, lambda rank: ours.barrier(stores[rank], size, "b", START_S, rank, lambda r: f"node{r:02}"))
    absent = tuple(rank for rank in range(size) if rank not in here)
    names = [f"node{rank:02}" for rank in absent]
    assert len(names) > 16, "PyTorch stops at 16"
    for rank, error in errors.items():
        assert isinstance(error, ours.BarrierTimeout)
        assert (error.rank, error.key_prefix, error.world_size, error.timeout_s) == (rank, "b", size, START_S)
        assert error.missing_ranks == absent and error.missing == tuple(names)
        assert str(error) == (
            f"Timed out waiting on barrier on rank {rank}, for key prefix: b "
            f"(world_size={size}, missing_ranks=[{', '.join(names)}], timeout={START_S})"
        )
    assert {rank: store.timeout for rank, store in stores.items()} == before


@on_hash
def test_a_missing_rank_0_is_named(open_store: Opener) -> None:
    store = open_store()
    assert missed(lambda: ours.barrier(store, 2, "b", BRIEF_S, rank=1)).missing == ("0",)


@on
def test_without_a_rank_the_error_counts_the_arrived(open_store: Opener) -> None:
    store = open_store()
    error = missed(lambda: ours.barrier(store, 2, "b", BRIEF_S))
    assert str(error) == "Timed out waiting on barrier, for key prefix: b (world_size=2, arrived=1, timeout=0.3)"
    assert error.rank is None and error.missing_ranks == () and error.arrived == 1


@on
def test_barrier_timeout_is_caught_as_the_store_s_own_error(open_store: Opener) -> None:
    store = open_store()
    with pytest.raises(RuntimeError) as own:
        store.wait(["nothing"], timedelta(seconds=0.01))
    error = missed(lambda: ours.barrier(store, 2, "b", BRIEF_S, rank=0))
    assert isinstance(error, type(own.value))
    assert isinstance(error, compat.DistStoreError) and isinstance(error, TimeoutError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ours.BarrierTimeout and vars(again) == vars(error) and str(again) == str(error)


@on
def test_synchronize_raises_the_store_s_own_timeout(open_store: Opener) -> None:
    store = open_store()
    before = store.timeout
    with pytest.raises(RuntimeError) as own:
        store.wait(["nothing"], timedelta(seconds=0.01))
    with pytest.raises(RuntimeError) as caught:
        ours.synchronize(store, b"x", 0, 2, "s", BRIEF_S)
    assert type(caught.value) is type(own.value)
    assert store.timeout == before
    store.set("s1", "y")
    with pytest.raises(RuntimeError) as caught:  # all values are there, but rank 1 has not read them
        ours.synchronize(store, b"x", 0, 2, "s", BRIEF_S)
    assert type(caught.value) is type(own.value)
    stores = [open_store(), open_store()]
    got = each(range(2), lambda r: ours.synchronize(stores[r], b"xy"[r : r + 1], r, 2, "s", AMPLE_S))
    assert got == {0: [b"x", b"y"], 1: [b"x", b"y"]}, "a rank may repeat the call with the same value"


def test_a_timeout_of_synchronize_names_the_missing_keys() -> None:
    with pytest.raises(StoreTimeout) as caught:
        ours.synchronize(rallypoint.HashStore(), b"x", 0, 3, "s", 0.01)
    assert caught.value.missing == ("s1", "s2")


@on
def test_a_rank_that_gave_up_is_not_counted_and_may_retry(open_store: Opener) -> None:
    store = open_store()
    assert missed(lambda: ours.barrier(store, 2, "b", BRIEF_S, rank=0)).missing == ("1",)
    error = missed(lambda: ours.barrier(store, 2, "b", BRIEF_S, rank=1))
    assert error.missing == ("0",), "rank 0 has given up"
    stores = [open_store(), open_store()]
    assert each(range(2), lambda r: ours.barrier(stores[r], 2, "b", AMPLE_S, r)) == {
        0: None,
        1: None,
    }


@on_hash
def test_a_timeout_of_zero_passes_only_an_open_barrier(open_store: Opener) -> None:
    store = open_store()
    assert missed(lambda: ours.barrier(store, 2, "b", 0, rank=0, trace_timeout=0)).missing == ("1",)
    ours.barrier(store, 1, "alone", 0)


@on_hash
def test_a_failing_decoder_still_names_the_rank(open_store: Opener) -> None:
    store = open_store()
    error = missed(lambda: ours.barrier(store, 3, "b", 0.01, 0, {1: "alice"}.__getitem__))
    assert error.missing == ("alice", "2 (the decoder raised KeyError)")
    with pytest.raises(AssertionError):
        ours.barrier(store, 2, "b", BRIEF_S, rank_tracing_decoder=str)
    assert not store.check(["b2/TRACE"])


def test_a_lost_server_is_not_a_barrier_timeout() -> None:
    with rallypoint.Server(grace=0.1) as server, rallypoint.connect(server.url) as one:
        outcome: dict[str, Any] = {}

        def kill() -> None:
            with rallypoint.connect(server.url) as other:
                other.wait(["b/num_members"], AMPLE_S)
            server.close()

        outcome = together({"waiter": lambda: ours.barrier(one, 2, "b", AMPLE_S, 0), "killer": kill})
        assert isinstance(outcome["waiter"], NetworkError)
        assert not isinstance(outcome["waiter"], ours.BarrierTimeout)


def test_an_interrupted_caller_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    store = rallypoint.HashStore()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ours.barrier(store, 2, "b", AMPLE_S, rank=0)
    assert store.get("b/num_members") == b"0" and store.get("b0/TRACE") == b"gone"


@on
def test_store_timeout_restores_the_timeout(open_store: Opener) -> None:
    store = open_store()
    before = store.timeout
    with ours.store_timeout(store, 7):
        assert store.timeout == timedelta(seconds=7)
    assert store.timeout == before
    with pytest.raises(KeyError), ours.store_timeout(store, timeout=1.5):
        raise KeyError
    assert store.timeout == before


# Beside PyTorch's own functions


@pytest.mark.needs("torch")
def test_signatures_equal_pytorch_s() -> None:
    from torch.distributed.elastic.utils import store as theirs

    for name in theirs.__all__:
        mine, other = (inspect.signature(getattr(module, name)).parameters for module in (ours, theirs))
        assert [(p.name, p.default, p.kind) for p in mine.values()] == [
            (p.name, p.default, p.kind) for p in other.values()
        ]


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("open_store", THEIRS, indirect=True)
def test_our_callers_and_pytorch_s_meet(open_store: Opener, first: str) -> None:
    from torch.distributed.elastic.utils import store as theirs

    of = [ours, theirs, theirs, ours] if first == "ours" else [theirs, theirs, ours, ours]
    stores = [open_store() for _ in of]
    got = each(range(4), lambda r: of[r].synchronize(stores[r], b"%d" % r, r, 4, "s", AMPLE_S))
    assert got == {rank: [b"0", b"1", b"2", b"3"] for rank in range(4)}
    got = each(range(4), lambda r: of[r].barrier(stores[r], 4, "b", AMPLE_S, rank=r))
    assert got == dict.fromkeys(range(4))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("open_store", ["torch-hash", "torch-tcp"], indirect=True)
def test_our_callers_and_pytorch_s_name_the_same_missing_ranks(open_store: Opener, first: str) -> None:
    from torch.distributed.elastic.utils import store as theirs

    of = [ours, theirs, ours, theirs] if first == "ours" else [theirs, ours, theirs, ours]
    stores = [open_store() for _ in of]
    errors = each(range(4), lambda r: of[r].barrier(stores[r], 5, "b", 2.0, r, lambda n: f"n{n}", 1.5))
    for rank in {0, *(rank for rank in range(4) if of[rank] is ours)}:
        assert "missing_ranks=[n4]" in str(errors[rank]), rank
    for rank in (rank for rank in range(1, 4) if of[rank] is theirs):
        assert "check rank 0 (n0)" in str(errors[rank])


def scene(module: Any, open_store: Opener) -> tuple[dict[str, Any], dict[int, Any]]:
    """Synchronize and pass a barrier, then time out at a barrier with a missing rank; return results and errors."""
    stores = [open_store() for _ in range(3)]
    values = each(range(3), lambda r: module.synchronize(stores[r], b"v%d" % r, r, 3, "s", AMPLE_S))
    passed = each(range(3), lambda r: module.barrier(stores[r], 3, "b", AMPLE_S))
    left = {key: stores[0].get(key) for key in keys(stores[0]) if not key.endswith("last_member")}
    late = each(range(2), lambda r: module.barrier(stores[r], 3, "late", 1.0, r, trace_timeout=1))
    return {"values": values, "passed": passed, "left": left, "keys": keys(stores[0])}, late


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["torch-hash", "torch-tcp", "torch-file"])
def test_our_functions_have_the_same_results_and_keys_as_pytorch_s(kind: str, tmp_path: Path, stack: ExitStack) -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.utils import store as theirs

    (tmp_path / "theirs").mkdir()
    seen, late = scene(theirs, opener(kind, tmp_path / "theirs", stack))
    our_seen, our_late = scene(ours, opener(kind, tmp_path, stack))
    if kind == "torch-file":  # where PyTorch's function names no ranks
        assert {type(error) for error in late.values()} == {RuntimeError}
        assert set(our_seen.pop("keys")) - set(seen.pop("keys")) == {"late/TRACING_GATE", "late0/TRACE", "late1/TRACE"}
    else:
        assert all(isinstance(error, dist.DistStoreError) for error in [*late.values(), *our_late.values()])
        assert str(our_late[0]) == str(late[0])
        assert str(our_late[1]) == str(late[0]).replace("on rank 0", "on rank 1")
    assert our_seen == seen


# In processes: rank 0 hosts the store and exits after its timeout

MEMBER = """
import sys
from rallypoint.compat import store as ours
kind, port, rank, size = sys.argv[1], *map(int, sys.argv[2:])
if kind == "torch":
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
else:
    from rallypoint import TCPStore
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
print(ours.synchronize(store, b"v%d" % rank, rank, size, "start", 60), flush=True)
try:
    ours.barrier(store, size + 1, "b", 1, rank, "host{}".format)
except ours.BarrierTimeout as error:
    print(error.rank, error.missing_ranks, error.missing, flush=True)
"""


@pytest.mark.parametrize("kind", ["ours", pytest.param("torch", marks=pytest.mark.needs("torch"))])
def test_the_host_of_the_store_leaves_last(kind: str) -> None:

    port, size = reserve_port(), 3
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, kind, str(port), str(rank), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank, member in enumerate(members):
            out, errors = member.communicate(timeout=AMPLE_S)
            assert member.returncode == 0, errors
            assert out.splitlines() == ["[b'v0', b'v1', b'v2']", f"{rank} (3,) ('host3',)"]
    finally:
        for member in members:
            if member.poll() is None:
                member.send_signal(signal.SIGKILL)
                member.communicate()


def test_rank_0_waits_only_trace_timeout_for_a_dead_rank() -> None:
    store = rallypoint.HashStore()
    store.set("b1/TRACE", "here")  # arrived, was counted, and was killed
    store.add("b/num_members", 1)
    began_at = time.monotonic()
    assert missed(lambda: ours.barrier(store, 3, "b", 0.01, rank=0, trace_timeout=0.2)).missing == ("2",)
    assert time.monotonic() - began_at < AMPLE_S / 2
