"""The signals that an agent handles, by name."""

from __future__ import annotations

import signal

__all__ = ["ENDING_SIGNALS", "preempt_signals", "signal_names"]

ENDING_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals that end a job on this node, unless --signals-to-handle names others."""

UNHANDLED = ("SIGKILL", "SIGSTOP", "SIGALRM", "SIGCHLD", "SIGCONT")
"""Signals that the kernel or the agent itself needs."""


def signal_names(text: str) -> tuple[str, ...]:
    """Parse --signals-to-handle, names of signals separated by commas."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in signal.Signals.__members__ or name in UNHANDLED:
            raise ValueError(f"{name!r} is not a signal that can be handled: use names such as SIGTERM,SIGUSR1")
    if not names:
        raise ValueError("names no signal: the agent could not be ended")
    return names


def preempt_signals(text: str) -> tuple[str, ...]:
    """Parse --preempt-signal, names of signals separated by commas; none by default."""
    return signal_names(text) if text.strip() else ()
