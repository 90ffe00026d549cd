"""The thread that reconnects a session after a cut, while each caller waits no longer than its own deadline.

The thread that notices a cut starts it: a call that reads, or the connection monitor. It becomes the reader, so no
other thread reads meanwhile, and it holds no lock while it connects: calls get numbers and wait as always, and are sent
when the session is resumed. So a call can end at its deadline or by Ctrl-C, and the store can be closed or dropped,
without waiting for a connection. A second reconnect thread finds that there is a reader, and ends.

Rejected: letting the reading call connect, and hand over at its deadline. Calls shorter than a greeting would each
start one and none would finish it; and a signal could interrupt between any two steps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

from rallypoint.client.blocking.one_shot_event import OneShotEvent
from rallypoint.client.routing.dial import Dialer, DialResult

__all__ = ["ReconnectTarget", "start"]

START_S = 10.0
"""How long a thread may take to start. If it takes longer, the next thread that notices the cut starts another."""


class ReconnectTarget(Protocol):
    """A session to reconnect: see `supervisor.py`."""

    closed: OneShotEvent
    """Set when the session is over."""

    def take_over(self, connection: object, reader: object) -> bool:
        """Become the reader instead of `reader`; return False if another thread reads, or there is no need."""

    def drop_connection(self) -> tuple[Dialer, float] | None:
        """Close the old connection; return a dialer and the pause before its first attempt; None if ended."""

    def resume(self, result: DialResult) -> None:
        """Continue on a new connection, and let other threads read; if it is lost, too, they notice."""

    def note_attempt(self, why: str, no_quorum: Mapping[str, str]) -> None:
        """Note why an attempt failed; `no_quorum` has the reason at each address, if one reported no quorum."""

    def give_up(self, error: Exception) -> None:
        """End the session."""


def start(reference: weakref.ref[ReconnectTarget], connection: object, reader: object) -> None:
    """Reconnect a session in a new thread; return once that thread is the reader, or has nothing to do.

    `connection` is the one that was cut, `reader` the reader that noticed it (None: no thread reads).
    """
    begun = OneShotEvent()
    arguments = (reference, connection, reader, begun)
    try:
        threading.Thread(target=_run, args=arguments, name="rallypoint reconnect", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down and starts no threads
        _run(*arguments)
    begun.wait(START_S)


def _run(reference: weakref.ref[ReconnectTarget], connection: object, reader: object, begun: OneShotEvent) -> None:
    target = reference()
    try:
        ours = target is not None and target.take_over(connection, reader)
    finally:
        begun.set()
    if target is None or not ours:
        return
    closed, found = target.closed, target.drop_connection()
    del target  # its owner can release it between attempts
    dialer, pause_s = found or (None, None)
    while pause_s is not None and dialer is not None and not closed.wait(pause_s):
        pause_s = _attempt(reference, dialer)


def _attempt(reference: weakref.ref[ReconnectTarget], dialer: Dialer) -> float | None:
    """Try once to resume the session; return the pause before the next attempt, None if there is none."""
    try:
        result = dialer.try_all()
        target = reference()
        if target is None:
            if result is not None:
                result.socket.close()
            return None
        if result is not None:
            target.resume(result)
            return None
        target.note_attempt(dialer.explain_failure, dialer.no_quorum)
        return dialer.pause_s()
    except Exception as error:  # even a bug: nothing else would ever release the callers
        target = reference()
        if target is not None:
            target.give_up(error)
        return None
