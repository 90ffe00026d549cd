"""Invalid calls and limits: the error names the culprit, nothing changes, and the store stays usable."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import methodcaller
from typing import Any, NamedTuple

import pytest

from rallypoint import (
    LimitExceeded,
    NotAnInteger,
    PrefixStore,
    QueueEmpty,
    RallypointError,
    Store,
    StoreClosed,
    StoreError,
    StoreTimeout,
)

from .calls import Call
from .kinds import Kind, Place

MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_KEYS = 8191, 8 * 1024 * 1024, 131_072


class Bad(NamedTuple):
    """A call that must be refused, its error, and a text that the message must contain."""

    call: Callable[[Any], Any]
    """Gets a store, typed as Any since the calls are wrong on purpose."""
    error: type[Exception]
    names: str


NOT_KEYS: list[Any] = [5, b"k", None, ("k",)]
NOT_VALUES: list[Any] = [5, None, 1.5, ["v"]]

BAD = {
    **{f"set {key!r}": Bad(methodcaller("set", key, "v"), TypeError, repr(key)) for key in NOT_KEYS},
    **{f"set k to {value!r}": Bad(methodcaller("set", "k", value), TypeError, "'k'") for value in NOT_VALUES},
    "set a lone surrogate": Bad(lambda s: s.set("\ud800", "v"), ValueError, r"'\ud800'"),
    "set to a lone surrogate": Bad(lambda s: s.set("k", "\ud800"), ValueError, "'k'"),
    "get 5": Bad(lambda s: s.get(5), TypeError, "5"),
    "add to 5": Bad(lambda s: s.add(5, 1), TypeError, "5"),
    "add text": Bad(lambda s: s.add("n", "1"), TypeError, "'n'"),
    "add a fraction": Bad(lambda s: s.add("n", 1.0), TypeError, "'n'"),
    "add a bool": Bad(lambda s: s.add("n", True), TypeError, "'n'"),
    "add too much": Bad(lambda s: s.add("n", 2**63), ValueError, str(2**63)),
    "add too little": Bad(lambda s: s.add("n", -(2**63) - 1), ValueError, str(-(2**63) - 1)),
    "compare_set, nothing expected": Bad(lambda s: s.compare_set("k", None, "v"), TypeError, "'k'"),
    "compare_set, nothing desired": Bad(lambda s: s.compare_set("k", "v", None), TypeError, "'k'"),
    "append 5": Bad(lambda s: s.append("k", 5), TypeError, "'k'"),
    "check a text": Bad(lambda s: s.check("there"), TypeError, "'there'"),
    "check bytes": Bad(lambda s: s.check(b"there"), TypeError, "b'there'"),
    "check 5": Bad(lambda s: s.check(["there", 5]), TypeError, "5"),
    "wait for a text": Bad(lambda s: s.wait("there"), TypeError, "'there'"),
    "wait for 5": Bad(lambda s: s.wait([5]), TypeError, "5"),
    "multi_get a text": Bad(lambda s: s.multi_get("there"), TypeError, "'there'"),
    "multi_get 5": Bad(lambda s: s.multi_get(["there", 5]), TypeError, "5"),
    "multi_set, too few values": Bad(lambda s: s.multi_set(["k", "l"], ["v"]), ValueError, "2 keys and 1 values"),
    "multi_set, too few keys": Bad(lambda s: s.multi_set(["k"], ["v", "w"]), ValueError, "1 keys and 2 values"),
    "multi_set, the last is bad": Bad(lambda s: s.multi_set(["k", "l"], ["v", 5]), TypeError, "'l'"),
    "multi_set, the last key is bad": Bad(lambda s: s.multi_set(["k", 5], ["v", "w"]), TypeError, "5"),
    "delete_key 5": Bad(lambda s: s.delete_key(5), TypeError, "5"),
    "queue_push to 5": Bad(lambda s: s.queue_push(5, "item"), TypeError, "5"),
    "queue_push 5": Bad(lambda s: s.queue_push("items", 5), TypeError, "'items'"),
    "queue_pop 5": Bad(lambda s: s.queue_pop(5), TypeError, "5"),
    "queue_len 5": Bad(lambda s: s.queue_len(5), TypeError, "5"),
    "barrier 5": Bad(lambda s: s.barrier(5, 1), TypeError, "5"),
    "barrier of text": Bad(lambda s: s.barrier("gate", "1"), TypeError, "'gate'"),
    "barrier of a bool": Bad(lambda s: s.barrier("gate", True), TypeError, "'gate'"),
    "swap, 5 expected": Bad(lambda s: s.swap("k", 5, "v"), TypeError, "'k'"),
    "swap, nothing desired": Bad(lambda s: s.swap("k", None, None), TypeError, "'k'"),
    "delete_prefix 5": Bad(lambda s: s.delete_prefix(5), TypeError, "5"),
    "lease 5": Bad(lambda s: s.lease(5, "v"), TypeError, "5"),
    "lease for 5": Bad(lambda s: s.lease("k", 5), TypeError, "'k'"),
    "watch 5": Bad(lambda s: s.watch(5), TypeError, "5"),
    "prefix 5": Bad(lambda s: PrefixStore(5, s), TypeError, ""),  # type: ignore[arg-type]
    "prefix of 5": Bad(lambda s: PrefixStore("p", 5), TypeError, "int"),  # type: ignore[arg-type]
    "prefix of nothing": Bad(lambda s: PrefixStore("p", None), ValueError, "None"),  # type: ignore[arg-type]
}

NOT_NUMBERS = [
    b"",
    b"twelve",
    b" ",
    b"-",
    b"--1",
    b"\xff",
    b"9223372036854775808",
    b"-9223372036854775809",
    b"1" * 5000,
]


def content(store: Store) -> dict[str, bytes]:
    return {key: store.get(key, timeout=0) for key in sorted(store.list_keys())}


@pytest.fixture
def furnished(store: Store) -> Store:
    store.multi_set(["there", "text"], ["", "twelve"])
    store.queue_push("items", "item")
    return store


def test_invalid_input_is_refused_and_changes_nothing(furnished: Store) -> None:
    before = content(furnished)
    waiting = Call(furnished.get, "later").blocked()
    for name, bad in BAD.items():
        with pytest.raises(bad.error) as caught:
            bad.call(furnished)
        assert not isinstance(caught.value, RallypointError), f"{name}: misuse is a bug of the caller"
        assert bad.names in str(caught.value), name
    assert content(furnished) == before
    assert furnished.queue_len("items") == 1
    furnished.set("later", "now")
    assert waiting.result() == b"now"


@pytest.mark.parametrize("operation", ["add", "barrier"])
def test_counting_on_a_value_that_is_no_number_is_refused(furnished: Store, operation: str) -> None:
    waiting = Call(furnished.get, "later").blocked()
    for value in NOT_NUMBERS:
        furnished.set("n", value)
        with pytest.raises(NotAnInteger) as caught:
            furnished.add("n", 1) if operation == "add" else furnished.barrier("n", 2, timeout=0)
        assert caught.value.value == value[:1024]
        assert furnished.get("n", timeout=0) == value
    furnished.set("n", "41")
    assert furnished.add("n", 1) == 42
    furnished.set("later", "now")
    assert waiting.result() == b"now"


@pytest.mark.parametrize("operation", ["add", "barrier"])
def test_not_an_integer_names_the_key_without_the_prefix(store: Store, operation: str) -> None:
    view = PrefixStore("p", store)
    view.set("n", "twelve")
    with pytest.raises(NotAnInteger) as caught:
        view.add("n", 1) if operation == "add" else view.barrier("n", 2, timeout=0)
    assert caught.value.key == "n"


# Limits

BY_KEY: dict[str, Callable[[Store, str], Any]] = {
    "set": lambda s, key: s.set(key, "1"),
    "get": lambda s, key: s.get(key, timeout=0),
    "add": lambda s, key: s.add(key, 1),
    "compare_set": lambda s, key: s.compare_set(key, "", "1"),
    "append": lambda s, key: s.append(key, "1"),
    "check": lambda s, key: s.check(["there", key]),
    "wait": lambda s, key: s.wait([key], timeout=0),
    "multi_get": lambda s, key: s.multi_get(["there", key], timeout=0),
    "multi_set": lambda s, key: s.multi_set(["k", key], ["", "1"]),
    "queue_push": lambda s, key: s.queue_push(key, "item"),
    "queue_len": lambda s, key: s.queue_len(key),
    "queue_pop": lambda s, key: s.queue_pop(key, timeout=0),
    "barrier": lambda s, key: s.barrier(key, 1, timeout=0),
    "delete_key": lambda s, key: s.delete_key(key),
    "swap": lambda s, key: s.swap(key, None, "1"),
    "delete_prefix": lambda s, key: s.delete_prefix(key),
    "lease": lambda s, key: s.lease(key, "1"),
    "watch": lambda s, key: s.watch(key),
}
"""In an order in which every call succeeds."""


@pytest.mark.parametrize("letter", ["k", "é"])
def test_a_key_of_the_limit_works_and_one_byte_more_is_refused(furnished: Store, kind: Kind, letter: str) -> None:
    own_prefix = len(f"{kind.prefix}/".encode()) if kind.prefix else 0
    room = MAX_KEY_BYTES - own_prefix
    longest = letter * (room // len(letter.encode())) + "k" * (room % len(letter.encode()))
    for call in BY_KEY.values():
        before = content(furnished)
        with pytest.raises(LimitExceeded) as caught:
            call(furnished, longest + "k")
        error = caught.value
        assert (error.what, error.key, error.size, error.limit) == (
            "key",
            longest + "k",
            MAX_KEY_BYTES + 1,
            MAX_KEY_BYTES,
        )
        assert content(furnished) == before
        call(furnished, longest)
    assert furnished.check(["there", "items"])


def test_a_prefix_counts_as_part_of_the_key(store: Store, kind: Kind) -> None:
    own_prefix = len(f"{kind.prefix}/".encode()) if kind.prefix else 0
    view = PrefixStore("p" * (MAX_KEY_BYTES - own_prefix - 2), store)
    view.set("k", "v")
    assert view.get("k") == b"v"
    with pytest.raises(LimitExceeded) as caught:
        view.set("kk", "v")
    assert (caught.value.key, caught.value.size) == ("kk", MAX_KEY_BYTES + 1)
    with pytest.raises(LimitExceeded):
        PrefixStore("p" * MAX_KEY_BYTES, store)


BY_VALUE: dict[str, Callable[[Store, bytes], Any]] = {
    "set": lambda s, value: s.set("k", value),
    "append": lambda s, value: s.append("k", value),
    "compare_set, desired": lambda s, value: s.compare_set("k", "other", value),
    "compare_set, expected": lambda s, value: s.compare_set("k", value, "v"),
    "multi_set": lambda s, value: s.multi_set(["j", "k"], ["", value]),
    "queue_push": lambda s, value: s.queue_push("k", value),
    "swap, desired": lambda s, value: s.swap("k", None, value),
    "swap, expected": lambda s, value: s.swap("k", value, "v"),
    "lease": lambda s, value: s.lease("k", value),
}


def test_a_value_past_the_limit_is_refused(furnished: Store) -> None:
    before, value = content(furnished), bytes(MAX_VALUE_BYTES + 1)
    for call in BY_VALUE.values():
        with pytest.raises(LimitExceeded) as caught:
            call(furnished, value)
        error = caught.value
        assert (error.key, error.size, error.limit) == ("k", MAX_VALUE_BYTES + 1, MAX_VALUE_BYTES)
    assert content(furnished) == before
    assert furnished.queue_len("k") == 0


def test_a_value_of_the_limit_works(store: Store) -> None:
    largest = bytes(range(256)) * (MAX_VALUE_BYTES // 256)
    store.set("k", largest)
    assert store.get("k") == largest
    assert store.compare_set("k", largest, "small") == b"small"
    assert store.compare_set("k", "small", largest) == largest
    store.multi_set(["j", "k"], [largest, "small"])
    assert store.multi_get(["k", "j"]) == [b"small", largest]
    store.queue_push("q", largest)
    assert store.queue_pop("q") == largest
    store.append("j", largest)
    assert store.get("j") == largest + largest, "append may grow a value past the limit"


LISTS: dict[str, Callable[[Store, list[str]], Any]] = {
    "check": lambda s, keys: s.check(keys),
    "wait": lambda s, keys: s.wait(keys),
    "multi_get": lambda s, keys: s.multi_get(keys),
    "multi_set": lambda s, keys: s.multi_set(keys, [""] * len(keys)),
}


def test_a_list_of_the_limit_works_and_one_key_more_is_refused(furnished: Store) -> None:
    for call in LISTS.values():
        call(furnished, ["there"] * MAX_KEYS)
        with pytest.raises(LimitExceeded) as caught:
            call(furnished, ["there"] * (MAX_KEYS + 1))
        error = caught.value
        assert (error.what, error.key, error.size, error.limit) == ("keys", "there", MAX_KEYS + 1, MAX_KEYS)
    keys = [f"{number}" for number in range(MAX_KEYS)]
    furnished.multi_set(keys, keys)
    assert furnished.multi_get(keys) == [key.encode() for key in keys]
    assert furnished.num_keys() == MAX_KEYS + 2


# Unusual keys and values

ODD_KEYS = ["", " ", "/", "//", "a/", "/a", ".", "..", "\0", "a\0b", "\n", "'\"", "%2F", "ключ", "é", "e\u0301", "🙂"]
ODD_KEYS += ["init/", "refcount/", "-/k", "+k", "k\r\n", "k" * 8000, "\U0010ffff", "\ufeff", "\ud7ff"]


def test_every_text_is_a_distinct_key(store: Store) -> None:
    for number, key in enumerate(ODD_KEYS):
        store.set(key, f"{number}")
        store.queue_push(key, f"item {number}")
    assert sorted(store.list_keys()) == sorted(ODD_KEYS)
    assert store.num_keys() == len(ODD_KEYS)
    assert store.multi_get(ODD_KEYS) == [f"{number}".encode() for number in range(len(ODD_KEYS))]
    for number, key in enumerate(ODD_KEYS):
        assert store.queue_pop(key, False) == f"item {number}".encode()
        assert store.delete_key(key) is True
        assert store.delete_key(key) is False
    assert store.list_keys() == []


@pytest.mark.parametrize(
    "value",
    [
        "",
        "text",
        "ünï",
        b"",
        b"\0",
        bytes(range(256)),
        bytearray(b"array"),
        memoryview(b"view"),
        memoryview(b"abcd")[::2],
    ],
    ids=lambda value: repr(bytes(value) if isinstance(value, memoryview) else value)[:40],
)
def test_values_are_returned_as_bytes(store: Store, value: Any) -> None:
    expected = value.encode() if isinstance(value, str) else bytes(value)
    store.set("k", value)
    store.multi_set(["l"], [value])
    store.queue_push("q", value)
    assert [store.get("k"), *store.multi_get(["l"]), store.queue_pop("q")] == [expected] * 3
    assert type(store.get("k")) is bytes


def test_a_later_change_of_a_bytearray_does_not_change_the_value(store: Store) -> None:
    value: Any = bytearray(b"before")  # stores accept any bytes-like object
    store.set("k", value)
    store.queue_push("q", value)
    value[:] = b"after!"
    assert (store.get("k"), store.queue_pop("q")) == (b"before", b"before")


# Errors


def raised(call: Callable[[], Any]) -> RallypointError:
    with pytest.raises(RallypointError) as caught:
        call()
    return caught.value


def test_errors_of_a_store_survive_pickling(furnished: Store, place: Place) -> None:
    closed = place.open()
    closed.close()
    errors = {
        StoreTimeout: raised(lambda: furnished.wait(["there", "absent"], 0)),
        QueueEmpty: raised(lambda: furnished.queue_pop("absent", False)),
        NotAnInteger: raised(lambda: furnished.add("text", 1)),
        LimitExceeded: raised(lambda: furnished.get("k" * 9000)),
        StoreClosed: raised(closed.num_keys),
    }
    for kind, error in errors.items():
        assert type(error) is kind
        assert isinstance(error, StoreError)
        other_handle = pickle.loads(pickle.dumps(error))
        assert (type(other_handle), str(other_handle), vars(other_handle)) == (kind, str(error), vars(error))


def test_queue_empty_names_the_queue(store: Store) -> None:
    error = raised(lambda: store.queue_pop("jobs", block=False))
    assert isinstance(error, QueueEmpty)
    assert error.key == "jobs"
