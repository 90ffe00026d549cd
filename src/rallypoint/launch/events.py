"""The events of an agent on standard error: text for people, or one JSON object per line.

The text reports what a user asks about: which nodes are missing, what failed, what the agent does about it. All other
events are in the JSON only. A signal does not interrupt the writing of an event (`uninterrupted`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rallypoint.errors import RallypointError
from rallypoint.text import printable

__all__ = ["Events"]

WIDE = 80
STATUS_S = 1.0
"""How often the status line on a terminal is redrawn."""


class Events:
    """Writes the events of one agent. On a terminal, a status line that is redrawn in place shows a wait.

    With `report` every event is also passed to that function, and failures are shown nowhere else.
    """

    def __init__(
        self,
        node: str,
        quiet: bool,
        as_json: bool,
        uninterrupted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        report: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self.node = node
        self._quiet = quiet
        self._json = as_json
        self._uninterrupted = uninterrupted
        self._report = report
        self._show: Callable[[str], object] = _write_line
        self._terminal = os.isatty(2) and not as_json and not quiet

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[str], object]) -> Iterator[None]:
        """Write lines with `show` in this block, which keeps them apart from the lines of workers."""
        self._show = show
        try:
            yield
        finally:
            self._show = _write_line

    def say(self, event: str, message: str, *, as_text: bool = True, **facts: Any) -> None:
        """Report an event as JSON, or as text if `as_text` is true and the agent is not quiet."""
        self._pass_on(event, message, facts)
        if self._json:
            self._as_json(event, message, facts)
        elif as_text and not self._quiet:
            self._put(f"rallypoint run: {printable(message)}")

    def fail(self, event: str, message: str, text: str = "", **facts: Any) -> None:
        """Report a failure, even if quiet; `text`, if given, replaces the line of text."""
        self._pass_on(event, message, facts)
        if self._json:
            self._as_json(event, message, facts)
        elif self._report is None:
            self._put(printable(text, keep="\n\t") or f"rallypoint run: {printable(message)}")

    def line(self, text: str) -> None:
        """Write a line as it is."""
        self._put(text)

    def waits(self, message: str) -> None:
        """Report what the agent waits for; not on a terminal, where the status line shows it."""
        if not self._terminal:
            self.say("waiting", message)

    @contextlib.contextmanager
    def status(self, reason: Callable[[], str]) -> Iterator[None]:
        """Show what the agent waits for while in this block, on a terminal only."""
        if not self._terminal:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=_show_status, args=(reason, over), name="status line", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(STATUS_S)  # it may wait for a server that does not answer

    def _pass_on(self, event: str, message: str, facts: dict[str, Any]) -> None:
        if self._report is not None:
            with self._uninterrupted():
                self._report({"event": event, "reason": message, **facts})

    def _put(self, text: str) -> None:
        with self._uninterrupted():
            self._show(text)

    def _as_json(self, event: str, message: str, facts: dict[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._put(json.dumps({"time": now, "node": self.node, "event": event, "reason": message, **facts}))


def _show_status(reason: Callable[[], str], over: threading.Event) -> None:
    began_at, shown = time.monotonic(), False
    with contextlib.suppress(RallypointError):
        while not over.wait(STATUS_S):
            message = f"rallypoint run: this node has waited {time.monotonic() - began_at:.0f} s: {printable(reason())}"
            if over.is_set():
                break
            _write(f"\r\033[K{message[: _columns()]}")
            shown = True
    if shown:
        _write("\r\033[K")


def _columns() -> int:
    with contextlib.suppress(OSError):
        return (os.get_terminal_size(2).columns or WIDE) - 1
    return WIDE - 1


def _write_line(text: str) -> None:
    _write(text + "\n")


def _write(text: str) -> None:
    data = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # the reader has gone
        while data:
            data = data[os.write(2, data) :]
