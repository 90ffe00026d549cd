"""Stacks of workers: parsing what Python's faulthandler wrote, and folding equal stacks of many ranks into one line.

The stack of a rank is that of its main thread. In a dump of several threads, faulthandler writes it last.
A group is made of ranks that are at the same place: the same calls of the user's own code, and the same library
function called from there. Where they are inside of that function differs from moment to moment, and does not matter.
The place is shown as `all_reduce (train.py:41)`. Rare ones come first: the odd one out is usually the one to look at.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "MAX_STACK_BYTES",
    "Frame",
    "RankStack",
    "StackGroup",
    "describe_groups",
    "fold",
    "main_stack",
    "rank_list",
    "decode_stacks",
    "place_of",
]

MAX_STACK_BYTES = 64 * 1024
"""The longest dump of one worker that is kept."""

SHOWN_RANKS = 8
"""How many single ranks a list shows."""

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*:$")
_LIBRARY = re.compile(r"(/lib(64)?/python[\d.]+/|/site-packages/|/dist-packages/|^<frozen )")
_COLLECTIVE = re.compile(
    r"(/torch/(distributed|futures|cuda|nn/parallel|autograd)/"
    r"|/rallypoint/(recipes|store|client|compat|launch)/|/(mpi4py|horovod|deepspeed)/)"
)
"""Files whose functions wait for other ranks."""

_WRAPPERS = ("wrapper", "inner", "decorate_context", "__call__", "_call_impl", "_wrapped_call_impl", "<lambda>")
"""Functions that say nothing about a place."""


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether it is in a library, not in the user's own code."""
        return _LIBRARY.search(self.file) is not None or self.is_collective

    @property
    def is_collective(self) -> bool:
        """Whether it is in a file whose functions wait for other ranks."""
        return _COLLECTIVE.search(self.file) is not None

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class RankStack(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's state and stacks; it crosses the network, so it is checked when decoded."""

    rank: int
    node: Annotated[str, Meta(max_length=512)] = ""
    pid: int = 0
    text: Annotated[str, Meta(max_length=MAX_STACK_BYTES)] = ""
    """What faulthandler wrote."""

    note: Annotated[str, Meta(max_length=512)] = ""
    """Why there is no stack."""

    native: Annotated[str, Meta(max_length=MAX_STACK_BYTES)] = ""
    """The stacks of all threads with native frames, the main thread first, if they were asked for."""

    native_note: Annotated[str, Meta(max_length=512)] = ""
    """Why there are no native frames."""

    state: Annotated[str, Meta(max_length=32)] = "running"
    """running, stopped or ended."""

    step: int | None = None
    age_s: float | None = None
    """Time since its last progress; None if it never called `progress`."""

    stopped_s: float = 0.0
    """How long it is known to be stopped."""

    @property
    def stack(self) -> tuple[Frame, ...]:
        """The stack of its main thread, innermost call first."""
        return main_stack(self.text)

    @property
    def native_frames(self) -> list[str]:
        """The stack of its main thread with native frames, innermost call first; empty if it is unknown."""
        return [line.strip() for line in self.native.partition("\n\n")[0].splitlines()[1:]]

    @property
    def waits(self) -> bool:
        """Whether its main thread is in a library call that waits for other ranks."""
        return any(frame.is_collective for frame in itertools.takewhile(lambda frame: frame.is_library, self.stack))

    @property
    def place(self) -> str:
        """Where its main thread is, in words; the reason if that is unknown."""
        return place_of(self.stack) or self.note or "unknown"


class StackGroup(NamedTuple):
    """Ranks at the same place, and the stack of the first of them."""

    ranks: list[int]
    place: str
    stack: tuple[Frame, ...]
    native: list[str]
    """The stack with native frames, if it is known."""

    def __str__(self) -> str:
        return f"{rank_list(self.ranks)} {'in ' * bool(self.stack)}{self.place}"


def main_stack(text: str) -> tuple[Frame, ...]:
    """Return the stack of the main thread in a dump, innermost call first; empty if there is none."""
    frames: list[Frame] = []
    for line in text.splitlines():
        found = _FRAME.match(line)
        if _THREAD.match(line):
            frames = []
        elif found:
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    return tuple(frames)


def _cut_at_users_code(stack: Sequence[Frame]) -> tuple[str, tuple[Frame, ...]]:
    """Return the function called from the user's own code (or its own innermost one), and that code's calls."""
    at = next((at for at, frame in enumerate(stack) if not frame.is_library), 0)
    called = [frame.function for frame in reversed(stack[:at]) if frame.function not in _WRAPPERS]
    return called[0] if called else stack[at].function, tuple(stack[at:])


def place_of(stack: Sequence[Frame]) -> str:
    """Return the function that the user's code called, and the line of that call; empty without a stack."""
    if not stack:
        return ""
    function, own = _cut_at_users_code(stack)
    return f"{function} ({own[0].file.rpartition('/')[2]}:{own[0].line})"


def fold(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Group ranks at the same place, the rarest place first."""
    groups: dict[object, list[RankStack]] = {}
    for one in sorted(stacks, key=lambda one: one.rank):
        groups.setdefault(_cut_at_users_code(one.stack) if one.stack else one.note, []).append(one)
    made = [
        StackGroup(
            [one.rank for one in ranks],
            ranks[0].place,
            ranks[0].stack,
            next((one.native_frames for one in ranks if one.native), []),
        )
        for ranks in groups.values()
    ]
    return sorted(made, key=lambda group: (len(group.ranks), group.ranks))


def describe_groups(groups: Sequence[StackGroup]) -> str:
    """Return all groups in one line."""
    return "; ".join(map(str, groups))


def rank_list(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 2` or, for many, `62 ranks (0-16, 18-62)`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    more = ", ..." if len(texts) > SHOWN_RANKS else ""
    listed = ", ".join(texts[:SHOWN_RANKS]) + more
    if len(ranks) == 1:
        return f"rank {listed}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}" if len(ranks) <= 3 else f"{len(ranks)} ranks ({listed})"


_decoder = msgspec.json.Decoder(list[RankStack])


def decode_stacks(data: bytes) -> list[RankStack]:
    """Return the stacks in an answer of another node; empty if it is malformed."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return []
