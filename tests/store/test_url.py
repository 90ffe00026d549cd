"""The addresses in a tcp URL: one or several, each with or without a port; invalid ones are refused and quoted."""

from __future__ import annotations

import pytest

from rallypoint.net import Endpoint, Endpoints
from rallypoint.store.url import parse_url


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("tcp://a", [("a", 29400)]),
        ("tcp://a:1,b,[::1]:3/job-7", [("a", 1), ("b", 29400), ("::1", 3)]),
        ("tcp://[::1]:1,[::2]:2?timeout=5", [("::1", 1), ("::2", 2)]),
        ("tcp://[::1],a:5", [("::1", 29400), ("a", 5)]),
        ("tcp://a:1,a:1,b:1", [("a", 1), ("b", 1)]),
    ],
)
def test_a_list_of_addresses_is_parsed(url: str, endpoints: list[tuple[str, int]]) -> None:
    found = parse_url(url).endpoints()
    assert found == Endpoints(Endpoint(*each) for each in endpoints)
    assert parse_url(f"tcp://{found}").endpoints() == found, "its text parses to the same endpoints"


def test_prefix_and_options_behind_a_list_are_parsed() -> None:
    parsed = parse_url("tcp://a:1,[::1]:2/job-7/?timeout=5")
    assert (parsed.prefix, parsed.timeout_s, parsed.place) == ("job-7", 5.0, "a:1,[::1]:2")


@pytest.mark.parametrize(
    "url", ["tcp://", "tcp:///p", "tcp://a,", "tcp://,a", "tcp://a,,b", "tcp://a,b:x", "tcp://u@a"]
)
def test_an_invalid_url_is_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="store URL") as caught:
        parse_url(url).endpoints()
    assert repr(url) in str(caught.value)


def test_several_addresses_are_refused_where_one_is_needed() -> None:
    assert parse_url("tcp://a:1,a:1").endpoint() == ("a", 1)
    with pytest.raises(ValueError, match="expected one server, got several: a:1,b:2"):
        parse_url("tcp://a:1,b:2/p").endpoint()
