"""Hosting by our server: the real `Objects` on a real engine, with requests and answers that take their time.

A session's requests arrive in order, and its answers too; what happens between two sessions happens in any order. A
session whose process stands still for the grace is ended by the server, and told so when it says something again. Half
of the calls are patient: they end by an answer. The others are interrupted at their deadline, whatever is on the way;
such a call is taken back, but whether it came true nobody knows.
"""

from __future__ import annotations

import copy
from collections import deque
from itertools import count
from typing import Any

import msgspec

from rallypoint.core.engine import Engine
from rallypoint.core.machine import Call, Command, Done, Machine, Waiting
from rallypoint.core.objects import Objects
from rallypoint.core.records import TimedOut, Waiter

from .bytes_host import TIMED_OUT
from .ledger import INTERRUPTED, MEETINGS, check_loss
from .world import NEVER, Life, Process, SessionLost, World, Wrong

PROGRESS_S = 0.5
ENDED = "ended"


class ServerHost:
    """An engine and its objects, and the wires to all sessions."""

    waits_for_the_dead = True
    """Whether a call that only the dead are in the way of waits for their end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine = Engine()
        self.objects = Objects(self.engine)
        self.requests: dict[str, deque[tuple[Any, ...]]] = {}
        self.answers: dict[str, deque[tuple[int, Any]]] = {}
        self.parked: dict[tuple[str, int], Waiter] = {}
        self.ended: set[str] = set()
        self.away: set[str] = set()
        """The sessions whose connection is lost, for their process has crashed or does not answer."""

        self.tags = count(1)

    def call(self, process: Process, key: str, call: Call, command: Command, deadline: float) -> Life:
        """Carry a call through; return its outcome, or that its time was over."""
        process.waits = (key, call, command)
        patient = self.world.chance.random() < 0.5
        while True:
            tag = next(self.tags)
            self._send(call.session, "act", tag, key, call, command, min(PROGRESS_S, deadline - self.world.now))
            outcome: Any = yield from self._answer(process, call.session, tag, float("inf") if patient else deadline)
            if outcome is INTERRUPTED:
                self._send(call.session, "drop", tag)
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
        for session in sorted(set(self.world.by_session) - self.ended):
            self._end(session)
        machines = self.objects._machines.keys() - self.objects._idle.keys()
        left = [machines, self.objects._pending, self.objects._held, self.objects._late, self.objects._alarms]
        if any(left) or self.engine.size:
            raise Wrong(f"the server keeps something of nobody: {left} {self.engine.size} bytes")

    def bury(self, process: Process, key: str, kind: type[Machine]) -> Life:
        """Take nobody out: a session that stands still ends by itself."""
        yield None

    def deliver(self) -> bool:
        """Let some session's next request arrive."""
        sessions = [session for session, requests in self.requests.items() if requests]
        if not sessions:
            return False
        session = self.world.chance.choice(sessions)
        self._serve(session, *self.requests[session].popleft())
        self._drain()
        return True

    def tick(self) -> None:
        """End waits whose time is over, and sessions that have stood still."""
        self.engine.tick(self.world.now)
        self._drain()
        for session, process in self.world.by_session.items():
            if session in self.ended or process.session != session:
                continue
            if process.still(self.world.now):
                self.world.note("ended", session)
                self._end(session)
            elif process.stopped_at is not None:
                self.away.add(session)
                self.objects.doubts.away(session)
            elif session in self.away:
                self.away.discard(session)
                self.objects.back(session)
                self._drain()

    def due(self) -> float:
        """Return when the next alarm rings."""
        return min((alarm.due for alarm in self.objects._alarms.values()), default=NEVER)

    def crashed(self, process: Process) -> None:
        """Cut what it had sent at any place."""
        requests = self.requests.get(process.session, deque())
        while requests and self.world.chance.random() < 0.5:
            requests.pop()

    def _send(self, session: str, *request: Any) -> None:
        self.requests.setdefault(session, deque()).append(request)

    def _answer(self, process: Process, session: str, tag: int, deadline: float) -> Life:
        answers = self.answers.setdefault(session, deque())
        while True:
            while answers:
                number, outcome = answers.popleft()
                if outcome is ENDED:
                    raise SessionLost
                if number == tag:
                    return outcome
            if self.world.now >= deadline:
                return INTERRUPTED
            yield deadline

    def _serve(self, session: str, what: str, tag: int, *request: Any) -> None:
        if session in self.ended:
            self._reply(session, tag, ENDED)
        elif what == "drop":
            waiter = self.parked.pop((session, tag), None)
            if waiter is not None:
                self.engine.drop(waiter)
        else:
            key, call, command, wait_s = request
            outcome = self.objects.act(key.encode(), call, command, session, self.world.now, wait_s, (session, tag))
            if not isinstance(outcome, Waiter):
                self._reply(session, tag, outcome)
            elif wait_s <= 0:
                self.engine.drop(outcome)
                self._reply(session, tag, self.objects.why(outcome))
            else:
                self.parked[session, tag] = outcome

    def _drain(self) -> None:
        while self.engine.outbox:
            self._carry_out(*self.engine.outbox.pop(0))

    def _carry_out(self, waiter: Any, answer: Any) -> None:
        if waiter.owner is self.objects:
            self.world.note("rings", waiter.tag)
            self.objects.answer(waiter, answer)
        else:
            session, tag = waiter.tag
            if self.parked.pop((session, tag), None) is None:
                raise Wrong(f"an answer for a wait that is over: {session} {tag}")
            self._reply(session, tag, self.objects.why(waiter) if isinstance(answer, TimedOut) else answer)

    def _reply(self, session: str, tag: int, outcome: Any) -> None:
        if isinstance(outcome, Done) and isinstance(outcome.answer, msgspec.Raw):
            outcome = Done(msgspec.msgpack.decode(outcome.answer))
        if not isinstance(outcome, Waiting):
            self.world.note("answer", session, tag, outcome)
        self.answers.setdefault(session, deque()).append((tag, outcome))
        self.world.by_session[session].woken = True

    def _end(self, session: str) -> None:
        self.ended.add(session)
        self.engine.end(session)
        for place in [place for place in self.parked if place[0] == session]:
            del self.parked[place]
        machines = self.objects._machines.items()
        before = {place: copy.deepcopy(machine) for place, machine in machines if machine.kind in MEETINGS}
        self.objects.end(session, self.world.now)
        for place, machine in before.items():
            check_loss(machine, self.objects._machines.get(place) or type(machine)(), session)
        self._drain()
        self._reply(session, 0, ENDED)
