"""The changes that a thread of the agent listens to, for as long as the session lasts.

Rejected: `for change in watch`. It raises StoreTimeout when nothing has changed for a while, and NoQuorum while etcd
has no majority. A thread that ended there would be missed at the next failure: this agent would not notice it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.errors import NoQuorum, RallypointError, StoreTimeout
from rallypoint.store.base import Change, Watch

__all__ = ["changes_of"]


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
