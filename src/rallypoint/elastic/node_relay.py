"""The relay of a node: a child of its agent, started beside whatever else that does, for the node's workers.

Clients of ours use it because `variable` is in their environment, and go on without it when it dies. Clients of
PyTorch's have a port of it as their store: when it dies, theirs is gone, and the round is over. The relay itself is
started again at once (`supervisor.py`), and opens the port of the next round.

One that hangs, as when it was stopped, is not dead to anybody: it is asked for a sign of life every few seconds, and
killed where it gives none. It answers that by itself, whether its server is there or not.

It listens on loopback. A round that workers of other nodes use, too, has its port on all interfaces.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.elastic import round_port
from rallypoint.elastic.round_port import RoundPort
from rallypoint.errors import MeetingError, NetworkError
from rallypoint.liveness import PAUSE_S
from rallypoint.relay.settings import upstream_store
from rallypoint.relay.spawn import Relay
from rallypoint.store.dial import answers

__all__ = ["NodeRelay"]

log = logging.getLogger("rallypoint.server")

LOOK_S, SILENT_S = 2.0, 5.0
"""How often a relay is asked for a sign of life, and how long it may take to give one."""


class NodeRelay:
    """A relay of the store with a URL; `on_end` is called, in a thread of its own, when it has died in a round."""

    def __init__(self, upstream: str, on_end: Callable[[], object] = lambda: None) -> None:
        self._store = upstream_store(upstream)
        self._upstream = upstream
        self._on_end = on_end
        self._port: RoundPort | None = None
        self._closed = threading.Event()
        self._started: Future[Relay] = Future()
        threading.Thread(target=self._run, name=f"relay of {self._store.label}", daemon=True).start()

    def _run(self) -> None:
        try:
            relay = Relay(self._upstream)
        except BaseException as error:  # it is the one who needs the relay to hear of it
            self._started.set_exception(error)
            return
        self._started.set_result(relay)
        alive = relay.pid
        while not self._closed.wait(LOOK_S) and relay.running():
            alive = self._look(relay, alive)

    def _look(self, relay: Relay, alive: int) -> int:
        """Kill a relay that has answered before and does not now; return the process id of the one that has.

        One that is only starting is left to its supervisor. After a pause of our own its answer may just be unread.
        """
        pid, began_at = relay.pid, time.monotonic()
        if answers(self._at, Deadline(SILENT_S)):
            return pid
        paused = time.monotonic() - began_at > SILENT_S + PAUSE_S
        if pid == alive and not paused and not self._closed.is_set():
            log.warning("the relay (pid %d) has answered nothing for %g s, and is killed", pid, SILENT_S)
            relay.kill(pid)
        return alive

    @property
    def relay(self) -> Relay:
        """The relay, once it is up; raises ServerFailed where it does not come up."""
        return self._started.result()

    def variable(self, identity: bytes) -> str:
        """Return what RALLYPOINT_RELAY is for workers, with the identity of the store."""
        return self._store.relay_address(self.relay.url)._replace(identity=identity).variable

    def open(
        self, run: str, scope: int, number: int, timeout_s: float, *, port: int = 0, everywhere: bool = False
    ) -> int:
        """Open the port of a round, this one where it is free; that of an earlier round is closed."""
        opened = round_port.open_port(
            self._at, run, scope, timeout_s, self._on_end, number=number, port=port, everywhere=everywhere
        )
        self._forget_port()
        self._port = opened
        return opened.port

    def close_port(self, run: str, timeout_s: float) -> None:
        """Close the port of an earlier round, if there is one: that of this round is at another node's relay."""
        before = self._port
        self._forget_port()
        if before is not None and not before.lost:
            with contextlib.suppress(NetworkError, MeetingError):  # then it goes with the relay
                round_port.close_round(self._at, run, timeout_s, before.scope, again=False)

    def close_round(self, run: str, scope: int | None, timeout_s: float) -> None:
        """Close a round, at the relay and at the server."""
        self._forget_port()
        round_port.close_round(self._at, run, timeout_s, scope)

    def lost(self) -> str:
        """Say that the relay has died with the port of this round; empty where it has not."""
        port = self._port
        return f"its relay (pid {port.pid}) has died" if port is not None and port.lost else ""

    def close(self) -> None:
        """End the relay, also one that is just starting."""
        self._closed.set()
        self._forget_port()
        if self._started.exception() is None:
            self._started.result().close()

    def _forget_port(self) -> None:
        before, self._port = self._port, None
        if before is not None:
            before.close()

    @property
    def _at(self) -> net.Endpoint:
        return net.Endpoint("127.0.0.1", self.relay.port)
