"""The simulated server as a host of machines; it checks each loss of a session, and at the end that it keeps nothing.

In some simulations the log is replayed at the end: that may make no difference.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.core.state_checks import work_bytes

from rallypoint.core import entries
from rallypoint.core.calls.call_waiter import object_bytes
from rallypoint.core.machines.machine import Call, Command, Machine, Waiting
from rallypoint.core.machines.work_queue import WorkQueueMachine
from rallypoint.core.ops import Act, Drop
from rallypoint.core.records import OUTCOMES, ReplyStatus
from rallypoint.core.snapshot import write
from rallypoint.core.state import State
from rallypoint.protocol.native_client import Reply
from rallypoint.testing.simulation.simulated_server import SimulatedServer
from rallypoint.testing.simulation.simulator import (
    INTERRUPTED,
    NEVER,
    ScheduledProcess,
    Simulator,
    Steps,
    Violation,
)

from .bytes_host import TIMED_OUT
from .call_checker import MEETINGS, check_loss

PROGRESS_S = 0.5
"""How long a call waits before it is made again."""


class ServerHost(SimulatedServer):
    """A simulated server under check."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(simulator)
        self.replays = simulator.chance.random() < 0.1

    def call(self, process: ScheduledProcess, key: str, call: Call, command: Command, deadline: float) -> Steps:
        """Make a call on a shared object; return its outcome, TIMED_OUT or INTERRUPTED.

        Half of the calls are patient: they end with an answer. The others are interrupted at their deadline, whatever
        is in flight; such a call is withdrawn, and whether it completed is unknown.
        """
        process.waits = (key, call, command)
        patient = self.simulator.chance.random() < 0.5
        while True:
            wait_s = max(0.0, min(PROGRESS_S, deadline - self.simulator.now))
            number = next(self.numbers)
            act = Act(number, key.encode(), call.member, call.number, command, wait_s)  # type: ignore[arg-type]
            reply: Any = yield from self.request(call.session, act, NEVER if patient else deadline)
            if reply is INTERRUPTED:
                self.send(call.session, Drop(next(self.numbers), number))
                process.waits = None
                return INTERRUPTED
            outcome = _outcome(reply)
            if isinstance(outcome, Waiting):
                if self.simulator.now < deadline:
                    continue
                outcome = TIMED_OUT
            process.waits = None
            return outcome

    def machine(self, key: str, kind: type[Machine]) -> Machine:
        """Return the current machine."""
        return self.objects.machines.get((kind, key.encode())) or kind()

    def evict(self, process: ScheduledProcess, key: str, kind: type[Machine]) -> Steps:
        """Do nothing: the server ends frozen sessions by itself."""
        yield None

    def due(self) -> float:
        """Return when the next timer fires: members may wait for ever, and are checked then."""
        return min((at for key, at in self.deadlines._at.items() if key[0] == "timer"), default=NEVER)  # type: ignore[index]

    def end_session(self, session: str) -> None:
        machines = self.objects.machines.items()
        before = {place: copy.deepcopy(machine) for place, machine in machines if machine.kind in MEETINGS}
        super().end_session(session)
        for place, machine in before.items():
            check_loss(machine, self.objects.machines.get(place) or type(machine)(), session)

    def settle(self) -> None:
        """End all sessions, and check that nothing is left."""
        self.open_sessions()
        for session in sorted(set(self.simulator.by_session) - self.ended, key=int):
            self.end_session(session)
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


def _outcome(reply: Reply) -> Any:
    """Read the outcome of a call on a shared object as a client does."""
    if reply.status != ReplyStatus.OK:
        raise Violation(f"a call failed: {reply.result}")
    kind, *rest = reply.result
    return OUTCOMES[kind](*rest)
