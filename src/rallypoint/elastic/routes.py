"""Where the output of workers goes: torchrun's `--redirects`, `--tee` and `--local-ranks-filter`, and its files.

Redirected is to a file only, teed is to the file and the console, and teed wins. A local rank that is not named is
left alone. The filter says who may show anything on the console, and changes nothing about files.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Route", "Std", "parse_ranks", "parse_std", "route", "worker_dir"]


class Std(enum.IntFlag):
    """Which of a worker's streams, numbered as on torchrun's command line."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class _Choice(dict[int, Std]):
    """Streams by local rank; a rank that is not named has the default."""

    def __init__(self, default: Std, named: Mapping[int, Std]) -> None:
        super().__init__(named)
        self._default = default

    def __missing__(self, local_rank: int) -> Std:
        return self._default


def parse_std(text: str) -> Mapping[int, Std]:
    """Read `--redirects` or `--tee`: 0 to 3 for all ranks, or RANK:VALUE,…; the result answers for every local rank.

    Raises ValueError, which quotes what is wrong.
    """
    if ":" not in text:
        return _Choice(_std(text, text), {})
    named = {}
    for part in text.split(","):
        rank, colon, value = part.partition(":")
        if not colon:
            raise ValueError(f"{text!r}: {part.strip()!r} is not RANK:VALUE, as in '0:1,1:3'")
        named[_rank(rank, text)] = _std(value, text)
    return _Choice(Std.NONE, named)


def parse_ranks(text: str) -> frozenset[int] | None:
    """Read `--local-ranks-filter`: local ranks with commas between; None, for all of them, if it is empty."""
    return frozenset(_rank(part, text) for part in text.split(",")) if text.strip() else None


def _rank(part: str, text: str) -> int:
    if not (part.strip().isascii() and part.strip().isdigit()):
        raise ValueError(f"{text!r}: {part.strip()!r} is not a local rank, a whole number from 0")
    return int(part)


def _std(value: str, text: str) -> Std:
    if value.strip() not in ("0", "1", "2", "3"):
        raise ValueError(f"{text!r}: {value.strip()!r} is none of 0 (nothing), 1 (stdout), 2 (stderr), 3 (both)")
    return Std(int(value))


class Route(NamedTuple):
    """Where one stream of one worker goes: shown on the console or not, and written to this file if there is one."""

    console: bool
    path: Path | None = None


def route(
    stream: Std,
    local_rank: int,
    redirects: Mapping[int, Std],
    tee: Mapping[int, Std],
    shown: Collection[int] | None,
    directory: Path | None,
) -> Route:
    """Say where a stream goes by torchrun's rules: redirected to a file only, teed to both, which wins, else shown.

    `shown` are the local ranks that may show anything, None for all. `directory` may be None where no file is wanted.
    """
    teed, redirected = bool(tee[local_rank] & stream), bool(redirects[local_rank] & stream)
    path = None
    if teed or redirected:
        if directory is None:
            raise ValueError("output goes to files only where there is a directory for logs")
        path = directory / f"{'stdout' if stream is Std.OUT else 'stderr'}.log"
    return Route((teed or not redirected) and (shown is None or local_rank in shown), path)


def worker_dir(log_dir: Path, attempt: int, local_rank: int) -> Path:
    """Return where the files of one worker of one attempt are, as torchrun lays them out."""
    return log_dir / f"attempt_{attempt}" / str(local_rank)
