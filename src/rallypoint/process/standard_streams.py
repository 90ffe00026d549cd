"""The standard streams of a child process: open the missing ones, and read the settings from standard input.

A process may be started with some of the descriptors 0 to 2 closed. The next file that it opens would get such a
number, and receive what is meant for the standard stream.
"""

from __future__ import annotations

import os

__all__ = ["fill", "read_settings"]


def fill() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed, before another file gets its number."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def read_settings() -> bytes:
    """Return the child's settings, one line of standard input, and redirect standard input to /dev/null."""
    with os.fdopen(os.dup(0), "rb") as pipe:
        line = pipe.readline()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return line
