"""The changes that a thread of the agent listens to, for as long as the session lasts.

The request is sent when a `ChangeListener` is made, and its thread waits for the reply. So the agent goes on with
requests of its own, which the server handles after it: a change that one of them causes is not missed.

Rejected: `for change in watch`. It raises StoreTimeout when nothing has changed for a while, and NoQuorum while etcd
has no majority. A thread that ended there would be missed at the next failure: this agent would not notice it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from rallypoint.errors import NoQuorum, RallypointError, StoreTimeout
from rallypoint.store.base import Change, Store, Watch
from rallypoint.store.batch import Batch

__all__ = ["ChangeListener", "changes_of"]


class ChangeListener:
    """A thread that passes the changes of keys that start with a prefix to `handle`."""

    def __init__(self, store: Store, prefix: str, handle: Callable[[Change], object], name: str) -> None:
        self._handle = handle
        self._batch = Batch(store)
        self._asked = self._batch.watch(store, prefix)
        self._watch: Future[Watch] = Future()
        self._batch.send()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def confirm(self) -> None:
        """Wait until the server has accepted the watch; raise its error."""
        self._watch.result()

    def close(self) -> None:
        """Stop listening, soon: a thread tells the server. Changes that are under way may still be handled."""
        threading.Thread(target=self._close, name="end of a watch", daemon=True).start()

    def _close(self) -> None:
        with contextlib.suppress(RallypointError):
            self._watch.result().close()

    def _run(self) -> None:
        try:
            self._batch.wait()
        except BaseException as error:  # raised to the agent
            self._watch.set_exception(error)
            return
        self._watch.set_result(self._asked.value)
        for change in changes_of(self._asked.value):
            self._handle(change)


def changes_of(watch: Watch) -> Iterator[Change]:
    """Yield the changes of a watch until the watch is closed or its session is over."""
    while True:
        try:
            change = watch.next()
        except (StoreTimeout, NoQuorum):
            continue  # the watch goes on
        except RallypointError:
            return
        yield change
