"""Members that cannot be are refused where they are given, by name, and nothing is sent; all others are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.kinds import Open

from rallypoint import Barrier, Exchange, Group, HashStore, LimitExceeded, Lock, MembersMissing

LONG, MANY = "node" * 64 + "!", 65_537
NAMES = [str(number) for number in range(MANY)]


class Silent:
    """A store that has no operation, so that whatever is sent to it fails."""


@pytest.mark.parametrize("members", [0, -1, True, "ann", b"ann", None, [], ["a", "a"], [1, 2]])
def test_impossible_members_are_refused_by_name(members: Any) -> None:
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
    with pytest.raises(ValueError, match=r"may have 256 characters, and 'nodenode\w+'\.\.\. has 257"):
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
        ({"devices": [0, 1]}, TypeError, "devices must be a list of names, and 0 is no name"),
        ({"devices": "cuda"}, TypeError, "devices must be a list of names, not 'cuda'"),
        ({"devices": None}, TypeError, "devices must be a list of names, not None"),
        ({"devices": [LONG]}, ValueError, "the name of a device may have 256 characters"),
        ({"devices": NAMES[:1025]}, ValueError, "a member's devices may be 1,024 at most, not 1,025"),
        ({"device_maps": ["bob"]}, TypeError, r"device_maps must have a map for each peer, .* it is \['bob'\]"),
        ({"device_maps": {"bob": "cuda"}}, TypeError, "the device map for 'bob' must go .* it is 'cuda'"),
        ({"device_maps": {"bob": {"cuda": 1}}}, TypeError, "the device map for 'bob' must go .* and 1 is no name"),
        ({"device_maps": {"bob": {0: "cuda"}}}, TypeError, "the device map for 'bob' must go .* and 0 is no name"),
        ({"device_maps": {"bob": {"cuda": LONG}}}, ValueError, "the name of a device may have 256 characters"),
        ({"device_maps": {"bob": dict(zip(NAMES[:1025], NAMES, strict=False))}}, ValueError, "in the map for 'bob'"),
    ],
)
def test_what_no_member_can_be_is_refused(wrong: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        Group(Silent(), "workers").join("ann", **wrong)


def test_a_name_that_nobody_can_have_is_not_waited_for() -> None:
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
def test_too_many_are_refused(give: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"the number of .+ must be 1 to 65,536, not 65,537"):
        give(Silent())


@pytest.mark.parametrize("size", [True, 2.0, None])
def test_a_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(TypeError, match="the number of ranks must be a whole number"):
        Exchange(Silent(), "data", size)


def test_what_is_not_refused_is_taken_everywhere(open_store: Open) -> None:
    longest, most = LONG[:-1], MANY - 1
    with Lock(open_store(), "token", longest), Group(open_store(), "workers").join(longest) as member:
        assert member.wait_for([longest]).members
    with pytest.raises(MembersMissing) as caught:
        Barrier(open_store(), "start", most).wait(0, 0)
    assert len(caught.value.missing) == most - 1
