"""A server whose disk is really full: changes are refused, reads and waits continue, and space brings changes back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.raw_peer import until
from tests.storage.small_disk import take_all, tmpfs

import rallypoint
from rallypoint.errors import DiskFull

from .durable import AMPLE_S

pytestmark = pytest.mark.needs("tmpfs")

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", 16 * MIB):
        yield tmp_path / "disk"


def refused(store: rallypoint.Store, key: str, value: bytes) -> DiskFull | None:
    """Set a key; return why it was refused, if it was."""
    try:
        store.set(key, value)
    except DiskFull as error:
        return error
    return None


def fill(store: rallypoint.Store, size: int) -> int:
    """Set new keys until one is refused; return how many were not."""
    done = 0
    while (error := refused(store, f"fill/{done}", bytes(size))) is None:
        done += 1
    assert "cannot grow: No space left on device" in str(error)
    return done


def await_room(store: rallypoint.Store) -> None:
    """Try a change again and again until it is accepted."""
    until(lambda: refused(store, "works", bytes(100 * KIB)), lambda error: error is None)


def test_changes_are_refused_and_reads_and_waits_go_on(point: Path) -> None:
    with rallypoint.Server(data_dir=point / "data") as server, ThreadPoolExecutor(2) as pool:
        store, other = (rallypoint.connect(server.url, timeout=AMPLE_S) for _ in range(2))
        store.set("before", "kept")
        waits = pool.submit(other.get, "after")
        others = take_all(point)
        done = fill(store, 4 * KIB)
        for _ in range(3):
            with pytest.raises(DiskFull):
                store.add("count", 1)
        assert store.get("before") == b"kept" and not store.check(["count"])
        assert all(store.get(f"fill/{index}") == bytes(4 * KIB) for index in range(done))
        with rallypoint.connect(server.url, timeout=AMPLE_S) as late:
            assert late.get("before") == b"kept", "clients can connect and leave"
        assert not waits.done()
        others.unlink()
        await_room(store)
        store.set("after", "room")
        assert waits.result(AMPLE_S) == b"room"
        assert store.add("count", 1) == 1, "refused additions have no effect"
        for each in (store, other):
            each.close()


def test_a_server_with_a_full_disk_can_be_restarted_and_read(point: Path) -> None:
    """Repeatedly, even if other files take the space in between."""
    with rallypoint.Server(data_dir=point / "data") as server, rallypoint.connect(server.url) as store:
        store.set("before", "kept")
        others = take_all(point)
        fill(store, KIB)
    for _ in range(3):
        take_all(point)
        with rallypoint.Server(data_dir=point / "data") as server, rallypoint.connect(server.url) as store:
            assert store.get("before") == b"kept"
            with pytest.raises(DiskFull):
                store.set("more", bytes(100 * KIB))
    others.unlink()
    with rallypoint.Server(data_dir=point / "data") as server, rallypoint.connect(server.url) as store:
        await_room(store)
        assert store.get("before") == b"kept"


def test_one_key_set_again_and_again_does_not_fill_the_disk(point: Path) -> None:
    with rallypoint.Server(data_dir=point / "data") as server, rallypoint.connect(server.url, timeout=AMPLE_S) as store:
        for index in range(64):
            overwrite = functools.partial(refused, store, "only", b"%d" % index + bytes(MIB))
            until(overwrite, lambda error: error is None)
        assert store.get("only").startswith(b"63")
        facts = server.statistics()["storage"]
        assert facts["compactions"] > 1 and facts["failed_compactions"] == 0
    with rallypoint.Server(data_dir=point / "data") as server, rallypoint.connect(server.url) as store:
        assert store.get("only").startswith(b"63")
