"""Waiting until a descriptor can be read or written, by `poll`.

Rejected: `select.select`, which fails for descriptors of 1,024 and above, as a process with many workers, files or
connections has.
"""

from __future__ import annotations

import select
from typing import Protocol

__all__ = ["wait_readable", "wait_writable"]


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_readable(*descriptors: int | _HasFileno, timeout_s: float | None) -> bool:
    """Wait until one of the descriptors is readable or at its end; return whether one is."""
    return _poll(descriptors, select.POLLIN, timeout_s)


def wait_writable(descriptor: int | _HasFileno, timeout_s: float | None) -> bool:
    """Wait until a descriptor is writable or its reader is gone; return whether it is."""
    return _poll((descriptor,), select.POLLOUT, timeout_s)


def _poll(descriptors: tuple[int | _HasFileno, ...], events: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, events)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
