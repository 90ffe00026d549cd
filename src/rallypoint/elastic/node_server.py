"""The servers of a store in etcd that a job brings along: one on each of three nodes, a child of the node's agent.

A node starts one while the store has fewer than three, whoever runs those; seats in etcd bound the number where all
nodes come at once (`storage/etcd_lookup.py`). It looks when it begins, when its own server has died, when the list of
servers that its session is told is short, and when its session finds none. So the servers of nodes that are lost come
up again on others, and a job outlives the loss of all nodes but one, one after the other.

A server that died is not started again at its port: while somebody holds that, it refuses no connections, by which
the others know at once that it is gone. Its end is no loss to anybody: sessions go on at the next leader.

Rejected: to let rank decide which nodes have one. Ranks are known only when nodes have met, for which a server is
needed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence

from rallypoint import net
from rallypoint.deadline import Deadline
from rallypoint.elastic.home import is_loopback, resolved
from rallypoint.elastic.workers import describe_exit
from rallypoint.errors import EtcdRefused, NoQuorum
from rallypoint.etcd.address import Address
from rallypoint.spawn import Server
from rallypoint.storage.etcd_lookup import SEATS, claim_seat, give_up_seat, look_up
from rallypoint.store.etcd import listen_host

__all__ = ["NodeServer"]

log = logging.getLogger("rallypoint.server")

LOOK_S = (1.0, 2.0)
"""How often a node without a server looks at the list that its session was told; chance decides in between."""

ASK_S = 5.0
"""How long etcd may take to answer when a seat is asked for; then it is asked again."""

START_S, CLOSE_S = 60.0, 10.0
"""How long a server may take to come up, and one that is just coming up to end."""

PAUSE_S, STEADY_S, LONGEST_S = 0.5, 10.0, 60.0
"""How long to wait before another is started, where the last one has not lived for so long; where none came up, that
doubles each time, up to the last of these."""

TRIES = 3
"""How many starts in a row may fail before those who wait for a server are told."""


class NodeServer:
    """This node's server of a store in etcd, if it needs one; `address` is where other nodes reach this one, if known.

    `known` returns the servers that the node's session was told of last.
    """

    def __init__(self, store: Address, address: str | None = None) -> None:
        self.known: Callable[[], Sequence[str]] = tuple
        self._store, self._address = store, address
        self._failures = 0
        self._error: Exception | None = None
        self._server: Server | None = None
        self._starting = False
        self._closed = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"server of {store.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process id of the server; None where there is none."""
        server = self._server
        return None if server is None else server.pid

    def find(self, deadline: Deadline) -> tuple[str, ...]:
        """Return the URLs of the store's servers, that of the leader first; none where they are about to come up.

        Raises NoQuorum and EtcdRefused, and ServerFailed where there is none and this node's does not come up.
        """
        servers = look_up(self._store, deadline).servers
        if len(servers) < SEATS:
            self._wanted.set()
        if not servers and self._error is not None:
            raise self._error
        return servers

    def close(self) -> None:
        """End the server, which hands over; another leads."""
        with self._lock:
            self._closed.set()
            server, starting = self._server, self._starting
        self._wanted.set()
        if server is not None:
            server.close()
        if starting:
            self._thread.join(CLOSE_S)  # else it ends with this process

    def _run(self) -> None:
        while not self._closed.is_set():
            if not self._wanted.wait(random.uniform(*LOOK_S)) and len(self.known()) >= SEATS:
                continue
            self._wanted.clear()
            lease = self._seat()
            with self._lock:
                self._starting = lease is not None and not self._closed.is_set()
            if lease is not None and self._starting:
                self._serve(lease)

    def _seat(self) -> int | None:
        try:
            return claim_seat(self._store, Deadline(ASK_S), beside=True)
        except (NoQuorum, EtcdRefused):  # which `find` will raise, too, where somebody needs to know
            return None

    def _serve(self, lease: int) -> None:
        """Start a server, and wait until it has ended."""
        try:
            server = Server(self._hosts(), storage=self._store.url, start_timeout=START_S)
        except Exception as error:
            self._failed(error)
            return
        finally:
            give_up_seat(self._store, lease, Deadline(ASK_S))
        self._failures, self._error = 0, None
        with self._lock:
            self._server, self._starting = server, False
            if self._closed.is_set():
                server.close()
        steady = Deadline(STEADY_S)
        code = server.wait() or 0
        self._server = None
        self._wanted.set()
        if not self._closed.is_set():
            log.warning("the server of this node (pid %d) has ended: %s", server.pid, describe_exit(code))
            self._closed.wait(0.0 if steady.expired() else PAUSE_S)

    def _failed(self, error: Exception) -> None:
        """Note that no server came up, and pause."""
        self._failures += 1
        if self._failures <= TRIES:
            log.warning("no server comes up on this node: %s", error)
        if self._failures >= TRIES:
            self._error = error
        self._closed.wait(min(PAUSE_S * 2.0 ** min(self._failures - 1, 10), LONGEST_S))

    def _hosts(self) -> list[str]:
        """Return where to listen, so that other nodes reach the server."""
        told = self._address
        if told and not self._store.host and net.is_this_host(told):
            reachable = [address for address in resolved(told) if not is_loopback(address)]
            if reachable:
                return reachable[:1]
        return [listen_host(self._store)]
