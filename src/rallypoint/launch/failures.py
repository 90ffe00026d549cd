"""Failures of workers: which worker, how and when it failed, and the error message that it left.

The message comes from the error file, if the script wrote one as PyTorch's `record` does (TORCHELASTIC_ERROR_FILE),
else from the end of stderr: the last Python traceback is extracted from there, with the exceptions that it is chained
to, also if its lines have a prefix such as PyTorch's `[rank0]: `. For a worker killed by a signal the message is the
signal: a traceback that it printed before is not the cause.

failure_report.py shows them.
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

from rallypoint.launch.output.stream import KEPT_LINES, last_lines
from rallypoint.launch.workers.worker_process import describe_exit
from rallypoint.text import printable

__all__ = ["ERROR_FILE", "Failure", "Failures", "earliest", "failure_of", "read", "server_failure", "write"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of a worker's error file."""

FILE_NAME = "failure.json"
MAX_TEXT = 64 * 1024
"""Limit of a message or a traceback; the middle of a longer one is dropped."""

MAX_ERROR_FILE = 4 * 1024 * 1024
MAX_MESSAGE_LINES = 20

_HEADER = re.compile(r"(?P<prefix>.*?)(Traceback \(most recent call last\):|Fatal Python error: .*)$")
_LINK = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SYNTAX = re.compile(r'  File ".*", line \d+$')


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one worker; `code` is the exit code, negative for a signal, and `how` the same in words."""

    node: str
    host: str
    rank: int
    """Global rank of the worker; negative if the store of a node failed instead."""

    local_rank: int
    pid: int
    code: int
    how: str
    at: str
    """When its exit was seen: ISO 8601, UTC, by the clock of its host."""

    message: str
    traceback: str = ""
    stderr: tuple[str, ...] = ()
    recorded_at: float = 0.0
    """When it wrote its error file, in seconds by the clock of its host; 0 if it wrote none."""

    hung: tuple[int, ...] = ()
    """All ranks that hang, if this is a hang."""

    stacks: tuple[str, ...] = ()
    """Where the ranks of the job were at that time, a line for each place."""

    def encode(self) -> str:
        """Return the failure as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, data: bytes | str) -> Failure:
        """Parse JSON; raise `msgspec.DecodeError` if it is not a failure."""
        return msgspec.json.decode(data, type=cls)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def summary(self) -> str:
        """Return the failure in one line."""
        first = self.message.strip().partition("\n")[0]
        if self.rank < 0:
            return printable(f"{self.node}: {first}")
        cause = "" if first in ("", self.how) else f": {first.removeprefix(f'{self.how}: ')}"
        return printable(f"rank {self.rank} on {self.node} (pid {self.pid}) failed: {self.how}{cause}")


class Failures(msgspec.Struct, frozen=True):
    """The content of failure.json."""

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
    """Build the failure of a worker from its exit code, its error file and the end of its `stderr`.

    `code` is None for a worker that wrote its error file and has not exited yet; Python would exit with 1.
    """
    how = "error recorded, not exited yet" if code is None else describe_exit(code)
    cause, found, lines = _recorded(error_file), _last_traceback(stderr.decode(errors="replace")), last_lines(stderr)
    if cause is None:
        cause = _Cause(found.message if (code or 0) > 0 else "", found.traceback)
    elif found.message and cause.message.startswith(found.message):  # stderr repeats the error, with other frames
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
        message=_cut(cause.message or last or how),
        traceback=_cut(cause.traceback),
        stderr=tuple(map(_cut, lines)),
        recorded_at=cause.at,
    )


def server_failure(node: str, message: str) -> Failure:
    """Build a failure of the store of a node's workers; no worker failed."""
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
    """Return the first of several failures on one host; the exit of `ended` was seen first.

    That is `ended`, unless another worker wrote its error file earlier: a worker that records an error and exits slowly
    may cause the failures that are seen before its own. If `ended` wrote no file it failed at once, perhaps by a
    signal, and not because of another worker.
    """
    recorded = [other for other in others if other.recorded_at and ended.recorded_at]
    return min([ended, *recorded], key=lambda failure: failure.recorded_at)


def write(directory: Path, first: Failure, others: Sequence[Failure] = ()) -> Path:
    """Write failure.json atomically, and return its path; raise OSError."""
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
    """Read failure.json; raise OSError or `msgspec.DecodeError`."""
    return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Failures)


class _Cause(NamedTuple):
    message: str
    traceback: str
    at: float = 0.0
    around: tuple[str, ...] = ()
    """The lines before and after the traceback."""


def _recorded(path: Path | None) -> _Cause | None:
    """Return the error that a script recorded, or None if the file is missing or malformed."""
    try:
        with open(path or os.devnull, "rb", opener=_open_nonblocking) as file:
            facts = os.fstat(file.fileno())
            message = json.loads(file.read(MAX_ERROR_FILE) if stat.S_ISREG(facts.st_mode) else b"")["message"]
        inner = message if isinstance(message, Mapping) else {"message": message}
        more = inner.get("extraInfo")
        more = more if isinstance(more, Mapping) else {}
        stack = more.get("py_callstack")
        if inner["message"] is None:
            return None
        return _Cause(str(inner["message"]), stack if isinstance(stack, str) else "", _time_of(more, facts.st_mtime))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking: a script may have put a pipe there."""
    return os.open(path, flags | os.O_NONBLOCK)


def _time_of(more: Mapping[str, Any], written_at: float) -> float:
    """Return when an error was recorded: PyTorch's timestamp, in whole seconds, refined by the file's."""
    try:
        second = float(more["timestamp"])
    except (KeyError, TypeError, ValueError):
        return written_at
    return min(max(written_at, second), second + 1) if math.isfinite(second) else written_at


def _last_traceback(text: str) -> _Cause:
    """Return the last traceback in a text, with the exceptions that it is chained to."""
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
                continue  # incomplete, or not a traceback
            message, after = said, lines[at + end :]
        elif not any(_LINK.match(_without(line, prefix)) for line in lines[at + end : before]):
            break
        block = [_without(line, prefix) for line in lines[at : at + end if not block else before]] + block
        before = at
    return _Cause(message, "\n".join(block), around=(*lines[:before], *after))


def _body(lines: Sequence[str]) -> tuple[str, int]:
    """Return the exception line of a traceback and the length of the traceback; ("", 0) if it is incomplete."""
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


def _cut(text: str) -> str:
    """Remove colours, escape control characters, and limit the length of a text."""
    half, text = MAX_TEXT // 2, printable(_COLOUR.sub("", text), keep="\n\t")
    return text if len(text) <= MAX_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"
