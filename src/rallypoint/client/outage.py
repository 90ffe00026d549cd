"""An outage as a client sees it: what the log and errors say about it, and how long a call waits meanwhile.

A client reconnects after a cut; if the session is resumed within `DOWN_S`, no call notices. After that the server is
*down*. The log reports it once, and once more when the server is back. A waiting call then ends at its own timeout, by
the client's clock, because no server will report it. A call that does not wait has as long as for any reply, and ends
with ConnectionLost. The session keeps trying for the grace period of the server's welcome, whatever becomes of its
calls.

A server may also be reachable but unable to reply, because etcd has no quorum. It reports that (`trouble`), or standbys
do (`no_quorum`). Then, too, calls end at their own timeout, with `NoQuorum`.

The blocking and the asyncio client share these rules; each connects in its own way.

Rejected: ending a call with a timeout of 0 as soon as the connection is cut. A poll would fail at every failover.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from rallypoint.client.routing.dial import ForeignServer
from rallypoint.core import ops
from rallypoint.core.machines.machine import Disconnected
from rallypoint.deadline import Deadline
from rallypoint.errors import (
    ConnectFailed,
    ConnectionLost,
    NoQuorum,
    RallypointError,
    ServerRestarted,
    SessionLost,
    Unsupported,
)
from rallypoint.protocol.native_client import ClientProtocol
from rallypoint.text import printable

__all__ = [
    "DOWN_S",
    "Outage",
    "CallDeadline",
    "ServerDown",
    "WithoutQuorum",
    "disconnected",
    "operation_name",
    "patience_s",
    "report_denied",
    "session_error",
    "shown_by",
]

log = logging.getLogger("rallypoint.client")

DOWN_S = 1.0
"""How long a server may be unreachable before it counts as down."""

LEAST_PATIENCE_S = 10.0
"""How long a server may take to reply, beyond the requested wait, however short the store's timeout is."""

BRIEF_S = 1.0
"""How much time must be left for a line in the log; otherwise an error is about to report the same."""


class ServerDown(RallypointError):
    """Internal: a call's timeout expired while the server was down, or read nothing; callers turn it into a timeout.

    Requests numbered `unsent_from` or higher were never sent; the caller that knows the number sets `sent`. If etcd has
    no quorum, `no_quorum` maps each address to the reason.
    """

    def __init__(self, words: str, unsent_from: float, no_quorum: Mapping[str, str] | None = None) -> None:
        super().__init__(words)
        self.unsent_from = unsent_from
        self.sent = True
        self.no_quorum = no_quorum or {}


class WithoutQuorum(Disconnected):
    """The client-side reason why a call on a shared object waits: etcd has no quorum."""

    no_quorum: Mapping[str, str]
    """The reason at each address."""


def disconnected(down: ServerDown) -> Disconnected:
    """Return the outcome of a call on a shared object that waits while the server is down."""
    if not down.no_quorum:
        return Disconnected(str(down))
    waiting = WithoutQuorum(str(down))
    waiting.no_quorum = down.no_quorum
    return waiting


def patience_s(timeout_s: float) -> float:
    """Return how long the server may take to reply, beyond the requested wait, for a store with this timeout."""
    return max(timeout_s, LEAST_PATIENCE_S)


def operation_name(op: ops.Op) -> str:
    """Return the name of an operation for errors; a call on a shared object is named after the object's kind."""
    return op.command.machine.kind if isinstance(op, ops.Act) else op.verb


class CallDeadline(Deadline):
    """The deadlines of a call: `at` for the server's reply, `own_at` for the caller's own timeout.

    They are the same for a call that does not wait (`wait_s` None).
    """

    __slots__ = ("own_at",)

    def __init__(self, patience_s: float, wait_s: float | None) -> None:
        super().__init__(patience_s + (wait_s or 0.0))
        self.own_at = self.at if wait_s is None else self.at - patience_s

    def unsent(self, peer: str, operation: str, waits: bool) -> ConnectionLost | ServerDown:
        """Return the error of a call that could not be sent in time."""
        why = "not sent: the server has not read all of an earlier request yet"
        return ServerDown(why, 0) if waits else ConnectionLost(peer=peer, operation=operation, why=why)

    def until(self, outage: Outage | None, trouble: str = "") -> float:
        """Return when the call gives up, in the current state of the server."""
        return self.own_at if (trouble if outage is None else outage.down) else self.at

    def ended(
        self, peer: str, operation: str, outage: Outage | None, trouble: str = ""
    ) -> ConnectionLost | ServerDown | NoQuorum:
        """Return the error of a call that gives up."""
        why = f"no answer within {self.timeout_s:g} s"
        no_quorum = outage.no_quorum if outage is not None else {peer: trouble} if trouble else {}
        if outage is not None and outage.down:
            if self.own_at < self.at:
                return ServerDown(outage.describe(), outage.unsent_from, no_quorum)
            why = f"{why}; it may or may not have been applied: {outage.describe()}"
        elif no_quorum and self.own_at < self.at:
            return ServerDown(f"the server at {peer} cannot answer: {trouble}", float("inf"), no_quorum)
        if no_quorum:
            return NoQuorum(store=f"tcp://{peer}", timeout_s=self.timeout_s, tried=no_quorum)
        return ConnectionLost(peer=peer, operation=operation, why=why)


class Outage:
    """One outage of a server, from the cut on. Requests numbered `unsent_from` or higher were never sent."""

    def __init__(self, peer: str, patience_s: float, unsent_from: int, trouble: str = "") -> None:
        self.deadline = Deadline(patience_s)
        """When the session will be lost."""

        self.unsent_from = unsent_from
        self.down = False
        """Whether it has lasted for `DOWN_S`."""

        self.why = ""
        """Why the last attempt to connect failed."""

        self.no_quorum: Mapping[str, str] = {peer: trouble} if trouble else {}
        """The reason at each address, if one of them reported that etcd has no quorum; else empty."""

        self._peer = peer
        self._began_at = time.monotonic()
        self._said = False

    def was_sent(self, number: int) -> bool:
        """Return whether a request may have reached the server: it was made before the outage."""
        return number < self.unsent_from

    def note_attempt(self, why: str, no_quorum: Mapping[str, str]) -> None:
        """Note why an attempt to connect failed; `no_quorum` has the reason at each address, if one reported that."""
        self.why, self.no_quorum = why, no_quorum

    def check_down(self) -> bool:
        """Mark the server as down, and log it, after `DOWN_S`; return whether that happened now."""
        lasted_s = time.monotonic() - self._began_at
        if self.down or lasted_s < DOWN_S:
            return False
        self.down = True
        left_s = self.deadline.remaining()
        if left_s >= BRIEF_S:
            self._said = True
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + left_s))
            words = "server at %s is down for %.0f s%s; waiting until %s (%.0f s more)"
            log.warning(words, self._peer, lasted_s, self._because(), until, left_s)
        return True

    def end(self) -> None:
        """Log that the server is back, if the log said that it was down."""
        if self._said:
            log.warning("server at %s is back after %.1f s", self._peer, time.monotonic() - self._began_at)

    def describe(self) -> str:
        """Return a description of the outage for errors."""
        lasted_s, left_s = time.monotonic() - self._began_at, self.deadline.remaining()
        since = f"the server at {self._peer} has been down for {lasted_s:.1f} s{self._because()}"
        return f"{since}; this client will retry for another {left_s:.0f} s"

    def _because(self) -> str:
        return f" ({self.why})" if self.why else ""


def session_error(error: Exception, peer: str, grace_s: float) -> RallypointError:
    """Return the error that ends a session with this grace period after a reconnect failed with `error`."""
    if isinstance(error, ConnectFailed):
        return SessionLost(peer=peer, why=f"cut for {grace_s:g} s; {error}")
    if isinstance(error, (ForeignServer, Unsupported)):
        return ServerRestarted(peer=peer, why="it is a PyTorch server now")
    if isinstance(error, RallypointError):
        return error
    return ConnectionLost(peer=peer, operation="reconnecting", why=f"{type(error).__name__}: {error}")


def report_denied(peer: str, core: ClientProtocol) -> None:
    """Log the hosts that a server denied access: a job may be waiting for one of them."""
    while core.denied:
        log.warning("server at %s denied access to %s", peer, printable(core.denied.pop(0)))


@contextlib.contextmanager
def shown_by(show: Callable[[str], object], *others: str) -> Iterator[None]:
    """In this block, pass log messages about outages, and those of the loggers named in `others`, to `show`.

    `show` is called from any thread, and replaces the usual log handlers.
    """
    handler = _Handler(show)
    logs = {each: each.propagate for each in (log, *map(logging.getLogger, others))}
    for each in logs:
        each.propagate = False
        each.addHandler(handler)
    try:
        yield
    finally:
        for each, propagates in logs.items():
            each.removeHandler(handler)
            each.propagate = propagates


class _Handler(logging.Handler):
    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # the output is closed
            self._show(record.getMessage())
