"""A blocking client of etcd's JSON API: the same calls as gRPC, as HTTP requests to the same port.

Clients and relays ask etcd a few things when they begin and when all servers of their store are gone. This needs the
standard library alone: no gRPC, whose threads do not survive a fork and whose import takes longer than the question.

A call goes to the endpoint that answered last, for a second at most; where that does not answer, to the next, until the
deadline. So every request must bear to be repeated. Each call has a connection of its own, and nothing is kept between
calls but a token.

Rejected: to keep connections. There are a handful of calls in the life of a client, and a fork would share them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.errors import EtcdRefused, NoQuorum
from rallypoint.etcd.address import DEFAULT_PORT, Access, Address

if TYPE_CHECKING:
    import ssl

__all__ = ["JsonApi"]

ATTEMPT_S = (1.0, 8.0)
"""How long one endpoint has to answer: in the first round, and after doubling each round."""

LEAST_S = 0.05
"""What each of them gets, however little time is left."""

PAUSE_S = 0.1
"""How long to wait when all endpoints have failed at once."""

MAX_ANSWER = 8 * 1024 * 1024
"""The largest answer that is read, in bytes; those to our questions are far smaller."""

_AGAIN = frozenset((1, 2, 4, 10, 13, 14))
"""Codes of gRPC: cancelled, unknown, too late, aborted, internal, unavailable. A later attempt may succeed."""

_UNAUTHENTICATED = 16


class _Failed(Exception):
    """An endpoint gave no answer, or etcd has not carried a request out: it may be made again."""


class _WantsToken(Exception):
    """etcd wants a user, or does not know the token any more."""


class JsonApi:
    """All endpoints of one cluster; for one thread at a time."""

    def __init__(self, address: Address) -> None:
        self._name, self._access = address.name, address.access
        self._endpoints = list(net.parse_endpoints(",".join(address.endpoints), DEFAULT_PORT))
        self._tls = _tls(address.access)
        self._token = ""

    def call(self, path: str, body: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Make a call, at one endpoint after the other until one answers.

        Raises NoQuorum when none does in time, EtcdRefused when etcd will not do it.
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
        """Yield how long an endpoint has in each round, until the deadline."""
        attempt_s, longest_s = ATTEMPT_S
        while True:
            began_at = time.monotonic()
            yield attempt_s
            if deadline.expired():
                return
            if time.monotonic() - began_at < PAUSE_S:  # all failed at once
                time.sleep(min(PAUSE_S, deadline.remaining()))
            attempt_s = min(2 * attempt_s, longest_s)

    def _authorized(self, endpoint: net.Endpoint, path: str, body: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Make a call at one endpoint; log in where that is asked for."""
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
        except _WantsToken as error:  # another member has not heard of it yet
            raise _Failed(str(error)) from None
        except KeyError:
            raise _Failed("it gave no token") from None

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
            raise _Failed("not etcd's JSON API: the answer is no object")
        if response.status != 200:
            self._judge(response.status, answer, path)
        return answer

    def _why_hung_up(self, error: OSError) -> str:
        """Say what a member may want that hangs up on a client without a certificate, for it does not say so itself."""
        if self._tls is None or self._access.cert or "verify failed" in str(error):
            return ""
        return f"{net.why_failed(error)}; it may ask for a certificate: give cert= and key="

    def _judge(self, status: int, answer: dict[str, Any], path: str) -> None:
        """Raise what an answer that is an error comes to."""
        code, why = answer.get("code"), str(answer.get("message") or answer.get("error") or f"HTTP status {status}")
        if code == _UNAUTHENTICATED or "user name is empty" in why or "invalid auth token" in why:
            raise _WantsToken(why)
        if code in _AGAIN or code is None or "too many requests" in why:
            raise _Failed(why)
        raise EtcdRefused(store=self._name, key=path, why=why)

    def _connection(self, endpoint: net.Endpoint, within_s: float) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(*endpoint, timeout=within_s)
        return HTTPSConnection(*endpoint, timeout=within_s, context=self._tls)


def _tls(access: Access) -> ssl.SSLContext | None:
    """Return how to encrypt; None where neither an authority nor a certificate is given, as gRPC's client does it."""
    if not (access.ca or access.cert):
        return None
    import ssl

    context = ssl.create_default_context(cafile=access.ca or None)
    if access.cert:
        context.load_cert_chain(access.cert, access.key)
    return context
