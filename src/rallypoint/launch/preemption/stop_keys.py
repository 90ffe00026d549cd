"""The agreement of one round on a step to stop at, in the round's store; the keys go with the round.

    round:RUN:SCOPE/stop/state        the `StopState`, by compare-and-set: it has one sequence of values
    round:RUN:SCOPE/stop/node:NODE    the `NodeStop` of that node

Every agent watches the state. Only the coordinator, the living node with the lowest rank, watches the reports: with n
nodes, a watch by all would be n times as many events as there are reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from rallypoint.core.policy.stop_policy import NodeStop, StopState
from rallypoint.launch.changes import changes_of
from rallypoint.store.base import Store, Watch
from rallypoint.store.prefix import with_prefix

__all__ = ["StopKeys"]

STATE, NODE = "state", "node:"


class StopKeys:
    """One agent's access to the agreement of a round; `wake` is called in another thread after each change."""

    def __init__(self, round_store: Store, wake: Callable[[], object]) -> None:
        self.round_store = round_store
        self._keys: Store = with_prefix("stop", round_store)
        self._wake = wake
        self._watches: list[Watch] = []
        self._lock = threading.Lock()
        self._text: bytes | None = None
        """The state, as it was found."""

        self.state: StopState | None = None
        self.reports: dict[str, NodeStop] | None = None
        """The reports by node; None if this agent does not watch them."""

        self.changed = False
        """Whether something has changed; the reader resets it before it looks."""

    def begin(self, state: StopState) -> None:
        """Begin the agreement, unless it has begun."""
        self._keys.swap(STATE, None, msgspec.json.encode(state))

    def has_begun(self) -> bool:
        """Return whether there is an agreement."""
        return self._keys.check([STATE])

    def join(self) -> None:
        """Follow the state of an agreement that has begun."""
        self._watch(STATE, self._found_state)
        self._found_state(STATE, self._keys.get(STATE))

    def advance(self, before: StopState, state: StopState) -> None:
        """Replace the state, unless it is not the one before any more."""
        with self._lock:
            if self.state is not before:
                return
            text = self._text
        swap = self._keys.swap(STATE, text, msgspec.json.encode(state))
        if swap.value is not None:
            self._found_state(STATE, swap.value)

    def report(self, node: str, report: NodeStop) -> None:
        """Write the report of a node."""
        self._keys.set(f"{NODE}{node}", msgspec.json.encode(report))

    def watch_reports(self) -> None:
        """Follow the reports of all nodes, for the coordinator."""
        if self.reports is not None:
            return
        self.reports = {}
        self._watch(NODE, self._found_report)
        names = [key for key in self._keys.list_keys() if key.startswith(NODE)]
        for name, data in zip(names, self._keys.multi_get(names) if names else [], strict=True):
            report = _decoded(data, NodeStop)
            if report is not None:
                self.reports.setdefault(name.removeprefix(NODE), report)  # the watch may have a later one

    def close(self) -> None:
        """Stop following."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()

    # In threads of the watches

    def _watch(self, prefix: str, found: Callable[[str, bytes], object]) -> None:
        watch = self._keys.watch(prefix)
        self._watches.append(watch)
        threading.Thread(target=self._follow, args=(watch, found), name=f"stop/{prefix}", daemon=True).start()

    def _follow(self, watch: Watch, found: Callable[[str, bytes], object]) -> None:
        for change in changes_of(watch):
            if change.value is not None:
                found(change.key, change.value)
                self.changed = True
                self._wake()

    def _found_state(self, _: str, data: bytes) -> None:
        state = _decoded(data, StopState)
        with self._lock:
            if state is not None and (self.state is None or state.order > self.state.order):
                self._text, self.state = data, state

    def _found_report(self, key: str, data: bytes) -> None:
        report = _decoded(data, NodeStop)
        if report is not None and self.reports is not None:
            self.reports[key.removeprefix(NODE)] = report


def _decoded(data: bytes, kind: Any) -> Any:
    """Return a value from the store, or None if it is malformed: another client wrote it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        return None
