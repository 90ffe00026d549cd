"""Invalid members and arguments are refused at once and named, and nothing is sent; all others are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.store_kinds import Open

from rallypoint import Barrier, Exchange, Group, HashStore, LimitExceeded, Lock, MembersMissing

LONG, MANY = "node" * 64 + "!", 65_537
NAMES = [str(number) for number in range(MANY)]


class Silent:
    """A store without operations, so that every call on it fails."""


@pytest.mark.parametrize("members", [0, -1, True, "ann", b"ann", None, [], ["a", "a"], [1, 2]])
def test_invalid_members_are_refused(members: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="member"):
        Barrier(Silent(), "start", members)


@pytest.mark.parametrize(
    "give",
    [
        lambda store: Barrier(store, "start", ["ann", LONG]),
        lambda store: Barrier(store, "start", 2).wait(LONG),
        lambda store: Lock(store, "token", LONG),
        lambda store: Group(store, "workers").join(LONG),
        lambda store: Group(store, "workers").join("ann", device_maps={LONG: {}}),
    ],
)
def test_a_name_that_is_too_long_is_refused(give: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"may have at most 256 characters, but 'nodenode\w+'\.\.\. has 257"):
        give(Silent())


@pytest.mark.parametrize("members", [{"ann", "bob"}, frozenset(["ann"])])
def test_members_without_an_order_are_refused(members: Any) -> None:
    with pytest.raises(TypeError, match=r"a set has none: .*'ann'"):
        Barrier(Silent(), "start", members)


@pytest.mark.parametrize(
    ("wrong", "error", "why"),
    [
        ({"info": "text"}, TypeError, "the info of a member must be bytes, not 'text'"),
        ({"info": None}, TypeError, "the info of a member must be bytes, not None"),
        ({"info": bytes(8 * 1024**2 + 1)}, LimitExceeded, "the info of member 'ann' has 8,388,609 bytes"),
        ({"devices": [0, 1]}, TypeError, "devices must be a list of names, but 0 is not a name"),
        ({"devices": "cuda"}, TypeError, "devices must be a list of names, not 'cuda'"),
        ({"devices": None}, TypeError, "devices must be a list of names, not None"),
        ({"devices": [LONG]}, ValueError, "the name of a device may have at most 256 characters"),
        ({"devices": NAMES[:1025]}, ValueError, "a member may have at most 1,024 devices, not 1,025"),
        ({"device_maps": ["bob"]}, TypeError, r"device_maps must map each peer's name .* not \['bob'\]"),
        ({"device_maps": {"bob": "cuda"}}, TypeError, "the device map for 'bob' must map .* not 'cuda'"),
        ({"device_maps": {"bob": {"cuda": 1}}}, TypeError, "the device map for 'bob' must map .* but 1 is not a name"),
        ({"device_maps": {"bob": {0: "cuda"}}}, TypeError, "the device map for 'bob' must map .* but 0 is not a name"),
        ({"device_maps": {"bob": {"cuda": LONG}}}, ValueError, "the name of a device may have at most 256 characters"),
        ({"device_maps": {"bob": dict(zip(NAMES[:1025], NAMES, strict=False))}}, ValueError, "map for 'bob' may have"),
    ],
)
def test_invalid_fields_of_a_member_are_refused(wrong: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        Group(Silent(), "workers").join("ann", **wrong)


def test_waiting_for_an_invalid_name_is_refused() -> None:
    with Group(HashStore(), "workers").join("ann") as ann, pytest.raises(ValueError, match="has 257"):
        ann.wait_for(["ann", LONG])


@pytest.mark.parametrize(
    "give",
    [
        lambda store: Barrier(store, "start", MANY),
        lambda store: Barrier(store, "start", NAMES),
        lambda store: Exchange(store, "data", MANY),
        lambda store: Group(store, "workers").join("ann", device_maps={name: {} for name in NAMES}),
    ],
)
def test_too_many_members_are_refused(give: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"the number of .+ must be 1 to 65,536, not 65,537"):
        give(Silent())


@pytest.mark.parametrize("size", [True, 2.0, None])
def test_a_size_that_is_no_integer_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match="the number of ranks must be a whole number"):
        Exchange(Silent(), "data", size)


def test_names_and_sizes_at_the_limit_work_on_every_store(open_store: Open) -> None:
    longest, most = LONG[:-1], MANY - 1
    with Lock(open_store(), "token", longest), Group(open_store(), "workers").join(longest) as member:
        assert member.wait_for([longest]).members
    with pytest.raises(MembersMissing) as caught:
        Barrier(open_store(), "start", most).wait(0, 0)
    assert len(caught.value.missing) == most - 1
