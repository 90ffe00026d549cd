"""Access to the HTTP pages of a server: by its token, or by a cookie from a login link.

The token comes as a bearer (`Authorization: Bearer TOKEN`), only over TLS or from this machine, because it would cross
the network in the clear otherwise; rallypoint's own clients prove it in the greeting of the connection instead. A
browser gets a login link, `/login?code=…`, which `rallypoint token link` prints. The page behind it has one button,
which turns the code into a cookie: so a link preview cannot use the code up, and no GET changes anything. A code is
good once and for `CODE_S`; a cookie for `COOKIE_S`, for reading only, and until the server ends.

A request that changes something needs the token. On a server without one it must come from this machine, and not from
a web page: browsers send `Origin` with every such request.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["COOKIE", "COOKIE_S", "HttpAccess", "HttpRefusal", "cookie_of", "set_cookie"]

COOKIE = "rallypoint"
"""The name of the cookie."""

CODE_S, COOKIE_S = 300.0, 12 * 3600.0
"""How long a login link and a cookie are valid."""

READS = (b"GET", b"HEAD")

MAX_CODES, MAX_COOKIES = 64, 256
"""How many of each are valid at a time, the latest ones."""


NO_ACCESS = "access needs the token (Authorization: Bearer TOKEN), or a link from: rallypoint token link"
IN_THE_CLEAR = "send the token only over TLS, or from this machine"
NOT_FROM_HERE = "this server has no token: it accepts changes only from its own machine, and not from web pages"


class HttpRefusal(NamedTuple):
    """Why a request is refused."""

    status: int
    why: str
    failed: bool = False
    """Whether the sender tried a wrong token."""


class HttpAccess:
    """The codes and cookies of one server, and its token."""

    def __init__(self, token: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self.required = bool(token)
        """Whether pages need the token or a cookie."""

        self._token, self._clock = token, clock
        self._codes: dict[str, float] = {}
        self._cookies: dict[str, float] = {}

    def refusal(
        self, method: bytes, headers: Mapping[bytes, bytes], *, local: bool, private: bool
    ) -> HttpRefusal | None:
        """Return why a request is refused; None if it is not.

        `local`: it comes from this machine. `private`: nobody can read it on its way.
        """
        if not self.required:
            allowed = method in READS or (local and b"origin" not in headers)
            return None if allowed else HttpRefusal(403, NOT_FROM_HERE)
        given = headers.get(b"authorization", b"")
        if given and not private:
            return HttpRefusal(403, IN_THE_CLEAR)
        if given:
            return None if self._is_token(given) else HttpRefusal(401, NO_ACCESS, failed=True)
        known = method in READS and self._cookies.get(cookie_of(headers.get(b"cookie", b"")), 0.0) > self._clock()
        return None if known else HttpRefusal(401, NO_ACCESS)

    def _is_token(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.strip().partition(b" ")
        return hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer"

    def new_login(self) -> str:
        """Return the path of a new login link; that of the first page if nothing is required."""
        return f"/login?code={self.new_code()}" if self.required else "/"

    def new_code(self) -> str:
        """Return a code for a login link."""
        return self._add(self._codes, MAX_CODES, CODE_S)

    def has_code(self, code: str) -> bool:
        """Return whether a code is valid; it stays so."""
        return self._codes.get(code, 0.0) > self._clock()

    def redeem(self, code: str) -> str | None:
        """Return a new cookie for a valid code, which is then used up; None if it is not valid."""
        valid = self.has_code(code)
        self._codes.pop(code, None)
        return self._add(self._cookies, MAX_COOKIES, COOKIE_S) if valid else None

    def _add(self, table: dict[str, float], most: int, valid_s: float) -> str:
        if len(table) >= most:
            del table[next(iter(table))]
        secret = secrets.token_urlsafe(32)
        table[secret] = self._clock() + valid_s
        return secret


def set_cookie(cookie: str, over_tls: bool) -> str:
    """Return the value of the header `Set-Cookie` for a cookie."""
    secure = "; Secure" * over_tls
    return f"{COOKIE}={cookie}; Path=/; HttpOnly; SameSite=Strict; Max-Age={COOKIE_S:.0f}{secure}"


def cookie_of(header: bytes) -> str:
    """Return the value of our cookie in the header `Cookie`; "" if there is none."""
    for part in header.decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""
