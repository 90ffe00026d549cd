"""The agent: it has one node's workers, and lives through the rounds of a job.

One thread does everything: it joins, starts the workers, and then waits for what comes first: the exit of a worker, the
end of the round, a signal, a moment that was set. What to do about it is `core/gang.py`'s to say. Other threads only
bring news: they ring a bell, and the pump moves the workers' output.

How nodes meet is in meeting.py, and what they tell each other in board.py. The run is closed by whoever sees that it
has a result, and everybody hears that as the end of the round.

An agent that loses its server stops its workers, for the others go on without this node, and tries to come back until
its join timeout: as a node that returns, or, where the server has forgotten everything, to a run that all begin again,
which uses a restart. Rejected: to let the workers go on meanwhile; their ranks are given to others.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator, Sequence

from rallypoint.core.gang import Act, Decision, Exit, Gang
from rallypoint.deadline import Deadline
from rallypoint.elastic.bell import Bell, Signalled
from rallypoint.elastic.board import Board
from rallypoint.elastic.crew import Crew
from rallypoint.elastic.events import Events
from rallypoint.elastic.job import Job
from rallypoint.elastic.logs import Logs
from rallypoint.elastic.losses import Losses
from rallypoint.elastic.meeting import FAILED, SUCCEEDED, Meeting, in_words, why_lost
from rallypoint.elastic.rendezvous import Rendezvous
from rallypoint.elastic.world import World
from rallypoint.errors import MeetingError, NetworkError, RallypointError, RunClosed
from rallypoint.server.settings import DEFAULT_GRACE_S
from rallypoint.store import outage

__all__ = ["Agent"]

LOST_S = DEFAULT_GRACE_S + 1.0
"""When it is known of a node that it is lost: a worker that fails before may have failed of that."""

LONG_S = 3600.0
LOOK_S = 5.0
"""How often a node that is done, and has lost its place, looks whether the others come to another round."""

AGAIN_S = 1.0
"""How long an agent pauses before it looks for a lost server again, where that failed at once."""

STARTED = "started"


class Agent:
    """What runs one node's workers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gang = Gang(rules=job.rules)
        self._events = Events(job.node or "", job.quiet, job.json)
        self._bell = Bell()
        self._meeting = Meeting(job, self._events, self._bell)
        self._crew: Crew | None = None
        self._world: World
        self._losses = Losses()
        self._due: list[tuple[Deadline, Sequence[int]]] = []
        """Who is started again, and when."""

        self._heard = self._came = False
        self._done_by: Deadline | None = None
        self._look_by: Deadline | None = None
        """When to look at the round again, for a node that is not in it any more and is told of nothing."""

        self._failing = ""
        """The failure that is about to end the run."""

    def run(self) -> int:
        """Run the job; return the exit code."""
        with (
            self._bell.rung_by_signals(),
            outage.shown_by(self._server_away, "rallypoint.server"),
            contextlib.ExitStack() as stack,
        ):
            try:
                for note in self._job.notes:
                    self._events.say("note", note)
                self._settle(stack)
                return self._live()
            except Signalled as caught:
                self._events.say("signal", f"{caught.name} while {self._meeting.waits_for}")
                return 128 + int(signal.Signals[caught.name])
            except RallypointError as error:
                words, text = in_words(error, self._came), ""
            except Exception:
                words = f"a fault of the launcher itself:\n{traceback.format_exc().rstrip()}"
                text = f"rallypoint run: {words}"
            self._events.fail("error", words, text)
            self._meeting.failed = words
            self._stop()
            return 1

    def _server_away(self, words: str) -> None:
        """Tell that the server is down, is started again, or is back; meanwhile the workers run on."""
        self._events.say("server", words)

    # Rounds

    def _settle(self, stack: contextlib.ExitStack) -> None:
        """Get ready for the first round; the stack puts it all away again."""
        stack.callback(self._meeting.close)
        self._meeting.attach(Deadline(self._job.join_timeout_s))
        self._logs = Logs(self._job, self._events)
        stack.callback(self._logs.close)
        self._crew = Crew(self._job, self._logs, self._bell.fileno())
        stack.callback(self._crew.close)
        stack.enter_context(self._events.shown_by(self._crew.say))

    def _live(self) -> int:
        """Come to one round after the other, also after the server was lost; return the exit code."""
        lost: NetworkError | None = None
        while True:
            try:
                code = self._next_round() if lost is None else self._come_back(lost)
                lost = None
            except NetworkError as error:
                code, lost = None, error
            if code is not None:
                return code

    def _next_round(self) -> int | None:
        """Live through the next round, or to the end of one in which this node is done; as `_watch_over` returns."""
        if not self._meeting.done:
            try:
                world = self._meeting.come()
            except RunClosed as closed:
                return self._too_late(closed)
            self._enter(world)
        code = self._watch_over()
        if code is None:
            self._meeting.done = False  # there is another round to come to
        return code

    def _too_late(self, closed: RunClosed) -> int:
        """Say how the run has ended without this node; that is its own end if it took part, or waited as a spare."""
        if not closed.result:
            self._events.fail("end", "the run ended while this node was away, and another run has its name now")
            return 1
        reason = f"the run has {closed.result}{' without this node' * (not self._came)}: {closed.reason}"
        if self._came or (closed.waited and self._job.min_nodes < self._job.max_nodes):
            return self._ended(closed.result, reason)
        self._events.fail("end", f"{reason}. Nothing was run here. If this is another job, name it: --rdzv-id")
        return 1

    def _come_back(self, lost: NetworkError) -> int | None:
        """Stop the workers and find the server again; return the exit code if that is all, or None to go on."""
        done_by = self._done_by if self._meeting.done else None
        if done_by is not None and self._job.alone:
            return self._ended(SUCCEEDED, "the workers have succeeded")
        deadline = done_by or Deadline(self._job.join_timeout_s)
        stopped = "; the workers are stopped" if self._gang.running else ""
        trying = f"looking for the server again for up to {deadline.remaining():.0f} s"
        self._events.say("disconnected", f"{why_lost(lost)}{stopped}; {trying}")
        self._stop()
        self._gang.excused("the server")
        try:
            self._attach_again(deadline)
        except NetworkError as error:
            if done_by is None:
                raise MeetingError(in_words(error, self._came)) from error
            words = "the workers of this node have succeeded; what became of the others is not known"
            return self._ended(SUCCEEDED, f"{words}: {why_lost(error)}")
        if self._meeting.forgotten and self._came:
            self._begin_again()
            return None
        self._events.say("reconnected", "the server answers again; this node returns to the run")
        if done_by is not None:
            self._bell.ask(self._meeting.follow)
            self._heard, self._look_by = False, Deadline(LOOK_S)
        return self._end_failing() if self._failing else None

    def _end_failing(self) -> int | None:
        """Go on where a failure was about to end the run when the server was lost: it may have come of the same cut."""
        own, reason = self._losses.last, self._failing
        if own.pid and own.code not in self._job.rules.final_codes:
            if self._bell.ask(self._board.restarts) > self._job.rules.budget:
                self._bell.ask(self._board.refund)
            self._events.say("refund", f"{own.summary()}; it may have come of the lost connection, and uses no restart")
            self._failing = ""
            return None
        self._bell.ask(lambda: self._board.fail(own))
        self._bell.ask(lambda: self._meeting.end_run(FAILED, reason))
        return self._ended(FAILED, f"the run has failed: {reason}")

    def _begin_again(self) -> None:
        """Begin the run again at a server that has forgotten it, as all agents do; that uses one restart."""
        self._meeting.done = False
        budget, used = self._job.rules.budget, self._bell.ask(lambda: self._board.carry_over(self._board.used + 1))
        reason = "the server was restarted, and has lost the run"
        if used > budget:  # the others see the same; the run that is there now may be another's, and is left alone
            raise MeetingError(f"the run cannot go on: {reason}; restart budget exhausted ({budget} of {budget} used)")
        self._meeting.forgotten = False
        self._events.say("restart", f"{reason}; restart {used} of {budget}")

    def _attach_again(self, deadline: Deadline) -> None:
        """Attach to the server until the deadline, whatever fails."""
        while True:
            try:
                self._meeting.attach(deadline)
                return
            except NetworkError as error:
                if deadline.expired():
                    raise
                self._events.waits(f"no server yet: {why_lost(error)}")
                self._bell.wait(min(AGAIN_S, deadline.remaining()))

    def _enter(self, world: World) -> None:
        """Take this node's place in a round, whose workers are to be started."""
        self._world, self._came, self._heard, self._done_by, self._look_by = world, True, False, None, None
        self._failing = ""
        self._losses.forget()
        self._gang.regrouped()
        self._bell.forget_forwarded()
        self._workers.enter(world)
        words = f"round {world.number}: {world.words()}; {world.reason}"
        facts = {"round": world.number, "node_rank": world.node_rank, "nodes": world.nodes, "workers": world.size}
        self._events.say("round", words, to_people=self._job.max_nodes > 1, **facts)
        self._due = [(Deadline(0.0), world.ranks)]

    def _watch_over(self) -> int | None:
        """Live through a round; return the exit code, or None to come again."""
        while True:
            with contextlib.suppress(Signalled):  # the server may be silent; what was asked of it does not matter now
                for decision in self._decisions():
                    self._announce(decision)
                    ends, code = self._carry_out(decision)
                    if ends:
                        return code
            self._workers.wait(self._patience_s())
            self._bell.silence()

    def _announce(self, decision: Decision) -> None:
        """Tell what was decided; people are not told what they will read in the end anyway."""
        act = decision.act
        if act != Act.WAIT:
            told_at_end = act == Act.FAIL and (not self._job.rules.budget or not self._losses.last.pid)
            shown = act not in (Act.FINISH, Act.END, Act.FORWARD, STARTED) and not told_at_end
            self._events.say(act, decision.reason, to_people=shown, ranks=list(decision.ranks))

    def _patience_s(self) -> float:
        """Return how long nothing is to be done unless something happens."""
        if self._bell.signals or self._board.news or self._ends_now():
            return 0.0
        moments = [*(deadline for deadline, _ in self._due), self._done_by, self._look_by]
        return min([LONG_S, *(moment.remaining() for moment in moments if moment is not None)])

    def _decisions(self) -> Iterator[Decision]:
        """Look at all that may have happened, and yield what to do about it."""
        while self._bell.signals:
            yield self._gang.signal(self._bell.signals.pop(0))
        for end in self._workers.exits():
            yield self._exited(end)
        looks = self._look_by is not None and self._look_by.expired()
        if self._ends_now() or self._board.news or looks:
            self._board.news = False
            self._look_by = Deadline(LOOK_S) if looks else self._look_by
            yield self._bell.ask(self._look) or Decision(Act.WAIT, "the round stands")
        while self._due and self._due[0][0].expired():
            yield self._start(self._due.pop(0)[1])
        bereft = self._bell.ask(self._bereft)
        if bereft is not None:
            yield bereft
        if self._done_by is not None and self._done_by.expired():
            standing = self._bell.ask(self._meeting.standing)
            late = ", ".join(sorted(standing.living.difference(standing.done)))
            yield Decision(Act.END, f"waited {self._job.exit_timeout_s:g} s for other nodes, which go on: {late}")

    def _carry_out(self, decision: Decision) -> tuple[bool, int | None]:
        """Do what was decided; return whether this node's round is over by that, and the exit code if all is."""
        act = decision.act
        if act == Act.FORWARD:
            self._workers.signal(signal.Signals[decision.signal])
        elif act == Act.RESTART:
            self._losses.forget(decision.ranks)
            self._stop(decision.ranks)
            self._workers.restarted(self._bell.ask(self._board.restarts))
            self._due = sorted([*self._due, (Deadline(decision.after_s), decision.ranks)], key=lambda due: due[0].at)
        elif act == Act.REJOIN:
            if self._losses:
                self._bell.ask(lambda: self._meeting.tell_of(self._losses))
            self._stop()
            self._pause(decision.after_s)
            return True, None
        elif act == Act.FINISH:
            return self._bell.ask(self._finish)
        elif act in (Act.LEAVE, Act.KILL):
            self._stop(how=signal.Signals[decision.signal], grace_s=0.0 if act == Act.KILL else None)
            return True, 128 + int(signal.Signals[decision.signal])
        elif act == Act.FAIL:
            return True, self._fail(decision.reason)
        elif act == Act.END:
            self._stop()
            return True, self._ended(self._bell.ask(self._rendezvous.status).result or SUCCEEDED, decision.reason)
        return False, None

    # What happened

    def _start(self, ranks: Sequence[int]) -> Decision:
        self._gang.started(ranks)
        unstartable = self._workers.start(ranks)
        if unstartable is not None:
            self._losses.keep([unstartable])
            return self._gang.unstartable(unstartable.message)
        return Decision(STARTED, f"started {len(ranks)} worker{'s' * (len(ranks) > 1)}", ranks)

    def _exited(self, end: Exit) -> Decision:
        """Decide on the end of a worker; one that failed when the round was over may have failed of that."""
        if end.code == 0 or self._gang.ending:
            return self._gang.exited(end, 0)
        self._losses.keep(self._workers.failures(end.rank, end.code))
        other = self._bell.ask(self._bereft) or (None if self._heard else self._bell.ask(self._look))
        other = other or self._bell.ask(lambda: self._bereft(failed=True))
        if other is not None:
            return other
        of_all = self._job.rules.restart == "group"
        return self._gang.exited(end, self._bell.ask(lambda: self._board.charge(self._losses.last, of_all)))

    def _bereft(self, failed: bool = False) -> Decision | None:
        """Decide about the end of the workers' own store: they cannot go on without it, a node that is done can."""
        works = self._gang.running and not self._gang.ending
        cause = self._meeting.bereft(failed) if works else None
        return None if cause is None else self._gang.failed_elsewhere(f"{cause.summary()}; no restart is used")

    def _look(self) -> Decision | None:
        """Decide about the round as it stands; None to go on."""
        status = self._rendezvous.status()
        if status.phase == "closed":
            return self._gang.closed(*status.reason.split(": ", 1))
        cause = self._board.cause()
        if cause is not None:
            return self._gang.failed_elsewhere(cause.summary())
        change = self._rendezvous.changed  # it is also set when the watch was lost, and the round stands
        stands = status.phase == "formed" and status.round == self._world.number and not change.is_set()
        if stands:
            return None
        reason = "another node has gone" if self._heard else status.over or change.reason or "another round was formed"
        decision = self._gang.changed(reason, self._meeting.standing(status))
        if decision.act != Act.WAIT:
            self._heard = True
            return decision
        if not self._heard:
            self._heard = True
            self._events.say("left", decision.reason)
            self._board.attend()
        return None

    def _finish(self) -> tuple[bool, int | None]:
        """Say that this node is done, and close the run if everybody is."""
        reason = "the workers of all nodes have succeeded"
        self._done_by = self._done_by or Deadline(self._job.exit_timeout_s)
        self._meeting.finish()
        if not self._meeting.standing().all_done:
            return False, None
        self._meeting.end_run(SUCCEEDED, reason)
        return True, self._ended(self._rendezvous.status().result or SUCCEEDED, f"the run has succeeded: {reason}")

    def _fail(self, reason: str) -> int | None:
        """End the run for all, unless what failed did so because a node was lost: then None, to come again."""
        own, self._failing = self._losses.last, reason
        self._losses.keep([self._workers.failure(end.rank, end.code) for end in self._workers.exits() if end.code])
        known = Deadline(LOST_S)
        if self._world.nodes > 1 and own.pid and own.code not in self._job.rules.final_codes:
            self._bell.ask(lambda: self._board.blame(own))
            self._bell.ask(self._board.tell)
            self._stop()
            self._pause(known.remaining())
            lost = self._bell.ask(self._meeting.lost)
            if lost:
                if self._bell.ask(self._board.cause) == own:
                    self._bell.ask(self._board.refund)
                self._failing = ""
                self._events.say("rejoin", self._gang.excused(", ".join(sorted(lost))).reason)
                return None
        self._bell.ask(lambda: self._board.fail(self._board.cause() or own))
        self._bell.ask(lambda: self._meeting.end_run(FAILED, reason))
        self._stop()
        return self._ended(FAILED, f"the run has failed: {reason}")

    def _ended(self, result: str, reason: str) -> int:
        """Say how the run has ended; return the exit code."""
        if result == SUCCEEDED:
            self._events.say("end", reason, to_people=not self._job.alone)
            return 0
        first = self._bell.ask(self._board.failure)
        if first is None:
            self._events.fail("end", reason)
            return 1
        return self._losses.report(first, self._events, self._logs)

    # Stopping, pausing, signals

    @property
    def _board(self) -> Board:
        return self._meeting.board

    @property
    def _rendezvous(self) -> Rendezvous:
        return self._meeting.rendezvous

    @property
    def _workers(self) -> Crew:
        assert self._crew is not None
        return self._crew

    def _stop(
        self, ranks: Sequence[int] | None = None, how: int = signal.SIGTERM, grace_s: float | None = None
    ) -> None:
        """Stop workers: a signal, then KILL when the grace is over, or at once when interrupted again."""
        if ranks is None:
            self._due = []
        if self._crew is not None:
            self._crew.stop(ranks, how, Deadline(self._job.grace_s if grace_s is None else grace_s), self._hurried)

    def _hurried(self) -> bool:
        self._bell.silence()
        return self._gang.hurried(self._bell.signals)

    def _pause(self, after_s: float) -> None:
        """Pause, unless this agent is to end, or the run has."""
        deadline = Deadline(after_s)
        while not deadline.expired() and not self._bell.ends():
            if self._bell.ask(self._rendezvous.status).phase == "closed":
                break
            self._bell.wait(deadline.remaining())

    def _ends_now(self) -> bool:
        return self._rendezvous.changed.is_set() and not self._heard
