"""A disk that may lose power at any moment: the files that it would hold then, in the worst cases.

`Disk` intercepts the calls that change files. The content of a file is safe after a sync of the file, names after a
sync of the directory. After every call it records three possible disks after a loss of power:

    oldest       names and contents as of their last sync
    new names    all current names, with contents as of their last sync
    removed      as oldest, but without the files that were removed since

(test_segment.py covers partly written contents.) A rename of a file that was not synced, an acknowledgement before a
sync of the directory, a removal too early: each loses something on one of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.storage.logs import files


class Moment(NamedTuple):
    """After a call: the number of acknowledged records, and the content of each possible disk."""

    call: str
    acknowledged: int
    disks: list[dict[str, bytes]]


class _Stored:
    """A file, independent of its name."""

    def __init__(self, safe: bytes = b"") -> None:
        self.safe = safe


class Disk:
    """Watches one directory, which is `synced` in the beginning or not; the test counts `acknowledged`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, synced: bool = True) -> None:
        self.moments: list[Moment] = []
        self.acknowledged = 0
        self._directory = directory
        self._names = {name: _Stored(data if synced else b"") for name, data in files(directory).items()}
        self._safe_names = dict(self._names) if synced else {}
        self._removed: set[str] = set()
        self._fds: dict[int, str] = {}
        self._real = {name: getattr(os, name) for name in ("open", "fsync", "fdatasync", "rename", "unlink", "pwrite")}
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, name))

    def open(self, path: Any, flags: int, *mode: int) -> int:
        fd: int = self._real["open"](path, flags, *mode)
        self._fds[fd] = os.fspath(path)
        name = self._name(path)
        if name and name not in self._names:
            self._names[name] = _Stored()
            self._note(f"create {name}")
        return fd

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        written: int = self._real["pwrite"](fd, data, at)
        self._note(f"write {self._fds.get(fd)}")
        return written

    def fsync(self, fd: int) -> None:
        path = self._fds[fd]
        if path == str(self._directory):
            self._safe_names = dict(self._names)
            self._removed.clear()
        elif name := self._name(path):
            self._names[name].safe = (self._directory / name).read_bytes()
        self._note(f"sync {path}")

    fdatasync = fsync

    def rename(self, old: str, new: str) -> None:
        self._real["rename"](old, new)
        self._names[self._name(new)] = self._names.pop(self._name(old))
        self._fds = {fd: new if path == old else path for fd, path in self._fds.items()}
        self._note(f"rename {new}")

    def unlink(self, path: str) -> None:
        self._real["unlink"](path)
        del self._names[self._name(path)]
        self._removed.add(self._name(path))
        self._note(f"unlink {path}")

    def _name(self, path: Any) -> str:
        """Return the name of a file in the directory; empty for the lock and for other files."""
        parent, name = os.path.split(os.fspath(path))
        return name if parent == str(self._directory) and name != "lock" else ""

    def _note(self, call: str) -> None:
        oldest = {name: stored.safe for name, stored in self._safe_names.items()}
        new_names = {name: stored.safe for name, stored in self._names.items()}
        removed = {name: data for name, data in oldest.items() if name not in self._removed}
        self.moments.append(Moment(call, self.acknowledged, [oldest, new_names, removed]))
