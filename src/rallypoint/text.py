"""Text from a peer, a script or a file, escaped for a terminal and for one line of a log.

A name or a reason may contain anything: a newline that forges a second log line, a terminal escape sequence, a mark
that reverses the writing direction. Fields of errors and records stay raw; a sentence for people is made printable
where it is built or shown.
"""

from __future__ import annotations

import re

__all__ = ["printable"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, line and paragraph separators, directional marks, lone surrogates."""


def printable(text: object, keep: str = "") -> str:
    """Return a text with each control character, except those in `keep`, escaped like `\\x1b`."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), str(text))


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
