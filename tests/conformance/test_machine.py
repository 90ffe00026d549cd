"""Every kind of store against the model: the same random operations must have the same results and errors.

Two sessions on one store (a handle and its clone), and views of them through prefixes, take turns. Blocking calls have
a timeout of zero, so they return at once or time out. A watch must report every change.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from rallypoint import Lease, PrefixStore, Store

from .kinds import EVERY_VIEW, Kind, Place
from .model import LARGEST, SMALLEST, Model, Refused, View

LONG_ENOUGH_S = 60.0

FEW = st.sampled_from(["", "a", "p", "p/a", "p/q/a"])
ODD = st.sampled_from(["b", "a/b", "p/", "p/q", "pa", "/", "/a", "//", "init/", "ключ", "\0"])
KEYS = st.one_of(FEW, FEW, ODD, st.text(max_size=4))
LISTS = st.lists(st.one_of(FEW, KEYS), max_size=4)
NUMBERS = st.sampled_from(
    [b"0", b"7", b"-3", b" 12abc", b"\t+5", b"0x1", b"--1", b"-", b"1_0", b"\xd9\xa3"]
    + [str(edge).encode() for edge in (SMALLEST - 1, SMALLEST, LARGEST, LARGEST + 1)]
)
VALUES = st.one_of(st.sampled_from([b"", bytes(range(256)), b"x" * 3000]), NUMBERS, st.binary(max_size=8))
AMOUNTS = st.one_of(st.integers(-3, 3), st.sampled_from([SMALLEST, LARGEST]))
HANDLES = st.integers(0, 5)


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Make a call on the model, and return the result or error that a store must have."""
    try:
        return "answers", call(*arguments, **options)
    except Refused as error:
        return "raises", error.kind, error.fields


class Agreement(RuleBasedStateMachine):
    """Drives a store and a model side by side."""

    def __init__(self, kind: Kind, place: Place) -> None:
        super().__init__()
        self.kind, self.place, self.model = kind, place, Model()
        self.sessions = {"one": place.open()}
        self.sessions["two"] = self.sessions["one"].clone()
        self.leases: list[tuple[Lease, View]] = []
        self.queues: set[str] = set()
        self.watch = self.sessions["one"].watch()
        assert self.sessions["one"].list_keys() == []

    def handle(self, number: int) -> tuple[Store, View]:
        """Return one of several views of one of the sessions, and the same view of the model."""
        session = "two" if number % 2 else "one"
        store, prefix = self.sessions[session], ""
        for part in ([], ["p"], ["p", "q"])[number // 2]:
            store, prefix = PrefixStore(part, store), f"{prefix}{part}/"
        return store, View(self.model, prefix, session)

    def both(self, number: int, operation: str, *arguments: Any, **options: Any) -> Any:
        """Make the same call on the store and the model, and compare."""
        store, view = self.handle(number)
        call = getattr(store, operation)
        expected = outcome(getattr(view, operation), *arguments, **options)
        if expected[0] == "raises":
            _, kind, fields = expected
            with pytest.raises(kind) as caught:
                call(*arguments, **options)
            assert type(caught.value) is kind
            assert {name: getattr(caught.value, name) for name in fields} == fields
            answer = None
        else:
            answer = call(*arguments, **options)
            if operation != "lease":
                assert answer == expected[1]
                assert type(answer) is type(expected[1]) or isinstance(answer, tuple)
        self.see_changes()
        return answer

    def see_changes(self) -> None:
        """Take as many changes from the watch as the model has; they must be the same."""
        expected, self.model.changes = self.model.changes, []
        seen = [self.watch.next(LONG_ENOUGH_S) for _ in expected]
        reported = [(change.key, change.value) for change in seen]
        assert sorted(reported, key=itemgetter(0)) == sorted(expected, key=itemgetter(0))

    @rule(handle=HANDLES, key=KEYS, value=VALUES)
    def set(self, handle: int, key: str, value: bytes) -> None:
        self.both(handle, "set", key, value)

    @rule(handle=HANDLES, key=KEYS, timeout=st.sampled_from([0, 0.0]))
    def get(self, handle: int, key: str, timeout: float) -> None:
        self.both(handle, "get", key, timeout=timeout)

    @rule(handle=HANDLES, key=KEYS, amount=AMOUNTS)
    def add(self, handle: int, key: str, amount: int) -> None:
        self.both(handle, "add", key, amount)

    @rule(handle=HANDLES, key=KEYS, value=NUMBERS, amount=AMOUNTS)
    def add_to(self, handle: int, key: str, value: bytes, amount: int) -> None:
        self.both(handle, "set", key, value)
        self.both(handle, "add", key, amount)

    @rule(handle=HANDLES, key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, handle: int, key: str, expected: bytes, desired: bytes) -> None:
        self.both(handle, "compare_set", key, expected, desired)

    @rule(handle=HANDLES, key=KEYS, desired=VALUES)
    def compare_set_current_value(self, handle: int, key: str, desired: bytes) -> None:
        _, view = self.handle(handle)
        self.both(handle, "compare_set", key, self.model.values.get(view.prefix + key, b""), desired)

    @rule(handle=HANDLES, key=KEYS, expected=st.one_of(st.none(), VALUES), desired=VALUES)
    def swap(self, handle: int, key: str, expected: bytes | None, desired: bytes) -> None:
        self.both(handle, "swap", key, expected, desired)

    @rule(handle=HANDLES, key=KEYS, desired=VALUES)
    def swap_what_is_there(self, handle: int, key: str, desired: bytes) -> None:
        _, view = self.handle(handle)
        self.both(handle, "swap", key, self.model.values.get(view.prefix + key), desired)

    @rule(handle=HANDLES, key=KEYS, value=VALUES)
    def append(self, handle: int, key: str, value: bytes) -> None:
        self.both(handle, "append", key, value)

    @rule(handle=HANDLES, keys=LISTS)
    def check(self, handle: int, keys: list[str]) -> None:
        self.both(handle, "check", keys)

    @rule(handle=HANDLES, keys=LISTS)
    def wait(self, handle: int, keys: list[str]) -> None:
        self.both(handle, "wait", keys, timeout=0)

    @rule(handle=HANDLES, keys=LISTS)
    def multi_get(self, handle: int, keys: list[str]) -> None:
        self.both(handle, "multi_get", keys, timeout=0)

    @rule(handle=HANDLES, data=st.data())
    def read_existing_keys(self, handle: int, data: st.DataObject) -> None:
        keys = self.handle(handle)[1].list_keys()
        chosen = data.draw(st.lists(st.sampled_from(keys), max_size=4)) if keys else []
        self.both(handle, "wait", chosen, timeout=LONG_ENOUGH_S)
        self.both(handle, "multi_get", chosen, timeout=LONG_ENOUGH_S)

    @rule(handle=HANDLES, pairs=st.lists(st.tuples(KEYS, VALUES), max_size=4))
    def multi_set(self, handle: int, pairs: list[tuple[str, bytes]]) -> None:
        self.both(handle, "multi_set", [key for key, _ in pairs], [value for _, value in pairs])

    @rule(handle=HANDLES, key=KEYS)
    def delete_key(self, handle: int, key: str) -> None:
        self.both(handle, "delete_key", key)

    @rule(handle=HANDLES, prefix=st.sampled_from(["a", "p", "p/", "q/", "/", "i"]))
    def delete_prefix(self, handle: int, prefix: str) -> None:
        self.both(handle, "delete_prefix", prefix)

    @rule(handle=HANDLES)
    def count_and_list(self, handle: int) -> None:
        self.both(handle, "num_keys")
        self.both(handle, "list_keys")

    @rule(handle=HANDLES, key=KEYS, value=VALUES)
    def queue_push(self, handle: int, key: str, value: bytes) -> None:
        self.queues.add(self.handle(handle)[1].prefix + key)
        self.both(handle, "queue_push", key, value)

    @rule(handle=HANDLES, key=KEYS, block=st.booleans())
    def queue_pop(self, handle: int, key: str, block: bool) -> None:
        self.both(handle, "queue_pop", key, block, timeout=0)

    @precondition(lambda self: self.model.queues)
    @rule(data=st.data(), block=st.booleans())
    def queue_pop_existing_item(self, data: st.DataObject, block: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.queues)))
        self.both(0, "queue_pop", key, block, timeout=LONG_ENOUGH_S)

    @rule(handle=HANDLES, key=KEYS)
    def queue_len(self, handle: int, key: str) -> None:
        self.both(handle, "queue_len", key)

    @rule(handle=HANDLES, key=KEYS, world_size=st.integers(-1, 3))
    def barrier(self, handle: int, key: str, world_size: int) -> None:
        self.both(handle, "barrier", key, world_size, timeout=0)

    @rule(handle=HANDLES, key=KEYS, value=VALUES)
    def lease(self, handle: int, key: str, value: bytes) -> None:
        lease = self.both(handle, "lease", key, value)
        if lease is not None:
            self.leases.append((lease, self.handle(handle)[1]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, view = data.draw(st.sampled_from(self.leases))
        assert lease.release() == view.release(lease.key)
        self.see_changes()

    @rule()
    def close_one_session_and_open_another(self) -> None:
        self.sessions["two"].close()
        self.sessions["two"] = self.place.open()
        self.leases = [(lease, view) for lease, view in self.leases if view.session != "two"]
        self.model.end("two")
        self.see_changes()

    def teardown(self) -> None:
        """Compare the whole content, and empty the store even after a failure: the next example may reuse it."""
        try:
            for key in self.handle(1)[1].list_keys():
                self.both(1, "get", key)
                self.both(1, "delete_key", key)
            for name, items in list(self.model.queues.items()):
                for _ in tuple(items):
                    self.both(1, "queue_pop", name, False)
            self.both(1, "list_keys")
            if self.watch is not None:
                self.both(1, "set", "no other change is reported", b"")
        finally:
            for session in self.sessions.values():
                session.close()
            with self.place.open() as store:
                for key in store.list_keys():
                    store.delete_key(key)
                for name in self.queues:
                    for _ in range(store.queue_len(name)):
                        store.queue_pop(name, False)


@pytest.mark.parametrize("kind", EVERY_VIEW, ids=str)
def test_random_operations_agree_with_the_model(kind: Kind, tmp_path: Path) -> None:
    with kind.world(tmp_path) as fresh:

        class OnNewStore(Agreement):
            def __init__(self) -> None:
                super().__init__(kind, fresh())

        run_state_machine_as_test(
            OnNewStore, settings=settings(max_examples=100, stateful_step_count=40, report_multiple_bugs=False)
        )
