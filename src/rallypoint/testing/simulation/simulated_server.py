"""The server of a simulation: a real `State`, changed only by log entries, with the engine and the machines.

Requests and answers of one session arrive in order; those of different sessions in any order. A frozen process has lost
its connection; after the grace the server ends its session, and the process learns it with its next request. One that
thaws in time repeats its unanswered requests.

Every entry is encoded and decoded. In some simulations the state is sometimes replaced by its snapshot, which may make
no difference.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

import msgspec

from rallypoint.core import entries
from rallypoint.core.deadlines import Deadlines
from rallypoint.core.engine import Engine
from rallypoint.core.entries import (
    AttachSession,
    ContinueDelete,
    DetachOwner,
    EndSession,
    Entry,
    FireTimer,
    OpenSession,
    SessionRequest,
    StartServer,
    TimeOutRequest,
)
from rallypoint.core.machines.machine import Waiting
from rallypoint.core.objects import Objects
from rallypoint.core.ops import Bye, Confirm, Drop, Op
from rallypoint.core.records import LATER, InternalError
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State
from rallypoint.errors import SessionLost
from rallypoint.protocol.native import encode_answer
from rallypoint.protocol.native_client import Reply
from rallypoint.testing.simulation.simulator import (
    INTERRUPTED,
    NEVER,
    ScheduledProcess,
    Simulator,
    Steps,
    Violation,
)

__all__ = ["SimulatedServer"]

UNLIMITED = 1 << 62

_ENDED = Reply(0, -1, "the session has ended")

_decode = msgspec.msgpack.Decoder(Reply).decode


class SimulatedServer:
    """The state of a server, its clock, and the messages of all sessions."""

    waits_for_the_dead = True
    """Whether a call that only a dead session blocks waits for that session's end."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.state = State()
        self.log: list[bytes] = []
        self.deadlines = Deadlines()
        self.requests: dict[str, deque[Op]] = {}
        """Requests in flight, by session."""

        self.answers: dict[str, deque[Reply]] = {}
        """Replies in flight, by session."""

        self.open: dict[tuple[str, int], Op] = {}
        """Unanswered requests."""

        self.ended: set[str] = set()
        self.away: set[str] = set()
        """Sessions without a connection: their process has crashed or is frozen."""

        self.numbers = count(1)
        self.restores = 0.01 if simulator.chance.random() < 0.2 else 0.0
        """How likely the state is replaced by its snapshot before a request."""

        self.apply(StartServer(entries.VERSION, b"server", UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED))

    @property
    def engine(self) -> Engine:
        """The keys and queues."""
        return self.state.namespaces[0].engine

    @property
    def objects(self) -> Objects:
        """The shared objects."""
        return self.state.namespaces[0].objects

    # Called by processes

    def request(self, session: str, op: Op, deadline: float = NEVER) -> Steps:
        """Send a numbered request and wait for its reply; return INTERRUPTED if there is none at the deadline.

        Raises SessionLost once the session has ended.
        """
        self.send(session, op)
        answers = self.answers.setdefault(session, deque())
        while True:
            while answers:
                reply = answers.popleft()
                if reply is _ENDED:
                    raise SessionLost(peer="the simulated server", why="its grace period was over")
                if reply.number == op.number:
                    if self.simulator.chance.random() < 0.3:
                        self.send(session, Confirm(0, op.number, [], 0))
                    return reply
            if self.simulator.now >= deadline:
                return INTERRUPTED
            yield deadline

    def send(self, session: str, op: Op) -> None:
        """Send a request without waiting for its reply."""
        self.requests.setdefault(session, deque()).append(op)

    # Called by the simulator

    def deliver(self) -> bool:
        """Deliver the next request of a random session."""
        sessions = [session for session, requests in self.requests.items() if requests]
        if not sessions:
            return False
        if self.restores and self.simulator.chance.random() < self.restores:
            self._restore()
        session = self.simulator.chance.choice(sessions)
        self._serve(session, self.requests[session].popleft())
        return True

    def tick(self) -> None:
        """Time out waits, fire timers, and end frozen sessions."""
        self.open_sessions()
        for key in self.deadlines.due(self.simulator.now):
            self._expire(key)
        for session, process in self.simulator.by_session.items():
            if process.stopped_at is None and session not in self.away:
                continue
            if session in self.ended or process.session != session:
                continue
            if process.still(self.simulator.now):
                self.simulator.note("ended", session)
                self.end_session(session)
            elif process.stopped_at is None:
                self._return(session)
            elif session not in self.away:
                self.away.add(session)
                self.apply(DetachOwner(int(session)))

    def due(self) -> float:
        """Return when the next timer fires, or the next wait times out."""
        return self.deadlines.earliest

    def crashed(self, process: ScheduledProcess) -> None:
        """Lose a random tail of the requests in flight."""
        requests = self.requests.get(process.session, deque())
        while requests and self.simulator.chance.random() < 0.5:
            requests.pop()

    def open_sessions(self) -> None:
        """Open the sessions of new processes in order, so that they have the simulator's numbers."""
        while self.state.opened < len(self.simulator.by_session):
            name = str(self.state.opened + 1)
            former = [one.encode() for one in self.simulator.by_session[name].former]
            self.apply(OpenSession(name.encode(), "", 0, former))

    def end_session(self, session: str) -> None:
        """End a session: its grace period is over."""
        self.ended.add(session)
        for name, number in [place for place in self.open if place[0] == session]:
            self._over(name, number)
        if session not in self.away:
            self.apply(DetachOwner(int(session)))
        self.apply(EndSession(int(session)))
        self._enqueue(session, _ENDED)

    def apply(self, entry: Entry) -> Any:
        """Log and apply an entry, and deliver its outputs."""
        record = entries.encode(entry)
        self.log.append(record)
        answer = self.state.apply(entries.decode(record))
        if isinstance(answer, InternalError):
            raise Violation(str(answer))
        self._settle()
        if self.engine.clearing and not isinstance(entry, ContinueDelete):
            while self.engine.clearing:
                self.apply(ContinueDelete(0))
        return answer

    # Inside

    def _restore(self) -> None:
        """Replace the state by its snapshot, in which there are no waiting reads: clients repeat them."""
        self.simulator.trace.append((self.simulator.step, "restored"))  # not an event that others can see
        self.state = read(list(write(self.state)))
        for (session, _), op in list(self.open.items()):
            if not op.changes and session not in self.away:
                self._serve(session, op)

    def _return(self, session: str) -> None:
        """Let a thawed process resume its session and repeat its unanswered requests."""
        self.away.discard(session)
        self.apply(AttachSession(session.encode(), 0, 0))
        for op in [op for (name, _), op in self.open.items() if name == session]:
            self.requests.setdefault(session, deque()).appendleft(op)

    def _serve(self, session: str, op: Op) -> None:
        if session in self.ended:
            self._enqueue(session, _ENDED)
            return
        if isinstance(op, Drop):
            self._over(session, op.target)
        if isinstance(op, (Drop, Confirm, Bye)):
            self._execute(session, op)
            if isinstance(op, Bye):
                self.end_session(session)
            return
        place = session, op.number
        self.open[place] = op  # first: a large change ends later than it is answered
        answer = self._execute(session, op)
        if answer is not LATER:
            self._over(session, op.number)
            self._reply(session, op.number, answer)
        elif place in self.open and place not in self.deadlines:
            self.deadlines.set(place, self.simulator.now + getattr(op, "timeout_s", NEVER))

    def _execute(self, session: str, op: Op) -> Any:
        """Execute a request; only changes are entries of the log."""
        if op.changes:
            return self.apply(SessionRequest(int(session), op))  # type: ignore[arg-type]
        answer = self.state.sessions[int(session)].execute(op)
        self._settle()
        return answer

    def _over(self, session: str, number: int) -> None:
        self.open.pop((session, number), None)
        self.deadlines.drop((session, number))

    def _expire(self, key: Any) -> None:
        if key[0] != "timer":
            self._time_out(*key)
            return
        place = key[1]
        timer = self.objects.timers.get(place)
        if timer is not None:
            self.simulator.note("fires", place[1])
            self.apply(FireTimer(0, place[0].kind, place[1], timer[0]))

    def _time_out(self, session: str, number: int) -> None:
        op = self.open.get((session, number))
        if op is None or op.changes:
            self.apply(TimeOutRequest(int(session), number))
        elif (answer := self.state.sessions[int(session)].time_out(number)) is not LATER:
            self._over(session, number)
            self._reply(session, number, answer)

    def _settle(self) -> None:
        """Deliver what the state has for clients, and set the deadlines of changed timers."""
        while self.engine.read_work:
            self.engine.continue_reads()
        self.state.settle(self.engine)
        for owner, number, later in self.state.take_outputs():
            session = str(owner.serial)
            if self.open.pop((session, number), None) is None:
                raise Violation(f"an answer to a finished request: {session} {number}")
            self.deadlines.drop((session, number))
            self._reply(session, number, later)
        objects = self.objects
        changed, objects.changed_timers = objects.changed_timers, []
        for place in changed:
            timer = objects.timers.get(place)
            if timer is None:
                self.deadlines.drop(("timer", place))
            else:
                self.deadlines.set(("timer", place), self.simulator.now + timer[1])

    def _reply(self, session: str, number: int, answer: Any) -> None:
        reply = _decode(bytes(encode_answer(number, answer))[4:])
        if not isinstance(answer, Waiting):
            self.simulator.note("answer", session, number, reply.result)
        self._enqueue(session, reply)

    def _enqueue(self, session: str, reply: Reply) -> None:
        self.answers.setdefault(session, deque()).append(reply)
        self.simulator.by_session[session].woken = True
