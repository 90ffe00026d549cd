"""What is known of a failure: who, how and when, and the cause in the worker's own words.

The words come from the error file, if the script wrote one as PyTorch's `record` does (TORCHELASTIC_ERROR_FILE), else
from the last of its standard error: a Python traceback is found there without the script's help, also behind a prefix
such as PyTorch's `[rank0]: `, with the exceptions that led to it. A worker that a signal ended did not die of one: its
message is the signal, whatever it had printed before.

A report shows the first failure with all of that, and folds under it what others died of afterwards.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rallypoint.elastic.stream import KEPT_LINES, last_lines
from rallypoint.elastic.workers import describe_exit
from rallypoint.text import printable

__all__ = ["ERROR_FILE", "Failure", "Failures", "earliest", "failure_of", "read", "report", "server_failure", "write"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable that tells a worker where to write its error."""

FILE_NAME = "failure.json"
MAX_TEXT = 64 * 1024
"""How much of a message or a traceback is kept: its beginning and its end."""

MAX_ERROR_FILE = 4 * 1024 * 1024
MAX_MESSAGE_LINES = 20
OTHERS_SHOWN = 20
RULE = "=" * 80

_HEADER = re.compile(r"(?P<prefix>.*?)(Traceback \(most recent call last\):|Fatal Python error: .*)$")
_LINK = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SYNTAX = re.compile(r'  File ".*", line \d+$')


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker failed; `code` is its exit code, or its signal as a negative number, `how` the same in words."""

    node: str
    host: str
    rank: int
    """That of the worker; negative where it was the server of a node that failed."""

    local_rank: int
    pid: int
    code: int
    how: str
    at: str
    """When its end was seen: ISO 8601, UTC, by the clock of its host."""

    message: str
    traceback: str = ""
    stderr: tuple[str, ...] = ()
    recorded_at: float = 0.0
    """When it wrote its error file, in seconds by the clock of its host; 0 if it wrote none."""

    def encode(self) -> str:
        """Return it as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, data: bytes | str) -> Failure:
        """Read it from JSON; raises `msgspec.DecodeError` where that is none."""
        return msgspec.json.decode(data, type=cls)

    def facts(self) -> dict[str, Any]:
        """Return its fields, as JSON has them."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def summary(self) -> str:
        """Say it in one line."""
        first = self.message.strip().partition("\n")[0]
        if self.rank < 0:
            return printable(f"{self.node}: {first}")
        cause = "" if first in ("", self.how) else f": {first}"
        return printable(f"rank {self.rank} on {self.node} (pid {self.pid}) failed: {self.how}{cause}")


class Failures(msgspec.Struct, frozen=True):
    """What failure.json holds."""

    first: Failure
    others: tuple[Failure, ...] = ()


def failure_of(
    *,
    node: str,
    host: str,
    rank: int,
    local_rank: int,
    pid: int,
    code: int | None,
    at: datetime,
    stderr: bytes = b"",
    error_file: Path | None = None,
) -> Failure:
    """Put together what is known of a worker that ended; `stderr` is the last that it wrote there.

    `code` is None for one that wrote its error file and has not ended yet: Python would end it with 1.
    """
    how = "an error on record, and still on its way out" if code is None else describe_exit(code)
    told, found, lines = _told(error_file), _last_traceback(stderr.decode(errors="replace")), last_lines(stderr)
    if told is None:
        told = _Cause(found.message if (code or 0) > 0 else "", found.traceback)
    elif found.message and told.message.startswith(found.message):  # the same once more, from other frames
        lines = found.around[-KEPT_LINES:]
    last = next((line.strip() for line in reversed(lines) if line.strip()), "") if (code or 0) > 0 else ""
    return Failure(
        node=node,
        host=host,
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        code=1 if code is None else code,
        how=how,
        at=at.astimezone(timezone.utc).isoformat(timespec="milliseconds"),
        message=_cut(told.message or last or how),
        traceback=_cut(told.traceback),
        stderr=tuple(map(_cut, lines)),
        recorded_at=told.at,
    )


def server_failure(node: str, message: str) -> Failure:
    """Put together what is known where no worker failed, but the server of a node's workers."""
    return Failure(
        node=node,
        host=socket.gethostname(),
        rank=-1,
        local_rank=-1,
        pid=0,
        code=1,
        how=message,
        at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        message=message,
    )


def earliest(ended: Failure, others: Sequence[Failure]) -> Failure:
    """Return who failed first, of one whose end was seen first and others of its host.

    That is the one whose end was seen, unless it wrote an error file later than another: who is slow to end after that
    may be why the others failed. One that wrote no file died at once, of a signal perhaps, and of nobody else.
    """
    recorded = [other for other in others if other.recorded_at and ended.recorded_at]
    return min([ended, *recorded], key=lambda failure: failure.recorded_at)


def report(first: Failure, others: Sequence[Failure] = ()) -> str:
    """Return the block that ends a failed run: the first failure whole, the others in a line each."""
    facts = {
        "how": first.how,
        "rank": f"{first.rank} (local rank {first.local_rank})",
        "node": f"{first.node} (host {first.host}, pid {first.pid})",
        "time": first.at,
    }
    lines = [RULE, f"FAILED FIRST: {first.message.rstrip()}"]
    lines += [f"  {name:<5} {printable(value)}" for name, value in facts.items()]
    if first.traceback:
        lines += ["", *first.traceback.rstrip().splitlines()]
    shown = {line.strip() for line in first.traceback.splitlines()}
    rest = [line for line in first.stderr if shown.isdisjoint((line.strip(), _bare(line)))]
    if any(line.strip() for line in rest):
        lines += ["", "  the last of its standard error:", *(f"  | {line}" for line in rest)]
    if others:
        lines += ["", f"  after it, {len(others)} more failed:"]
        lines += [f"  - {other.summary()}" for other in others[:OTHERS_SHOWN]]
        if len(others) > OTHERS_SHOWN:
            lines.append(f"  - and {len(others) - OTHERS_SHOWN} more")
    return "\n".join([*lines, RULE])


def write(directory: Path, first: Failure, others: Sequence[Failure] = ()) -> Path:
    """Write failure.json, whole or not at all, and return its path; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(Failures(first, tuple(others))), indent=2)
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=FILE_NAME)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data + b"\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, directory / FILE_NAME)
    except BaseException:
        os.unlink(temporary)
        raise
    return directory / FILE_NAME


def read(directory: Path) -> Failures:
    """Read what `write` wrote; raises OSError, or `msgspec.DecodeError`."""
    return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Failures)


class _Cause(NamedTuple):
    message: str
    traceback: str
    at: float = 0.0
    around: tuple[str, ...] = ()
    """What was printed before and after the traceback."""


def _told(path: Path | None) -> _Cause | None:
    """Return what a script wrote about its own error, None where it did not, or nothing that can be read."""
    try:
        with open(path or os.devnull, "rb", opener=_at_once) as file:
            facts = os.fstat(file.fileno())
            told = json.loads(file.read(MAX_ERROR_FILE) if stat.S_ISREG(facts.st_mode) else b"")["message"]
        inner = told if isinstance(told, Mapping) else {"message": told}
        more = inner.get("extraInfo")
        more = more if isinstance(more, Mapping) else {}
        stack = more.get("py_callstack")
        if inner["message"] is None:
            return None
        return _Cause(str(inner["message"]), stack if isinstance(stack, str) else "", _when(more, facts.st_mtime))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _at_once(path: str, flags: int) -> int:
    """Open a file that may be anything, such as a pipe that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


def _when(more: Mapping[str, Any], written_at: float) -> float:
    """Return when an error was recorded: PyTorch notes the second, and the file system knows more."""
    try:
        second = float(more["timestamp"])
    except (KeyError, TypeError, ValueError):
        return written_at
    return min(max(written_at, second), second + 1) if math.isfinite(second) else written_at


def _last_traceback(text: str) -> _Cause:
    """Find the last traceback in what was printed, with the exceptions that it is said to come from."""
    lines = text.splitlines()
    message, block, before = "", [""] * 0, len(lines)
    after: list[str] = []
    for at in reversed(range(len(lines))):
        header = _HEADER.match(lines[at]) or (None if block else _SYNTAX.match(lines[at]))
        if header is None or at >= before:
            continue
        prefix = header.groupdict().get("prefix") or ""
        said, end = _body([_without(line, prefix) for line in lines[at:before]])
        if not block:
            if not said:
                continue  # it was cut off, or is no traceback
            message, after = said, lines[at + end :]
        elif not any(_LINK.match(_without(line, prefix)) for line in lines[at + end : before]):
            break
        block = [_without(line, prefix) for line in lines[at : at + end if not block else before]] + block
        before = at
    return _Cause(message, "\n".join(block), around=(*lines[:before], *after))


def _body(lines: Sequence[str]) -> tuple[str, int]:
    """Return the exception that ends a traceback, and how many lines that has; none if it is not complete."""
    if lines[0].startswith("Fatal Python error"):
        return lines[0], len(lines)
    end = next((at for at, line in enumerate(lines[1:], 1) if line.strip() and not line[0].isspace()), 0)
    if not end or (_SYNTAX.match(lines[0]) and not re.match(r"\w+Error\b", lines[end])):
        return "", 0
    last = end + 1
    while last < min(len(lines), end + MAX_MESSAGE_LINES) and lines[last].strip():
        last += 1
    return lines[end], last


def _without(line: str, prefix: str) -> str:
    return line.removeprefix(prefix) if line.startswith(prefix) else line.removeprefix(prefix.rstrip())


def _bare(line: str) -> str:
    """Return a line without a prefix in brackets, as PyTorch puts before those of a traceback."""
    return re.sub(r"^\[\w+\]:", "", line).strip()


def _cut(text: str) -> str:
    """Return a text without what a terminal would obey or nobody can encode, and not too long."""
    half, text = MAX_TEXT // 2, printable(_COLOUR.sub("", text), keep="\n\t")
    return text if len(text) <= MAX_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"
