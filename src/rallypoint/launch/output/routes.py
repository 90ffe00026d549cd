"""Routes of the workers' output: torchrun's `--redirects`, `--tee` and `--local-ranks-filter`, and its log files.

A redirected stream goes to a file only, a teed one to the file and the console; tee takes precedence. A local rank that
neither option names goes to the console. The filter selects the local ranks shown on the console, and does not affect
files.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["OutputRoute", "Std", "parse_global_ranks", "parse_ranks", "parse_std", "route", "worker_dir"]

MAX_RANKS = 1 << 20
"""Limit of a rank in a filter."""


class Std(enum.IntFlag):
    """A set of a worker's streams, numbered as on torchrun's command line."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class _StdByRank(dict[int, Std]):
    """Streams by local rank, with a default for ranks that are not named."""

    def __init__(self, default: Std, named: Mapping[int, Std]) -> None:
        super().__init__(named)
        self._default = default

    def __missing__(self, local_rank: int) -> Std:
        return self._default


def parse_std(text: str) -> Mapping[int, Std]:
    """Parse `--redirects` or `--tee`, 0 to 3 for all ranks, or RANK:VALUE,…; the result has every local rank.

    Raises ValueError that quotes the invalid part.
    """
    if ":" not in text:
        return _StdByRank(_std(text, text), {})
    named = {}
    for part in text.split(","):
        rank, colon, value = part.partition(":")
        if not colon:
            raise ValueError(f"{text!r}: {part.strip()!r} is not RANK:VALUE, as in '0:1,1:3'")
        named[_rank(rank, text)] = _std(value, text)
    return _StdByRank(Std.NONE, named)


def parse_ranks(text: str) -> frozenset[int] | None:
    """Parse `--local-ranks-filter`, local ranks separated by commas; return None, for all, if it is empty."""
    return frozenset(_rank(part, text) for part in text.split(",")) if text.strip() else None


def parse_global_ranks(text: str) -> frozenset[int] | None:
    """Parse `--ranks-filter`, global ranks and ranges of them, 0,8-15; return None, for all, if it is empty."""
    ranks: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        low, dash, high = part.partition("-")
        first = _rank(low, text, "rank")
        last = _rank(high, text, "rank") if dash else first
        if last < first or last >= MAX_RANKS:
            raise ValueError(
                f"{text!r}: {part.strip()!r} is not a range of ranks: use FIRST-LAST, up to {MAX_RANKS - 1}"
            )
        ranks.update(range(first, last + 1))
    return frozenset(ranks) or None


def _rank(part: str, text: str, what: str = "local rank") -> int:
    if not (part.strip().isascii() and part.strip().isdigit()):
        raise ValueError(f"{text!r}: {part.strip()!r} is not a {what}: use a number from 0")
    return int(part)


def _std(value: str, text: str) -> Std:
    if value.strip() not in ("0", "1", "2", "3"):
        raise ValueError(f"{text!r}: {value.strip()!r} is none of 0 (none), 1 (stdout), 2 (stderr), 3 (both)")
    return Std(int(value))


class OutputRoute(NamedTuple):
    """Destinations of one stream of one worker: the console or not, and a file if `path` is given."""

    console: bool
    path: Path | None = None


def route(
    stream: Std,
    local_rank: int,
    redirects: Mapping[int, Std],
    tee: Mapping[int, Std],
    shown: Collection[int] | None,
    directory: Path | None,
) -> OutputRoute:
    """Return the route of a stream by torchrun's rules.

    `shown` holds the local ranks shown on the console, None for all. `directory` may be None if no file is needed.
    """
    teed, redirected = bool(tee[local_rank] & stream), bool(redirects[local_rank] & stream)
    path = None
    if teed or redirected:
        if directory is None:
            raise ValueError("writing output to files needs a directory for logs")
        path = directory / f"{'stdout' if stream is Std.OUT else 'stderr'}.log"
    return OutputRoute((teed or not redirected) and (shown is None or local_rank in shown), path)


def worker_dir(log_dir: Path, attempt: int | str, local_rank: int) -> Path:
    """Return the directory of one worker in one attempt, in torchrun's layout."""
    return log_dir / f"attempt_{attempt}" / str(local_rank)
