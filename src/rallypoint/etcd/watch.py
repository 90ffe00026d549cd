"""One watch of a range of keys, on one stream, until that breaks.

Whoever watches has read the range as of a revision, and takes every change after it, in order. When the stream breaks,
or etcd has compacted what was not delivered yet, `watch` ends and says why; the caller reads the range again and goes
on from there. So nothing is missed, and there is one way to catch up.

A stream that says nothing may have nothing to say, or hang. Once a second it is asked to say something; when it does
not, `watch` ends. It asks for a member that has a leader, so one that is cut off from the others ends the stream.

Rejected: to resume a broken stream by its revision. It saves a small read, and needs the other way nevertheless.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.etcd import answers, messages
from rallypoint.etcd.answers import WatchAnswer
from rallypoint.etcd.client import Client, stream_trouble
from rallypoint.etcd.messages import Method
from rallypoint.etcd.rpc import grpc
from rallypoint.within import within

__all__ = ["watch"]

SILENCE_S = 1.0
"""How long a stream may say nothing before, and after, it is asked to."""

LOG_IN_S = 5.0


async def watch(client: Client, first: bytes, end: bytes, revision: int, take: Callable[[WatchAnswer], None]) -> str:
    """Call `take` with what changes in a range from a revision on; return why that ended."""
    endpoint, since = client.some_endpoint(), time.monotonic()
    stream = client.stream(Method.WATCH, endpoint)
    try:
        await within(SILENCE_S, stream.write(messages.watch(1, first, end, revision)))
        why = await _read(stream, take)
    except asyncio.TimeoutError:
        why = f"its watch stream was silent for {SILENCE_S:g} s"
        endpoint.failed(why, since)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        why = stream_trouble(error)
        endpoint.failed(why, since)
    finally:
        stream.cancel()
    if "auth token" in why:
        with contextlib.suppress(RallypointError):
            await client.log_in(Deadline(LOG_IN_S))
    return why


async def _read(stream: Any, take: Callable[[WatchAnswer], None]) -> str:
    asked = False
    reading: asyncio.Future[Any] | None = None
    try:
        while True:
            reading = reading or asyncio.ensure_future(stream.read())
            done, _ = await asyncio.wait((reading,), timeout=SILENCE_S)
            if not done:
                if asked:
                    raise asyncio.TimeoutError
                asked = True
                await within(SILENCE_S, stream.write(messages.progress()))
                continue
            data, reading, asked = reading.result(), None, False
            if data is grpc.aio.EOF:
                return "its watch stream ended"
            answer = answers.read_watch(data)
            if answer.cancelled:
                return answer.why or f"etcd has compacted its history up to revision {answer.compacted}"
            take(answer)
    finally:
        if reading is not None:
            reading.cancel()
