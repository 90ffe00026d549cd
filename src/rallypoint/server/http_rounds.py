"""Requests over HTTP to open and close the rounds of a run; `http.py` has the paths."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable

from rallypoint.server.http_site import HttpResource, HttpSite, json_reply
from rallypoint.server.round_errors import TooLate

__all__ = ["RoundRequests"]

SCOPE_DIGITS = 20


class RoundRequests:
    """Answers one request of a connection: at once, or later."""

    def __init__(
        self, site: HttpSite, wait: Callable[[Callable[[], None]], None], later: Callable[[HttpResource], None]
    ) -> None:
        """`wait` asks for a reply that may come later; `later` sends it."""
        self._site, self._wait, self._later = site, wait, later

    def answer(self, method: bytes, query: bytes, run: str, *rest: str) -> HttpResource | None:
        """Return the reply; None if it comes later."""
        name = urllib.parse.unquote(run)
        scope = _number(rest[0].encode()) if len(rest) == 1 else None
        if not name or (scope is None and (method == b"PUT" or rest)):
            return 404, "text/plain", b"nothing here: PUT or DELETE /rounds/RUN/SCOPE, or DELETE /rounds/RUN\n"
        if not self._site.leads():
            return 503, "text/plain", b"this server is a standby: another server leads\n"
        return self._close(name, scope) if scope is None or method == b"DELETE" else self._open(name, scope, query)

    def _close(self, name: str, scope: int | None) -> HttpResource | None:
        close_round = self._site.close_round
        if close_round is None:
            return json_reply({"closed": False})
        self._wait(lambda: close_round(name, scope, lambda closed: self._later(json_reply({"closed": closed}))))
        return None

    def _open(self, name: str, scope: int, query: bytes) -> HttpResource | None:
        open_round = self._site.open_round
        asked = urllib.parse.parse_qs(query)
        number, port = (_number(asked.get(what, [b""])[0]) for what in (b"round", b"port"))
        if port is not None and port > 65535:
            return 404, "text/plain", b"port out of range: at most 65535\n"
        if open_round is None:
            return 404, "text/plain", b"this server opens no ports for rounds; a relay of it does (rallypoint relay)\n"
        everywhere = asked.get(b"everywhere") == [b"1"]

        def opened(answer: int | Exception) -> None:
            self._later(_opened(answer))

        self._wait(lambda: open_round(name, scope, number, opened, port=port or 0, everywhere=everywhere))
        return None


def _opened(answer: int | Exception) -> HttpResource:
    if isinstance(answer, int):
        return json_reply({"port": answer})
    return 409 if isinstance(answer, TooLate) else 503, "text/plain", f"{answer}\n".encode()


def _number(text: bytes) -> int | None:
    """Return the number in the text; None if it is not one, or has more than `SCOPE_DIGITS` digits."""
    return int(text) if text.isdigit() and len(text) <= SCOPE_DIGITS else None
