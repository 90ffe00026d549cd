"""Leases and watches: keys that end with their owner, and notifications of changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from rallypoint import Change, PrefixStore, Store, StoreClosed, StoreTimeout

from .calls import LONG_ENOUGH_S, Call, Child, until
from .kinds import KINDS, Place


@pytest.fixture
def owner(place: Place) -> Iterator[Store]:
    """A second handle on the store, with its own leases."""
    with place.open() as owner:
        yield owner


# Leases


def test_a_leased_key_is_a_key(store: Store, owner: Store) -> None:
    call = Call(store.get, "k").blocked()
    lease = owner.lease("k", "v")
    assert call.result() == b"v"
    assert (lease.key, store.list_keys(), store.check(["k"])) == ("k", ["k"], True)
    assert "'k'" in repr(lease)


def test_a_lease_ends_by_release_and_with_its_block(store: Store, owner: Store) -> None:
    lease = owner.lease("k", "v")
    assert lease.release() is True
    assert lease.release() is False
    assert not store.check(["k"])
    with owner.lease("k", "v"):
        assert store.get("k") == b"v"
    assert not store.check(["k"])
    assert owner.delete_key("k") is False


def test_leases_end_with_their_handle(store: Store, place: Place) -> None:
    owner = place.open()
    owner.set("plain", "")
    owner.lease("k", "1")
    PrefixStore("p", owner).lease("k", "2")
    assert sorted(store.list_keys()) == ["k", "p/k", "plain"]
    owner.close()
    until(lambda: store.list_keys() == ["plain"])


def test_a_clone_has_its_own_leases(store: Store, owner: Store) -> None:
    other_handle = owner.clone()
    other_handle.lease("clone's", "")
    owner.lease("owner's", "")
    other_handle.close()
    until(lambda: store.list_keys() == ["owner's"])


TAKEOVERS: dict[str, Callable[[Store], object]] = {
    "set": lambda s: s.set("k", "2"),
    "add": lambda s: s.add("k", 1),
    "append": lambda s: s.append("k", "2"),
    "compare_set": lambda s: s.compare_set("k", "1", "2"),
    "swap": lambda s: s.swap("k", "1", "2"),
    "multi_set": lambda s: s.multi_set(["k"], ["2"]),
    "lease": lambda s: s.lease("k", "2"),
}


@pytest.mark.parametrize("writer", TAKEOVERS)
def test_a_later_write_ends_the_lease_of_the_key(store: Store, place: Place, writer: str) -> None:
    owner = place.open()
    lease = owner.lease("k", "1")
    TAKEOVERS[writer](store)
    assert lease.release() is False
    owner.close()
    assert store.check(["k"])


def test_a_failed_write_keeps_the_lease_of_the_key(store: Store, place: Place) -> None:
    owner = place.open()
    owner.lease("k", "1")
    store.compare_set("k", "other", "2")
    store.swap("k", None, "2")
    owner.close()
    until(lambda: not store.check(["k"]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.shared], ids=str, indirect=True)
def test_a_lease_ends_with_its_process(store: Store, place: Place) -> None:
    assert place.url is not None
    child = Child(place.url, "lease", "k")
    assert child.next_result() == "leased"
    assert store.get("k", timeout=0) == str(child.process.pid).encode()
    child.process.kill()
    child.process.communicate()
    until(lambda: not store.check(["k"]))


# Watches


def test_a_watch_reports_every_change_in_order(store: Store, owner: Store) -> None:
    store.set("job/0", "")
    with store.watch("job/") as watch:
        owner.set("job/a", "1")
        owner.set("other", "")
        owner.add("job/n", 5)
        store.append("job/a", "2")
        owner.multi_set(["job/b", "elsewhere", "job/c"], ["3", "", "4"])
        store.compare_set("job/a", "other", "no")
        owner.queue_push("job/q", "item")
        owner.delete_key("job/a")
        owner.delete_key("job/absent")
        owner.delete_prefix("job/b")
        changes = [watch.next(LONG_ENOUGH_S) for _ in range(7)]
        assert [(change.key, change.value) for change in changes] == [
            ("job/a", b"1"),
            ("job/n", b"5"),
            ("job/a", b"12"),
            ("job/b", b"3"),
            ("job/c", b"4"),
            ("job/a", None),
            ("job/b", None),
        ]
        revisions = [change.revision for change in changes]
        assert revisions == sorted(set(revisions))
        with pytest.raises(StoreTimeout):
            watch.next(0)


def test_a_watch_through_a_prefix_reports_keys_without_it(store: Store, owner: Store) -> None:
    view = PrefixStore("p", store)
    with view.watch() as everything, view.watch("a") as some:
        owner.set("p/ab", "1")
        owner.set("pa", "2")
        owner.set("p/b", "3")
        assert [everything.next(LONG_ENOUGH_S)[:2] for _ in range(2)] == [("ab", b"1"), ("b", b"3")]
        assert some.next(LONG_ENOUGH_S)[:2] == ("ab", b"1")
        with pytest.raises(StoreTimeout):
            some.next(0)


def test_a_change_wakes_a_blocked_watch(store: Store, owner: Store) -> None:
    with store.watch() as watch:
        call = Call(watch.next).blocked()
        owner.set("k", "v")
        change = call.result()
        assert isinstance(change, Change)
        assert change[:2] == ("k", b"v")
        owner.set("l", "")
        assert next(iter(watch)).key == "l"


def test_a_timeout_of_a_watch_names_its_prefix(store: Store) -> None:
    for timeout in (0, timedelta(0), 0.03, timedelta(milliseconds=30)):
        with store.watch("job/", timeout) as watch, pytest.raises(StoreTimeout) as caught:
            watch.next()
        assert (caught.value.operation, caught.value.keys) == ("watch", ("job/",))
    with pytest.raises(ValueError, match="negative"):
        store.watch("job/", -1)
    store.set_timeout(0)
    with store.watch() as watch, pytest.raises(StoreTimeout):
        watch.next()


def test_closing_a_watch_or_its_store_ends_a_blocked_next(store: Store, place: Place) -> None:
    watch = store.watch()
    call = Call(watch.next).blocked()
    watch.close()
    watch.close()
    assert isinstance(call.error(), StoreClosed)
    with pytest.raises(StoreClosed):
        watch.next()
    handle = place.open()
    watch = handle.watch()
    call = Call(watch.next).blocked()
    handle.close()
    assert isinstance(call.error(), StoreClosed)
    with pytest.raises(StoreClosed):
        watch.next()
    store.set("k", "v")


def test_a_watch_reports_the_end_of_a_lease(store: Store, place: Place) -> None:
    with store.watch("members/") as watch:
        owner = place.open()
        owner.lease("members/1", "here")
        assert watch.next(LONG_ENOUGH_S)[:2] == ("members/1", b"here")
        owner.close()
        assert watch.next(LONG_ENOUGH_S)[:2] == ("members/1", None)


def test_every_one_of_many_watches_reports_all_changes(store: Store, owner: Store) -> None:
    watches = [handle.watch(prefix) for handle in (store, owner) for prefix in ("", "k", "k/") for _ in range(5)]
    for number in range(20):
        owner.set("k/x", f"{number}")
    for watch in watches:
        assert [watch.next(LONG_ENOUGH_S).value for _ in range(20)] == [f"{n}".encode() for n in range(20)]
        watch.close()


def test_a_watch_reports_every_change_of_another_process(store: Store, place: Place) -> None:
    """A store of one process is written by another thread instead."""
    with store.watch() as watch:
        if place.url is None:
            Call(lambda: [store.add("n", 1) for _ in range(50)])
        else:
            Child(place.url, "add", "n", 50).ended()
        assert [watch.next(LONG_ENOUGH_S).value for _ in range(50)] == [f"{n}".encode() for n in range(1, 51)]
