"""How a node is told that its round is over: a watch in a thread of its own, and the event that it sets."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from rallypoint.core import rendezvous
from rallypoint.core.machine import Done
from rallypoint.deadline import Timeout, seconds
from rallypoint.errors import RallypointError
from rallypoint.recipes.hosting import PROGRESS_S, Object
from rallypoint.text import printable

__all__ = ["Change", "Watch"]

log = logging.getLogger("rallypoint")

LOOK_S = 0.5
"""How often a watch looks on a store that the members host on: a client of torch's has one lock, so a wait would keep
everybody else from it."""


class Change:
    """Whether a round is over, and why: an event that is set once."""

    def __init__(self, callback: Callable[[str], object] | None = None) -> None:
        self.reason = ""
        self._event = threading.Event()
        self._callback = callback

    def is_set(self) -> bool:
        """Say whether the round is over."""
        return self._event.is_set()

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the round is over, or the time is; say which."""
        return self._event.wait(None if timeout is None else seconds(timeout))

    def set(self, reason: str) -> None:
        """Tell whoever waits."""
        self.reason = reason
        self._event.set()
        if self._callback is not None:
            try:
                self._callback(reason)
            except Exception:
                log.exception("on_change of a rendezvous failed; the round is over: %s", printable(reason))

    def dismiss(self, reason: str) -> None:
        """Let go whoever waits, for this node itself goes on; nobody is called."""
        self._callback = None
        self.set(reason)


class Watch:
    """A daemon thread that waits for a round to be over."""

    def __init__(self, shared: Object, member: str, scope: int, change: Change) -> None:
        self.change = change
        self._object = shared
        self._member = member
        self._command = rendezvous.Watch(scope)
        self._call = shared.next_call()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"watch of {shared.thing}", daemon=True).start()

    def stop(self) -> None:
        """End the watch; nobody will hear of it any more."""
        self._stopped.set()
        if not self.change.is_set():
            self.change.dismiss("this node has left the round")
            with contextlib.suppress(RallypointError):
                self._object.act(self._member, self._object.next_call(), rendezvous.Withdraw(self._call), 0.0)

    def _run(self) -> None:
        pushed = self._object.statistics().hosted_by == "server"
        try:
            while not self._stopped.is_set():
                wait_s = PROGRESS_S if pushed else 0.0
                outcome = self._object.act(self._member, self._call, self._command, wait_s)
                if isinstance(outcome, Done):
                    self._tell(str(outcome.answer))
                    return
                if not pushed:
                    self._stopped.wait(LOOK_S)
        except (RallypointError, RuntimeError) as error:  # torch's stores raise the latter
            self._tell(f"the store is lost: {error}")

    def _tell(self, reason: str) -> None:
        if not self._stopped.is_set():
            self.change.set(reason)
