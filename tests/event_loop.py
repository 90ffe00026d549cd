"""Tests that are coroutines: each runs in an event loop of its own, and fails if that takes too long.

Rejected: a plug-in of pytest; a test would depend on its mode, and this is a few lines.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tests.raw_peer import AMPLE_S

__all__ = ["in_loop", "in_loop_with"]

Subject = TypeVar("Subject")


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test, which may take fixtures, in an event loop; its own waits of AMPLE_S end before it does."""

    async def run(*arguments: Any, **fixtures: Any) -> None:
        await asyncio.wait_for(test(*arguments, **fixtures), 2 * AMPLE_S)

    @functools.wraps(test)
    def call(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(run(*arguments, **fixtures))

    return call


def in_loop_with(
    make: Callable[[], Subject],
) -> Callable[[Callable[[Subject], Awaitable[None]]], Callable[[], None]]:
    """Run a test in an event loop, on an object made in that loop."""

    def decorate(test: Callable[[Subject], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            await test(make())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return in_loop(run)

    return decorate
