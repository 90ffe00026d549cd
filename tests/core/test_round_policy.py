"""The round policy as tables: situations and decisions, waiting nodes and the chosen ones, nodes and their ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.machines.machine import Call
from rallypoint.core.policy.round_policy import (
    Form,
    Hold,
    JoinedNode,
    NodeLimits,
    Refuse,
    RoundSituation,
    assign_ranks,
    choose_nodes,
    decide,
    list_few,
)

TO_FOUR = NodeLimits(2, 4, 5.0)
AT_ONCE = NodeLimits(2, 4, 0.0)
PAIR = NodeLimits(2, 2, 5.0)


def node(name: str, rank: int = -1, host: str = "h", loopback: bool = False) -> JoinedNode:
    return JoinedNode(Call(name, f"s-{name}", 1, f"{host}:7"), rank, host, "", loopback)


ENDPOINT = "endpoint (use an address that every node can reach, not localhost)"
DECISIONS: list[tuple[str, RoundSituation, Form | Hold | Refuse]] = [
    # Too few
    ("the first", RoundSituation(TO_FOUR, 1), Hold("1 of at least 2 nodes: waiting for 1")),
    (
        "too few, and others have not rejoined",
        RoundSituation(TO_FOUR, 1, True, ["b", "c"]),
        Hold("1 of at least 2 nodes: waiting for 1; not back yet: b, c"),
    ),
    (
        "too few, though all survivors are back",
        RoundSituation(TO_FOUR, 1, True),
        Hold("1 of at least 2 nodes: waiting for 1"),
    ),
    ("nobody", RoundSituation(TO_FOUR, 0, True), Hold("0 of at least 2 nodes: waiting for 2")),
    (
        "too few at the end of last call",
        RoundSituation(TO_FOUR, 1, last_call_over=True),
        Hold("1 of at least 2 nodes: waiting for 1"),
    ),
    # All
    ("full", RoundSituation(TO_FOUR, 4), Form("all 4 nodes joined")),
    ("full, and more", RoundSituation(TO_FOUR, 6, True), Form("all 4 nodes joined")),
    ("one is all", RoundSituation(NodeLimits(1, 1, 5.0), 1), Form("all 1 nodes joined")),
    (
        "full of newcomers, and nodes of the last round are missing",
        RoundSituation(TO_FOUR, 5, True, ["a"]),
        Hold("5 nodes joined for 4 places: last call of 5 s; not back yet: a", True),
    ),
    (
        "a spare more than needed, and one is not back",
        RoundSituation(PAIR, 2, True, ["b"]),
        Hold("2 nodes joined for 2 places: last call of 5 s; not back yet: b", True),
    ),
    (
        "last call is over without them",
        RoundSituation(PAIR, 3, True, ["b"], last_call_over=True),
        Form("2 of at most 2 nodes joined before the last call of 5 s ended"),
    ),
    # Enough
    (
        "enough",
        RoundSituation(TO_FOUR, 2),
        Hold("2 nodes are enough, up to 4 may join: last call of 5 s", True),
    ),
    (
        "last call is over",
        RoundSituation(TO_FOUR, 3, last_call_over=True),
        Form("3 of at most 4 nodes joined before the last call of 5 s ended"),
    ),
    (
        "last call is over, and one did not rejoin",
        RoundSituation(TO_FOUR, 3, True, ["d"], last_call_over=True),
        Form("3 of at most 4 nodes joined before the last call of 5 s ended"),
    ),
    (
        "enough, and some are not back",
        RoundSituation(TO_FOUR, 2, True, ["c", "d"]),
        Hold("2 nodes are enough, up to 4 may join: last call of 5 s; not back yet: c, d", True),
    ),
    (
        "enough, and everybody is back",
        RoundSituation(TO_FOUR, 3, True),
        Form("all nodes of the last round are back: 3 of at most 4 nodes"),
    ),
    (
        "everybody is back, and all requested ranks exist",
        RoundSituation(TO_FOUR, 3, True, highest=2),
        Form("all nodes of the last round are back: 3 of at most 4 nodes"),
    ),
    (
        "everybody is back, and a requested rank needs one more node",
        RoundSituation(TO_FOUR, 3, True, highest=3),
        Hold("3 nodes are enough, up to 4 may join: last call of 5 s; rank 3 was requested", True),
    ),
    # Enough, and there is no last call
    (
        "no last call",
        RoundSituation(AT_ONCE, 2),
        Form("2 of at most 4 nodes joined; there is no last call"),
    ),
    (
        "no last call, and a requested rank does not exist",
        RoundSituation(AT_ONCE, 2, highest=3),
        Form("2 of at most 4 nodes joined; there is no last call"),
    ),
    (
        "no last call, but one of the last round is missing",
        RoundSituation(AT_ONCE, 2, True, ["a"]),
        Hold("2 nodes are enough, up to 4 may join: last call of 3 s; not back yet: a", True),
    ),
    (
        "no last call, full, but one of the last round is missing",
        RoundSituation(AT_ONCE, 4, True, ["a"]),
        Hold("4 nodes joined for 4 places: last call of 3 s; not back yet: a", True),
    ),
    (
        "many are not back",
        RoundSituation(NodeLimits(1, 99, 5.0), 1, True, [str(number) for number in range(22)]),
        Hold(
            "1 nodes are enough, up to 99 may join: last call of 5 s; not back yet: "
            "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 2 more",
            True,
        ),
    ),
    # Newcomers
    ("a newcomer", RoundSituation(TO_FOUR, 1, newcomer=node("a")), Hold("1 of at least 2 nodes: waiting for 1")),
    ("the last rank", RoundSituation(TO_FOUR, 4, newcomer=node("a", 3)), Form("all 4 nodes joined")),
    (
        "a rank that no round has",
        RoundSituation(TO_FOUR, 4, newcomer=node("a", 4)),
        Refuse("NotAMember", {"member": "a as rank 4", "members": "ranks 0 to 3"}),
    ),
    (
        "limits that contradict each other",
        RoundSituation(NodeLimits(3, 2), 1, newcomer=node("a")),
        Refuse("NotAMember", {"member": "a", "members": "no nodes: min_nodes 3 is greater than max_nodes 2"}),
    ),
    (
        "a rank that another node requested",
        RoundSituation(TO_FOUR, 2, newcomer=node("b", 1), origin=node("a", 1), rival=node("a", 1)),
        Refuse("RankTaken", {"rank": 1, "member": "b", "other": "a (h:7)"}),
    ),
    (
        "another setting",
        RoundSituation(TO_FOUR, 2, newcomer=node("b", host="i"), origin=node("a"), differs=("batch", "8", "16")),
        Refuse("Disagreement", {"what": "batch", "mine": "8 (b (i:7))", "theirs": "16", "other": "a (h:7)"}),
    ),
    (
        "both on one machine, over loopback",
        RoundSituation(TO_FOUR, 1, newcomer=node("b", loopback=True), origin=node("a", loopback=True)),
        Hold("1 of at least 2 nodes: waiting for 1"),
    ),
    (
        "two machines, and the first came over loopback",
        RoundSituation(TO_FOUR, 1, newcomer=node("b", host="i"), origin=node("a", loopback=True)),
        Refuse(
            "Disagreement",
            {"what": ENDPOINT, "mine": "i, network (b (i:7))", "theirs": "h, loopback", "other": "a (h:7)"},
        ),
    ),
    (
        "two machines, and the second came over loopback",
        RoundSituation(TO_FOUR, 1, newcomer=node("b", host="i", loopback=True), origin=node("a")),
        Refuse(
            "Disagreement",
            {"what": ENDPOINT, "mine": "i, loopback (b (i:7))", "theirs": "h, network", "other": "a (h:7)"},
        ),
    ),
]


@pytest.mark.parametrize(("now", "decision"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_decide_returns_the_decision_and_its_reason(now: RoundSituation, decision: Form | Hold | Refuse) -> None:
    decided = decide(now)
    assert (type(decided), decided) == (type(decision), decision)


CHOICES: list[tuple[str, str, int, str]] = [
    # waiting nodes in order (name and requested rank); nodes of the last round; max_nodes; the chosen nodes
    ("a b c", "", 3, "a b c"),
    ("a b c d", "", 3, "a b c"),
    ("c d a b", "a b", 2, "a b"),
    ("c d a b", "a b", 3, "a b c"),
    ("c d0 a b", "a b", 3, "a b d"),
    ("c0 d e a1", "a", 2, "a c"),
    ("c d", "a b", 1, "c"),
]


def waiting_of(words: str) -> list[JoinedNode]:
    return [node(word[0], int(word[1:] or -1)) for word in words.split()]


@pytest.mark.parametrize(("waiting", "last", "most", "names"), CHOICES)
def test_choose_nodes_prefers_the_last_round_and_requested_ranks(
    waiting: str, last: str, most: int, names: str
) -> None:
    ranks = {name: rank for rank, name in enumerate(last.split())}
    assert [one.name for one in choose_nodes(waiting_of(waiting), ranks, most)] == names.split()


RANKS: list[tuple[str, dict[str, int], dict[str, int], str]] = [
    # nodes; their ranks in the last round, and in earlier ones; names by rank
    ("a b c", {}, {}, "a b c"),
    ("a b0 c", {}, {}, "b a c"),
    ("a2 b c", {}, {}, "b c a"),
    ("a5 b", {}, {}, "a b"),
    ("b a", {"a": 0, "b": 1}, {}, "a b"),
    ("x c b", {"a": 0, "b": 1, "c": 2}, {}, "x b c"),
    ("x y d", {"a": 0, "b": 1, "c": 2, "d": 3}, {}, "x y d"),
    ("x0 a", {"a": 0}, {}, "x a"),
    ("a1 b", {"a": 0, "b": 1}, {}, "b a"),
    ("x b", {"x": 0}, {"b": 0}, "x b"),
    ("x y a", {"x": 0}, {"a": 1}, "x a y"),
    ("x y a", {"x": 0, "y": 1}, {"a": 1}, "x y a"),
    ("a b", {}, {"a": 1, "b": 1}, "a b"),
    ("a b", {}, {"b": 1, "a": 1}, "b a"),
]


@pytest.mark.parametrize(("nodes", "last", "past", "names"), RANKS)
def test_assign_ranks_by_request_then_last_round_then_past(
    nodes: str, last: dict[str, int], past: dict[str, int], names: str
) -> None:
    ranks = assign_ranks(waiting_of(nodes), last, past)
    assert list(ranks) == names.split(), "in the order of rank"
    assert list(ranks.values()) == list(range(len(ranks)))


NAMES = [chr(ord("a") + number) for number in range(8)]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[JoinedNode], dict[str, int], dict[str, int]]:
    """Nodes of a round, some with a requested rank, and ranks in the last round and in earlier ones."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, len(NAMES)))]
    wished = draw(st.permutations(range(len(NAMES))))
    asks = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    nodes = [node(name, rank if ask else -1) for name, rank, ask in zip(names, wished, asks, strict=False)]
    before = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
    past: dict[str, Any] = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)))
    return nodes, {name: rank for rank, name in enumerate(before)}, past


@given(rounds())
def test_assigned_ranks_respect_requests_and_history(
    made: tuple[list[JoinedNode], dict[str, int], dict[str, int]],
) -> None:
    nodes, last, past = made
    ranks, size = assign_ranks(nodes, last, past), len(nodes)
    assert sorted(ranks) == sorted(one.name for one in nodes)
    assert list(ranks.values()) == list(range(size))
    asked = {one.rank: one.name for one in nodes if one.rank != -1}
    for one in nodes:
        if 0 <= one.rank < size:
            assert ranks[one.name] == one.rank
        elif last.get(one.name, size) < size and last[one.name] not in asked:
            assert ranks[one.name] == last[one.name]
        elif one.rank == -1 and one.name not in last and past.get(one.name, size) < size:
            taken = asked.keys() | {last[other.name] for other in nodes if other.name in last}
            here = {other.name for other in nodes}
            latest = [name for name, rank in past.items() if name in here and rank == past[one.name]][-1]
            if past[one.name] not in taken and latest == one.name:
                assert ranks[one.name] == past[one.name], "a node that returns gets its rank back"


def test_list_few_names_at_most_twenty() -> None:
    names = [str(number) for number in range(21)]
    assert list_few(names[:2]) == "0, 1"
    assert list_few(names[:20]).endswith("18, 19")
    assert list_few(names).endswith("18, 19 and 1 more")
