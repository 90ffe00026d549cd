"""A cgroup (version 2) for an agent's workers and their children, below the agent's own, if this user may create one.

A child inherits the cgroup of its parent whatever else it changes, and `cgroup.kill` kills the whole cgroup at once,
including processes that fork meanwhile. The agent enters the cgroup to start a worker and leaves it again, so that a
worker and all its children are in it from the start. It enables no controllers: limits and accounting remain those of
the agent's cgroup. In a container it can rarely be created, and nothing depends on it.
Rejected: to move a worker after its start; a shell had started a daemon outside by then.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["enter", "leave", "make_cgroup"]

PROCESSES = "cgroup.procs"
"""The file that moves processes; writing 0 moves the writer."""


def make_cgroup(name: str) -> str:
    """Create a cgroup that can be killed, and return its directory; empty if that is not possible."""
    try:
        place = _own()
        if place is None:
            return ""
        made = place / name
        made.mkdir()
    except (OSError, ValueError):
        return ""
    if os.access(made / "cgroup.kill", os.W_OK) and enter(str(made)) and leave(str(made)):
        return str(made)
    with contextlib.suppress(OSError):
        made.rmdir()
    return ""


def enter(cgroup: str) -> bool:
    """Move this process into a cgroup, if it can also leave it; return whether it did."""
    return os.access(Path(cgroup).parent / PROCESSES, os.W_OK) and _move(Path(cgroup))


def leave(cgroup: str) -> bool:
    """Move this process back to the parent cgroup; return whether it did."""
    return _move(Path(cgroup).parent)


def _move(place: Path) -> bool:
    try:
        (place / PROCESSES).write_text("0")
    except OSError:
        return False
    return True


def _own() -> Path | None:
    """Return the directory of this process's cgroup, or None without version 2."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    for mount in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = mount.partition(" - ")
        root, point = fields.split()[3:5]
        if path is not None and kind.startswith("cgroup2 ") and os.path.commonpath([root, path]) == root:
            return Path(point, os.path.relpath(path, root))
    return None
