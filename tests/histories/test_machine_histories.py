"""Histories of the shared objects' machines: who asked what, and what everyone was told, in order.

`new lock` starts a machine. A command starts with who gives it: `1` is the member of that name, in a session of the
same name; `1@x` is member 1 in session x, and `1@x.2` a second call that it has under way. `look` applies the call
again, `undo` takes it back, `why` asks what it waits for, `fence` whether it holds; `1.2 out 1` leaves the round of a
barrier to which call `1` arrived, and `arrive 3 0` means that 0 is its last out. What a call came to is written
after it; those who wait and are woken look at once, and what they find is written `1 <- done`. `slow 1@x` looks only
when it is told to. `alarm` says which one is set, and `ring` lets it, or that of a number, ring. After every command
the state is written down and read back, and the last call is applied twice, which changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.core import rendezvous
from rallypoint.core.barrier import Arrive, Barrier, Stay, Withdraw
from rallypoint.core.barrier import Leave as LeaveBarrier
from rallypoint.core.exchange import Exchange, Give, TakeBack
from rallypoint.core.gathering import Limits
from rallypoint.core.lock import Acquire, Lock, Release
from rallypoint.core.lock import Look as LookAtLock
from rallypoint.core.machine import WAIT, Call, Command, Done, Machine, Outcome, Refused, Step, Undo, Waiting
from rallypoint.core.roster import Join, Leave, Look, Roster, Watch

from .transcript import check

HERE = Path(__file__).parent / "machines"
MACHINES: dict[str, tuple[type[Machine], type[Undo]]] = {
    "barrier": (Barrier, Withdraw),
    "exchange": (Exchange, TakeBack),
    "lock": (Lock, Release),
    "rendezvous": (rendezvous.Rendezvous, rendezvous.Withdraw),
    "roster": (Roster, Leave),
}
WHO = re.compile(r"([^@.]+)(?:@([^.]+))?(?:\.\d+)?")


def arrow_maps(words: list[str]) -> dict[str, dict[str, str]]:
    """Read `b:x>y,z>w` as a map for peer b."""
    split = [word.split(":", 1) for word in words]
    return {peer: dict(way.split(">") for way in ways.split(",") if way) for peer, ways in split}  # type: ignore[misc]


def command_of(verb: str, words: list[str]) -> Command:
    match verb:
        case "arrive":
            return Arrive(int(words[0]) if words[0].isdecimal() else words[0].split(","), *words[1:])
        case "all_gather" | "gather" | "broadcast":
            size, rank, data, *root = words
            return Give(int(size), int(rank), data.encode(), verb, int(root[0]) if root else 0)  # type: ignore[arg-type]
        case "acquire":
            return Acquire()
        case "join":
            devices = [word for word in words if ":" not in word]
            return Join(b"info", devices, arrow_maps([word for word in words if ":" in word]))
        case "watch":
            return Watch(int(words[0]))
        case "view":
            return Look()
    raise ValueError(verb)


def rendezvous_command(verb: str, words: list[str]) -> Command:
    """Read `join 2 4 5 rank=1 batch=16`: min, max and last call, then what a join has, and settings."""
    match verb:
        case "join":
            least, most, last_call_s, *more = words
            said = dict(word.split("=") for word in more)
            return rendezvous.Join(
                Limits(int(least), int(most), float(last_call_s)),
                rank=int(said.pop("rank", -1)),
                run=int(said.pop("run", -1)),
                host=said.pop("host", ""),
                address=said.pop("address", ""),
                loopback=said.pop("loopback", "no") == "yes",
                settings=said,
            )
        case "watch":
            return rendezvous.Watch(int(words[0]))
        case "close":
            return rendezvous.Close(words[0], " ".join(words[1:]))
        case "open":
            return rendezvous.Open()
        case "nodes":
            return rendezvous.Look(int(words[0]))
    raise ValueError(verb)


def told(answer: Any) -> str:
    match answer:
        case None:
            return "done"
        case bool():
            return "yes" if answer else "no"
        case bytes():
            return answer.decode()
        case {"epoch": epoch, "members": members}:
            return f"epoch {epoch}: " + (", ".join(f"{name}#{one['id']}" for name, one in members.items()) or "nobody")
        case [{"epoch": _} as view, events, every]:
            said = "; ".join(f"{name}#{number} {reason}" for _, name, number, _, reason in events)
            return f"{told(view)} | {said or 'no events'}{'' if every else ' (and more)'}"
        case [int(run), number, scope, rank, size, (first, at), before, reason]:
            where = f"{first} at {at}" if at else first
            later = f", run {run}" if run else ""
            return f"round {number}{later}: rank {rank} of {size}, 0 is {where}, scope {scope} after {before}; {reason}"
        case list():
            return f"[{' '.join(map(told, answer))}]"
    return str(answer)


def write(outcome: Outcome | Waiting) -> str:
    match outcome:
        case Done(answer):
            return told(answer)
        case Refused(error, fields):
            return f"{error}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
        case Waiting(reason, missing, withdrawn):
            names = [f"{what} {list(who)}" for what, who in (("missing", missing), ("withdrawn", withdrawn)) if who]
            return " | ".join([reason, *names, *["stands by"][: outcome.stands_by]])
    return "waits"


class MachineScript:
    """A machine that takes its commands as lines of text."""

    def __init__(self, kind: str = "barrier") -> None:
        made, self.undo = MACHINES[kind]
        self.machine = made()
        self.stamp = self.number = 0
        self.calls: dict[str, tuple[Call, Command]] = {}
        self.slow: set[str] = set()

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
                return self.woken(self.did(self.machine.lost(words[0], self.stamp + 1)).woken)
            case "ring":
                number = int(words[0]) if words else (self.machine.alarm or (0,))[0]
                return self.woken(self.did(self.machine.ring(number, self.stamp + 1)).woken)
            case "alarm":
                set_now = self.machine.alarm
                return [f"alarm -> number {set_now[0]}, in {set_now[1]:g} s" if set_now else "alarm -> none"]
            case "idle":
                return [f"idle -> {told(self.machine.idle)}"]
            case "sessions":
                return [f"sessions -> {' '.join(sorted(self.machine.sessions()))}"]
            case "drop":
                assert self.machine.idle
                self.machine = type(self.machine)()
                return []
        return self.of_member(line, first, words[0], words[1:])

    def of_member(self, line: str, who: str, verb: str, words: list[str]) -> list[str]:
        if verb == "why":
            return [f"{line} -> {write(self.machine.why(self.calls[who][0]))}"]
        if verb == "fence":
            return [f"{line} -> {write(self.machine.apply(self.calls[who][0], LookAtLock(), 0).outcome)}"]
        if verb == "see":
            return [f"{line} -> {self.see(words[0])}"]
        if verb == "look":
            call, command = self.calls[who]
        elif verb in ("undo", "leave"):
            undo = self.undo if verb == "undo" else rendezvous.Leave
            if isinstance(self.calls[who][1], LeaveBarrier):
                undo = Stay
            command = undo(self.calls[who][0].number)
            call = self.call(who)
        else:
            if verb == "out":
                command = LeaveBarrier(self.calls[words[0]][0].number)
            elif isinstance(self.machine, rendezvous.Rendezvous):
                command = rendezvous_command(verb, words)
            else:
                command = command_of(verb, words)
            call = self.call(who)
            self.calls[who] = call, command
        step = self.did(self.machine.apply(call, command, self.stamp + 1))
        if not isinstance(command, (Undo, rendezvous.Close, rendezvous.Open)):
            self.again(call, command, step.outcome)
        return [f"{line} -> {write(step.outcome)}", *self.woken(step.woken)]

    def call(self, who: str) -> Call:
        self.number += 1
        split = WHO.fullmatch(who)
        assert split is not None, who
        session, _, former = (split[2] or "").partition("<")
        return Call(split[1], session or split[1], self.number, session, (former,) if former else ())

    def again(self, call: Call, command: Command, before: Outcome) -> None:
        """Apply once more: it must change nothing, and say the same; what was refused may be so for another reason."""
        step = self.machine.apply(call, command, self.stamp + 1)
        assert not step.changed and not list(step.woken)
        assert isinstance(before, Refused) or step.outcome == before
        assert self.machine.keeps(call.id) or step.outcome is not WAIT

    def did(self, step: Step) -> Step:
        """Number a change, and take the state through its written form."""
        self.stamp += step.changed
        written = msgspec.msgpack.encode(self.machine)
        read = msgspec.msgpack.decode(written, type=type(self.machine))
        assert read == self.machine
        self.machine = read
        return step

    def woken(self, calls: Iterable[Call]) -> list[str]:
        names = {call.id: who for who, (call, _) in self.calls.items()}
        said = []
        for call in calls:
            who = names[call.id]
            if who in self.slow:
                continue
            step = self.did(self.machine.apply(call, self.calls[who][1], self.stamp + 1))
            assert step.outcome is not WAIT, f"{who} was woken for nothing"
            said.append(f"{who} <- {write(step.outcome)}")
        return said

    def see(self, name: str) -> str:
        looked = self.machine.apply(Call("x", "x", 0), Look(), 0).outcome
        assert isinstance(looked, Done)
        one = looked.answer["members"][name]
        return f"devices {one['devices']} to {one['device_maps']} back {one['reverse_maps']}"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check(path, MachineScript())


def test_there_are_histories_of_every_machine() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(MACHINES)
