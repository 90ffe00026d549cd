"""The standard streams of a child: those that it was started without, and what it is told on its input.

A process may be started without some of them, and then its next file takes their place.
"""

from __future__ import annotations

import os

__all__ = ["fill", "read_settings"]


def fill() -> None:
    """Open those of the descriptors 0 to 2 that are closed, on nothing, before anything else takes their numbers."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def read_settings() -> bytes:
    """Return the line on standard input that tells a child what to do, and close that input."""
    with os.fdopen(os.dup(0), "rb") as pipe:
        line = pipe.readline()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return line
