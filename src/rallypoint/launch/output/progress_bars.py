"""Progress bars: lines that a program rewrites with carriage returns, as tqdm does.

A stream with bars is split into text, which is forwarded, and the current state of a bar, which replaces the one before
it. Of a bar, the last state becomes a line when the program ends it. Text without carriage returns passes unchanged, an
unfinished line included; so do lines that end in `\\r\\n`, and bytes that are not UTF-8.

tqdm draws nested bars with a line feed, the bar, and "cursor up". A cursor that goes up and down again is where it was:
the inner bar stays one bar, and each new state of the outer one is a line.

Rejected: a terminal emulator for each rank. Programs that draw whole screens do not run 64 times in one terminal.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["BarSplitter", "clip", "last_state"]

MAX_STATE = 64 * 1024
"""A longer state is not a bar's, and is forwarded as text."""

UP = b"\x1b[A"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[^\[]?|[\x00-\x1f\x7f-\x9f]")
"""Control sequences and control characters."""


def last_state(line: bytes) -> bytes:
    """Return what a terminal would show of a line with carriage returns; empty if it was cleared."""
    states = [state for state in line.split(b"\r") if state]
    state = states[-1].replace(UP, b"") if states else b""
    return state if state.strip() else b""


class BarSplitter:
    """Splits one stream into text and the state of a bar."""

    def __init__(self) -> None:
        self._bar = b""
        """The unfinished line from its last carriage returns on; empty if it has none."""

        self._has_text = False
        """Whether a part of the unfinished line was forwarded."""

    @property
    def state(self) -> bytes:
        """The state of the bar; empty without one."""
        return last_state(self._bar) if self._bar else b""

    def feed(self, data: bytes) -> bytes:
        """Return the text to forward."""
        if not self._bar and b"\r" not in data and UP not in data:
            self._has_text = (self._has_text or bool(data)) if b"\n" not in data else not data.endswith(b"\n")
            return data
        *lines, rest = (self._bar + data).replace(UP + b"\n", b"\r").split(b"\n")
        text = b"".join(map(self._finished, lines))
        self._bar = b""
        if b"\r" not in rest:
            self._has_text = self._has_text or bool(rest)
            return text + rest
        if len(rest) > MAX_STATE:
            self._has_text = True
            return text + rest
        # The trailing one may belong to "\r\n", and the first one says that this is a bar.
        head, last = rest.rpartition(b"\r")[::2]
        self._bar = b"\r" + last if last else (head if b"\r" not in head else b"\r" + last_state(head)) + b"\r"
        return text

    def finish(self) -> bytes:
        """Return the last state of a bar that the program has not ended, as a line."""
        state, self._bar = self.state, b""
        return self._line(state) if state else b""

    def _finished(self, line: bytes) -> bytes:
        """Return a line that has ended, as text."""
        if b"\r" in line.removesuffix(b"\r"):
            return self._line(last_state(line))
        self._has_text = False
        return line + b"\n"

    def _line(self, state: bytes) -> bytes:
        """Return a state as a line of its own."""
        before = b"\n" if self._has_text else b""
        self._has_text = False
        return before + state + b"\n"


def clip(text: bytes, columns: int) -> bytes:
    """Return the beginning of a text that fits a terminal's line, without its control sequences."""
    kept, width = [], 0
    for char in _ESCAPE.sub("", text.decode(errors="replace")):
        wide = 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width + wide > columns:
            break
        kept.append(char)
        width += wide
    return "".join(kept).encode()
