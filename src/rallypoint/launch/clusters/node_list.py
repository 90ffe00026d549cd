"""Lists of hosts in Slurm's notation: `node[001-003,7],gpu-a[1-2]-b[0-1]`.

A name may have several bracketed groups; the rightmost varies fastest. The lower end of a range sets the width to which
its numbers are padded with zeros. Text that would expand to more hosts than a run may have is refused before it is
expanded.

Rejected: to ask `scontrol show hostnames`. It is missing in containers, and where it is missing, recipes that use it
make every node a job of its own.
"""

from __future__ import annotations

import math
import re
from itertools import product

from rallypoint.core.machines.machine import MAX_MEMBERS

__all__ = ["expand_hosts", "split_list"]

MAX_NAME = 253
"""The longest name of a host."""

MAX_DIGITS = 18

_NAME = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]*\])+")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list, in its order; raise ValueError that quotes the offending part."""
    found: list[str] = []
    for part in split_list(text):
        if not _NAME.fullmatch(part):
            raise ValueError(f"{_quoted(text)} is not a list of hosts: {_quoted(part)} is not a name with [ranges]")
        pieces = [_choices(piece, part) for piece in re.split(r"(\[.*?\])", part) if piece]
        if len(found) + math.prod(map(len, pieces)) > MAX_MEMBERS:
            raise ValueError(f"{_quoted(text)} has more than {MAX_MEMBERS} hosts")
        found += map("".join, product(*pieces))
    for host in found:
        if len(host) > MAX_NAME or not _HOST.fullmatch(host):
            raise ValueError(f"{_quoted(host)} is not the name of a host")
    return found


def split_list(text: str) -> list[str]:
    """Split a list at the commas that are not in brackets."""
    parts, begin, inside = [], 0, False
    for at, char in enumerate(text):
        inside = char == "[" or (inside and char != "]")
        if char == "," and not inside:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def _choices(piece: str, part: str) -> list[str]:
    """Return what may stand in the place of a piece of a name."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for item in piece[1:-1].split(","):
        ends = _RANGE.fullmatch(item)
        if ends is None or len(item) > 2 * MAX_DIGITS:
            raise ValueError(f"{_quoted(part)}: {_quoted(item)} is neither a number nor a range like 1-4")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first or last - first >= MAX_MEMBERS:
            raise ValueError(f"{_quoted(part)}: {_quoted(item)} is not a range of 1 to {MAX_MEMBERS} numbers")
        numbers += [f"{number:0{len(ends[1])}d}" for number in range(first, last + 1)]
        if len(numbers) > MAX_MEMBERS:
            raise ValueError(f"{_quoted(part)} has more than {MAX_MEMBERS} hosts")
    return numbers


def _quoted(text: str) -> str:
    """Return a text for an error, shortened."""
    return repr(text if len(text) <= MAX_NAME else f"{text[:MAX_NAME]}…")
