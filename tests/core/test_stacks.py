"""Dumps of faulthandler, parsed and folded."""

from __future__ import annotations

import pytest

from rallypoint.core.stacks import RankStack, decode_stacks, describe_groups, fold, main_stack, rank_list

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed"
IN_ALL_REDUCE = f"""Thread 0x00007f0c0a9ea6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f0c0c484b80 (most recent call first):
  File "{TORCH}/distributed_c10d.py", line 2810 in all_reduce
  File "{TORCH}/c10d_logger.py", line 81 in wrapper
  File "/job/train.py", line 41 in step
  File "/job/train.py", line 60 in <module>
"""
IN_ALL_REDUCE_DEEPER = IN_ALL_REDUCE.replace(
    f'  File "{TORCH}/distributed_c10d.py", line 2810 in all_reduce',
    f'  File "{TORCH}/x.py", line 1 in helper\n  File "{TORCH}/distributed_c10d.py", line 2811 in all_reduce',
)
IN_READ = """Current thread 0x00007f0c0c484b80 (most recent call first):
  File "/job/data.py", line 9 in read
  File "/job/train.py", line 40 in step
  File "/job/train.py", line 60 in <module>
"""
IN_QUEUE = """Thread 0x00007f0c0c484b80 [main] (most recent call first):
  File "/usr/lib/python3.14/queue.py", line 171 in get
  File "/job/train.py", line 7 in <module>
"""
IN_RUNPY = 'Thread 0x1 (most recent call first):\n  File "<frozen runpy>", line 3 in run'


def stack(rank: int, text: str = "", note: str = "") -> RankStack:
    return RankStack(rank=rank, text=text, note=note)


@pytest.mark.parametrize(
    ("text", "place", "waits", "depth"),
    [
        (IN_ALL_REDUCE, "all_reduce (train.py:41)", True, 4),
        (IN_ALL_REDUCE_DEEPER, "all_reduce (train.py:41)", True, 5),
        (IN_READ, "read (data.py:9)", False, 3),
        (IN_QUEUE, "get (train.py:7)", False, 2),
        (IN_RUNPY, "run (<frozen runpy>:3)", False, 1),
        ("", "unknown", False, 0),
        ("no dump at all\n\x1b[31m", "unknown", False, 0),
    ],
)  # fmt: skip
def test_the_place_is_the_call_of_the_users_own_code(text: str, place: str, waits: bool, depth: int) -> None:
    one = stack(0, text)
    assert (one.place, one.waits, len(main_stack(text))) == (place, waits, depth)


def test_equal_places_are_folded_and_the_odd_one_comes_first() -> None:
    ranks = [stack(rank, IN_ALL_REDUCE if rank % 2 else IN_ALL_REDUCE_DEEPER) for rank in range(63) if rank != 17]
    groups = fold([*ranks, stack(17, IN_READ), stack(63, note="stopped (SIGSTOP)")])
    assert describe_groups(groups) == (
        "rank 17 in read (data.py:9); rank 63 stopped (SIGSTOP); 62 ranks (0-16, 18-62) in all_reduce (train.py:41)"
    )


def test_the_same_call_from_another_line_is_another_place() -> None:
    other = IN_ALL_REDUCE.replace("line 60", "line 70")
    assert len(fold([stack(0, IN_ALL_REDUCE), stack(1, other)])) == 2


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        ([0, 1, 2], "ranks 0, 1, 2"),
        ([0, 1, 2, 3], "4 ranks (0-3)"),
        (list(range(0, 40, 2)), "20 ranks (0, 2, 4, 6, 8, 10, 12, 14, ...)"),
    ],
)
def test_ranks_are_listed_briefly(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text


@pytest.mark.parametrize("data", [b"", b"{}", b'[{"rank":"x"}]', b'[{"rank":1,"text":7}]', b"\xff"])
def test_malformed_answers_have_no_stacks(data: bytes) -> None:
    assert decode_stacks(data) == []
