"""Hosting by our server: a real `State`, changed by entries alone, as its log would have them.

A session's requests arrive in order, and its answers too; what happens between two sessions happens in any order. A
session whose process stands still has lost its connection, and for as long as the grace, is ended by the server, and
told so when it says something again; one that goes on in time repeats the request that it has no answer to. Half of the
calls are patient: they end by an answer. The others are interrupted at their deadline, whatever is on the way; such a
call is taken back, but whether it came true nobody knows.

Every entry goes through its encoding. In some worlds the state is replaced now and then by what its snapshot is read
back as, and in some the log is replayed at the end: nobody may see a difference.
"""

from __future__ import annotations

import copy
from collections import deque
from itertools import count
from typing import Any

import msgspec

from rallypoint.core import entries
from rallypoint.core.deadlines import Deadlines
from rallypoint.core.engine import Engine
from rallypoint.core.entries import Attach, Detach, End, Entry, Fire, Open, Request, Start, TimeOut
from rallypoint.core.machine import Call, Command, Done, Machine, Refused, Waiting
from rallypoint.core.objects import Objects
from rallypoint.core.ops import Act, Confirm, Drop, Op
from rallypoint.core.records import DONE, LATER, REFUSED, InternalError, Status
from rallypoint.core.snapshot import read, write
from rallypoint.core.state import State
from rallypoint.protocol.native import encode_answer

from .bytes_host import TIMED_OUT
from .ledger import INTERRUPTED, MEETINGS, check_loss
from .world import NEVER, Life, Process, SessionLost, World, Wrong

PROGRESS_S = 0.5
ENDED = "ended"
UNLIMITED = 1 << 62


class ServerHost:
    """The state of a server, its clock, and the wires to all sessions."""

    waits_for_the_dead = True
    """Whether a call that only the dead are in the way of waits for their end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = State()
        self.log: list[bytes] = []
        self.deadlines = Deadlines()
        self.requests: dict[str, deque[Op]] = {}
        self.answers: dict[str, deque[tuple[int, Any]]] = {}
        self.open: dict[tuple[str, int], Op] = {}
        """The requests that wait for an answer."""

        self.ended: set[str] = set()
        self.away: set[str] = set()
        """The sessions whose connection is lost, for their process has crashed or does not answer."""

        self.numbers = count(1)
        self.restores = 0.01 if world.chance.random() < 0.2 else 0.0
        self.replays = world.chance.random() < 0.1
        self._apply(Start(entries.VERSION, b"server", UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED))

    @property
    def engine(self) -> Engine:
        return self.state.namespaces[0].engine

    @property
    def objects(self) -> Objects:
        return self.state.namespaces[0].objects

    def call(self, process: Process, key: str, call: Call, command: Command, deadline: float) -> Life:
        """Carry a call through; return its outcome, or that its time was over."""
        process.waits = (key, call, command)
        patient = self.world.chance.random() < 0.5
        while True:
            number = next(self.numbers)
            wait_s = max(0.0, min(PROGRESS_S, deadline - self.world.now))
            self._send(call.session, Act(number, key.encode(), call.member, call.number, command, wait_s))  # type: ignore[arg-type]
            outcome: Any = yield from self._answer(call.session, number, float("inf") if patient else deadline)
            if outcome is INTERRUPTED:
                self._send(call.session, Drop(next(self.numbers), number))
            elif isinstance(outcome, Waiting):
                if self.world.now < deadline:
                    continue
                outcome = TIMED_OUT
            process.waits = None
            return outcome

    def machine(self, key: str, kind: type[Machine]) -> Machine:
        """Return the machine as it is now."""
        return self.objects._machines.get((kind, key.encode())) or kind()

    def settle(self) -> None:
        """End all sessions: nothing may be left."""
        self._open_sessions()
        for session in sorted(set(self.world.by_session) - self.ended, key=int):
            self._end(session)
        left = self.objects
        kept = [left._machines.keys() - left._idle.keys(), left._calls, left.late, left.late.by_session]
        kept += [left.timers, left.doubts._away, left.doubts._calls, self.state.sessions, self.open]
        if any(kept) or self.engine.size or self.state.budget.kept or self.engine.statistics().waiters:
            raise Wrong(f"the server keeps something of nobody: {kept} {self.engine.size} bytes")
        if self.replays:
            again = State()
            for record in self.log:
                again.apply(entries.decode(record))
            if list(write(again)) != list(write(self.state)):
                raise Wrong("the log, replayed, makes another state")

    def bury(self, process: Process, key: str, kind: type[Machine]) -> Life:
        """Take nobody out: a session that stands still ends by itself."""
        yield None

    def deliver(self) -> bool:
        """Let some session's next request arrive."""
        sessions = [session for session, requests in self.requests.items() if requests]
        if not sessions:
            return False
        if self.restores and self.world.chance.random() < self.restores:
            self.world.trace.append((self.world.step, "restored"))  # no event: others notice nothing
            self.state = read(list(write(self.state)))
        session = self.world.chance.choice(sessions)
        self._serve(session, self.requests[session].popleft())
        return True

    def tick(self) -> None:
        """End waits whose time is over, fire timers, and end sessions that have stood still."""
        self._open_sessions()
        for key in self.deadlines.due(self.world.now):
            self._expire(key)
        for session, process in self.world.by_session.items():
            if process.stopped_at is None and session not in self.away:
                continue
            if session in self.ended or process.session != session:
                continue
            if process.still(self.world.now):
                self.world.note("ended", session)
                self._end(session)
            elif process.stopped_at is None:
                self._return(session)
            elif session not in self.away:
                self.away.add(session)
                self._apply(Detach(int(session)))

    def _return(self, session: str) -> None:
        """Let a process that goes on come back to its session, and repeat what it has no answer to."""
        self.away.discard(session)
        self._apply(Attach(session.encode(), 0, 0))
        for op in [op for (name, _), op in self.open.items() if name == session]:
            self.requests.setdefault(session, deque()).appendleft(op)

    def due(self) -> float:
        """Return when the next timer fires."""
        return min((at for key, at in self.deadlines._at.items() if key[0] == "timer"), default=NEVER)  # type: ignore[index]

    def crashed(self, process: Process) -> None:
        """Cut what it had sent at any place."""
        requests = self.requests.get(process.session, deque())
        while requests and self.world.chance.random() < 0.5:
            requests.pop()

    def _open_sessions(self) -> None:
        """Open the sessions of processes that are new, in their order, so that they are numbered as the world does."""
        while self.state.opened < len(self.world.by_session):
            name = str(self.state.opened + 1)
            former = [one.encode() for one in self.world.by_session[name].former]
            self._apply(Open(name.encode(), "", 0, former))

    def _send(self, session: str, op: Op) -> None:
        self.requests.setdefault(session, deque()).append(op)

    def _answer(self, session: str, number: int, deadline: float) -> Life:
        answers = self.answers.setdefault(session, deque())
        while True:
            while answers:
                answered, outcome = answers.popleft()
                if outcome is ENDED:
                    raise SessionLost
                if answered == number:
                    if self.world.chance.random() < 0.3:
                        self._send(session, Confirm(0, number, [], 0))
                    return outcome
            if self.world.now >= deadline:
                return INTERRUPTED
            yield deadline

    def _serve(self, session: str, op: Op) -> None:
        if session in self.ended:
            self._reply(session, op.number, ENDED)
            return
        if isinstance(op, Drop):
            self._over(session, op.target)
        answer = self._apply(Request(int(session), op))  # type: ignore[arg-type]
        if not isinstance(op, Act):
            return
        if answer is not LATER:
            self._over(session, op.number)
            self._reply(session, op.number, answer)
        elif (session, op.number) not in self.open:
            self.open[session, op.number] = op
            self.deadlines.set((session, op.number), self.world.now + op.timeout_s)

    def _over(self, session: str, number: int) -> None:
        self.open.pop((session, number), None)
        self.deadlines.drop((session, number))

    def _expire(self, key: Any) -> None:
        if key[0] != "timer":
            self._apply(TimeOut(int(key[0]), key[1]))
            return
        place = key[1]
        timer = self.objects.timers.get(place)
        if timer is not None:
            self.world.note("fires", place[1])
            self._apply(Fire(0, place[0].kind, place[1], timer[0]))

    def _apply(self, entry: Entry) -> Any:
        """Apply an entry as the log has it, and carry out what it brings for others."""
        record = entries.encode(entry)
        self.log.append(record)
        answer = self.state.apply(entries.decode(record))
        if isinstance(answer, InternalError):
            raise Wrong(str(answer))
        for owner, number, later in self.state.take_outputs():
            session = str(owner.serial)
            if self.open.pop((session, number), None) is None:
                raise Wrong(f"an answer for a wait that is over: {session} {number}")
            self.deadlines.drop((session, number))
            self._reply(session, number, later)
        objects = self.objects
        changed, objects.changed_timers = objects.changed_timers, []
        for place in changed:
            timer = objects.timers.get(place)
            if timer is None:
                self.deadlines.drop(("timer", place))
            else:
                self.deadlines.set(("timer", place), self.world.now + timer[1])
        return answer

    def _reply(self, session: str, number: int, answer: Any) -> None:
        outcome = answer if answer is ENDED else _read(bytes(encode_answer(number, answer)))
        if not isinstance(outcome, Waiting):
            self.world.note("answer", session, number, outcome)
        self.answers.setdefault(session, deque()).append((number, outcome))
        self.world.by_session[session].woken = True

    def _end(self, session: str) -> None:
        self.ended.add(session)
        for name, number in [place for place in self.open if place[0] == session]:
            self._over(name, number)
        if session not in self.away:
            self._apply(Detach(int(session)))
        machines = self.objects._machines.items()
        before = {place: copy.deepcopy(machine) for place, machine in machines if machine.kind in MEETINGS}
        self._apply(End(int(session)))
        for place, machine in before.items():
            check_loss(machine, self.objects._machines.get(place) or type(machine)(), session)
        self._reply(session, 0, ENDED)


def _read(reply: bytes) -> Done | Refused | Waiting:
    """Read an answer as a client does."""
    _, status, result = msgspec.msgpack.decode(reply[4:])
    if status != Status.OK:
        raise Wrong(f"a call failed: {result}")
    kind, *rest = result
    return Done(*rest) if kind == DONE else Refused(*rest) if kind == REFUSED else Waiting(*rest)
