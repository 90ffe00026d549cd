"""A thin asyncio client of etcd's v3 API: all endpoints of a cluster, one call at a time.

A call goes to the endpoint that answered last (the leader, where that is known), with a short deadline of its own.
Whoever does not answer is set aside, and the call is made again at the next, until the caller's deadline; so every
request must bear to be repeated, or its caller find out what came of it. An endpoint that was set aside is tried
again after a while, first by whoever has no other. `NoQuorum` says what each of them did.

Pings are no faster than etcd allows (5 s by default; faster ones make it hang up): what finds a hung endpoint within a
second is the deadline of the call itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum
from rallypoint.etcd import answers, messages
from rallypoint.etcd.address import Access
from rallypoint.etcd.messages import Method
from rallypoint.etcd.rpc import grpc

__all__ = ["Answer", "Client", "Compacted", "LeaseGone", "Refusal", "stream_trouble"]

ATTEMPT_S = 1.0
"""How long one endpoint has to answer before another is asked."""

ASIDE_S = (1.0, 2.0, 4.0, 8.0)
"""For how long an endpoint is set aside: the first time, and again and again without an answer."""

PAUSE_S = 0.1
"""How long to wait before the same endpoint is asked again."""

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
)


class Refusal(Exception):
    """etcd understood a request and refused it; an earlier attempt may have been carried out if it was `repeated`."""

    def __init__(self, why: str, repeated: bool = False) -> None:
        super().__init__(why)
        self.why, self.repeated = why, repeated


class LeaseGone(Refusal):
    """A request spoke of a lease that has ended."""


class Compacted(Refusal):
    """A request asked for a revision that etcd no longer has."""


class Answer(NamedTuple):
    """What a call came to, and whether an earlier attempt may have been carried out too."""

    data: bytes
    repeated: bool


class Endpoint:
    """One member of the cluster, as it was lately."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, _OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, _OPTIONS)
        self.trouble = ""
        self._failures = 0
        self._aside_until = float("-inf")
        self.heard_at = float("-inf")
        self._methods: dict[str, Any] = {}

    def unary(self, method: str) -> Any:
        """Return what makes one call."""
        if method not in self._methods:
            self._methods[method] = self.channel.unary_unary(method)
        return self._methods[method]

    async def close(self) -> None:
        """Hang up."""
        await self.channel.close()

    def answered(self) -> None:
        """Note that it is well."""
        self.heard_at = time.monotonic()
        self._failures, self.trouble = 0, ""
        self._aside_until = float("-inf")

    def failed(self, why: str, since: float) -> None:
        """Set it aside, unless it answered others since the call began."""
        self.trouble = why
        if self.heard_at < since:
            self._aside_until = time.monotonic() + ASIDE_S[min(self._failures, len(ASIDE_S) - 1)]
            self._failures += 1

    def aside_s(self) -> float:
        """Return for how long it is still set aside; nothing, or less, if it is not."""
        return self._aside_until - time.monotonic()


class Client:
    """All endpoints of one cluster; for the tasks of one event loop."""

    def __init__(self, endpoints: Sequence[str], access: Access, name: str) -> None:
        self.name = name
        """How errors call it."""

        self._access = access
        credentials = _credentials(access)
        self.endpoints = [Endpoint(address, credentials) for address in endpoints]
        self._current = self.endpoints[0]
        self._token = ""
        self._closed = False

    async def call(self, method: str, request: bytes, deadline: Deadline) -> Answer:
        """Make a call, at one endpoint after the other until one answers; NoQuorum when none does in time."""
        repeated = False
        attempts, attempt_s = 0, ATTEMPT_S
        while True:
            endpoint = self._choose()
            since = time.monotonic()
            within_s = min(attempt_s, max(deadline.remaining(), 0.001))
            try:
                data = await endpoint.unary(method)(request, timeout=within_s, metadata=self._metadata())
            except grpc.aio.AioRpcError as error:
                if not await self._may_repeat(error, deadline):
                    raise _refusal(error, repeated) from None
                why = error.details() or error.code().name
                endpoint.failed(f"no answer within {within_s:.1f} s" if _late(error) else why, since)
                repeated = repeated or error.code() is not grpc.StatusCode.UNAUTHENTICATED
                attempts += 1
                if endpoint.aside_s() <= 0 or attempts % len(self.endpoints) == 0:  # it may be that all are slow
                    attempt_s = min(2 * attempt_s, 8 * ATTEMPT_S)
            else:
                endpoint.answered()
                self._current = endpoint
                return Answer(data, repeated)
            if deadline.expired():
                raise self.no_quorum(deadline)
            if time.monotonic() - since < PAUSE_S:  # it failed at once: do not spin
                await asyncio.sleep(min(PAUSE_S / len(self.endpoints), deadline.remaining()))

    async def prefer_leader(self, deadline: Deadline) -> int:
        """Ask all who they are, go on with the leader if it answers soon, and return the cluster's id."""
        asked = [asyncio.ensure_future(self._status(endpoint)) for endpoint in self.endpoints]
        try:
            for answer in asyncio.as_completed(asked, timeout=ATTEMPT_S):
                endpoint, member, leader = await answer
                if member and member == leader:
                    self._current = endpoint
                    break
        except asyncio.TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
        return answers.read_status((await self.call(Method.STATUS, b"", deadline)).data)[0]

    async def log_in(self, deadline: Deadline) -> None:
        """Get a token; that of a member that was restarted is worth nothing any more."""
        self._token = ""
        request = messages.authenticate(self._access.user, self._access.password)
        try:
            self._token = answers.read_token((await self.call(Method.AUTHENTICATE, request, deadline)).data)
        except Refusal as error:
            raise EtcdRefused(store=self.name, key=f"user {self._access.user}", why=error.why) from None

    def no_quorum(self, deadline: Deadline) -> NoQuorum:
        """Build the error that says what became of each endpoint."""
        tried = {endpoint.address: endpoint.trouble or "no answer" for endpoint in self.endpoints}
        return NoQuorum(store=self.name, timeout_s=deadline.timeout_s, tried=tried)

    def stream(self, method: str, endpoint: Endpoint, timeout_s: float | None = None) -> Any:
        """Open a stream in both directions; one that would tell of nothing, for want of a leader, ends."""
        return endpoint.channel.stream_stream(method)(
            timeout=timeout_s, metadata=(*self._metadata(), ("hasleader", "true"))
        )

    def some_endpoint(self) -> Endpoint:
        """Return one that is well, if any is."""
        return self._choose()

    async def close(self) -> None:
        """Hang up on all."""
        self._closed = True
        for endpoint in self.endpoints:
            await endpoint.close()

    # Inside

    async def _status(self, endpoint: Endpoint) -> tuple[Endpoint, int, int]:
        try:
            data = await endpoint.unary(Method.STATUS)(b"", timeout=ATTEMPT_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            endpoint.trouble = error.details() or error.code().name
            return endpoint, 0, 0
        endpoint.answered()
        _, member, leader = answers.read_status(data)
        return endpoint, member, leader

    def _choose(self) -> Endpoint:
        if self._current.aside_s() <= 0:
            return self._current
        self._current = min(self.endpoints, key=lambda endpoint: max(0.0, endpoint.aside_s()))
        return self._current

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    async def _may_repeat(self, error: grpc.aio.AioRpcError, deadline: Deadline) -> bool:
        """Say whether a failed call can be made again: it was not refused, or only for want of a token."""
        wants_token = error.code() is grpc.StatusCode.UNAUTHENTICATED or "user name is empty" in (error.details() or "")
        if wants_token and self._access.user:
            await self.log_in(deadline)
            return True
        busy = "too many requests" in (error.details() or "")
        return (error.code() in _AGAIN or busy) and not self._closed


def _late(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _credentials(access: Access) -> grpc.ChannelCredentials | None:
    if not (access.ca or access.cert):
        return None
    ca, cert, key = (Path(path).read_bytes() if path else None for path in (access.ca, access.cert, access.key))
    return grpc.ssl_channel_credentials(ca, key, cert)


def _refusal(error: grpc.aio.AioRpcError, repeated: bool) -> Refusal:
    why = error.details() or error.code().name
    if error.code() is grpc.StatusCode.NOT_FOUND and "lease" in why:
        return LeaseGone(why, repeated)
    return (Compacted if "compacted" in why else Refusal)(why, repeated)


def stream_trouble(error: BaseException) -> str:
    """Say what became of a stream."""
    return (error.details() or error.code().name) if isinstance(error, grpc.aio.AioRpcError) else str(error)
