"""A cgroup for what an agent's workers start: version 2, below the agent's own, where this user may make one.

A child inherits its parent's cgroup whatever else it changes, and `cgroup.kill` ends all of them at once, also those
that fork while they are killed. The agent goes in to start a worker and comes out again, so that no child of the worker
can be older than its place. No controller is enabled in it: limits and accounts stay those of the agent's own. In a
container it can rarely be made, and nothing depends on it.
Rejected: to move a worker once it has started; a shell had a daemon outside by then.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["enter", "leave", "make_cgroup"]

PROCESSES = "cgroup.procs"
"""The file that processes are moved by; 0 is whoever writes."""


def make_cgroup(name: str) -> str:
    """Make a cgroup that can be killed, and return its directory; empty where that is not possible."""
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
    """Move this process into a cgroup, if it can also get out again; say whether it is in."""
    return os.access(Path(cgroup).parent / PROCESSES, os.W_OK) and _move(Path(cgroup))


def leave(cgroup: str) -> bool:
    """Move this process back to where it was; say whether it is out."""
    return _move(Path(cgroup).parent)


def _move(place: Path) -> bool:
    try:
        (place / PROCESSES).write_text("0")
    except OSError:
        return False
    return True


def _own() -> Path | None:
    """Return the directory of the cgroup that this process is in, None where there is no version 2."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    for mount in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = mount.partition(" - ")
        root, point = fields.split()[3:5]
        if path is not None and kind.startswith("cgroup2 ") and os.path.commonpath([root, path]) == root:
            return Path(point, os.path.relpath(path, root))
    return None
