"""A thin asyncio client of etcd's v3 API: unary calls to the endpoints of a cluster.

A call goes to the endpoint that answered last (the leader, if known), with a short timeout of its own. An endpoint that
does not answer is skipped for a while, and the call is retried at the next, until the caller's deadline. So every
request must be idempotent, or its caller must find out whether it was executed. If all endpoints are skipped, the one
whose time ends first is tried. `NoQuorum` says how each of them failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum
from rallypoint.etcd import requests, responses
from rallypoint.etcd.address import DEFAULT_PORT, Access
from rallypoint.etcd.requests import Method
from rallypoint.etcd.rpc.channel import RpcChannel
from rallypoint.etcd.rpc.status import RETRYABLE, Code, RpcError
from rallypoint.etcd.tls import tls_context

if TYPE_CHECKING:
    import ssl

__all__ = ["REQUIRE_LEADER", "EtcdReply", "EtcdClient", "Compacted", "EtcdEndpoint", "LeaseGone", "Refusal"]

ATTEMPT_S = 1.0
"""Timeout of an attempt at one endpoint, before the next is tried."""

ASIDE_S = (1.0, 2.0, 4.0, 8.0)
"""How long an endpoint is skipped after its first failure, and after further failures in a row."""

REQUIRE_LEADER = ("hasleader", "true")
"""Metadata with which a call fails at a member that has lost its leader, instead of waiting there."""

PAUSE_S = 0.1
"""Pause before the next attempt at the same endpoint."""


class Refusal(Exception):
    """etcd refused a valid request; if it was `repeated`, an earlier attempt may have been executed."""

    def __init__(self, why: str, repeated: bool = False) -> None:
        super().__init__(why)
        self.why, self.repeated = why, repeated


class LeaseGone(Refusal):
    """A request used a lease that has expired or was revoked."""


class Compacted(Refusal):
    """A request needed a revision that etcd has compacted."""


class EtcdReply(NamedTuple):
    """The reply to a call, and whether an earlier attempt may have been executed too."""

    data: bytes
    repeated: bool


class EtcdEndpoint:
    """One member of the cluster and its recent failures."""

    def __init__(self, address: str, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.channel = RpcChannel(net.parse_endpoint(address, DEFAULT_PORT), tls)
        self.last_error = ""
        self._failures = 0
        self._skipped_until = float("-inf")
        self.answered_at = float("-inf")

    def answered(self) -> None:
        """Record an answer; the endpoint is no longer skipped."""
        self.answered_at = time.monotonic()
        self._failures, self.last_error = 0, ""
        self._skipped_until = float("-inf")

    def failed(self, why: str, since: float) -> None:
        """Skip it for a while, unless it answered another call since `since`; only briefly if etcd itself gave `why`.

        Such a member has lost etcd's leader, and may find the next one a moment later.
        """
        self.last_error = why
        if why.startswith("etcdserver:"):
            self._skipped_until = time.monotonic() + PAUSE_S
        elif self.answered_at < since:
            self._skipped_until = time.monotonic() + ASIDE_S[min(self._failures, len(ASIDE_S) - 1)]
            self._failures += 1

    def skipped_s(self) -> float:
        """Return how long it is still skipped; 0 or less if it is not."""
        return self._skipped_until - time.monotonic()


class EtcdClient:
    """A client of one cluster, for the tasks of one event loop."""

    def __init__(self, endpoints: Sequence[str], access: Access, name: str) -> None:
        self.name = name
        """Its name in errors."""

        self._access = access
        tls = tls_context(access, "h2")
        self.endpoints = [EtcdEndpoint(address, tls) for address in endpoints]
        self._current = self.endpoints[0]
        self.metadata: tuple[tuple[str, str], ...] = ()
        """Metadata of every call: the auth token, if any."""

        self._closed = False

    async def call(self, method: str, request: bytes, deadline: Deadline) -> EtcdReply:
        """Make a call, trying the endpoints in turn until one answers; raise NoQuorum if none does in time."""
        repeated = False
        attempts, attempt_s = 0, ATTEMPT_S
        while True:
            endpoint = self._choose()
            since = time.monotonic()
            within_s = min(attempt_s, max(deadline.remaining(), 0.001))
            try:
                data = await endpoint.channel.unary(method, request, within_s, self.metadata)
            except RpcError as error:
                if not await self._may_repeat(error, deadline):
                    raise _refusal(error, repeated) from None
                late = error.code == Code.DEADLINE_EXCEEDED
                endpoint.failed(f"no answer within {within_s:.1f} s" if late else error.why, since)
                repeated = repeated or error.code != Code.UNAUTHENTICATED
                attempts += 1
                if endpoint.skipped_s() <= 0 or attempts % len(self.endpoints) == 0:  # all may be slow
                    attempt_s = min(2 * attempt_s, 8 * ATTEMPT_S)
            else:
                endpoint.answered()
                self._current = endpoint
                return EtcdReply(data, repeated)
            if deadline.expired():
                raise self.no_quorum(deadline)
            if time.monotonic() - since < PAUSE_S:  # failed immediately: do not spin
                await asyncio.sleep(min(PAUSE_S / len(self.endpoints), deadline.remaining()))

    async def prefer_leader(self, deadline: Deadline) -> int:
        """Query all endpoints, prefer the leader if it answers soon, and return the cluster's id."""
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
        return responses.read_status((await self.call(Method.STATUS, b"", deadline)).data)[0]

    async def log_in(self, deadline: Deadline) -> None:
        """Get an auth token; a restarted member rejects old tokens."""
        self.metadata = ()
        request = requests.authenticate(self._access.user, self._access.password)
        try:
            answer = await self.call(Method.AUTHENTICATE, request, deadline)
        except Refusal as error:
            raise EtcdRefused(store=self.name, key=f"user {self._access.user}", why=error.why) from None
        self.metadata = (("token", responses.read_token(answer.data)),)

    def no_quorum(self, deadline: Deadline) -> NoQuorum:
        """Return the error that says how each endpoint failed."""
        tried = {endpoint.address: endpoint.last_error or "no answer" for endpoint in self.endpoints}
        return NoQuorum(store=self.name, timeout_s=deadline.timeout_s, tried=tried)

    def some_endpoint(self) -> EtcdEndpoint:
        """Return an endpoint that is not skipped, if there is one."""
        return self._choose()

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        for endpoint in self.endpoints:
            endpoint.channel.close()

    # Inside

    async def _status(self, endpoint: EtcdEndpoint) -> tuple[EtcdEndpoint, int, int]:
        try:
            data = await endpoint.channel.unary(Method.STATUS, b"", ATTEMPT_S, self.metadata)
        except RpcError as error:
            endpoint.last_error = error.why
            return endpoint, 0, 0
        endpoint.answered()
        _, member, leader = responses.read_status(data)
        return endpoint, member, leader

    def _choose(self) -> EtcdEndpoint:
        if self._current.skipped_s() <= 0:
            return self._current
        self._current = min(self.endpoints, key=lambda endpoint: max(0.0, endpoint.skipped_s()))
        return self._current

    async def _may_repeat(self, error: RpcError, deadline: Deadline) -> bool:
        """Return whether a failed call can be retried: it was not refused, or only for lack of a token."""
        if (error.code == Code.UNAUTHENTICATED or "user name is empty" in error.why) and self._access.user:
            await self.log_in(deadline)
            return True
        return (error.code in RETRYABLE or "too many requests" in error.why) and not self._closed


def _refusal(error: RpcError, repeated: bool) -> Refusal:
    if error.code == Code.NOT_FOUND and "lease" in error.why:
        return LeaseGone(error.why, repeated)
    return (Compacted if "compacted" in error.why else Refusal)(error.why, repeated)
