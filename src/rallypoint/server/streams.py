"""Standard streams that are there: a process may be started without them, and then its next file takes their place."""

from __future__ import annotations

import os

__all__ = ["fill"]


def fill() -> None:
    """Open those of the descriptors 0 to 2 that are closed, on nothing, before anything else takes their numbers."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
