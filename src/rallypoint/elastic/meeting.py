"""Where a node meets the others of its run: the server, the rendezvous, and the board on which they write.

The server is that of --store, which runs; or that of an endpoint, which whoever has the address starts, and which
outlives them all; or, for a node that is alone, a child on a free port. Where --store is etcd, three of the nodes have
a server of the store, and one of these leads.

A session with the server may be lost: the node was cut off for longer than its grace, or the server died. `attach`
opens another, under the same name, and notes whether the server is another one, which knows nothing of the run.

Rejected: to have the store open sessions by itself. What hung on the lost one is gone, and only the agent knows what
follows from that: its workers have to stop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container, Iterator, Sequence

from rallypoint import net
from rallypoint.core.gang import Standing
from rallypoint.core.machine import Waiting
from rallypoint.deadline import Deadline
from rallypoint.elastic import store_provider
from rallypoint.elastic.bell import Bell
from rallypoint.elastic.board import Board
from rallypoint.elastic.events import Events
from rallypoint.elastic.failure import Failure, server_failure
from rallypoint.elastic.job import LOCAL, Job
from rallypoint.elastic.rendezvous import Rendezvous, Round, Status
from rallypoint.elastic.store_provider import StoreProvider, rank0_address
from rallypoint.elastic.world import Told, World, gather
from rallypoint.errors import (
    ConnectFailed,
    ConnectionLost,
    Disagreement,
    MeetingError,
    NetworkError,
    NoQuorum,
    RallypointError,
    SessionLost,
)
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.store.url import parse_url

__all__ = ["FAILED", "SUCCEEDED", "Meeting", "in_words", "why_lost"]

SUCCEEDED, FAILED = "succeeded", "failed"
"""The results of a run."""

SAY_S = 10.0
"""How often a wait is spoken of."""

READ_S, LEAVE_S = 60.0, 5.0
"""How long an operation of the store may take, and how long leaving may, all in all."""


class Meeting:
    """One node's side of a run, over as many sessions with its server as it takes."""

    board: Board
    rendezvous: Rendezvous

    def __init__(self, job: Job, events: Events, bell: Bell) -> None:
        self._job = job
        self._events = events
        self._bell = bell
        self._members: list[str] = []
        self._suspects: set[str] = set()
        self._round: Round | None = None
        self._provider: StoreProvider | None = None
        self._server_id: bytes | None = None
        self._silent_s = 0.0
        self._stack = contextlib.ExitStack()
        self.done = False
        """Whether this node's workers have succeeded in its last round, which the others are told."""

        self.forgotten = False
        """Whether the server is another one than at first, and knows nothing of the run; the agent sets it back."""

        self.failed = ""
        """Why this node ends in failure, if it does: said when it leaves."""

        self.waits_for = "no worker ran" if job.max_nodes == 1 else "waiting for other nodes"
        """What an agent that is told to end was doing, where it has no workers."""

    # The session

    def attach(self, deadline: Deadline) -> None:
        """Open a session with the server, for the first time or after one was lost.

        Raises NetworkError where no server answers by the deadline.
        """
        self._provider = None
        self._stack.close()  # what is left of the session before
        at = self._open(deadline)
        self._stack.callback(at.close)
        at.store.set_timeout(READ_S)
        first, same = self._server_id is None, self._server_id == at.server_id
        with self._bell.interrupting():
            board = Board(at.store, self._job.run_id, self._bell.ring, 0 if first else self.board.used)
            rendezvous = self._rendezvous(at)
            if first:
                rendezvous.begin_anew()
            else:
                rendezvous.succeed(self.rendezvous, same)
        self._provider, self._server_id, self.board, self.rendezvous = at, at.server_id, board, rendezvous
        self.forgotten = self.forgotten or not (first or same)

    def close(self) -> None:
        """Leave the run, if the server answers, and end the session."""
        with self._stack:
            if self._provider is not None:
                self._leave(self._provider)

    def _rendezvous(self, at: StoreProvider) -> Rendezvous:
        job = self._job
        return Rendezvous(
            at.store,
            job.run_id,
            job.min_nodes,
            job.max_nodes,
            node=job.node,
            rank=job.node_rank,
            settings=job.settings(),
            last_call=job.last_call_s,
            address=job.local_address,
            spare=job.min_nodes < job.max_nodes,
            progress=self._waits,
            on_change=self._bell.ring,
        )

    def _open(self, deadline: Deadline) -> StoreProvider:
        job, within_s, local, ring = self._job, deadline.remaining(), self._job.relay == LOCAL, self._bell.ring
        if job.alone:
            return store_provider.alone(job.data_dir, READ_S, ring)
        url = None if job.store is None else parse_url(job.store)
        if url is not None and url.scheme == "etcd":
            etcd, own = url.etcd(), job.local_address
            with self._searching(f"{etcd.name} does not answer yet"):
                return store_provider.on_etcd(etcd, own, within_s, self._in_vain, local, ring)
        endpoint = url.endpoint() if url else net.parse_endpoint(job.endpoint or "", DEFAULT_PORT)
        with self._searching(f"no server answers at {endpoint} yet"):
            is_host = False if url else job.is_host
            return store_provider.at_endpoint(endpoint, is_host, within_s, self._in_vain, job.data_dir, local, ring)

    @contextlib.contextmanager
    def _searching(self, words: str) -> Iterator[None]:
        """Say in this block that no server answers: on a terminal all the time, elsewhere after every attempt."""
        before, self.waits_for = self.waits_for, words
        with self._bell.interrupting(), self._events.status(lambda: self.waits_for):
            yield
        self.waits_for = before

    def _in_vain(self, error: ConnectFailed | NoQuorum) -> None:
        why = "; ".join(f"{address}: {why}" for address, why in error.tried.items()) or "no address was found"
        silent = (
            f"no server answers at {error.peer}" if isinstance(error, ConnectFailed) else f"{error.store} is silent"
        )
        self.waits_for = f"{silent} yet ({why})"
        self._events.waits(self.waits_for)

    @property
    def _here(self) -> StoreProvider:
        assert self._provider is not None
        return self._provider

    # Rounds

    def come(self) -> World:
        """Come to a round that holds until all of it know each other."""
        self.done = False
        run, here = self._job.run_id, self._here
        while True:
            with self._bell.interrupting(), self._events.status(self._why):
                now = self._round = self.rendezvous.join(self._job.join_timeout_s)
                self.board.enter(now.store, self.rendezvous.node)
                self._events.node = self.rendezvous.node
                self._forgive()
                self._silent_s = 0.0
                try:
                    own = Told(self.rendezvous.node, self._job.workers, here.offer(run, now, READ_S))
                    told = gather(now, own, self._is_over, READ_S)
                    master = here.store_of(run, now, told[0].port, READ_S)
                except (MeetingError, ConnectionLost) as error:
                    if not isinstance(error, MeetingError) and not here.lost():
                        raise
                    self._events.say("rejoin", f"round {now.number} fell apart: {error}")
                    continue
            self._members = [one.node for one in told]
            return World(
                run_id=run,
                url=here.url,
                relay=here.relay(),
                scope=now.scope,
                number=now.number,
                reason=now.reason,
                members=self._members,
                node_rank=now.rank,
                workers=[one.workers for one in told],
                master=master,
                rank0=rank0_address(now),
                role=self._job.role,
                restarts=self.board.restarts(),
                max_restarts=self._job.rules.budget,
            )

    def _is_over(self, waited_s: float, missing: Sequence[str]) -> bool:
        """Say for whom the nodes of a new round wait, and return whether it is over."""
        late = f"ranks {', '.join(missing)} have" if len(missing) > 1 else f"rank {missing[0]} has" if missing else ""
        if late and waited_s >= self._silent_s + SAY_S:
            self._silent_s = waited_s
            words = f"a round is formed, but node {late} not said for {waited_s:.0f} s how many workers it has"
            self._events.waits(words)
        return self.rendezvous.changed.is_set()

    def follow(self) -> None:
        """After a cut, go on waiting for the others of a round in which this node is done, unless there is another."""
        last, status = self._round, self.rendezvous.status()
        if last is None or status.round != last.number or not set(self._members).isdisjoint(status.waiting):
            self.done = False  # the others come to another round, or have come
            return
        self.board.enter(self.rendezvous.follow(last).store, self.rendezvous.node)
        if status.phase != "closed":
            self.finish()  # the cut may have swallowed it
        self.board.news = True

    def finish(self) -> None:
        """Tell the others that this node's workers have succeeded."""
        self.done = True  # also if the server is lost now: what is done is not done again
        self.board.finish(self.rendezvous.node)
        self._events.say("done", "the other nodes know that this one is done", to_people=False)

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

    def bereft(self, failed: bool = False) -> Failure | None:
        """Return the end of the store of this node's workers, where it has died, and have all nodes stop for it.

        It is the first cause of what follows, and uses no restart: no worker has failed, and one that fails now, here
        or elsewhere, does so of this. Where a worker has `failed` already, it is looked for on rank 0's node, too.
        """
        how = self._here.lost(failed)
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

    def end_run(self, result: str, reason: str) -> None:
        """End the run for everybody, unless somebody has."""
        self.rendezvous.close(result, reason)
        self.board.tell()

    def _leave(self, at: StoreProvider) -> None:
        """Leave, if the server answers: one that is silent holds nobody back."""
        given_up = threading.Timer(LEAVE_S, at.store.close)
        given_up.daemon = True
        given_up.start()
        with contextlib.suppress(RallypointError):
            self.board.leave()
            last = self.rendezvous.leave(failed=self.failed, done=self.done)
            if self.failed:
                self.board.tell()
            if last and self._round is not None:
                at.close_round(self._job.run_id, self._round.scope, LEAVE_S)
                self.board.clear()
        given_up.cancel()

    def _why(self) -> str:
        status = self.rendezvous.status()
        return "this node is a spare" if status.phase == "formed" else status.reason

    def _waits(self, waiting: Waiting) -> None:
        self._events.waits(f"this node has waited {waiting.waited_s:.0f} s: {waiting.reason}")


def in_words(error: RallypointError, came: bool) -> str:
    """Say what ends a run; that a store can be opened again is advice for scripts, not for whoever reads this."""
    if isinstance(error, Disagreement):
        return f"{error} If this is another job at the same place, give it a name of its own: --rdzv-id."
    if not isinstance(error, NetworkError):
        return str(error)
    return f"the run cannot {'go on' if came else 'begin'} without its server: {why_lost(error)}"


def why_lost(error: NetworkError) -> str:
    """Say why the server cannot be asked, without advice for scripts."""
    return f"the session with {error.peer} is lost: {error.why}" if isinstance(error, SessionLost) else str(error)
