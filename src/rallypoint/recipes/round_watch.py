"""Notify a node that its round is over: a thread that watches the round, and the event that it sets.

On our server the watch is a pending request, answered when the round ends. On any other store the thread polls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from rallypoint.core.machines import rendezvous
from rallypoint.core.machines.machine import Done
from rallypoint.deadline import Timeout, seconds
from rallypoint.errors import RallypointError
from rallypoint.recipes.hosting.shared_object import PROGRESS_S, SharedObject
from rallypoint.store.batch import Batch
from rallypoint.text import printable

__all__ = ["RoundChange", "RoundWatch"]

log = logging.getLogger("rallypoint")

LOOK_S = 0.5
"""Poll interval on a store other than our server. A torch client has one lock: a blocking wait would keep all other
threads of this process from it."""


class RoundChange:
    """A one-time event: the round is over, and the reason."""

    def __init__(self, callback: Callable[[str], object] | None = None) -> None:
        self.reason = ""
        self._event = threading.Event()
        self._callback = callback

    def is_set(self) -> bool:
        """Return whether the round is over."""
        return self._event.is_set()

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the round is over; return False at the timeout."""
        return self._event.wait(None if timeout is None else seconds(timeout))

    def set(self, reason: str) -> None:
        """Set the event, and call the callback with the reason."""
        self.reason = reason
        self._event.set()
        if self._callback is not None:
            try:
                self._callback(reason)
            except Exception:
                log.exception("the on_change callback of a rendezvous raised; the round is over: %s", printable(reason))

    def dismiss(self, reason: str) -> None:
        """Set the event without the callback, because this node itself has left the round."""
        self._callback = None
        self.set(reason)


class RoundWatch:
    """A daemon thread that waits for the end of a round."""

    def __init__(self, shared: SharedObject, member: str, scope: int, change: RoundChange) -> None:
        self.change = change
        self._object = shared
        self._member = member
        self._command = rendezvous.RendezvousWatch(scope)
        self._call = shared.next_call()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"watch of {shared.title}", daemon=True).start()

    def stop(self, batch: Batch | None = None) -> None:
        """Stop watching; the callback is not called any more. The server is told at once, or with a batch."""
        self._stopped.set()
        if not self.change.is_set():
            self.change.dismiss("this node has left the round")
            with contextlib.suppress(RallypointError):
                self._object.ask(batch, self._member, rendezvous.RendezvousWithdraw(self._call)).optional = True

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
            self._tell(f"lost the store: {error}")

    def _tell(self, reason: str) -> None:
        if not self._stopped.is_set():
            self.change.set(reason)
