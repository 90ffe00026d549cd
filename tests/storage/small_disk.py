"""A file system of its own, so small that a test can fill it: `needs("tmpfs")`."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def mounts() -> bool:
    """Say whether this process may mount a file system, by doing so where nobody sees it."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def tmpfs(point: Path, size: int) -> Iterator[None]:
    """Mount a new directory as a file system of this size."""
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", point], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


def take_all(point: Path) -> Path:
    """Fill a file system to its last byte, as others may at any moment; return the file to remove."""
    path = point / "others"
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    return path
