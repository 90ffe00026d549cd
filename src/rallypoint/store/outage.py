"""The absence of a server as a client lives through it: what is said of it, and how long a call waits meanwhile.

A connection that is cut is made again, and a session that is back within `DOWN_S` was only cut: no call notices. After
that the server is *down*. The log says so once, and once when it is back. A call that waits then ends when its own time
is over, with a time-out that says so, for no server will say it. A call that is answered at once waits as long as for
any answer, and ends with ConnectionLost. The session itself goes on trying until the server's welcome says that it is
over, whatever becomes of its calls.

A server may also be there and unable to answer, for etcd has no quorum. It says so (`trouble`), or servers that stand
by do (`no_quorum`). Calls then end when their own time is over, too, with `NoQuorum`.

The blocking client and the asyncio one share these rules; who connects is theirs.

Rejected: to let a call of no time end at the very cut. A poll would fail whenever a connection is moved.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from rallypoint.core.machine import Disconnected
from rallypoint.deadline import Deadline
from rallypoint.errors import ConnectionLost, NoQuorum, RallypointError

__all__ = ["DOWN_S", "Outage", "Patience", "ServerDown", "WithoutQuorum", "shown_by"]

log = logging.getLogger("rallypoint.client")

DOWN_S = 1.0
"""How long a server may be away before it is down."""

BRIEF_S = 1.0
"""How much time must be left to be worth a line in the log; otherwise an error is about to say the same."""


class ServerDown(RallypointError):
    """A call's own time is over while the server is down, or reads nothing: callers inside make a time-out of it.

    Requests from the number `unsent_from` on were sent to nobody; whoever knows the number sets `sent`. Where etcd has
    no quorum, `no_quorum` has what was tried.
    """

    unsent_from: float
    sent: bool
    no_quorum: Mapping[str, str]

    def __init__(self, words: str, unsent_from: float, no_quorum: Mapping[str, str] | None = None) -> None:
        super().__init__(words, unsent_from=unsent_from, sent=True, no_quorum=no_quorum or {})


class WithoutQuorum(Disconnected):
    """Why a call on a shared object waits as far as its client knows: etcd has no quorum."""

    no_quorum: Mapping[str, str]
    """What was tried."""


class Patience(Deadline):
    """How long a call waits for its answer: `at` is when the server owes it, `own_at` when the caller's time is over.

    For a call that is answered at once (`wait_s` None) they are the same.
    """

    __slots__ = ("own_at",)

    def __init__(self, patience_s: float, wait_s: float | None) -> None:
        super().__init__(patience_s + (wait_s or 0.0))
        self.own_at = self.at if wait_s is None else self.at - patience_s

    def unsent(self, peer: str, operation: str, waits: bool) -> ConnectionLost | ServerDown:
        """Return what ends a call that could not be sent in its time."""
        why = "not sent: the server has not read all of an earlier request yet"
        return ServerDown(why, 0) if waits else ConnectionLost(peer=peer, operation=operation, why=why)

    def until(self, outage: Outage | None, trouble: str = "") -> float:
        """Return when the call gives up, as things are now."""
        return self.own_at if (trouble if outage is None else outage.down) else self.at

    def ended(
        self, peer: str, operation: str, outage: Outage | None, trouble: str = ""
    ) -> ConnectionLost | ServerDown | NoQuorum:
        """Return what ends a call that gives up."""
        why = f"no answer within {self.timeout_s:g} s"
        no_quorum = outage.no_quorum if outage is not None else {peer: trouble} if trouble else {}
        if outage is not None and outage.down:
            if self.own_at < self.at:
                return ServerDown(outage.words(), outage.unsent_from, no_quorum)
            why = f"{why}, and whether it was carried out is not known: {outage.words()}"
        elif no_quorum and self.own_at < self.at:
            return ServerDown(f"the server at {peer} cannot answer: {trouble}", float("inf"), no_quorum)
        if no_quorum:
            return NoQuorum(store=f"tcp://{peer}", timeout_s=self.timeout_s, tried=no_quorum)
        return ConnectionLost(peer=peer, operation=operation, why=why)


class Outage:
    """One absence of a server, from a cut on. Requests from the number `unsent_from` on were sent to nobody."""

    def __init__(self, peer: str, patience_s: float, unsent_from: int, trouble: str = "") -> None:
        self.deadline = Deadline(patience_s)
        """When the session is lost."""

        self.unsent_from = unsent_from
        self.down = False
        """Whether this has lasted long enough to be noticed."""

        self.why = ""
        """What the last attempt to connect met."""

        self.no_quorum: Mapping[str, str] = {peer: trouble} if trouble else {}
        """What it met at each address, where one of them said that etcd has no quorum; else nothing."""

        self._peer = peer
        self._began_at = time.monotonic()
        self._said = False

    def look(self) -> bool:
        """Find the server down, and say so, once it is time; return whether that was now."""
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

    def over(self) -> None:
        """Note that the server is back; say so if it was said that it is down."""
        if self._said:
            log.warning("server at %s is back after %.1f s", self._peer, time.monotonic() - self._began_at)

    def words(self) -> str:
        """Say for errors what is known."""
        lasted_s, left_s = time.monotonic() - self._began_at, self.deadline.remaining()
        since = f"the server at {self._peer} has been down for {lasted_s:.1f} s{self._because()}"
        return f"{since}; this client tries to reach it for another {left_s:.0f} s"

    def _because(self) -> str:
        return f" ({self.why})" if self.why else ""


@contextlib.contextmanager
def shown_by(show: Callable[[str], object], *others: str) -> Iterator[None]:
    """Have what the log would say of outages shown by a function instead, from any thread, while in this block.

    So is what other loggers say, which are given by name.
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
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            self._show(record.getMessage())
