"""Who may make which HTTP request: the token, codes of login links, cookies; by a clock in the hands of the test."""

from __future__ import annotations

import pytest

from rallypoint.server.http_access import (
    CODE_S,
    COOKIE,
    COOKIE_S,
    IN_THE_CLEAR,
    MAX_CODES,
    MAX_COOKIES,
    NO_ACCESS,
    NOT_FROM_HERE,
    HttpAccess,
    HttpRefusal,
    cookie_of,
)

TOKEN = b"the-token-of-the-server"
DENIED = HttpRefusal(401, NO_ACCESS)
FAILED = HttpRefusal(401, NO_ACCESS, failed=True)
CLEAR = HttpRefusal(403, IN_THE_CLEAR)
NOT_HERE = HttpRefusal(403, NOT_FROM_HERE)
READS, CHANGES = (b"GET", b"HEAD"), (b"PUT", b"DELETE", b"POST", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT", b"get")


class Site:
    """The access to one server."""

    def __init__(self, token: bytes = TOKEN) -> None:
        self.now = 1000.0
        self.access = HttpAccess(token, lambda: self.now)

    def ask(
        self, method: bytes = b"GET", local: bool = True, private: bool | None = None, **headers: bytes
    ) -> HttpRefusal | None:
        given = {name.encode(): value for name, value in headers.items()}
        return self.access.refusal(method, given, local=local, private=local if private is None else private)

    def with_cookie(self, cookie: str, method: bytes = b"GET", local: bool = False) -> HttpRefusal | None:
        return self.ask(method, local, cookie=f"{COOKIE}={cookie}".encode())


# The token


@pytest.mark.parametrize("given", [b"Bearer " + TOKEN, b"bearer " + TOKEN, b"  BEARER   " + TOKEN + b" "])
def test_the_token_opens_everything(given: bytes) -> None:
    for method in (*READS, *CHANGES):
        assert Site().ask(method, authorization=given) is None
        assert Site().ask(method, authorization=given, origin=b"https://example.org") is None
        assert Site().ask(method, local=False, private=True, authorization=given) is None, "over TLS"


@pytest.mark.parametrize(
    "given",
    [
        b"Bearer " + TOKEN[:-1], b"Bearer " + TOKEN + b"x", b"Bearer", b"Bearer ", TOKEN, b"Basic " + TOKEN,
        b"Bearer " + TOKEN.upper(), b"Bearer\t" + TOKEN, b"Bearer x " + TOKEN, b"Bearer " + b"\xff" * 23,
    ],
)  # fmt: skip
def test_anything_else_is_a_failed_attempt(given: bytes) -> None:
    site = Site()
    cookie = site.access.redeem(site.access.new_code())
    for method in (*READS, *CHANGES):
        assert site.ask(method, authorization=given) == FAILED
        assert site.ask(method, authorization=given, cookie=f"{COOKIE}={cookie}".encode()) == FAILED, "no second try"


def test_a_token_that_others_could_read_on_its_way_is_not_looked_at() -> None:
    """Right or wrong: the reply must not tell, and it must not become a habit."""
    for given in (b"Bearer " + TOKEN, b"Bearer wrong", b"x"):
        assert Site().ask(local=False, private=False, authorization=given) == CLEAR


def test_without_anything_there_is_no_access_and_no_failure() -> None:
    for method in (*READS, *CHANGES):
        for local in (True, False):
            assert Site().ask(method, local) == DENIED
            assert Site().ask(method, local, authorization=b"") == DENIED


# Login links and cookies


def test_a_code_becomes_a_cookie_once() -> None:
    site = Site()
    code = site.access.new_code()
    assert site.access.has_code(code) and site.access.has_code(code), "a preview does not use it up"
    cookie = site.access.redeem(code)
    assert cookie and cookie != code and not site.access.has_code(code)
    assert site.access.redeem(code) is None
    assert site.with_cookie(cookie) is None and site.with_cookie(cookie) is None
    assert site.with_cookie(code) == DENIED, "a code is no cookie"


def test_a_cookie_is_for_reading() -> None:
    site = Site()
    cookie = site.access.redeem(site.access.new_code())
    assert cookie is not None
    assert all(site.with_cookie(cookie, method) is None for method in READS)
    assert all(site.with_cookie(cookie, method, local) == DENIED for method in CHANGES for local in (True, False))


@pytest.mark.parametrize("code", ["", "guess", "x" * 43])
def test_a_forged_code_is_worth_nothing(code: str) -> None:
    site = Site()
    real = site.access.new_code()
    assert not site.access.has_code(code) and site.access.redeem(code) is None
    assert site.with_cookie(code) == DENIED
    assert site.access.has_code(real)


def test_codes_and_cookies_end() -> None:
    site = Site()
    late, code = site.access.new_code(), site.access.new_code()
    site.now += CODE_S - 1
    cookie = site.access.redeem(code)
    assert cookie is not None and site.access.has_code(late)
    site.now += 1
    assert not site.access.has_code(late) and site.access.redeem(late) is None
    site.now += COOKIE_S - 2
    assert site.with_cookie(cookie) is None
    site.now += 1
    assert site.with_cookie(cookie) == DENIED


def test_the_latest_codes_and_cookies_are_valid() -> None:
    site = Site()
    first = site.access.new_code()
    codes = [site.access.new_code() for _ in range(MAX_CODES)]
    assert not site.access.has_code(first) and all(map(site.access.has_code, codes))
    cookies = [site.access.redeem(site.access.new_code()) for _ in range(MAX_COOKIES + 1)]
    assert len({*codes, *cookies}) == MAX_CODES + MAX_COOKIES + 1, "never the same"
    known = [cookie is not None and site.with_cookie(cookie) is None for cookie in cookies]
    assert known == [False] + [True] * MAX_COOKIES


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (b"", ""), (b"rallypoint=x", "x"), (b"a=b; rallypoint=x; c=d", "x"), (b"rallypoint=x=y", "x=y"),
        (b"notrallypoint=x", ""), (b"rallypoint", ""), (b"Rallypoint=x", ""), (b";;;", ""), (b"\xff=\xfe", ""),
    ],
)  # fmt: skip
def test_the_cookie_in_a_header(header: bytes, value: str) -> None:
    assert cookie_of(header) == value


# Servers without a token


def test_an_open_server_is_read_by_all_and_changed_from_its_own_machine() -> None:
    for method in READS:
        assert Site(b"").ask(method, local=False) is None
        assert Site(b"").ask(method, local=True, origin=b"https://example.org") is None
    for method in CHANGES:
        assert Site(b"").ask(method, local=True) is None
        assert Site(b"").ask(method, local=False) == NOT_HERE
        assert Site(b"").ask(method, local=False, private=True, authorization=b"Bearer ") == NOT_HERE
        for origin in (b"https://example.org", b"http://127.0.0.1:29400", b"null", b""):
            assert Site(b"").ask(method, local=True, origin=origin) == NOT_HERE, "from a web page"


def test_without_a_token_none_opens_anything() -> None:
    """An empty token is no token: "Bearer " must not match it."""
    site = Site(b"")
    assert not site.access.required and site.ask(b"PUT", local=False, authorization=b"Bearer ") == NOT_HERE
