"""The error tree: every class has its facts as fields and in its message, and survives pickling.

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


class Sample(NamedTuple):
    """An error, the fields it must have, the words its message must contain, and its other base classes."""

    error: errors.RallypointError
    fields: dict[str, Any]
    facts: list[str]
    also: tuple[type[Exception], ...]


def sample(cls: Any, facts: list[str], *also: type[Exception], **fields: Any) -> Sample:
    return Sample(cls(**fields), fields, facts, also)


SAMPLES: list[Sample] = [
    Sample(errors.RallypointError("the sentence"), {}, ["the sentence"], (RuntimeError,)),
    Sample(errors.StoreError("the sentence"), {}, ["the sentence"], (errors.RallypointError,)),
    Sample(errors.MeetingError("the sentence"), {}, ["the sentence"], (errors.StoreError,)),
    Sample(
        errors.NetworkError("the sentence"), {}, ["the sentence"], (errors.RallypointError, ConnectionError, OSError)
    ),
    sample(
        errors.SessionLost,
        ["10.0.0.1:29400", "cut for 2 s", "leases are gone", "make the call again"],
        errors.NetworkError,
        peer="10.0.0.1:29400",
        why="cut for 2 s",
        advice="make the call again",
    ),
    sample(
        errors.ServerRestarted,
        ["10.0.0.1:29400", "no such session", "is gone"],
        errors.NetworkError,
        peer="10.0.0.1:29400",
        why="no such session",
    ),
    sample(
        errors.StoreTimeout,
        ["wait timed out after 2.5 s", "'y', 'z'", "2 of 3 keys", "memory://1"],
        errors.StoreError,
        TimeoutError,
        operation="wait",
        keys=("x", "y", "z"),
        missing=("y", "z"),
        timeout_s=2.5,
        store="memory://1",
        what=None,
        down="",
    ),
    sample(
        errors.WorkersMissing,
        ["1 of 3 clients joined tcp://h:1 within 5 s", "missing: rank 1, rank 2", "connected: rank 0"],
        errors.StoreError,
        TimeoutError,
        store="tcp://h:1",
        joined=1,
        world_size=3,
        timeout_s=5.0,
        members=("rank 0",),
        missing=("rank 1", "rank 2"),
    ),
    sample(
        errors.QueueEmpty, ["'jobs'", "memory://1", "block=True"], errors.StoreError, key="jobs", store="memory://1"
    ),
    sample(errors.NotAnInteger, ["'n'", "b'twelve'"], errors.StoreError, ValueError, key="n", value=b"twelve"),
    sample(
        errors.LimitExceeded,
        ["key 'k' has 9,000", "8,191"],
        errors.StoreError,
        ValueError,
        what="key",
        key="k",
        size=9000,
        limit=8191,
    ),
    sample(errors.StoreFull, ["'big'", "2,000", "1,000"], errors.StoreError, key="big", size=2000, limit=1000),
    sample(
        errors.Unsupported,
        ["watch is not available on file:///s: no"],
        errors.StoreError,
        NotImplementedError,
        operation="watch",
        store="file:///s",
        why="no",
    ),
    sample(errors.StoreClosed, ["memory://1 was closed"], errors.StoreError, store="memory://1"),
    sample(
        errors.DiskFull,
        ["/tmp/s", "No space", "quota", "ulimit"],
        OSError,
        path="/tmp/s",
        why="No space left",
        number=28,
    ),
    sample(
        errors.CorruptFile,
        ["/tmp/s", "byte 12", "bad length"],
        errors.StoreError,
        path="/tmp/s",
        offset=12,
        why="bad length",
    ),
    sample(
        errors.ConnectFailed,
        ["node-a:29500", "within the timeout of 3 s", "10.0.0.1: refused", "10.0.0.2: no route"],
        errors.NetworkError,
        TimeoutError,
        peer="node-a:29500",
        timeout_s=3.0,
        tried={"10.0.0.1": "refused", "10.0.0.2": "no route"},
    ),
    sample(
        errors.ConnectionLost,
        ["node-a:29500", "during add", "reset by peer"],
        errors.NetworkError,
        peer="node-a:29500",
        operation="add",
        why="reset by peer",
    ),
    sample(
        errors.AddressTaken,
        ["[::1]:80", "in use by us (pid 123)", "multi_tenant"],
        errors.NetworkError,
        address="[::1]:80",
        why="in use by us",
        ours=True,
        pid=123,
    ),
    sample(
        errors.NoQuorum,
        ["etcd://a:2379,b:2379/jobs", "timeout of 2 s", "a:2379: refused", "b:2379: no answer", "may or may not"],
        errors.NetworkError,
        TimeoutError,
        store="etcd://a:2379,b:2379/jobs",
        timeout_s=2.0,
        tried={"a:2379": "refused", "b:2379": "no answer"},
    ),
    sample(
        errors.EtcdRefused,
        ["etcd://a:2379/jobs", "'k'", "database space exceeded", "quota"],
        errors.StoreError,
        store="etcd://a:2379/jobs",
        key="k",
        why="mvcc: database space exceeded",
    ),
    sample(errors.ServerFailed, ["process 123 did not start: it ended"], errors.NetworkError, pid=123, why="it ended"),
    sample(
        errors.AuthenticationFailed,
        ["cannot authenticate at h:1", "the server has another token", "Set RALLYPOINT_TOKEN"],
        errors.NetworkError,
        peer="h:1",
        why="the server has another token",
        advice="Set RALLYPOINT_TOKEN",
    ),
    sample(
        errors.MembersMissing,
        ["barrier 'start'", "member 0", "30 s", "7 of 8", "missing: 3"],
        errors.MeetingError,
        errors.StoreError,
        TimeoutError,
        thing="barrier 'start'",
        member="0",
        missing=("3",),
        timeout_s=30.0,
        reason="7 of 8 members are here; missing: 3",
        withdrawn=(),
        advice="",
    ),
    sample(
        errors.MembersLost,
        ["barrier 'start'", "3 (node-c pid 17)"],
        errors.MeetingError,
        thing="barrier 'start'",
        lost=("3 (node-c pid 17)",),
    ),
    sample(
        errors.NotAMember,
        ["barrier 'start'", "'8'", "8 members, 0 to 7"],
        errors.MeetingError,
        ValueError,
        thing="barrier 'start'",
        member="8",
        members="8 members, 0 to 7",
    ),
    sample(
        errors.Disagreement,
        ["exchange 'x'", "size", "8", "4", "2 (node-b pid 9)"],
        errors.MeetingError,
        ValueError,
        thing="exchange 'x'",
        what="size",
        mine="8",
        theirs="4",
        other="2 (node-b pid 9)",
    ),
    sample(
        errors.NameTaken,
        ["group 'rpc'", "'worker1'", "node-b pid 9"],
        errors.MeetingError,
        thing="group 'rpc'",
        member="worker1",
        other="worker1 (node-b pid 9)",
    ),
    sample(
        errors.BadDeviceMap,
        ["group 'rpc'", "'worker1'", "'worker2'", "'cuda:1'", "no such device"],
        errors.MeetingError,
        ValueError,
        thing="group 'rpc'",
        member="worker1",
        peer="worker2",
        device="cuda:1",
        why="worker2 has no such device",
    ),
    sample(
        errors.RankTaken,
        ["rendezvous 'run'", "'node-b'", "rank 3", "node-a pid 9"],
        errors.MeetingError,
        ValueError,
        thing="rendezvous 'run'",
        rank=3,
        member="node-b",
        other="node-a (node-a pid 9)",
    ),
    sample(
        errors.ItemLost,
        ["work queue 'jobs'", "item 3-7", "worker (b:9) has it", "cut for 2 s"],
        errors.MeetingError,
        thing="work queue 'jobs'",
        item="3-7",
        holder="worker (b:9)",
        why="cut for 2 s",
    ),
    sample(
        errors.RunFull,
        ["rendezvous 'run'", "2 nodes (a, b)", "c cannot join", "MIN:MAX"],
        errors.MeetingError,
        thing="rendezvous 'run'",
        member="c",
        nodes=("a", "b"),
    ),
    sample(
        errors.RunClosed,
        ["rendezvous 'run'", "'failed'", "out of memory"],
        errors.MeetingError,
        thing="rendezvous 'run'",
        result="failed",
        reason="out of memory",
        waited=False,
    ),
]

each = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample.error).__name__)


def classes() -> set[type[Exception]]:
    return {value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)} - {
        errors.WithFields
    }


def test_every_class_has_a_sample_and_is_exported() -> None:
    assert {type(sample.error) for sample in SAMPLES} == classes()
    assert {cls.__name__ for cls in classes()} == set(errors.__all__)


def test_every_class_is_in_the_tree_of_the_docstring() -> None:
    assert [cls.__name__ for cls in classes() if cls.__name__ not in (errors.__doc__ or "")] == []


@each
def test_an_error_has_its_facts_as_fields(sample: Sample) -> None:
    assert vars(sample.error) == sample.fields
    assert set(inspect.get_annotations(type(sample.error))) == set(sample.fields), "every field is declared"


@each
def test_the_message_contains_the_facts(sample: Sample) -> None:
    assert [fact for fact in sample.facts if fact not in str(sample.error)] == []


@each
def test_the_message_of_a_timeout_contains_the_word(sample: Sample) -> None:
    assert "timeout" in str(sample.error) or not isinstance(sample.error, TimeoutError)


@each
def test_an_error_is_also_an_instance_of_its_builtin_class(sample: Sample) -> None:
    assert [
        kind for kind in (errors.RallypointError, RuntimeError, *sample.also) if not isinstance(sample.error, kind)
    ] == []


@each
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(sample: Sample, protocol: int) -> None:
    assert_same(pickle.loads(pickle.dumps(sample.error, protocol)), sample.error)


@each
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_an_error_survives_copying(sample: Sample, how: Callable[[Any], Any]) -> None:
    revived = how(sample.error)
    assert_same(revived, sample.error)
    revived.key = "changed"
    assert getattr(sample.error, "key", None) != "changed", "a copy has fields of its own"


def assert_same(revived: errors.RallypointError, error: errors.RallypointError) -> None:
    assert revived is not error
    assert type(revived) is type(error)
    assert (str(revived), revived.args, vars(revived)) == (str(error), error.args, vars(error))


def test_a_note_and_a_subclass_survive_pickling_too() -> None:
    error = _Mine(operation="get", keys=["k"], missing=["k"], timeout_s=1.0, store="s")
    vars(error)["__notes__"] = ["seen on node-b"]  # which `add_note` does, from Python 3.11 on
    revived = pickle.loads(pickle.dumps(error))
    assert type(revived) is _Mine
    assert (str(revived), vars(revived)["__notes__"], revived.missing) == (str(error), ["seen on node-b"], ("k",))


class _Mine(errors.StoreTimeout):
    pass


def test_a_long_list_of_names_is_cut_and_counted() -> None:
    keys = [f"rank{i}" for i in range(100)]
    error = errors.StoreTimeout(operation="wait", keys=keys, missing=keys, timeout_s=1.0, store="s")
    assert "'rank7' and 92 more, 100 of 100 keys" in str(error)
    assert "rank8" not in str(error)
    assert error.missing == tuple(keys)


def test_a_long_name_or_value_is_cut_in_the_sentence() -> None:
    assert len(str(errors.QueueEmpty(key="k" * 8000, store="s"))) < 300
    assert len(str(errors.NotAnInteger(key="k", value=b"x" * 8_000_000))) < 300
    assert len(errors.NotAnInteger(key="k", value=b"x" * 8_000_000).value) == 1024


def test_disk_full_has_the_attributes_of_an_os_error() -> None:
    error = pickle.loads(pickle.dumps(errors.DiskFull(path="/tmp/s", why="No space left", number=28)))
    assert (error.errno, error.filename, error.strerror) == (28, "/tmp/s", "No space left")


def test_a_message_about_one_key_has_no_count() -> None:
    error = errors.StoreTimeout(operation="get", keys=["k"], missing=["k"], timeout_s=0.0, store="s")
    assert "of 1 keys" not in str(error)


def test_a_timeout_may_describe_the_missing_keys() -> None:
    error = errors.StoreTimeout(
        operation="watch", keys=["job/"], missing=["job/"], timeout_s=1.0, store="s", what="no key has changed"
    )
    assert "watch timed out after 1 s: no key has changed in s" in str(error)


def test_a_timeout_in_an_outage_names_no_missing_key() -> None:
    down = "the server at h:1 has been down for 3.2 s"
    error = errors.StoreTimeout(operation="wait", keys=["k"], missing=["k"], timeout_s=1.0, store="s", down=down)
    assert str(error).startswith(f"wait timed out after 1 s: {down}. It is not known which keys are missing in s. Is")
    assert error.down == down and "process that writes it" not in str(error)


def test_the_message_for_too_many_keys_names_the_first() -> None:
    error = errors.LimitExceeded(what="keys", key="first", size=131_073, limit=131_072)
    assert str(error) == "131,073 keys in one call, starting with 'first'; the limit is 131,072"


def test_another_programs_port_is_not_suggested_for_sharing() -> None:
    for ours in (False, None):
        error = errors.AddressTaken(address="[::1]:80", why="not allowed", ours=ours)
        assert str(error).startswith("cannot listen on [::1]:80: not allowed. Choose an address")
        assert (error.ours, error.pid) == (ours, None)


def test_a_server_that_was_never_started_has_no_pid() -> None:
    assert str(errors.ServerFailed(pid=0, why="no h11")) == "the server process did not start: no h11"


def test_the_constructor_takes_the_fields_and_no_others() -> None:
    with pytest.raises(TypeError, match="QueueEmpty needs the field 'store'"):
        errors.QueueEmpty(key="k")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="QueueEmpty has no field 'shop', 'x'"):
        errors.QueueEmpty(key="k", store="s", shop="s", x=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        errors.QueueEmpty("queue k is empty")  # type: ignore[call-arg]


def test_an_error_does_not_change_with_what_it_was_made_of() -> None:
    keys, tried = ["k"], {"10.0.0.1": "refused"}
    late = errors.StoreTimeout(operation="get", keys=keys, missing=keys, timeout_s=1.0, store="s")
    failed = errors.ConnectFailed(peer="p", timeout_s=1.0, tried=tried)
    keys.append("other")
    tried.clear()
    assert (late.keys, late.missing, failed.tried) == (("k",), ("k",), {"10.0.0.1": "refused"})


def test_a_subclass_adds_fields_and_defaults() -> None:
    error = _Rejected(store="s", why="late")
    assert vars(error) == {"operation": "put", "store": "s", "why": "late", "tries": 1}
    assert str(error) == "put was rejected 1 times: late"
    assert_same(pickle.loads(pickle.dumps(error)), error)


class _Rejected(errors.Unsupported):
    operation: str = "put"
    tries: int = 1

    def _sentence(self) -> str:
        return f"{self.operation} was rejected {self.tries} times: {self.why}"


def test_a_subclass_may_have_a_constructor_and_a_sentence_of_its_own() -> None:
    error = pickle.loads(pickle.dumps(_Plain(7)))
    assert (str(error), vars(error)) == ("code 7", {"code": 7})


class _Plain(errors.StoreError):
    code: int

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}", code=code)


def test_a_sentence_is_printable_and_a_field_is_as_it_was_given() -> None:
    error = errors.StoreClosed(store="evil\x1b[2J")
    assert "evil\\x1b[2J was closed" in str(error)
    assert error.store == "evil\x1b[2J"


def test_a_failed_connection_without_addresses_says_so() -> None:
    assert "(no address was found)" in str(errors.ConnectFailed(peer="p", timeout_s=1.0, tried={}))
