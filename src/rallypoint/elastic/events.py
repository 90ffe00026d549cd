"""What an agent says of itself: lines for people, or one JSON object a line, on standard error.

People are told what they would ask: that nodes are waited for, that somebody failed, what is done about it. All the
rest is in the JSON only.
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
"""How often the line on a terminal is written anew."""


class Events:
    """The voice of one agent. On a terminal, what it waits for is one line that is written over."""

    def __init__(self, node: str, quiet: bool, as_json: bool) -> None:
        self.node = node
        self._quiet = quiet
        self._json = as_json
        self._show: Callable[[str], object] = _write_line
        self._terminal = os.isatty(2) and not as_json and not quiet

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[str], object]) -> Iterator[None]:
        """Let somebody else write the lines, who knows where those of the workers end."""
        self._show = show
        try:
            yield
        finally:
            self._show = _write_line

    def say(self, event: str, words: str, *, to_people: bool = True, **facts: Any) -> None:
        """Tell of an event."""
        if self._json:
            self._as_json(event, words, facts)
        elif to_people and not self._quiet:
            self._show(f"rallypoint run: {printable(words)}")

    def fail(self, event: str, words: str, text: str = "", **facts: Any) -> None:
        """Tell what must be read, however quiet the agent is; to people as `text`, if there is one."""
        if self._json:
            self._as_json(event, words, facts)
        else:
            self._show(printable(text, keep="\n\t") or f"rallypoint run: {printable(words)}")

    def waits(self, words: str) -> None:
        """Tell what is waited for, now and then; not on a terminal, where there is a line of it."""
        if not self._terminal:
            self.say("waiting", words)

    @contextlib.contextmanager
    def status(self, look: Callable[[], str]) -> Iterator[None]:
        """Show what is waited for while in this block, if that is a while; on a terminal only."""
        if not self._terminal:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=_show_status, args=(look, over), name="status line", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _as_json(self, event: str, words: str, facts: dict[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._show(json.dumps({"time": now, "node": self.node, "event": event, "reason": words, **facts}))


def _show_status(look: Callable[[], str], over: threading.Event) -> None:
    began_at, shown = time.monotonic(), False
    with contextlib.suppress(RallypointError):
        while not over.wait(STATUS_S):
            words = f"rallypoint run: this node has waited {time.monotonic() - began_at:.0f} s: {printable(look())}"
            _write(f"\r\033[K{words[: _columns()]}")
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
    with contextlib.suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(2, data) :]
