"""How a round comes together, as tables: what is known, and what is decided; who waits, and who is in; who has which
rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.gathering import Form, Hold, Limits, Node, Refuse, Situation, chosen, decide, few, ranks_for
from rallypoint.core.machine import Call

TO_FOUR = Limits(2, 4, 5.0)
AT_ONCE = Limits(2, 4, 0.0)
PAIR = Limits(2, 2, 5.0)


def node(name: str, rank: int = -1, host: str = "h", loopback: bool = False) -> Node:
    return Node(Call(name, f"s-{name}", 1, f"{host}:7"), rank, host, "", loopback)


ENDPOINT = "endpoint (use an address that every node can reach, not localhost)"
DECISIONS: list[tuple[str, Situation, Form | Hold | Refuse]] = [
    # Too few
    ("the first", Situation(TO_FOUR, 1), Hold("1 of at least 2 nodes: waiting for 1")),
    (
        "too few, and others are to come again",
        Situation(TO_FOUR, 1, True, ["b", "c"]),
        Hold("1 of at least 2 nodes: waiting for 1; not back yet: b, c"),
    ),
    (
        "too few, though all who live are back",
        Situation(TO_FOUR, 1, True),
        Hold("1 of at least 2 nodes: waiting for 1"),
    ),
    ("nobody", Situation(TO_FOUR, 0, True), Hold("0 of at least 2 nodes: waiting for 2")),
    (
        "too few, whatever rang",
        Situation(TO_FOUR, 1, last_call_over=True),
        Hold("1 of at least 2 nodes: waiting for 1"),
    ),
    # All
    ("full", Situation(TO_FOUR, 4), Form("all 4 nodes are here")),
    ("full, and more", Situation(TO_FOUR, 6, True), Form("all 4 nodes are here")),
    ("one is all", Situation(Limits(1, 1, 5.0), 1), Form("all 1 nodes are here")),
    (
        "full of newcomers, and those of the last round are on their way",
        Situation(TO_FOUR, 5, True, ["a"]),
        Hold("5 nodes are here for 4 places: last call of 5 s; not back yet: a", True),
    ),
    (
        "a spare more than needed, and one is not back",
        Situation(PAIR, 2, True, ["b"]),
        Hold("2 nodes are here for 2 places: last call of 5 s; not back yet: b", True),
    ),
    (
        "they never came",
        Situation(PAIR, 3, True, ["b"], last_call_over=True),
        Form("2 of at most 2 nodes came before the last call of 5 s was over"),
    ),
    # Enough
    (
        "enough",
        Situation(TO_FOUR, 2),
        Hold("2 nodes are enough, and up to 4 may come: last call of 5 s", True),
    ),
    (
        "last call is over",
        Situation(TO_FOUR, 3, last_call_over=True),
        Form("3 of at most 4 nodes came before the last call of 5 s was over"),
    ),
    (
        "last call is over, and one did not come again",
        Situation(TO_FOUR, 3, True, ["d"], last_call_over=True),
        Form("3 of at most 4 nodes came before the last call of 5 s was over"),
    ),
    (
        "enough, and some are not back",
        Situation(TO_FOUR, 2, True, ["c", "d"]),
        Hold("2 nodes are enough, and up to 4 may come: last call of 5 s; not back yet: c, d", True),
    ),
    (
        "enough, and everybody is back",
        Situation(TO_FOUR, 3, True),
        Form("everybody of the last round is back: 3 of at most 4 nodes"),
    ),
    (
        "everybody is back, and all ranks that were asked for can be had",
        Situation(TO_FOUR, 3, True, highest=2),
        Form("everybody of the last round is back: 3 of at most 4 nodes"),
    ),
    (
        "everybody is back, and a rank is asked for that needs one more",
        Situation(TO_FOUR, 3, True, highest=3),
        Hold("3 nodes are enough, and up to 4 may come: last call of 5 s; rank 3 is asked for", True),
    ),
    # Enough, and there is no last call
    (
        "no last call",
        Situation(AT_ONCE, 2),
        Form("2 of at most 4 nodes are here, and there is no last call"),
    ),
    (
        "no last call, and a rank that cannot be had",
        Situation(AT_ONCE, 2, highest=3),
        Form("2 of at most 4 nodes are here, and there is no last call"),
    ),
    (
        "no last call, but one of the last round is on its way",
        Situation(AT_ONCE, 2, True, ["a"]),
        Hold("2 nodes are enough, and up to 4 may come: last call of 3 s; not back yet: a", True),
    ),
    (
        "no last call, full, but one of the last round is on its way",
        Situation(AT_ONCE, 4, True, ["a"]),
        Hold("4 nodes are here for 4 places: last call of 3 s; not back yet: a", True),
    ),
    (
        "many are not back",
        Situation(Limits(1, 99, 5.0), 1, True, [str(number) for number in range(22)]),
        Hold(
            "1 nodes are enough, and up to 99 may come: last call of 5 s; not back yet: "
            "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 2 more",
            True,
        ),
    ),
    # Who may come
    ("a newcomer", Situation(TO_FOUR, 1, newcomer=node("a")), Hold("1 of at least 2 nodes: waiting for 1")),
    ("the last rank", Situation(TO_FOUR, 4, newcomer=node("a", 3)), Form("all 4 nodes are here")),
    (
        "a rank that no round has",
        Situation(TO_FOUR, 4, newcomer=node("a", 4)),
        Refuse("NotAMember", {"member": "a as rank 4", "members": "ranks 0 to 3"}),
    ),
    (
        "limits that nobody can keep",
        Situation(Limits(3, 2), 1, newcomer=node("a")),
        Refuse("NotAMember", {"member": "a", "members": "3 to 2 nodes, which is nobody"}),
    ),
    (
        "a rank that another asked for",
        Situation(TO_FOUR, 2, newcomer=node("b", 1), origin=node("a", 1), rival=node("a", 1)),
        Refuse("RankTaken", {"rank": 1, "member": "b", "other": "a (h:7)"}),
    ),
    (
        "another setting",
        Situation(TO_FOUR, 2, newcomer=node("b", host="i"), origin=node("a"), differs=("batch", "8", "16")),
        Refuse("Disagreement", {"what": "batch", "mine": "8 (b (i:7))", "theirs": "16", "other": "a (h:7)"}),
    ),
    (
        "both on one machine, over loopback",
        Situation(TO_FOUR, 1, newcomer=node("b", loopback=True), origin=node("a", loopback=True)),
        Hold("1 of at least 2 nodes: waiting for 1"),
    ),
    (
        "two machines, and the first came over loopback",
        Situation(TO_FOUR, 1, newcomer=node("b", host="i"), origin=node("a", loopback=True)),
        Refuse(
            "Disagreement",
            {"what": ENDPOINT, "mine": "i, network (b (i:7))", "theirs": "h, loopback", "other": "a (h:7)"},
        ),
    ),
    (
        "two machines, and the second came over loopback",
        Situation(TO_FOUR, 1, newcomer=node("b", host="i", loopback=True), origin=node("a")),
        Refuse(
            "Disagreement",
            {"what": ENDPOINT, "mine": "i, loopback (b (i:7))", "theirs": "h, network", "other": "a (h:7)"},
        ),
    ),
]


@pytest.mark.parametrize(("now", "decision"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_what_is_decided(now: Situation, decision: Form | Hold | Refuse) -> None:
    decided = decide(now)
    assert (type(decided), decided) == (type(decision), decision)


CHOICES: list[tuple[str, str, int, str]] = [
    # who waits, as they came (a name, and a rank asked for); who was in the last round; how many may be; who is in
    ("a b c", "", 3, "a b c"),
    ("a b c d", "", 3, "a b c"),
    ("c d a b", "a b", 2, "a b"),
    ("c d a b", "a b", 3, "a b c"),
    ("c d0 a b", "a b", 3, "a b d"),
    ("c0 d e a1", "a", 2, "a c"),
    ("c d", "a b", 1, "c"),
]


def waiting_of(words: str) -> list[Node]:
    return [node(word[0], int(word[1:] or -1)) for word in words.split()]


@pytest.mark.parametrize(("waiting", "last", "most", "names"), CHOICES)
def test_who_is_chosen(waiting: str, last: str, most: int, names: str) -> None:
    ranks = {name: rank for rank, name in enumerate(last.split())}
    assert [one.name for one in chosen(waiting_of(waiting), ranks, most)] == names.split()


RANKS: list[tuple[str, dict[str, int], dict[str, int], str]] = [
    # who is in; the ranks of the last round, and of earlier ones; the names by rank
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
def test_who_has_which_rank(nodes: str, last: dict[str, int], past: dict[str, int], names: str) -> None:
    ranks = ranks_for(waiting_of(nodes), last, past)
    assert list(ranks) == names.split(), "in the order of rank"
    assert list(ranks.values()) == list(range(len(ranks)))


NAMES = [chr(ord("a") + number) for number in range(8)]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Node], dict[str, int], dict[str, int]]:
    """Who is in a round, some with a rank of their own, and what the ranks were in a last round and before."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, len(NAMES)))]
    wished = draw(st.permutations(range(len(NAMES))))
    asks = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    nodes = [node(name, rank if ask else -1) for name, rank, ask in zip(names, wished, asks, strict=False)]
    before = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
    past: dict[str, Any] = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)))
    return nodes, {name: rank for rank, name in enumerate(before)}, past


@given(rounds())
def test_ranks_are_kept(made: tuple[list[Node], dict[str, int], dict[str, int]]) -> None:
    nodes, last, past = made
    ranks, size = ranks_for(nodes, last, past), len(nodes)
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
                assert ranks[one.name] == past[one.name], "who returns gets its own back"


def test_few_names_are_listed() -> None:
    names = [str(number) for number in range(21)]
    assert few(names[:2]) == "0, 1"
    assert few(names[:20]).endswith("18, 19")
    assert few(names).endswith("18, 19 and 1 more")
