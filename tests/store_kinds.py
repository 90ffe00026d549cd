"""The stores that can host shared objects: our server, and every store that only has bytes. Fixtures to import."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.etcd.fixtures import etcd_space, shared_cluster

from rallypoint import FileStore, HashStore, PrefixStore, Server, TCPStore, connect
from rallypoint.recipes.hosting import heartbeat, local_session

AMPLE_S = 60.0
Open = Callable[[], Any]


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make all calls at once, each in a thread, and return what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(AMPLE_S) for future in [pool.submit(call) for call in calls]]


@contextlib.contextmanager
def on_our_server(_: Path) -> Iterator[Open]:
    with Server(grace=0.5) as server:
        yield lambda: TCPStore("127.0.0.1", server.port)


@contextlib.contextmanager
def under_a_prefix(_: Path) -> Iterator[Open]:
    with Server(grace=0.5) as server:
        yield lambda: PrefixStore("job/7", TCPStore("127.0.0.1", server.port))


@functools.cache
def replicated_server() -> tuple[str, Server]:
    """Return the URL of a store in etcd, and its server, which all tests of this process share."""
    url = etcd_space(shared_cluster())
    server = Server(storage=url, grace=0.5)
    atexit.register(server.close)
    return url, server


_prefixes = itertools.count(1)


@contextlib.contextmanager
def replicated(_: Path) -> Iterator[Open]:
    """A store in etcd, by its own URL and its server's in turn; every test has a prefix of it."""
    url, server = replicated_server()
    ways = itertools.cycle((url, server.url))
    prefix = f"test-{next(_prefixes)}"
    yield lambda: PrefixStore(prefix, connect(next(ways)))


@contextlib.contextmanager
def in_memory(_: Path) -> Iterator[Open]:
    yield HashStore().clone


@contextlib.contextmanager
def in_a_file(folder: Path) -> Iterator[Open]:
    with FileStore(str(folder / "store")):  # without an open handle, the file counts as abandoned
        yield lambda: FileStore(str(folder / "store"))


@contextlib.contextmanager
def on_torchs_server(_: Path) -> Iterator[Open]:
    dist = importlib.import_module("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: TCPStore("127.0.0.1", server.port)


@contextlib.contextmanager
def on_torchs_own_object(_: Path) -> Iterator[Open]:
    dist = importlib.import_module("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ample = timedelta(seconds=60)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=ample)


HOSTED = [on_our_server, under_a_prefix]
BYTES = [in_memory, in_a_file]
ETCD = [pytest.param(replicated, marks=pytest.mark.needs("etcd"), id="replicated")]
TORCHS = [
    pytest.param(kind, marks=pytest.mark.needs("torch"), id=kind.__name__)
    for kind in (on_torchs_server, on_torchs_own_object)
]


@pytest.fixture(params=[*HOSTED, *BYTES, *ETCD, *TORCHS])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """A function that opens another handle on one store."""
    with request.param(tmp_path) as opener:
        yield opener


@pytest.fixture
def quick_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the heartbeats on byte stores, so that a death is detected soon."""
    monkeypatch.setattr(local_session, "BEAT_S", 0.1)
    monkeypatch.setattr(heartbeat, "GRACE_S", 2.0)
    monkeypatch.setattr(heartbeat, "SLICE_S", 0.2)
