"""Clients of every kind that a server refuses, or that refuse a server: each returns why, as it says itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from tests.raw_peer import AMPLE_S

import rallypoint
from rallypoint import aio
from rallypoint.cli import main
from rallypoint.relay.upstream.connection import Upstream
from rallypoint.security.credentials import Credentials
from rallypoint.store.url import parse_url

__all__ = ["CLIENTS", "blocking", "by_relay"]

NETWORK_ERROR = 4
"""The exit code of commands that do not reach a store."""

Attempt = Callable[[str, Credentials], str]
"""Connects to a URL with credentials, in vain, and returns why that failed."""


def blocking(url: str, credentials: Credentials) -> str:
    with pytest.raises(rallypoint.AuthenticationFailed) as caught:
        rallypoint.connect(url, AMPLE_S, credentials=credentials)
    return told(caught.value, credentials)


def in_asyncio(url: str, credentials: Credentials) -> str:
    with pytest.raises(rallypoint.AuthenticationFailed) as caught:
        asyncio.run(aio.connect(url, AMPLE_S, credentials=credentials))
    return told(caught.value, credentials)


def told(error: rallypoint.AuthenticationFailed, credentials: Credentials) -> str:
    assert not credentials.token or credentials.token not in repr(error)
    assert error.advice and error.advice in str(error) and error.peer in str(error)
    return error.why


def by_command(url: str, credentials: Credentials) -> str:
    done = CliRunner().invoke(main, ["set", "key", "the user's data", "--store", url], env=credentials.environ())
    assert done.exit_code == NETWORK_ERROR and done.output.startswith("Error: cannot authenticate at "), done.output
    assert "RALLYPOINT_" in done.output and done.output.count("\n") == 1
    assert not credentials.token or credentials.token not in done.output
    return done.output


def by_relay(url: str, credentials: Credentials) -> str:
    """A relay goes on trying; return why its first attempt failed."""

    async def run() -> str:
        parsed = parse_url(url)
        upstream = Upstream(parsed.endpoints(), security=parsed.security(credentials))
        first = upstream.why
        upstream.start()
        while upstream.why == first:
            await asyncio.sleep(0)
        await upstream.close()
        return upstream.why

    return asyncio.run(asyncio.wait_for(run(), AMPLE_S))


CLIENTS: dict[str, Attempt] = {"blocking": blocking, "asyncio": in_asyncio, "command": by_command, "relay": by_relay}
