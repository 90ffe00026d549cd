"""What an agent says of itself: lines for people, or one JSON object a line, on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

__all__ = ["Events"]


class Events:
    """The voice of one agent. On a terminal, what it waits for is one line that is written over."""

    def __init__(self, node: str, quiet: bool, as_json: bool) -> None:
        self.node = node
        self._quiet = quiet
        self._json = as_json
        self._terminal = sys.stderr.isatty() and not as_json
        self._status = False

    def say(self, event: str, words: str, **facts: Any) -> None:
        """Tell of an event."""
        if self._json:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._write(json.dumps({"time": now, "node": self.node, "event": event, "reason": words, **facts}))
        elif not self._quiet:
            self._write(f"rallypoint run: {words}")

    def waiting(self, words: str) -> None:
        """Show what is waited for, on a terminal only."""
        if self._terminal and not self._quiet:
            os.write(2, f"\r\033[K{words}".encode())
            self._status = True

    def block(self, text: str) -> None:
        """Print what must be read, however quiet the agent is; as JSON it was said already."""
        if not self._json:
            self._write(text)

    def _write(self, text: str) -> None:
        start = "\r\033[K" if self._status else ""
        self._status = False
        data = f"{start}{text}\n".encode(errors="backslashreplace")
        while data:
            data = data[os.write(2, data) :]
