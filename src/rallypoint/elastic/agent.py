"""The agent: it has one node's workers, and lives through the rounds of a job.

One thread does everything: it joins, starts the workers, and then waits for what comes first: the exit of a worker, the
end of the round, a signal, a moment that was set. What to do about it is `core/gang.py`'s to say. Other threads only
bring news: the rendezvous' watch rings a bell, and the pump moves the workers' output.

Nodes talk through the store: the first failure of a round, by compare-and-set; how many restarts the job has used; who
is done. The run is closed by whoever sees that it has a result, and everybody hears that as the end of the round.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rallypoint import net
from rallypoint.core.gang import Act, Decision, Exit, Gang
from rallypoint.core.machine import Waiting
from rallypoint.deadline import Deadline
from rallypoint.elastic import failure, home
from rallypoint.elastic.bell import Bell, Signalled
from rallypoint.elastic.crew import Crew
from rallypoint.elastic.events import Events
from rallypoint.elastic.failure import Failure
from rallypoint.elastic.job import Job
from rallypoint.elastic.rendezvous import Rendezvous
from rallypoint.elastic.workers import WorkerUnstartable, exit_code_of
from rallypoint.elastic.world import World
from rallypoint.errors import MeetingError, RallypointError, RunClosed
from rallypoint.recipes.exchange import Exchange
from rallypoint.server.settings import DEFAULT_PORT
from rallypoint.spawn import Server
from rallypoint.store.tcp import TCPStore
from rallypoint.store.url import parse_url

__all__ = ["Agent"]

SUCCEEDED, FAILED = "succeeded", "failed"
READ_S = 60.0
"""How long an operation of the store may take."""


class Agent:
    """What runs one node's workers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gang = Gang(rules=job.rules)
        self._events = Events(job.node or "", job.quiet, job.json)
        self._bell = Bell()
        self._heard = False
        """Whether the end of this round has been dealt with."""

        self._failures: list[Failure] = []
        self._done_by = Deadline(float("inf"))

    def run(self) -> int:
        """Run the job; return the exit code."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._bell.rung_by_signals())
            try:
                self._settle(stack)
                return self._live()
            except Signalled as caught:
                self._events.say("signal", f"{caught.name} while waiting for other nodes")
                return 128 + int(signal.Signals[caught.name])
            except RunClosed as closed:
                return self._ended(closed.result, closed.reason)
            except RallypointError as error:
                self._events.block(f"rallypoint run: {error}")
                return 1

    # Where the job is

    def _settle(self, stack: contextlib.ExitStack) -> None:
        """Find or start the server, and get ready for the first round; the stack puts it all away again."""
        job = self._job
        with self._bell.interrupting():
            if job.store is not None:
                endpoint = parse_url(job.store).endpoint()
                self._store = TCPStore(*endpoint, timeout=READ_S, wait_for_workers=False)
            elif job.endpoint is not None:
                endpoint = net.parse_endpoint(job.endpoint, DEFAULT_PORT)
                self._store = home.find_or_start(endpoint, None, READ_S)
            else:
                server = stack.enter_context(Server())
                endpoint = net.Endpoint("127.0.0.1", server.port)
                self._store = TCPStore(*endpoint, timeout=READ_S, wait_for_workers=False)
        self._server = net.Endpoint(endpoint.host, self._store.port)
        stack.callback(self._store.close)
        self._rendezvous = Rendezvous(
            self._store,
            job.run_id,
            job.min_nodes,
            job.max_nodes,
            node=job.node,
            rank=job.node_rank,
            settings={"restart": job.rules.restart, "restart_budget": job.rules.budget},
            last_call=job.last_call_s,
            address=job.local_address,
            progress=self._waiting,
            on_change=self._bell.ring,
        )
        stack.callback(self._leave)
        logs = job.log_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="rallypoint-"))
        self._crew = Crew(job, Path(logs), self._bell.fileno())
        stack.callback(self._crew.close)

    def _leave(self) -> None:
        with contextlib.suppress(RallypointError):
            if self._rendezvous.leave():
                home.close_door(*self._server, self._job.run_id, READ_S, self._round.scope)
                self._store.delete_prefix(self._key(""))

    def _key(self, name: str) -> str:
        """Return a key of the whole run."""
        return f"run:{self._job.run_id}/{name}"

    # Rounds

    def _live(self) -> int:
        self._rendezvous.begin_anew()
        while True:
            world = None
            while world is None:
                self._join()
                world = self._world()
            self._gang.regrouped()
            self._crew.enter(world)
            try:
                self._start(world.ranks)
            except WorkerUnstartable as error:
                self._rendezvous.close(FAILED, str(error))
                raise
            code = self._watch_over()
            if code is not None:
                return code

    def _join(self) -> None:
        with self._bell.interrupting():
            now = self._round = self._rendezvous.join(self._job.join_timeout_s)
        self._heard = False
        self._events.node = self._rendezvous.node
        words = f"round {now.number}: node {now.rank} of {now.world_size}, {now.reason}"
        self._events.say("round", words, round=now.number, node_rank=now.rank, nodes=now.world_size)

    def _world(self) -> World | None:
        """Find out where this node's workers stand; None where the round fell apart meanwhile."""
        job, now = self._job, self._round
        try:
            with self._bell.interrupting():
                counts = [job.workers]
                if now.world_size > 1:
                    told = Exchange(now.store, "workers", now.world_size).all_gather(
                        now.rank, str(job.workers).encode(), READ_S
                    )
                    counts = [int(count) for count in told]
                port = home.open_door(*self._server, job.run_id, now.scope, READ_S)
        except MeetingError as error:
            self._events.say("rejoin", f"round {now.number} fell apart: {error}")
            return None
        return World(
            run_id=job.run_id,
            url=f"tcp://{self._server}",
            scope=now.scope,
            number=now.number,
            node=self._rendezvous.node,
            node_rank=now.rank,
            nodes=now.world_size,
            workers=counts,
            master=net.Endpoint(self._server.host, port),
            role=job.role,
            restarts=self._store.add(self._key("restarts"), 0),
            max_restarts=job.rules.budget,
        )

    def _start(self, ranks: Sequence[int]) -> None:
        self._gang.started(ranks)
        self._crew.start(ranks)
        words = f"started {len(ranks)} workers, of ranks {min(ranks)} to {max(ranks)}"
        self._events.say("started", words, ranks=list(ranks))

    def _watch_over(self) -> int | None:
        """Live through a round; return the exit code, or None to come again."""
        self._done_by = Deadline(float("inf"))
        while True:
            for decision in self._decisions():
                if decision.act not in (Act.WAIT, Act.END):
                    self._events.say(decision.act, decision.reason)
                ends, code = self._carry_out(decision)
                if ends:
                    return code

    def _decisions(self) -> Iterator[Decision]:
        """Wait for something to happen, and yield what to do about it."""
        exits = self._crew.wait(min(self._done_by.remaining(), 3600.0))
        self._bell.silence()
        while self._bell.signals:
            yield self._gang.signal(self._bell.signals.pop(0))
        for rank, code, words, uptime_s in exits:
            yield self._gang.exited(Exit(rank, code, words, uptime_s), self._charge(rank, code))
        if self._is_over() and not self._heard:
            self._heard = True
            yield self._what_now(self._rendezvous.changed.reason)
        if self._done_by.expired():
            waiting = ", ".join(sorted(set(self._rendezvous.status().nodes) - set(self._done())))
            reason = f"waited {self._job.exit_timeout_s:g} s for other nodes to be done; not done: {waiting}"
            yield Decision(Act.END, reason)

    def _carry_out(self, decision: Decision) -> tuple[bool, int | None]:
        """Do what was decided; return whether this node's round is over by that, and the exit code if all is."""
        act = decision.act
        if act == Act.FORWARD:
            self._crew.signal(signal.Signals[decision.reason.split()[0]])
        elif act == Act.RESTART:
            self._stop(decision.ranks)
            if not self._pause(decision.after_s):
                return False, None
            self._crew.restarted(self._store.add(self._key("restarts"), 0))
            self._start(decision.ranks)
        elif act == Act.REJOIN:
            self._stop()
            self._pause(decision.after_s)
            return True, None
        elif act == Act.FINISH:
            if self._finish():
                return True, self._ended(SUCCEEDED, decision.reason)
        elif act in (Act.LEAVE, Act.KILL):
            self._stop(grace_s=0.0 if act == Act.KILL else None)
            return True, 128 + int(signal.Signals[decision.reason.split()[0]])
        elif act == Act.FAIL:
            first = self._round.store.get("failure", READ_S)
            self._store.compare_set(self._key("failure"), "", first.decode())
            self._rendezvous.close(FAILED, decision.reason)
            self._stop()
            return True, self._ended(FAILED, decision.reason)
        elif act == Act.END:
            self._stop()
            status = self._rendezvous.status()
            return True, self._ended(status.result or SUCCEEDED, decision.reason)
        return False, None

    # What came

    def _charge(self, rank: int, code: int) -> int:
        """Write down a failure, and return how many restarts the job has used; a whole round uses one."""
        if code == 0 or self._gang.ending:
            return 0
        told = self._crew.failure(rank, code)
        self._failures.append(told)
        text = told.encode()
        first = self._round.store.compare_set("failure", "", text) == text.encode()
        return self._store.add(self._key("restarts"), int(first or self._job.rules.restart != "group"))

    def _what_now(self, reason: str) -> Decision:
        """Decide about a round that is over."""
        status = self._rendezvous.status()
        if status.phase == "closed":
            return self._gang.closed(status.result or "", reason)
        if self._round.store.check(["failure"]):
            cause = Failure.decode(self._round.store.get("failure"))
            reason = f"{reason}: {cause.summary()}"
        done = not self._gang.running and set(status.nodes) <= set(self._done())
        return self._gang.changed(reason, done)

    def _finish(self) -> bool:
        """Say that this node is done, and close the run if everybody is; say whether it was."""
        self._round.store.set(f"done:{self._rendezvous.node}", "")
        self._done_by = Deadline(self._job.exit_timeout_s)
        everybody = set(self._rendezvous.status().nodes) <= set(self._done())
        return everybody and self._rendezvous.close(SUCCEEDED, "the workers of all nodes have succeeded")

    def _done(self) -> list[str]:
        return [key.removeprefix("done:") for key in self._round.store.list_keys() if key.startswith("done:")]

    def _ended(self, result: str, reason: str) -> int:
        """Say how the run has ended; return the exit code."""
        if result == SUCCEEDED:
            self._events.say("end", f"done: {reason}")
            return 0
        found = self._store.check([self._key("failure")])
        first = Failure.decode(self._store.get(self._key("failure"))) if found else None
        if first is None:
            self._events.block(f"rallypoint run: the run has {result}: {reason}")
            return 1
        others = [other for other in self._failures if other != first]
        self._events.say("failure", first.summary(), failure=first.facts())
        self._events.block(failure.report(first, others))
        if self._job.log_dir is not None:
            failure.write(Path(self._job.log_dir), first, others)
        return exit_code_of(first.code)

    # Stopping, pausing, signals

    def _stop(self, ranks: Sequence[int] | None = None, grace_s: float | None = None) -> None:
        """Stop workers: TERM, then KILL when the grace is over, or at once when interrupted again."""
        deadline = Deadline(self._job.grace_s if grace_s is None else grace_s)
        self._crew.stop(ranks, deadline, self._interrupted_again)

    def _interrupted_again(self) -> bool:
        self._bell.silence()
        again = [self._gang.signal(name).act for name in self._bell.signals]
        self._bell.signals.clear()
        return Act.KILL in again

    def _pause(self, after_s: float) -> bool:
        """Pause before a restart; say whether nothing came between."""
        deadline = Deadline(after_s)
        while not deadline.expired() and not self._bell.signals and not self._is_over():
            self._bell.wait(deadline.remaining())
        return not self._bell.signals and not self._is_over()

    def _is_over(self) -> bool:
        return self._rendezvous.changed.is_set()

    def _waiting(self, waiting: Waiting) -> None:
        self._events.waiting(f"waiting {waiting.waited_s:.0f} s: {waiting.reason}")
        self._events.say("waiting", f"has waited {waiting.waited_s:.0f} s: {waiting.reason}")
