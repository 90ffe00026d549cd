"""The kinds of store that the suite runs on: one line each, in `BARE`; the others are the same, seen through a prefix.

A kind's `world` sets up what its stores need, such as a directory or a server, and yields a function that returns the
`Place` of a new, empty store. A place opens any number of handles; `url` opens it in other processes, and is None if
they cannot.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.etcd.fixtures import etcd_space, shared_cluster
from tests.raw_peer import http

from rallypoint import FileStore, HashStore, PrefixStore, Relay, Server, Store, TCPStore, connect


@dataclass(frozen=True)
class Place:
    """Where one store is: how to open it in this process, and its URL for others."""

    open: Callable[[], Store]
    url: str | None


StoreFactory = Callable[[Path], contextlib.AbstractContextManager[Callable[[], Place]]]


@dataclass(frozen=True)
class Kind:
    """One kind of store."""

    name: str
    world: StoreFactory
    shared: bool
    """Whether other processes can open it."""
    prefix: str = ""
    needs: str = ""
    """The outside part that it needs (see tests/conftest.py)."""

    def __str__(self) -> str:
        return f"{self.name}-prefix" if self.prefix else self.name


@contextlib.contextmanager
def hash_world(_: Path) -> Iterator[Callable[[], Place]]:
    def fresh() -> Place:
        return Place(HashStore().clone, None)

    yield fresh


@contextlib.contextmanager
def file_world(folder: Path) -> Iterator[Callable[[], Place]]:
    numbers = itertools.count()

    def fresh() -> Place:
        path = folder / f"store-{next(numbers)}"
        return Place(lambda: FileStore(str(path)), f"file://{path}")

    yield fresh


@contextlib.contextmanager
def tcp_world(_: Path) -> Iterator[Callable[[], Place]]:
    """One server for all places of a test: a caller that takes a new place has emptied the last one."""
    with Server() as server:
        yield lambda: Place(lambda: TCPStore("127.0.0.1", server.port), server.url)


@functools.cache
def shared_replicated() -> tuple[str, Server]:
    """Return the URL of a store in etcd and its server, shared by all tests of this process."""
    url = etcd_space(shared_cluster())
    server = Server(storage=url)
    atexit.register(server.close)
    return url, server


@contextlib.contextmanager
def replicated_world(_: Path) -> Iterator[Callable[[], Place]]:
    """One store in etcd for all tests, emptied before each; handles use its URL and the server's in turn."""
    url, server = shared_replicated()
    with connect(server.url) as store:
        store.delete_prefix("")
    ways = itertools.cycle((url, server.url))
    yield lambda: Place(lambda: connect(next(ways)), url)


_worlds = itertools.count(1)


@contextlib.contextmanager
def rounds_at(port: int) -> Iterator[Callable[[], Place]]:
    """Every place is a new round of one run, at a relay."""
    address = ("127.0.0.1", port)
    name = f"/rounds/{next(_worlds)}"
    rounds = itertools.count(1)

    def fresh() -> Place:
        answer = http(address, f"PUT {name}/{next(rounds)} HTTP/1.0\r\n\r\n".encode())
        opened = json.loads(answer.partition(b"\r\n\r\n")[2])["port"]
        return Place(lambda: TCPStore("127.0.0.1", opened), f"tcp://127.0.0.1:{opened}")

    try:
        yield fresh
    finally:
        http(address, f"DELETE {name} HTTP/1.0\r\n\r\n".encode())


@functools.cache
def shared_relay() -> Relay:
    """Return a relay and its server, shared by all tests of this process."""
    server = Server()
    atexit.register(server.close)
    relay = Relay(server.url)
    atexit.register(relay.close)
    return relay


def relay_world(_: Path) -> contextlib.AbstractContextManager[Callable[[], Place]]:
    """One relay for all tests: every place is a new round at it."""
    return rounds_at(shared_relay().port)


def prefixed(kind: Kind) -> Kind:
    """Return the same kind, seen through a prefix."""

    @contextlib.contextmanager
    def world(folder: Path) -> Iterator[Callable[[], Place]]:
        with kind.world(folder) as bare:

            def fresh() -> Place:
                place = bare()
                url = None if place.url is None else f"{place.url}?prefix=jöb/7"
                return Place(lambda: PrefixStore("jöb/7", place.open()), url)

            yield fresh

    return replace(kind, world=world, prefix="jöb/7")


BARE = [
    Kind("hash", hash_world, shared=False),
    Kind("file", file_world, shared=True),
    Kind("tcp", tcp_world, shared=True),
    Kind("relay", relay_world, shared=True),
    Kind("replicated", replicated_world, shared=True, needs="etcd"),
]
KINDS = [*BARE, prefixed(BARE[0])]
"""Kinds for most tests: a prefix is the same view of every kind, so one prefixed kind is enough."""

EVERY_VIEW = [*BARE, *(prefixed(kind) for kind in BARE if kind.name not in ("relay", "replicated"))]
"""Kinds for the slowest test. Prefixes of relay and replicated stores are omitted: their client is that of tcp."""
