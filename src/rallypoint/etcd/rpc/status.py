"""gRPC's status codes, and the error of a failed call."""

from __future__ import annotations

import enum

__all__ = ["RETRYABLE", "Code", "RpcError"]


class Code(enum.IntEnum):
    """The codes that etcd and `RpcConnection` use."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


RETRYABLE = frozenset(
    (Code.CANCELLED, Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.ABORTED, Code.INTERNAL, Code.UNAVAILABLE)
)
"""Codes after which a retry, or another member, may succeed."""


class RpcError(Exception):
    """A call failed: the member refused it, or did not answer."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why
