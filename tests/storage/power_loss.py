"""A disk that may lose power at any moment: which files it would hold then, at worst.

`Disk` watches the calls that change files. What a file holds is safe once the file was synced, and the names in the
directory once the directory was. After every call it notes three disks on which the machine might wake up:

    forgetful    names and contents as of their last sync, and nothing newer
    hasty        all names as they are now, but contents as of their last sync
    reckless     as forgetful, but what was removed is gone

(Contents that are newer in part are for test_segment.py.) A rename of a file that was not synced, an acknowledgement
before the directory was, a removal too early: each makes one of them lose something.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.storage.logs import files


class Moment(NamedTuple):
    """After a call: how much had been acknowledged by then, and what each disk would hold."""

    call: str
    acknowledged: int
    disks: list[dict[str, bytes]]


class _Stored:
    """A file, whatever its name is now."""

    def __init__(self, safe: bytes = b"") -> None:
        self.safe = safe


class Disk:
    """Watches one directory, of which everything is safe in the beginning, or nothing is (`synced`).

    `acknowledged` is for the test to count up.
    """

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
        """Return the name of a file in the directory, empty if it is another, or the lock."""
        parent, name = os.path.split(os.fspath(path))
        return name if parent == str(self._directory) and name != "lock" else ""

    def _note(self, call: str) -> None:
        forgetful = {name: stored.safe for name, stored in self._safe_names.items()}
        hasty = {name: stored.safe for name, stored in self._names.items()}
        reckless = {name: data for name, data in forgetful.items() if name not in self._removed}
        self.moments.append(Moment(call, self.acknowledged, [forgetful, hasty, reckless]))
