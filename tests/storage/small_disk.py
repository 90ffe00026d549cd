"""A file system so small that a test can fill it: `needs("tmpfs")`."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def mounts() -> bool:
    """Return whether this process may mount file systems, by mounting one in a private namespace."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def tmpfs(point: Path, size: int) -> Iterator[None]:
    """Create a directory and mount a file system of this size on it."""
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", point], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


def take_all(point: Path) -> Path:
    """Fill a file system to its last byte, as other programs may; return the file to remove."""
    path = point / "others"
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    return path
