"""One watch of a range of keys, on one stream, until the stream breaks.

The caller has read the range at a revision, and receives every later change, in order. When the stream breaks, or etcd
has compacted changes that were not delivered, `watch` returns the reason; the caller reads the range again and
continues from there. So no change is missed, and there is one way to catch up.

A silent stream is idle or hung. After a second of silence, `watch` requests a progress notification, and ends if
nothing arrives for another second. It requires a member that has a leader: a partitioned member then ends the stream.

Rejected: resume a broken stream at its revision. It saves a small read, and compaction needs the other way anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rallypoint.deadline import Deadline
from rallypoint.errors import RallypointError
from rallypoint.etcd import requests, responses
from rallypoint.etcd.client import REQUIRE_LEADER, EtcdClient
from rallypoint.etcd.requests import Method
from rallypoint.etcd.responses import WatchAnswer
from rallypoint.etcd.rpc.connection import RpcStream
from rallypoint.etcd.rpc.status import RpcError

__all__ = ["watch"]

SILENCE_S = 1.0
"""How long a stream may be silent before, and after, a request for progress."""

LOG_IN_S = 5.0
"""Timeout of the login that replaces an expired token."""


async def watch(
    client: EtcdClient, first: bytes, end: bytes, revision: int, take: Callable[[WatchAnswer], None]
) -> str:
    """Call `take` with the changes in a range from a revision on; return why the watch ended."""
    endpoint, since = client.some_endpoint(), time.monotonic()
    request, metadata = requests.watch(1, first, end, revision), (*client.metadata, REQUIRE_LEADER)
    stream: RpcStream | None = None
    try:
        stream = await endpoint.channel.stream(Method.WATCH, request, SILENCE_S, metadata)
        why = await _read(stream, take)
    except asyncio.TimeoutError:
        why = f"its watch stream was silent for {SILENCE_S:g} s"
        endpoint.failed(why, since)
    except RpcError as error:
        why = error.why
        endpoint.failed(why, since)
    finally:
        if stream is not None:
            stream.cancel()
    if "auth token" in why:
        with contextlib.suppress(RallypointError):
            await client.log_in(Deadline(LOG_IN_S))
    return why


async def _read(stream: RpcStream, take: Callable[[WatchAnswer], None]) -> str:
    requested_progress = False
    while True:
        try:
            data = await stream.read(SILENCE_S)
        except asyncio.TimeoutError:
            if requested_progress:
                raise
            requested_progress = True
            stream.write(requests.progress())
            continue
        requested_progress = False
        if data is None:
            return "its watch stream ended"
        answer = responses.read_watch(data)
        if answer.cancelled:
            return answer.cancel_reason or f"etcd has compacted its history up to revision {answer.compact_revision}"
        take(answer)
