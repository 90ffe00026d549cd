"""Histories of the shared objects' machines: the calls of several members and all results, in order.

`new lock` starts a machine. A command starts with its member: `1` is the member of that name, in a session of the same
name; `1@x` is member 1 in session x, and `1@x.2` a second pending call of it. `look` applies the call again, `undo`
withdraws it, `why` asks what it waits for, `fence` whether it holds the lock; `1.2 out 1` leaves the barrier's round of
call `1`, and in `arrive 3 0` member 0 leaves last. A result follows its command. A call that is woken is applied again
at once, and its result is written `1 <- done`; after `slow 1@x`, only `look` does so for that call. `timer` shows the
timer, and `fire` fires it, or the one of a number. At a work queue, `put 5 x,y` allows five deliveries, `done` and
`release` end the item of a take, and `status` shows the counts. After every command the state is encoded and decoded,
and the last call is applied twice, which must change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.histories.test_histories import write as write_value

from rallypoint.core.machines import rendezvous, work_queue
from rallypoint.core.machines.barrier import BarrierArrive, BarrierMachine, BarrierUndoLeave, BarrierWithdraw
from rallypoint.core.machines.barrier import BarrierLeave as LeaveBarrier
from rallypoint.core.machines.exchange import ExchangeGive, ExchangeMachine, ExchangeWithdraw
from rallypoint.core.machines.lock import LockAcquire, LockMachine, LockRelease
from rallypoint.core.machines.lock import LockQuery as LookAtLock
from rallypoint.core.machines.machine import WAIT, Call, Command, Done, Machine, Outcome, Refused, Step, Undo, Waiting
from rallypoint.core.machines.membership import (
    MembershipJoin,
    MembershipLeave,
    MembershipMachine,
    MembershipQuery,
    MembershipWatch,
)
from rallypoint.core.machines.work_queue import WorkQueueMachine
from rallypoint.core.policy.round_policy import NodeLimits
from rallypoint.testing import check_transcript

HERE = Path(__file__).parent / "machines"
MACHINES: dict[str, tuple[type[Machine], type[Undo]]] = {
    "barrier": (BarrierMachine, BarrierWithdraw),
    "exchange": (ExchangeMachine, ExchangeWithdraw),
    "lock": (LockMachine, LockRelease),
    "rendezvous": (rendezvous.RendezvousMachine, rendezvous.RendezvousWithdraw),
    "membership": (MembershipMachine, MembershipLeave),
    "work_queue": (WorkQueueMachine, work_queue.WorkWithdraw),
}
ONCE = (
    Undo, rendezvous.RendezvousClose, rendezvous.RendezvousReopen, work_queue.WorkPut, work_queue.WorkRemoveDead
)  # fmt: skip
"""Commands that are not repeated: their callers do not wait."""

WHO = re.compile(r"([^@.]+)(?:@([^.]+))?(?:\.\d+)?")


def arrow_maps(words: list[str]) -> dict[str, dict[str, str]]:
    """Read `b:x>y,z>w` as a map for peer b."""
    split = [word.split(":", 1) for word in words]
    return {peer: dict(way.split(">") for way in ways.split(",") if way) for peer, ways in split}


def command_of(verb: str, words: list[str]) -> Command:
    match verb:
        case "arrive":
            return BarrierArrive(int(words[0]) if words[0].isdecimal() else words[0].split(","), *words[1:])
        case "all_gather" | "gather" | "broadcast":
            size, rank, data, *root = words
            return ExchangeGive(int(size), int(rank), data.encode(), verb, int(root[0]) if root else 0)
        case "acquire":
            return LockAcquire()
        case "join":
            devices = [word for word in words if ":" not in word]
            return MembershipJoin(b"info", devices, arrow_maps([word for word in words if ":" in word]))
        case "watch":
            return MembershipWatch(int(words[0]))
        case "view":
            return MembershipQuery()
    raise ValueError(verb)


def rendezvous_command(verb: str, words: list[str]) -> Command:
    """Read `join 2 4 5 rank=1 batch=16`: min, max and last call, then fields of a join, and settings."""
    match verb:
        case "join":
            least, most, last_call_s, *more = words
            fields = dict(word.split("=") for word in more)
            return rendezvous.RendezvousJoin(
                NodeLimits(int(least), int(most), float(last_call_s)),
                rank=int(fields.pop("rank", -1)),
                run=int(fields.pop("run", -1)),
                host=fields.pop("host", ""),
                address=fields.pop("address", ""),
                loopback=fields.pop("loopback", "no") == "yes",
                settings=fields,
            )
        case "watch":
            return rendezvous.RendezvousWatch(int(words[0]))
        case "close":
            return rendezvous.RendezvousClose(words[0], " ".join(words[1:]))
        case "open":
            return rendezvous.RendezvousReopen()
        case "nodes":
            return rendezvous.RendezvousQuery(int(words[0]))
        case "evict":
            return rendezvous.RendezvousEvict(int(words[0]), words[1], " ".join(words[2:]))
    raise ValueError(verb)


def work_command(verb: str, words: list[str]) -> Command:
    """Read `put 5 x,y`: the limit of deliveries, and the items."""
    match verb:
        case "put":
            return work_queue.WorkPut([item.encode() for item in words[1].split(",")], int(words[0]))
        case "take" | "try":
            return work_queue.WorkTake(verb == "take")
        case "join":
            return work_queue.WorkJoin()
        case "dead":
            return work_queue.WorkDead()
        case "requeue" | "discard":
            return work_queue.WorkRemoveDead([int(word) for word in words[0].split(",")], verb == "requeue")
    raise ValueError(verb)


def text_of(answer: Any) -> str:
    match answer:
        case {"epoch": epoch, "members": members}:
            return f"epoch {epoch}: " + (", ".join(f"{name}#{one['id']}" for name, one in members.items()) or "nobody")
        case [{"epoch": _} as view, events, every]:
            changes = "; ".join(f"{name}#{number} {reason}" for _, name, number, _, reason in events)
            return f"{text_of(view)} | {changes or 'no events'}{'' if every else ' (and more)'}"
        case [int(run), number, scope, rank, size, (first, at), before, reason]:
            where = f"{first} at {at}" if at else first
            later = f", run {run}" if run else ""
            return f"round {number}{later}: rank {rank} of {size}, 0 is {where}, scope {scope} after {before}; {reason}"
        case list():
            return f"[{' '.join(map(text_of, answer))}]"
    return write_value(answer)


def write(outcome: Outcome | Waiting) -> str:
    match outcome:
        case Done(answer):
            return text_of(answer)
        case Refused(error, fields):
            return f"{error}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
        case Waiting(reason, missing, withdrawn):
            names = [f"{what} {list(who)}" for what, who in (("missing", missing), ("withdrawn", withdrawn)) if who]
            return " | ".join([reason, *names, *["stands by"][: outcome.is_spare]])
    return "waits"


class MachineScript:
    """A machine with commands as lines of text."""

    def __init__(self, kind: str = "barrier") -> None:
        made, self.undo = MACHINES[kind]
        self.machine = made()
        self.stamp = self.number = 0
        self.calls: dict[str, tuple[Call, Command]] = {}
        self.slow: set[str] = set()
        self.items: dict[str, str] = {}
        """The item of each taker."""

    def __call__(self, line: str) -> list[str]:
        first, *words = line.split()
        match first:
            case "new":
                self.__init__(*words)  # type: ignore[misc]
                return []
            case "slow":
                self.slow.update(words)
                return []
            case "lost":
                return self.woken(self.did(self.machine.session_ended(words[0], self.stamp + 1)).woken)
            case "fire":
                number = int(words[0]) if words else (self.machine.timer or (0,))[0]
                return self.woken(self.did(self.machine.on_timer(number, self.stamp + 1)).woken)
            case "timer":
                timer = self.machine.timer
                return [f"timer -> number {timer[0]}, in {timer[1]:g} s" if timer else "timer -> none"]
            case "idle":
                return [f"idle -> {text_of(self.machine.idle)}"]
            case "sessions":
                return [f"sessions -> {' '.join(sorted(self.machine.sessions()))}"]
            case "status":
                looked = self.machine.apply(Call("x", "x", 0), work_queue.WorkQuery(), 0).outcome
                assert isinstance(looked, Done)
                counts = ", ".join(f"{count} {name}" for name, count in looked.answer.items() if isinstance(count, int))
                return [f"status -> {counts}; {text_of(looked.answer['holders'])}"]
            case "drop":
                assert self.machine.idle
                self.machine = type(self.machine)()
                return []
        return self.of_member(line, first, words[0], words[1:])

    def of_member(self, line: str, who: str, verb: str, words: list[str]) -> list[str]:
        if verb == "why":
            return [f"{line} -> {write(self.machine.explain(self.calls[who][0]))}"]
        if verb == "fence":
            return [f"{line} -> {write(self.machine.apply(self.calls[who][0], LookAtLock(), 0).outcome)}"]
        if verb == "see":
            return [f"{line} -> {self.see(words[0])}"]
        if verb == "look":
            call, command = self.calls[who]
        elif verb in ("done", "release", "abandon"):
            command = self.ending(verb, who if verb != "done" or not words else words[0], " ".join(words))
            call = self.call(who)
        elif verb in ("undo", "leave"):
            undo = self.undo if verb == "undo" else rendezvous.RendezvousLeave
            if isinstance(self.calls[who][1], LeaveBarrier):
                undo = BarrierUndoLeave
            command = undo(self.calls[who][0].number)
            call = self.call(who)
        else:
            if verb == "out":
                command = LeaveBarrier(self.calls[words[0]][0].number)
            elif isinstance(self.machine, rendezvous.RendezvousMachine):
                command = rendezvous_command(verb, words)
            elif isinstance(self.machine, WorkQueueMachine):
                command = work_command(verb, words)
            else:
                command = command_of(verb, words)
            call = self.call(who)
            self.calls[who] = call, command
        step = self.did(self.machine.apply(call, command, self.stamp + 1))
        if not isinstance(command, ONCE):
            self.again(call, command, step.outcome)
        self.got(who, command, step.outcome)
        return [f"{line} -> {write(step.outcome)}", *self.woken(step.woken)]

    def ending(self, verb: str, taker: str, why: str) -> Command:
        """Return the command that ends a take, with the item that the taker got."""
        number = self.calls[taker][0].number
        if verb == "abandon":
            return work_queue.WorkAbandon(number)
        item = self.items[taker]
        return work_queue.WorkDone(number, item) if verb == "done" else work_queue.WorkRelease(number, item, why)

    def got(self, who: str, command: Command, outcome: Outcome) -> None:
        """Remember the item of a take."""
        if isinstance(command, work_queue.WorkTake) and isinstance(outcome, Done) and outcome.answer:
            self.items[who] = outcome.answer[0]

    def call(self, who: str) -> Call:
        self.number += 1
        split = WHO.fullmatch(who)
        assert split is not None, who
        session, _, former = (split[2] or "").partition("<")
        return Call(split[1], session or split[1], self.number, session, (former,) if former else ())

    def again(self, call: Call, command: Command, before: Outcome) -> None:
        """Apply a call again: it must change nothing and have the same result, or be refused again."""
        step = self.machine.apply(call, command, self.stamp + 1)
        assert not step.changed and not list(step.woken)
        assert isinstance(before, Refused) or step.outcome == before
        assert self.machine.holds(call.id) or step.outcome is not WAIT

    def did(self, step: Step) -> Step:
        """Count a change, and encode and decode the state."""
        self.stamp += step.changed
        written = msgspec.msgpack.encode(self.machine)
        read = msgspec.msgpack.decode(written, type=type(self.machine))
        assert read == self.machine
        self.machine = read
        return step

    def woken(self, calls: Iterable[Call]) -> list[str]:
        names = {call.id: who for who, (call, _) in self.calls.items()}
        output = []
        for call in calls:
            who = names[call.id]
            if who in self.slow:
                continue
            step = self.did(self.machine.apply(call, self.calls[who][1], self.stamp + 1))
            assert step.outcome is not WAIT, f"{who} was woken for nothing"
            self.got(who, self.calls[who][1], step.outcome)
            output.append(f"{who} <- {write(step.outcome)}")
        return output

    def see(self, name: str) -> str:
        looked = self.machine.apply(Call("x", "x", 0), MembershipQuery(), 0).outcome
        assert isinstance(looked, Done)
        one = looked.answer["members"][name]
        return f"devices {one['devices']} to {one['device_maps']} back {one['reverse_maps']}"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check_transcript(path, MachineScript())


def test_every_machine_has_a_history() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(MACHINES)
