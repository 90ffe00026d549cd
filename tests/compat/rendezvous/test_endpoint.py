"""Configuration strings, endpoints and hosts: results and error messages. The tests of `net` cover the parsing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.compat.rendezvous import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        (" \t", {}),
        ("a=b", {"a": "b"}),
        (" a = b ,c=d ", {"a": "b", "c": "d"}),
        ("a=1,b=2,a=3", {"a": "3", "b": "2"}),
        ("a=b=c", {"a": "b=c"}),
        ("url=tcp://h:1/x?y=z", {"url": "tcp://h:1/x?y=z"}),
    ],
)
def test_configuration(text: str, options: dict[str, str]) -> None:
    assert _parse_rendezvous_config(text) == options


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", "'a' has no value"),
        ("x=1,b=", "'b' has no value"),
        ("x=1, c= ,y=2", "'c' has no value"),
        ("=1", "'=1' has no key"),
        ("x=1,", "'' has no key"),
        ("x=1,,y=2", "'' has no key"),
        (",", "'' has no key"),
    ],
)
def test_incomplete_configuration_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        _parse_rendezvous_config(text)
    assert repr(text) in str(caught.value), "the whole string is quoted"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (None, ("localhost", 7)),
        ("  ", ("localhost", 7)),
        ("node-a", ("node-a", 7)),
        (" node-a:8 ", ("node-a", 8)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("::1", ("::1", 7)),
        ("2001:db8::1", ("2001:db8::1", 7)),
        ("[2001:db8::1]", ("2001:db8::1", 7)),
        ("[2001:db8::1]:8", ("2001:db8::1", 8)),
        ("fe80::1%eth0", ("fe80::1%eth0", 7)),
        ("[fe80::1%eth0]:8", ("fe80::1%eth0", 8)),
    ],
)
def test_endpoint(text: str | None, where: tuple[str, int]) -> None:
    found = parse_rendezvous_endpoint(text, 7)
    assert found == where and type(found) is tuple


@pytest.mark.parametrize("text", ["h:", "h:x", "h:65536", "h:-1", ":1", "[::1", "a b:4", "h!", "a:b:c", "h:1:2"])
def test_an_invalid_endpoint_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_rendezvous_endpoint(text, 7)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", socket.gethostname(), "LocalHost"])
def test_names_of_this_host_are_recognized(host: str) -> None:
    assert _matches_machine_hostname(host)


def test_an_alias_of_an_address_that_can_be_bound_is_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve: Callable[..., Any] = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, flags: int = 0, **more: Any) -> Any:
        if host in ("rendezvous.example", "elsewhere.example") and not flags & socket.AI_NUMERICHOST:
            host = "127.0.0.9" if host == "rendezvous.example" else "203.0.113.9"
        return resolve(host, *rest, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert _matches_machine_hostname("rendezvous.example")
    assert not _matches_machine_hostname("elsewhere.example")


@pytest.mark.parametrize("host", ["", "203.0.113.9", "2001:db8::9", "0.0.0.0"])
def test_other_hosts_are_not_recognized(host: str) -> None:
    assert not _matches_machine_hostname(host)
