"""The machines hosted by a server: a real `State`, changed only by log entries.

Requests and answers of one session arrive in order; those of different sessions in any order. A frozen process has lost
its connection; after the grace the server ends its session, and the process learns it with its next request. One that
thaws in time repeats its unanswered requests. Half of the calls are patient: they end with an answer. The others are
interrupted at their deadline, whatever is in flight; such a call is withdrawn, and whether it completed is unknown.

Every entry is encoded and decoded. In some simulations the state is sometimes replaced by its snapshot, in some the log
is replayed at the end: neither may make a difference.
"""

from __future__ import annotations

import copy
from collections import deque
from itertools import count
from typing import Any

import msgspec
from tests.core.state_checks import work_bytes

from rallypoint.core import entries
from rallypoint.core.calls.call_waiter import object_bytes
from rallypoint.core.deadlines import Deadlines
from rallypoint.core.engine import Engine
from rallypoint.core.entries import (
    AttachSession,
    DetachOwner,
    EndSession,
    Entry,
    FireTimer,
    OpenSession,
    SessionRequest,
    StartServer,
    TimeOutRequest,
)
from rallypoint.core.machines.machine import Call, Command, Done, Machine, Refused, Waiting
from rallypoint.core.machines.work_queue import WorkQueueMachine
from rallypoint.core.objects import Objects
from rallypoint.core.ops import Act, Confirm, Drop, Op
from rallypoint.core.records import DONE, LATER, REFUSED, InternalError, ReplyStatus
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State
from rallypoint.protocol.native import encode_answer

from .bytes_host import TIMED_OUT
from .call_checker import INTERRUPTED, MEETINGS, check_loss
from .simulator import NEVER, Process, SessionLost, Simulator, Steps, Violation

PROGRESS_S = 0.5
ENDED = "ended"
UNLIMITED = 1 << 62


class ServerHost:
    """The state of a server, its clock, and the messages of all sessions."""

    waits_for_the_dead = True
    """Whether a call that only a dead session blocks waits for that session's end."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.state = State()
        self.log: list[bytes] = []
        self.deadlines = Deadlines()
        self.requests: dict[str, deque[Op]] = {}
        self.answers: dict[str, deque[tuple[int, Any]]] = {}
        self.open: dict[tuple[str, int], Op] = {}
        """Unanswered requests."""

        self.ended: set[str] = set()
        self.away: set[str] = set()
        """Sessions without a connection: their process has crashed or is frozen."""

        self.numbers = count(1)
        self.restores = 0.01 if simulator.chance.random() < 0.2 else 0.0
        self.replays = simulator.chance.random() < 0.1
        self._apply(StartServer(entries.VERSION, b"server", UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED))

    @property
    def engine(self) -> Engine:
        return self.state.namespaces[0].engine

    @property
    def objects(self) -> Objects:
        return self.state.namespaces[0].objects

    def call(self, process: Process, key: str, call: Call, command: Command, deadline: float) -> Steps:
        """Make a call; return its outcome, TIMED_OUT or INTERRUPTED."""
        process.waits = (key, call, command)
        patient = self.simulator.chance.random() < 0.5
        while True:
            number = next(self.numbers)
            wait_s = max(0.0, min(PROGRESS_S, deadline - self.simulator.now))
            self._send(call.session, Act(number, key.encode(), call.member, call.number, command, wait_s))  # type: ignore[arg-type]
            outcome: Any = yield from self._answer(call.session, number, float("inf") if patient else deadline)
            if outcome is INTERRUPTED:
                self._send(call.session, Drop(next(self.numbers), number))
            elif isinstance(outcome, Waiting):
                if self.simulator.now < deadline:
                    continue
                outcome = TIMED_OUT
            process.waits = None
            return outcome

    def machine(self, key: str, kind: type[Machine]) -> Machine:
        """Return the current machine."""
        return self.objects.machines.get((kind, key.encode())) or kind()

    def settle(self) -> None:
        """End all sessions, and check that nothing is left."""
        self._open_sessions()
        for session in sorted(set(self.simulator.by_session) - self.ended, key=int):
            self._end(session)
        left = self.objects
        queues = {
            place: one for place, one in left.machines.items() if isinstance(one, WorkQueueMachine) and not one.idle
        }
        kept: list[Any] = [left.machines.keys() - left._idle.keys() - queues.keys(), left._calls, left.late]
        kept += [left.late.by_session]
        kept += [left.timers, left.contested._detached, left.contested._calls, self.state.sessions, self.open]
        size = self.engine.size - sum(object_bytes(name) + idle for (_, name), idle in left._idle.items())
        size -= sum(object_bytes(name) + work_bytes(queue) for (_, name), queue in queues.items())
        if any(kept) or size or self.state.memory.kept or self.engine.statistics().waiters:
            raise Violation(f"the server keeps data of ended sessions: {kept} {size} bytes")
        if self.replays:
            again = State()
            for record in self.log:
                again.apply(entries.decode(record))
            if list(write(again)) != list(write(self.state)):
                raise Violation("replaying the log produces another state")

    def evict(self, process: Process, key: str, kind: type[Machine]) -> Steps:
        """Do nothing: the server ends frozen sessions by itself."""
        yield None

    def deliver(self) -> bool:
        """Deliver the next request of a random session."""
        sessions = [session for session, requests in self.requests.items() if requests]
        if not sessions:
            return False
        if self.restores and self.simulator.chance.random() < self.restores:
            self.simulator.trace.append((self.simulator.step, "restored"))  # not an event that others can see
            self.state = read(list(write(self.state)))
        session = self.simulator.chance.choice(sessions)
        self._serve(session, self.requests[session].popleft())
        return True

    def tick(self) -> None:
        """Time out waits, fire timers, and end frozen sessions."""
        self._open_sessions()
        for key in self.deadlines.due(self.simulator.now):
            self._expire(key)
        for session, process in self.simulator.by_session.items():
            if process.stopped_at is None and session not in self.away:
                continue
            if session in self.ended or process.session != session:
                continue
            if process.still(self.simulator.now):
                self.simulator.note("ended", session)
                self._end(session)
            elif process.stopped_at is None:
                self._return(session)
            elif session not in self.away:
                self.away.add(session)
                self._apply(DetachOwner(int(session)))

    def _return(self, session: str) -> None:
        """Let a thawed process resume its session and repeat its unanswered requests."""
        self.away.discard(session)
        self._apply(AttachSession(session.encode(), 0, 0))
        for op in [op for (name, _), op in self.open.items() if name == session]:
            self.requests.setdefault(session, deque()).appendleft(op)

    def due(self) -> float:
        """Return when the next timer fires."""
        return min((at for key, at in self.deadlines._at.items() if key[0] == "timer"), default=NEVER)  # type: ignore[index]

    def crashed(self, process: Process) -> None:
        """Lose a random tail of the requests in flight."""
        requests = self.requests.get(process.session, deque())
        while requests and self.simulator.chance.random() < 0.5:
            requests.pop()

    def _open_sessions(self) -> None:
        """Open the sessions of new processes in order, so that they have the simulator's numbers."""
        while self.state.opened < len(self.simulator.by_session):
            name = str(self.state.opened + 1)
            former = [one.encode() for one in self.simulator.by_session[name].former]
            self._apply(OpenSession(name.encode(), "", 0, former))

    def _send(self, session: str, op: Op) -> None:
        self.requests.setdefault(session, deque()).append(op)

    def _answer(self, session: str, number: int, deadline: float) -> Steps:
        answers = self.answers.setdefault(session, deque())
        while True:
            while answers:
                answered, outcome = answers.popleft()
                if outcome is ENDED:
                    raise SessionLost
                if answered == number:
                    if self.simulator.chance.random() < 0.3:
                        self._send(session, Confirm(0, number, [], 0))
                    return outcome
            if self.simulator.now >= deadline:
                return INTERRUPTED
            yield deadline

    def _serve(self, session: str, op: Op) -> None:
        if session in self.ended:
            self._reply(session, op.number, ENDED)
            return
        if isinstance(op, Drop):
            self._over(session, op.target)
        answer = self._apply(SessionRequest(int(session), op))  # type: ignore[arg-type]
        if not isinstance(op, Act):
            return
        if answer is not LATER:
            self._over(session, op.number)
            self._reply(session, op.number, answer)
            return
        self.open[session, op.number] = op
        if (session, op.number) not in self.deadlines:
            self.deadlines.set((session, op.number), self.simulator.now + op.timeout_s)

    def _over(self, session: str, number: int) -> None:
        self.open.pop((session, number), None)
        self.deadlines.drop((session, number))

    def _expire(self, key: Any) -> None:
        if key[0] != "timer":
            self._apply(TimeOutRequest(int(key[0]), key[1]))
            return
        place = key[1]
        timer = self.objects.timers.get(place)
        if timer is not None:
            self.simulator.note("fires", place[1])
            self._apply(FireTimer(0, place[0].kind, place[1], timer[0]))

    def _apply(self, entry: Entry) -> Any:
        """Log and apply an entry, and deliver its outputs."""
        record = entries.encode(entry)
        self.log.append(record)
        answer = self.state.apply(entries.decode(record))
        if isinstance(answer, InternalError):
            raise Violation(str(answer))
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
        return answer

    def _reply(self, session: str, number: int, answer: Any) -> None:
        outcome = answer if answer is ENDED else _read(bytes(encode_answer(number, answer)))
        if not isinstance(outcome, Waiting):
            self.simulator.note("answer", session, number, outcome)
        self.answers.setdefault(session, deque()).append((number, outcome))
        self.simulator.by_session[session].woken = True

    def _end(self, session: str) -> None:
        self.ended.add(session)
        for name, number in [place for place in self.open if place[0] == session]:
            self._over(name, number)
        if session not in self.away:
            self._apply(DetachOwner(int(session)))
        machines = self.objects.machines.items()
        before = {place: copy.deepcopy(machine) for place, machine in machines if machine.kind in MEETINGS}
        self._apply(EndSession(int(session)))
        for place, machine in before.items():
            check_loss(machine, self.objects.machines.get(place) or type(machine)(), session)
        self._reply(session, 0, ENDED)


def _read(reply: bytes) -> Done | Refused | Waiting:
    """Read an answer as a client does."""
    _, status, result = msgspec.msgpack.decode(reply[4:])
    if status != ReplyStatus.OK:
        raise Violation(f"a call failed: {result}")
    kind, *rest = result
    return Done(*rest) if kind == DONE else Refused(*rest) if kind == REFUSED else Waiting(*rest)
