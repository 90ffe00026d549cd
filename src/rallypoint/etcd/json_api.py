"""A blocking client of etcd's JSON API: the same calls as gRPC, as HTTP requests to the same port.

Clients and relays query etcd when they start and when all servers of their store are gone. This needs only the standard
library: no asyncio and no HTTP/2, whose import takes longer than the query, and no state that a fork would share.

A call goes to the endpoint that answered last, with a timeout of a second at first. If it does not answer, the call is
retried at the next, until the deadline, so every request must be idempotent. Each call has a connection of its own;
only the auth token is kept between calls.

Rejected: keep connections. A client makes a handful of calls in its lifetime, and a fork would share them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum
from rallypoint.etcd.address import DEFAULT_PORT, Address
from rallypoint.etcd.rpc.status import RETRYABLE, Code
from rallypoint.etcd.tls import tls_context

__all__ = ["JsonApi"]

ATTEMPT_S = (1.0, 8.0)
"""Timeout of one endpoint: in the first round, and at most; it doubles each round."""

LEAST_S = 0.05
"""Minimum timeout of an endpoint, however little time is left."""

PAUSE_S = 0.1
"""Pause after all endpoints have failed immediately."""

MAX_ANSWER = 8 * 1024 * 1024
"""Maximum number of bytes read of a response; actual responses are far smaller."""


class _Failed(Exception):
    """An endpoint did not answer, or etcd did not execute a request: it may be retried."""


class _WantsToken(Exception):
    """etcd requires a user, or rejects the token."""


class JsonApi:
    """A client of one cluster, for one thread at a time."""

    def __init__(self, address: Address) -> None:
        self._name, self._access = address.name, address.access
        self._endpoints = list(net.parse_endpoints(",".join(address.endpoints), DEFAULT_PORT))
        self._tls = tls_context(address.access)
        self._token = ""

    def call(self, path: str, body: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Make a call, trying the endpoints in turn until one answers.

        Raises NoQuorum if none does in time, EtcdRefused if etcd refuses the call.
        """
        tried: dict[str, str] = {}
        for attempt_s in self._patience(deadline):
            for index, endpoint in enumerate(list(self._endpoints)):
                share_s = deadline.remaining() / (len(self._endpoints) - index)
                within_s = max(min(attempt_s, share_s), LEAST_S)
                try:
                    answer = self._authorized(endpoint, path, body, within_s)
                except _Failed as error:
                    tried[str(endpoint)] = str(error)
                else:
                    self._endpoints.remove(endpoint)
                    self._endpoints.insert(0, endpoint)
                    return answer
        raise NoQuorum(store=self._name, timeout_s=deadline.timeout_s, tried=tried)

    def _patience(self, deadline: Deadline) -> Iterator[float]:
        """Yield the timeout of an endpoint in each round, until the deadline."""
        attempt_s, longest_s = ATTEMPT_S
        while True:
            began_at = time.monotonic()
            yield attempt_s
            if deadline.expired():
                return
            if time.monotonic() - began_at < PAUSE_S:  # all failed immediately
                time.sleep(min(PAUSE_S, deadline.remaining()))
            attempt_s = min(2 * attempt_s, longest_s)

    def _authorized(self, endpoint: net.Endpoint, path: str, body: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Make a call at one endpoint; log in if etcd requires it."""
        try:
            return self._ask(endpoint, path, body, within_s)
        except _WantsToken as error:
            if not self._access.user:
                raise EtcdRefused(store=self._name, key="no user", why=str(error)) from None
        self._token = ""
        user = {"name": self._access.user, "password": self._access.password}
        try:
            self._token = self._ask(endpoint, "/v3/auth/authenticate", user, within_s)["token"]
            return self._ask(endpoint, path, body, within_s)
        except EtcdRefused as error:
            raise EtcdRefused(store=self._name, key=f"user {self._access.user}", why=error.why) from None
        except _WantsToken as error:  # this member does not know the new token yet
            raise _Failed(str(error)) from None
        except KeyError:
            raise _Failed("no token in its response to the login") from None

    def _ask(self, endpoint: net.Endpoint, path: str, body: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Make one request on a connection of its own."""
        connection = self._connection(endpoint, within_s)
        headers = {"Authorization": self._token} if self._token else {}
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read(MAX_ANSWER))
        except TimeoutError:
            raise _Failed(f"no answer within {within_s:.1f} s") from None
        except OSError as error:
            raise _Failed(self._why_hung_up(error) or net.why_failed(error)) from None
        except (HTTPException, ValueError) as error:
            raise _Failed(f"not etcd's JSON API: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise _Failed("not etcd's JSON API: the response is not an object")
        if response.status != 200:
            self._judge(response.status, answer, path)
        return answer

    def _why_hung_up(self, error: OSError) -> str:
        """Return a hint if the member may require a client certificate: it closes the connection without a reason."""
        if self._tls is None or self._access.cert or "verify failed" in str(error):
            return ""
        return f"{net.why_failed(error)}; it may require a certificate: set cert= and key="

    def _judge(self, status: int, answer: dict[str, Any], path: str) -> None:
        """Raise the exception for an error response."""
        code, why = answer.get("code"), str(answer.get("message") or answer.get("error") or f"HTTP status {status}")
        if code == Code.UNAUTHENTICATED or "user name is empty" in why or "invalid auth token" in why:
            raise _WantsToken(why)
        if code in RETRYABLE or code is None or "too many requests" in why:
            raise _Failed(why)
        raise EtcdRefused(store=self._name, key=path, why=why)

    def _connection(self, endpoint: net.Endpoint, within_s: float) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(*endpoint, timeout=within_s)
        return HTTPSConnection(*endpoint, timeout=within_s, context=self._tls)
