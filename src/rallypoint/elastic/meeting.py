"""Where a node meets the others of its run: the server, the rendezvous, and the board on which they write.

The server is that of --store, which runs; or that of an endpoint, which whoever has the address starts, and which
outlives them all; or, for a node that is alone, a child on a free port. Where --store is etcd, it is a gateway to that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Container

from rallypoint import net
from rallypoint.core.gang import Standing
from rallypoint.core.machine import Waiting
from rallypoint.elastic import home
from rallypoint.elastic.bell import Bell
from rallypoint.elastic.board import Board
from rallypoint.elastic.events import Events
from rallypoint.elastic.failure import Failure, server_failure
from rallypoint.elastic.job import UNNAMED, Job
from rallypoint.elastic.rendezvous import Rendezvous, Round, Status
from rallypoint.elastic.world import World, gather
from rallypoint.errors import ConnectionLost, MeetingError, NetworkError, RallypointError, SessionLost
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.spawn import Server
from rallypoint.store.tcp import TCPStore
from rallypoint.store.url import parse_url

__all__ = ["FAILED", "SUCCEEDED", "Meeting", "in_words"]

SUCCEEDED, FAILED = "succeeded", "failed"
"""The results of a run."""

READ_S, LEAVE_S = 60.0, 5.0
"""How long an operation of the store may take, and how long leaving may, all in all."""


class Meeting:
    """One node's side of a run; the stack leaves it, and puts everything away."""

    def __init__(self, job: Job, events: Events, bell: Bell, stack: contextlib.ExitStack) -> None:
        self._job = job
        self._events = events
        self._bell = bell
        self._members: list[str] = []
        self._suspects: set[str] = set()
        self._round: Round | None = None
        self._home = self._open(stack)
        stack.callback(self._home.close)
        self._home.store.set_timeout(READ_S)
        with bell.interrupting():
            self.board = Board(self._home.store, job.run_id, bell.ring)
        self.rendezvous = Rendezvous(
            self._home.store,
            job.run_id,
            job.min_nodes,
            job.max_nodes,
            node=job.node,
            rank=job.node_rank,
            settings=_settings(job),
            last_call=job.last_call_s,
            address=job.local_address,
            progress=self._waits,
            on_change=bell.ring,
        )
        stack.callback(self._leave)

    def come(self) -> World:
        """Come to a round that holds until all of it know each other."""
        while True:
            with self._bell.interrupting(), self._events.status(self._why):
                now = self._round = self.rendezvous.join(self._job.join_timeout_s)
                self.board.enter(now.store, self.rendezvous.node)
                self._events.node = self.rendezvous.node
                self._forgive()
                try:
                    told = gather(now, self.rendezvous.node, self._job.workers, self.rendezvous.changed.is_set, READ_S)
                    server = self._home.server()
                    port = home.open_door(*server, self._job.run_id, now.scope, READ_S)
                except (MeetingError, ConnectionLost) as error:
                    if not isinstance(error, MeetingError) and not self._home.lost():
                        raise
                    self._events.say("rejoin", f"round {now.number} fell apart: {error}")
                    continue
            self._members = [name for name, _ in told]
            return World(
                run_id=self._job.run_id,
                url=f"tcp://{server}",
                scope=now.scope,
                number=now.number,
                reason=now.reason,
                members=self._members,
                node_rank=now.rank,
                workers=[count for _, count in told],
                master=net.Endpoint(server.host, port),
                role=self._job.role,
                restarts=self.board.restarts(),
                max_restarts=self._job.rules.budget,
            )

    def standing(self, status: Status | None = None) -> Standing:
        """Return how the nodes of this round stand."""
        status = status or self.rendezvous.status()
        return Standing(self._members, list(status.nodes), status.waiting, self.board.done())

    def lost(self) -> set[str]:
        """Return the nodes of which others fail: gone before they were done, or the one whose server has died."""
        now, cause = self.standing(), self.board.cause()
        of_servers = {cause.node} if cause is not None and cause.rank < 0 else set()
        return set(now.members).difference(now.living, now.done) | of_servers

    def tell_of(self, failures: Container[Failure]) -> None:
        """Have all look at a failure; if it is one of these, it used a restart: note who may turn out to be why."""
        self.board.tell()
        if self.board.cause() in failures:
            self._suspects = set(self._members).difference(self.board.done())

    def bereft(self) -> Failure | None:
        """Return the end of this node's own server, where that has died, and have all nodes stop for it; or None.

        It is the first cause of what follows, and uses no restart: no worker has failed, and one that fails now, here
        or elsewhere, does so of this.
        """
        how = self._home.lost()
        if not how:
            return None
        cause = server_failure(self.rendezvous.node, how)
        self.board.blame(cause)
        self.board.tell()
        return cause

    def _forgive(self) -> None:
        """Give back a restart that a loss has cost; the others count restarts when they have heard from this node."""
        gone, self._suspects = self.board.gone(self._suspects), set()
        if gone:
            self.board.refund()
            words = f"the failure uses no restart: {', '.join(gone)} went in the same round"
            self._events.say("refund", words, nodes=gone)

    def close(self, result: str, reason: str) -> None:
        """End the run for everybody, unless somebody has."""
        self.rendezvous.close(result, reason)
        self.board.tell()

    def _open(self, stack: contextlib.ExitStack) -> home.Home:
        job = self._job
        if job.alone:
            server = stack.enter_context(Server())
            alone = TCPStore("127.0.0.1", server.port, timeout=READ_S, wait_for_workers=False)
            return home.Home(alone, net.Endpoint("127.0.0.1", server.port))
        url = None if job.store is None else parse_url(job.store)
        if url is not None and url.scheme == "etcd":
            with self._bell.interrupting(), self._events.status(lambda: f"etcd does not answer at {url.place} yet"):
                return home.on_etcd(url.text, job.run_id, job.join_timeout_s, self._bell.ring)
        endpoint = url.endpoint() if url else net.parse_endpoint(job.endpoint or "", DEFAULT_PORT)
        with self._bell.interrupting(), self._events.status(lambda: f"no server answers at {endpoint} yet"):
            store = home.find_or_start(endpoint, False if url else None, job.join_timeout_s)
        return home.Home(store, net.Endpoint(endpoint.host, store.port))

    def _leave(self) -> None:
        """Leave, if the server answers: one that is silent holds nobody back."""
        given_up = threading.Timer(LEAVE_S, self._home.store.close)
        given_up.daemon = True
        given_up.start()
        with contextlib.suppress(RallypointError):
            self.board.leave()
            if self.rendezvous.leave() and self._round is not None:
                home.close_door(*self._home.server(), self._job.run_id, LEAVE_S, self._round.scope)
                self.board.clear()
        given_up.cancel()

    def _why(self) -> str:
        status = self.rendezvous.status()
        return "this node is a spare" if status.phase == "formed" else status.reason

    def _waits(self, waiting: Waiting) -> None:
        self._events.waits(f"this node has waited {waiting.waited_s:.0f} s: {waiting.reason}")


def _settings(job: Job) -> dict[str, object]:
    """Return what all nodes must have alike; where the run has no name, that is the only sign of which run it is."""
    script = {"script": os.path.basename(job.command.what)} if job.run_id == UNNAMED else {}
    return {"restart": job.rules.restart, "restart_budget": job.rules.budget, **script}


def in_words(error: RallypointError, came: bool) -> str:
    """Say what ends a run; that a store can be opened again is advice for scripts, not for whoever reads this."""
    if not isinstance(error, NetworkError):
        return str(error)
    why = f"the session with {error.peer} is lost: {error.why}" if isinstance(error, SessionLost) else str(error)
    return f"the run cannot {'go on' if came else 'begin'} without its server: {why}"
