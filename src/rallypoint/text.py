"""Text from a peer, a script or a file, made fit for a terminal and for one line of a log.

A name or a reason may hold anything: a newline that forges a second log line, an escape sequence that a terminal obeys,
a mark that turns the direction of writing. Fields of errors and records stay as they came; a sentence that people read
is made printable where it is built or shown.
"""

from __future__ import annotations

import re

__all__ = ["printable"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, line and paragraph separators, marks of direction, halves of surrogate pairs."""


def printable(text: object, keep: str = "") -> str:
    """Return a text with each control character as an escape such as `\\x1b`, but for those to keep."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), str(text))


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
