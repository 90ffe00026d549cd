"""Liveness probe of a node's child servers, its relay and its server of a store in etcd: kills a child that hangs.

A process that is stopped, or whose event loop is stuck, keeps its port and its connections: its clients see no failure,
and the node would keep a useless child. So the agent connects every few seconds, and expects a reply to the preface. A
relay replies whether its server is up or not, and a server replies as leader and as standby.

The probe kills only a process that was ready, or has replied before: a starting process has its own timeout. It does
not kill the child after a pause of the agent itself, which may have left a reply unread.

Rejected: to read the state of the process (/proc/PID/stat), where a stuck event loop looks like a busy one.
"""

from __future__ import annotations

import logging
import threading
import time

from rallypoint import net
from rallypoint.client.routing.dial import answers
from rallypoint.deadline import Deadline
from rallypoint.liveness import PAUSE_S
from rallypoint.process.spawn import ChildServer
from rallypoint.security.client_security import ClientSecurity

__all__ = ["LOOK_S", "SILENT_S", "LivenessProbe"]

log = logging.getLogger("rallypoint.server")

LOOK_S, SILENT_S = 2.0, 5.0
"""Interval between probes of a child, and its time to reply."""


class LivenessProbe:
    """Probes a running child at an address of this machine; `name` identifies it in the log.

    Once `closed` is set it kills no child: the child is about to end.
    """

    def __init__(
        self, child: ChildServer, at: net.Endpoint, name: str, closed: threading.Event, security: ClientSecurity
    ) -> None:
        self._child, self._at, self._name, self._closed, self._security = child, at, name, closed, security
        self._alive = child.pid  # the process that replied last

    def check(self) -> None:
        """Probe the child once, and kill it if it does not reply."""
        pid, began_at = self._child.pid, time.monotonic()
        if answers(self._at, Deadline(SILENT_S), self._security):
            self._alive = pid
            return
        paused = time.monotonic() - began_at > SILENT_S + PAUSE_S
        if pid == self._alive and not paused and not self._closed.is_set():
            log.warning("killing %s (pid %d): no answer for %g s", self._name, pid, SILENT_S)
            self._child.kill(pid)
