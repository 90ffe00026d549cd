"""Our stores against PyTorch's: the same random histories have the same results, and every difference has its row.

A history is a list of calls, made on a PyTorch store and on our store of the same kind, with and without a prefix. A
call for which `row_of` names a row of differences.py is known to differ, and is made on neither. Every row is tested
separately, on PyTorch's stores and on ours.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint import FileStore, PrefixStore, Server

from .calls import LONG_ENOUGH_S, Call
from .differences import (
    BRIEF,
    CHANCE,
    FILE_ROWS,
    FOREVER,
    ROWS,
    SOCKET_ROWS,
    C10dSocket,
    FileRow,
    Row,
    SocketRow,
    outcome,
    page,
    prefixed,
)
from .kinds import BARE, Kind
from .model import LARGEST, SMALLEST, Model, Refused, View, number

needs_torch = pytest.mark.needs("torch")

ROOT = Path(__file__).resolve().parents[2]
NAMES = {row.name for row in ROWS}
TORCH = ["tcp", "hash", "file"]


@contextlib.contextmanager
def torch_stores(name: str, folder: Path) -> Iterator[Callable[[], Any]]:
    """Yield a factory of PyTorch stores of one kind; a TCPStore has its libuv server in this process."""
    import torch.distributed as dist

    numbers = itertools.count()
    patient = timedelta(seconds=LONG_ENOUGH_S)
    yield {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, None, True, timeout=patient, wait_for_workers=False),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(folder / f"torch-{next(numbers)}"), -1),
    }[name]


# Random histories

VOCABULARY = ["", "a", "b", "a/b", "p", "p/a", "pa", "/", "ключ", "\0", "n"]
KEYS = st.sampled_from(VOCABULARY)
LISTS = st.lists(KEYS, max_size=3)
VALUES = st.one_of(
    st.sampled_from([b"", b"0", b"7", b"-3", b" 12abc", b"\t+5", b"0x1", b"--1", b"twelve", bytes(range(256))]),
    st.sampled_from([str(edge).encode() for edge in (SMALLEST - 1, SMALLEST, LARGEST, LARGEST + 1)]),
    st.binary(max_size=6),
)
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.sampled_from(["get", "delete_key", "queue_len"]), KEYS),
    st.tuples(st.just("add"), KEYS, st.one_of(st.integers(-3, 3), st.sampled_from([SMALLEST, LARGEST]))),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.sampled_from(["append", "queue_push"]), KEYS, VALUES),
    st.tuples(st.sampled_from(["check", "wait", "multi_get"]), LISTS),
    st.lists(st.tuples(KEYS, VALUES), max_size=3).map(
        lambda pairs: ("multi_set", *map(list, zip(*pairs, strict=True)))
    ),
    st.tuples(st.just("queue_pop"), KEYS, st.booleans()),
    st.tuples(st.just("barrier"), KEYS, st.integers(0, 2)),
    st.sampled_from([("num_keys",), ("list_keys",)]),
).filter(lambda call: call != ("multi_set",))
HISTORIES = st.lists(st.tuples(st.booleans(), CALLS), max_size=30)


def row_of(torch: str, through: bool, call: tuple[Any, ...], view: View) -> str | None:
    """Name the row by which PyTorch's store differs, given the content of the store; None if it must agree."""
    operation, *arguments = call
    values, queues = view.model.values, view.model.queues
    if operation in ("num_keys", "list_keys"):
        by_prefix = {"num_keys": "prefix-num", "list_keys": "prefix-list"}
        return by_prefix[operation] if through else {"file": "num-own"}.get(torch)
    if operation.startswith("queue") and torch == "file":
        return "queues"
    name = view.prefix + arguments[0] if arguments and isinstance(arguments[0], str) else ""
    if operation in ("add", "barrier") and number(values.get(name, b"0")) is None:
        return "add-text" if values[name] else "add-empty"
    if operation == "barrier":
        if through or torch != "tcp":
            return "barrier-prefix-keys" if through else "barrier-keys"
        return None if wrapped_count(values.get(name, b"0")) >= arguments[1] else "barrier-timeout"
    if operation in ("get", "multi_get"):
        names = [name] if operation == "get" else [view.prefix + key for key in arguments[0]]
        if torch == "tcp" and any(name in queues and name not in values for name in names):
            return "get-queue"
    if operation == "queue_pop" and arguments[1] and name in values and name not in queues:
        return "pop-key"
    if operation == "delete_key" and torch == "file" and name not in values:
        return "delete-missing"
    if operation == "append" and torch == "file" and values.get(name) == arguments[1]:
        return "append-same"
    return None


def wrapped_count(value: bytes) -> int:
    count = number(value)
    assert count is not None
    return count + 1 if count < LARGEST else SMALLEST


def would_wait(call: tuple[Any, ...], view: View) -> bool:
    """Return whether the call would block now."""
    operation, *arguments = call
    values, queues = view.model.values, view.model.queues
    names = [
        view.prefix + key for key in (arguments[0] if arguments and isinstance(arguments[0], list) else arguments[:1])
    ]
    if operation in ("get", "multi_get"):
        return any(name not in values for name in names)
    if operation == "wait":
        return any(name not in values and name not in queues for name in names)
    return operation == "queue_pop" and bool(arguments[1]) and names[0] not in queues


def outcome_of(store: Any, call: tuple[Any, ...]) -> str:
    """Make a call and describe its outcome; results without an order are sorted."""
    operation, *arguments = call
    if operation == "list_keys":
        return outcome(lambda: sorted(store.list_keys()))
    return outcome(getattr(store, operation), *arguments)


@needs_torch
@pytest.mark.parametrize("name", TORCH)
def test_histories_have_the_same_results(name: str, tmp_path: Path) -> None:
    kind = next(kind for kind in BARE if kind.name == name)
    with kind.world(tmp_path) as fresh, fresh().open() as ours, torch_stores(name, tmp_path) as theirs_fresh:
        theirs = theirs_fresh()
        compare(name, (theirs, ours), (prefixed(theirs), PrefixStore("p", ours)), examples=150)


def compare(name: str, stores: tuple[Any, Any], through_prefix: tuple[Any, Any], examples: int) -> None:
    """Make the calls of random histories on PyTorch's store and ours, bare and through a prefix."""

    @settings(max_examples=examples)
    @given(HISTORIES)
    def run(history: list[tuple[bool, tuple[Any, ...]]]) -> None:
        model = Model()
        try:
            for through, call in history:
                views = through_prefix if through else stores
                step(name, views, View(model, "p/" if through else "", ""), through, call)
        finally:  # reuse the stores: a new PyTorch server may take 5 s to look up its caller in the DNS
            for store in stores:
                empty(store, model)

    run()


def empty(store: Any, model: Model) -> None:
    """Remove everything that a history may have left, even a failed one."""
    names = [*VOCABULARY, *(f"p/{key}" for key in VOCABULARY)]
    for key in names if model.values else ():
        store.delete_key(key)
    for key in names if model.queues else ():
        for _ in range(store.queue_len(key)):
            store.queue_pop(key, False)


def step(name: str, stores: tuple[Any, Any], view: View, through: bool, call: tuple[Any, ...]) -> None:
    """Make one call on both stores and the model, and compare; skip a call that is known to differ."""
    row = row_of(name, through, call, view)
    assert row is None or row in NAMES
    waits = would_wait(call, view)
    if row is not None or (waits and name == "file"):  # timeouts of PyTorch's FileStore take whole seconds
        return
    for store in stores:
        store.set_timeout(BRIEF if waits else timedelta(seconds=LONG_ENOUGH_S))
    theirs, ours = (outcome_of(store, call) for store in stores)
    assert theirs == ours
    assert (ours == "time-out") == waits
    with contextlib.suppress(Refused):
        getattr(view, call[0])(*call[1:])


# Rows


def check_row(row: Row, store: Any, expected: str) -> None:
    """Run the row's probe on a store; its outcome must be the expected one."""
    if expected == FOREVER:
        call = Call(outcome, row.probe, store).blocked("differences.py")
        store.clone().set("k", "")
        assert call.result() == "None", "it returned when the condition became true, and not before"
    elif expected == CHANCE:
        assert outcome(row.probe, store) in ("None", "time-out")
    else:
        assert outcome(row.probe, store) == expected


@needs_torch
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_holds_for_pytorch(row: Row, name: str, tmp_path: Path) -> None:
    with torch_stores(name, tmp_path) as fresh:
        check_row(row, fresh(), getattr(row, name))


@pytest.mark.parametrize("kind", BARE, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_holds_for_our_stores(row: Row, kind: Kind, tmp_path: Path) -> None:
    with kind.world(tmp_path) as fresh, fresh().open() as store:
        check_row(row, store, row.ours)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_a_difference(row: Row) -> None:
    assert {row.tcp, row.hash, row.file} != {row.ours}
    assert row.why


@needs_torch
@pytest.mark.parametrize("row", FILE_ROWS, ids=lambda row: row.name)
def test_a_row_about_files_holds(row: FileRow, tmp_path: Path) -> None:
    from torch.distributed import FileStore as Theirs

    assert row.probe(Theirs, str(tmp_path / "theirs")) == row.torch
    assert row.probe(FileStore, str(tmp_path / "ours")) == row.ours


@needs_torch
@pytest.mark.parametrize("row", SOCKET_ROWS, ids=lambda row: row.name)
def test_a_row_about_wakeups_holds(row: SocketRow, tmp_path: Path) -> None:
    with torch_stores("tcp", tmp_path) as fresh, Server() as server:
        theirs = fresh()
        for port, expected in ((theirs.port, row.torch), (server.port, row.ours)):
            sockets = C10dSocket(port), C10dSocket(port), C10dSocket(port)
            assert row.probe(*sockets) == expected
            for one in sockets:
                one.close()


def test_the_page_is_generated_from_the_rows() -> None:
    path = ROOT / "docs" / "differences.md"
    if os.environ.get("RALLYPOINT_REWRITE"):
        path.write_text(page())
    assert path.read_text() == page(), "RALLYPOINT_REWRITE=1 rewrites the page"
