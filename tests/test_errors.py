"""The error tree: every class has its facts as fields and in its sentence, and survives a trip to another process.

`SAMPLES` has one error of every class that can be made. A class without a sample fails the first test.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from rallypoint import errors
from rallypoint.errors import (
    AddressTaken,
    BadDeviceMap,
    ConnectFailed,
    ConnectionLost,
    CorruptFile,
    Disagreement,
    DiskFull,
    EtcdRefused,
    LimitExceeded,
    MeetingError,
    MembersLost,
    MembersMissing,
    NameTaken,
    NetworkError,
    NoQuorum,
    NotAMember,
    NotAnInteger,
    QueueEmpty,
    RallypointError,
    RankTaken,
    RunClosed,
    RunFull,
    ServerFailed,
    ServerRestarted,
    SessionLost,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreTimeout,
    Unsupported,
    WorkersMissing,
)


class Sample(NamedTuple):
    """An error, the fields it must have, the words its sentence must contain, and what else it is."""

    error: RallypointError
    fields: dict[str, Any]
    facts: list[str]
    also: tuple[type[Exception], ...]


def sample(cls: Any, facts: list[str], *also: type[Exception], **fields: Any) -> Sample:
    return Sample(cls(**fields), fields, facts, also)


SAMPLES: list[Sample] = [
    Sample(RallypointError("the sentence"), {}, ["the sentence"], (RuntimeError,)),
    Sample(StoreError("the sentence"), {}, ["the sentence"], (RallypointError,)),
    Sample(MeetingError("the sentence"), {}, ["the sentence"], (StoreError,)),
    Sample(NetworkError("the sentence"), {}, ["the sentence"], (RallypointError, ConnectionError, OSError)),
    sample(
        SessionLost,
        ["10.0.0.1:29400", "cut for 2 s", "leases are gone", "make the call again"],
        NetworkError,
        peer="10.0.0.1:29400",
        why="cut for 2 s",
        advice="make the call again",
    ),
    sample(
        ServerRestarted,
        ["10.0.0.1:29400", "no such session", "is gone"],
        NetworkError,
        peer="10.0.0.1:29400",
        why="no such session",
    ),
    sample(
        StoreTimeout,
        ["wait timed out after 2.5 s", "'y', 'z'", "2 of 3 keys", "memory://1"],
        StoreError,
        TimeoutError,
        operation="wait",
        keys=("x", "y", "z"),
        missing=("y", "z"),
        timeout_s=2.5,
        store="memory://1",
        down="",
    ),
    sample(
        WorkersMissing,
        ["1 of 3 clients joined tcp://h:1 within 5 s", "missing: rank 1, rank 2", "here: rank 0"],
        StoreError,
        TimeoutError,
        store="tcp://h:1",
        joined=1,
        world_size=3,
        timeout_s=5.0,
        members=("rank 0",),
        missing=("rank 1", "rank 2"),
    ),
    sample(QueueEmpty, ["'jobs'", "memory://1", "block=True"], StoreError, key="jobs", store="memory://1"),
    sample(NotAnInteger, ["'n'", "b'twelve'"], StoreError, ValueError, key="n", value=b"twelve"),
    sample(
        LimitExceeded,
        ["key 'k' has 9,000", "8,191"],
        StoreError,
        ValueError,
        what="key",
        key="k",
        size=9000,
        limit=8191,
    ),
    sample(StoreFull, ["'big'", "2,000", "1,000"], StoreError, key="big", size=2000, limit=1000),
    sample(
        Unsupported,
        ["watch is not available on file:///s: no"],
        StoreError,
        NotImplementedError,
        operation="watch",
        store="file:///s",
        why="no",
    ),
    sample(StoreClosed, ["memory://1 was closed"], StoreError, store="memory://1"),
    sample(DiskFull, ["/tmp/s", "No space", "quota", "ulimit"], OSError, path="/tmp/s", why="No space left", number=28),
    sample(CorruptFile, ["/tmp/s", "byte 12", "bad length"], StoreError, path="/tmp/s", offset=12, why="bad length"),
    sample(
        ConnectFailed,
        ["node-a:29500", "within 3 s", "10.0.0.1: refused", "10.0.0.2: no route"],
        NetworkError,
        TimeoutError,
        peer="node-a:29500",
        timeout_s=3.0,
        tried={"10.0.0.1": "refused", "10.0.0.2": "no route"},
    ),
    sample(
        ConnectionLost,
        ["node-a:29500", "during add", "reset by peer"],
        NetworkError,
        peer="node-a:29500",
        operation="add",
        why="reset by peer",
    ),
    sample(
        AddressTaken,
        ["[::1]:80", "in use by us (pid 123)", "multi_tenant"],
        NetworkError,
        address="[::1]:80",
        why="in use by us",
        ours=True,
        pid=123,
    ),
    sample(
        NoQuorum,
        ["etcd://a:2379,b:2379/jobs", "timeout of 2 s", "a:2379: refused", "b:2379: no answer", "not known", "half"],
        NetworkError,
        TimeoutError,
        store="etcd://a:2379,b:2379/jobs",
        timeout_s=2.0,
        tried={"a:2379": "refused", "b:2379": "no answer"},
    ),
    sample(
        EtcdRefused,
        ["etcd://a:2379/jobs", "'k'", "database space exceeded", "quota"],
        StoreError,
        store="etcd://a:2379/jobs",
        key="k",
        why="mvcc: database space exceeded",
    ),
    sample(ServerFailed, ["process 123 did not come up: it ended"], NetworkError, pid=123, why="it ended"),
    sample(
        MembersMissing,
        ["barrier 'start'", "member 0", "30 s", "7 of 8", "missing: 3"],
        MeetingError,
        StoreError,
        TimeoutError,
        thing="barrier 'start'",
        member="0",
        missing=("3",),
        withdrawn=(),
        timeout_s=30.0,
        reason="7 of 8 members are here; missing: 3",
    ),
    sample(
        MembersLost,
        ["barrier 'start'", "3 (node-c pid 17)"],
        MeetingError,
        thing="barrier 'start'",
        lost=("3 (node-c pid 17)",),
    ),
    sample(
        NotAMember,
        ["barrier 'start'", "'8'", "8 members, 0 to 7"],
        MeetingError,
        ValueError,
        thing="barrier 'start'",
        member="8",
        members="8 members, 0 to 7",
    ),
    sample(
        Disagreement,
        ["exchange 'x'", "size", "8", "4", "2 (node-b pid 9)"],
        MeetingError,
        ValueError,
        thing="exchange 'x'",
        what="size",
        mine="8",
        theirs="4",
        other="2 (node-b pid 9)",
    ),
    sample(
        NameTaken,
        ["group 'rpc'", "'worker1'", "node-b pid 9"],
        MeetingError,
        thing="group 'rpc'",
        member="worker1",
        other="worker1 (node-b pid 9)",
    ),
    sample(
        BadDeviceMap,
        ["group 'rpc'", "'worker1'", "'worker2'", "'cuda:1'", "no such device"],
        MeetingError,
        ValueError,
        thing="group 'rpc'",
        member="worker1",
        peer="worker2",
        device="cuda:1",
        why="worker2 has no such device",
    ),
    sample(
        RankTaken,
        ["rendezvous 'run'", "'node-b'", "rank 3", "node-a pid 9"],
        MeetingError,
        ValueError,
        thing="rendezvous 'run'",
        rank=3,
        member="node-b",
        other="node-a (node-a pid 9)",
    ),
    sample(
        RunFull,
        ["rendezvous 'run'", "2 nodes (a, b)", "c cannot join", "MIN:MAX"],
        MeetingError,
        thing="rendezvous 'run'",
        member="c",
        nodes=("a", "b"),
    ),
    sample(
        RunClosed,
        ["rendezvous 'run'", "'failed'", "out of memory"],
        MeetingError,
        thing="rendezvous 'run'",
        result="failed",
        reason="out of memory",
        waited=False,
    ),
]

each = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample.error).__name__)


def classes() -> set[type[Exception]]:
    return {value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)}


def test_every_class_has_a_sample_and_is_exported() -> None:
    assert {type(sample.error) for sample in SAMPLES} == classes()
    assert {cls.__name__ for cls in classes()} == set(errors.__all__)


def test_every_class_is_in_the_tree_of_the_docstring() -> None:
    assert [cls.__name__ for cls in classes() if cls.__name__ not in (errors.__doc__ or "")] == []


@each
def test_it_has_its_facts_as_fields(sample: Sample) -> None:
    assert vars(sample.error) == sample.fields
    assert set(inspect.get_annotations(type(sample.error))) == set(sample.fields), "every field is declared"


@each
def test_its_sentence_says_the_facts(sample: Sample) -> None:
    assert [fact for fact in sample.facts if fact not in str(sample.error)] == []


@each
def test_a_time_out_has_the_word(sample: Sample) -> None:
    assert "timeout" in str(sample.error) or not isinstance(sample.error, TimeoutError)


@each
def test_it_is_caught_as_what_else_it_is(sample: Sample) -> None:
    assert [kind for kind in (RallypointError, RuntimeError, *sample.also) if not isinstance(sample.error, kind)] == []


@each
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_it_survives_pickling(sample: Sample, protocol: int) -> None:
    assert_same(pickle.loads(pickle.dumps(sample.error, protocol)), sample.error)


@each
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_it_survives_copying(sample: Sample, how: Callable[[Any], Any]) -> None:
    twin = how(sample.error)
    assert_same(twin, sample.error)
    twin.key = "changed"
    assert getattr(sample.error, "key", None) != "changed", "a copy has fields of its own"


def assert_same(twin: RallypointError, error: RallypointError) -> None:
    assert twin is not error
    assert type(twin) is type(error)
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))


def test_a_note_and_a_subclass_survive_pickling_too() -> None:
    error = _Mine(operation="get", keys=["k"], missing=["k"], timeout_s=1.0, store="s")
    error.__notes__ = ["seen on node-b"]
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is _Mine
    assert (str(twin), twin.__notes__, twin.missing) == (str(error), ["seen on node-b"], ("k",))


class _Mine(StoreTimeout):
    pass


def test_a_long_list_of_names_is_cut_and_counted() -> None:
    keys = [f"rank{i}" for i in range(100)]
    error = StoreTimeout(operation="wait", keys=keys, missing=keys, timeout_s=1.0, store="s")
    assert "'rank7' and 92 more, 100 of 100 keys" in str(error)
    assert "rank8" not in str(error)
    assert error.missing == tuple(keys)


def test_a_long_name_or_value_is_cut_in_the_sentence() -> None:
    assert len(str(QueueEmpty(key="k" * 8000, store="s"))) < 300
    assert len(str(NotAnInteger(key="k", value=b"x" * 8_000_000))) < 300
    assert len(NotAnInteger(key="k", value=b"x" * 8_000_000).value) == 1024


def test_a_full_disk_is_an_error_as_the_system_gives_it() -> None:
    error = pickle.loads(pickle.dumps(DiskFull(path="/tmp/s", why="No space left", number=28)))
    assert (error.errno, error.filename, error.strerror) == (28, "/tmp/s", "No space left")


def test_one_key_is_not_counted() -> None:
    error = StoreTimeout(operation="get", keys=["k"], missing=["k"], timeout_s=0.0, store="s")
    assert "of 1 keys" not in str(error)


def test_a_timeout_may_say_in_other_words_what_is_missing() -> None:
    error = StoreTimeout(
        operation="watch", keys=["job/"], missing=["job/"], timeout_s=1.0, store="s", what="no key has changed"
    )
    assert "watch timed out after 1 s: no key has changed in s" in str(error)


def test_a_timeout_in_an_outage_does_not_say_what_is_missing() -> None:
    down = "the server at h:1 has been down for 3.2 s"
    error = StoreTimeout(operation="wait", keys=["k"], missing=["k"], timeout_s=1.0, store="s", down=down)
    assert str(error).startswith(f"wait timed out after 1 s: {down}. What is missing in s is not known. Is the server")
    assert error.down == down and "process that writes it" not in str(error)


def test_too_many_keys_are_a_sentence_of_their_own() -> None:
    error = LimitExceeded(what="keys", key="first", size=131_073, limit=131_072)
    assert str(error) == "131,073 keys in one call, starting with 'first'; the limit is 131,072"


def test_only_a_server_of_ours_can_be_shared() -> None:
    for ours in (False, None):
        error = AddressTaken(address="[::1]:80", why="not allowed", ours=ours)
        assert str(error).startswith("cannot listen on [::1]:80: not allowed. Choose an address")
        assert (error.ours, error.pid) == (ours, None)


def test_no_address_at_all_still_reads_well() -> None:
    assert "(no address was found)" in str(ConnectFailed(peer="p", timeout_s=1.0, tried={}))
