"""Histories of the engine: the operations of several owners and all results, in order.

A command starts with its owner; `b.2` is the second pending call of owner `b`. A result follows its command, `b get x
-> 1`; a call that waits, and one that only writes, has none. A later answer is written `b <- 1`. A bare word is bytes;
other bytes are written `b'\\x00'`, and `b'1'*9` is a repetition. Durations (`for 5`) count from the last `tick`: the
engine has no clock, so the script keeps the deadlines, as hosts do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core import ops
from rallypoint.core.deadlines import NEVER, Deadlines
from rallypoint.core.engine import Engine
from rallypoint.core.records import Event, Swap, TimedOut, Turn, Waiter, WatchHandle
from rallypoint.errors import RallypointError
from rallypoint.testing import check_transcript, replay_transcript

HERE = Path(__file__).parent
PLAIN = re.compile(rb"[\w./+-]+", re.ASCII)
WRITES = ("set", "lease", "append", "multi_set", "push")


def read(word: str) -> bytes:
    literal = re.fullmatch(r"(b'.*')(?:\*(\d+))?", word)
    return ast.literal_eval(literal[1]) * int(literal[2] or 1) if literal else word.encode()


def shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}... and {len(text) - 40} more"


def write(value: object) -> str:
    """Return an answer in the notation of a transcript."""
    match value:
        case None:
            return "done"
        case bool():
            return "yes" if value else "no"
        case bytes():
            return value.decode() if PLAIN.fullmatch(value) else shorten(repr(value))
        case Swap(won, now):
            return f"{'won' if won else 'lost'}, {'missing' if now is None else write(now)}"
        case TimedOut(missing):
            return f"TimedOut(missing={tuple(map(write, missing))})"
        case Event(revision, key, now):
            return f"{revision}: {write(key)} {'deleted' if now is None else '= ' + write(now)}"
        case Turn(key=key):
            return f"turn at {write(key)}"
        case list() | tuple():
            return " ".join(map(write, value)) or "nothing"
        case _:
            return str(value)


class EngineScript:
    """An engine with commands as lines of text. `new limit 500 slice 2` starts a new one with these limits."""

    def __init__(self, limit: int = 1 << 62, slice_keys: int = 1 << 62, reserve: int = 0) -> None:
        self.engine = Engine(slice_keys)
        self.engine.memory.limit, self.engine.memory.reserve = limit, reserve or limit
        self.now = 0.0
        self.deadlines = Deadlines()
        self.who = [""]
        """The owner of each call, by number."""

        self.held: dict[str, Waiter | WatchHandle] = {}
        self.turns: dict[str, Turn] = {}

    def __call__(self, line: str) -> list[str]:
        first, *words = line.split()
        try:
            returned = self.hosts[first](*words) if first in self.hosts else self.operation(first, *words)
        except RallypointError as error:
            fields = ", ".join(f"{name}={shorten(repr(value))}" for name, value in vars(error).items())
            returned = f"{type(error).__name__}({fields})"
        output = [] if returned is None else [f"{line} -> {returned}"]
        return output + [self.delivered(handle, answer) for handle, answer in self.engine.take()]

    @property
    def hosts(self) -> dict[str, Callable[..., str | None]]:
        """Commands of the host, as opposed to operations of owners."""
        return {
            "new": self.renew,
            "tick": self.tick,
            "sweep": self.sweep,
            "go_on": self.engine.continue_delete,
            "drop": lambda who: self.engine.drop(self.held.pop(who)),
            "done": lambda who: self.engine.drop(self.turns.pop(who)),
            "end": self.engine.end,
            "size": lambda: str(self.engine.size),
            "parked": lambda: str(self.engine.memory.parked),
            "count": self.count,
        }

    def renew(self, *words: str) -> None:
        limits = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        self.__init__(limits.get("limit", 1 << 62), limits.get("slice", 1 << 62), limits.get("reserve", 0))  # type: ignore[misc]

    def tick(self, now: str) -> str | None:
        self.now = float(now)
        for waiter in self.deadlines.due(self.now):
            assert isinstance(waiter, Waiter)
            timed_out = self.engine.expire(waiter)
            if timed_out is not None:
                self.engine.outbox.append((waiter, timed_out))
        return None if self.deadlines.earliest == NEVER else f"next at {self.deadlines.earliest:g}"

    def sweep(self) -> str:
        for turn in self.engine.idle_turns():
            self.engine.drop(turn)
        return f"turns are {'left' if self.engine._turns else 'over'}"

    def count(self) -> str:
        held = self.engine.statistics()._asdict()
        return ", ".join(f"{n} {what}" for what, n in held.items() if n and what != "revision") or "nothing"

    def operation(self, who: str, name: str, *words: str) -> str | None:
        owner, timeout_s = who.split(".")[0], ops.MAX_WAIT_S
        if "for" in words:
            *words, _, duration = words  # type: ignore[assignment]
            timeout_s = float(duration)
        self.who.append(who)
        result = self.call(owner, name, list(words), timeout_s)
        if isinstance(result, Waiter | WatchHandle):
            self.held[who] = result
            if isinstance(result, Waiter) and timeout_s < ops.MAX_WAIT_S:
                self.deadlines.set(result, self.now + timeout_s)
            return None
        if isinstance(result, Turn):
            self.turns[who] = result
        if name == "get":
            values = result if len(words) > 1 else [result]
            return write(["missing" if value is None else value for value in values])
        if result is None and name in WRITES:
            return None
        return "empty" if result is None and name == "pop" else write(result)

    def call(self, owner: str, name: str, words: list[str], timeout_s: float) -> Any:
        number, keys = len(self.who) - 1, [read(word) for word in words]
        if name == "watch":
            return self.engine.watch(keys[0] if keys else b"", owner, number)
        if name == "push" and words[2:] == ["front"]:
            return self.engine.push(keys[0], keys[1], front=True)
        makers: dict[str, Callable[[], ops.Op]] = {
            "set": lambda: ops.Set(number, *keys),
            "lease": lambda: ops.SetLease(number, keys[0], keys[1], 0.0),
            "unlease": lambda: ops.ReleaseLease(number, *keys),
            "multi_set": lambda: ops.MultiSet(number, [*zip(keys[::2], keys[1::2], strict=True)]),
            "get": lambda: ops.Peek(number, keys[0]) if len(keys) == 1 else ops.MultiPeek(number, keys),
            "add": lambda: ops.Add(number, keys[0], int(words[1])),
            "append": lambda: ops.Append(number, *keys),
            "compare_set": lambda: ops.CompareSet(number, *keys),
            "swap": lambda: ops.CompareSwap(number, keys[0], None if words[1] == "missing" else keys[1], keys[2]),
            "delete": lambda: ops.Delete(number, *keys),
            "delete_prefix": lambda: ops.DeletePrefix(number, *keys),
            "check": lambda: ops.Check(number, keys),
            "list": lambda: ops.List(number, *(keys or [b""])),
            "num": lambda: ops.Count(number, *(keys or [b""])),
            "push": lambda: ops.Push(number, *keys),
            "pop": lambda: ops.Pop(number, *keys),
            "len": lambda: ops.QueueLen(number, *keys),
            "wait": lambda: ops.Wait(number, keys, timeout_s),
            "values": lambda: ops.MultiGet(number, keys, timeout_s),
            "value": lambda: ops.Get(number, keys[0], timeout_s),
            "item": lambda: ops.BlockingPop(number, keys[0], timeout_s),
            "turn": lambda: ops.WaitOrTurn(number, keys[0]),
            "barrier": lambda: ops.Arrive(number, keys[0], int(words[1]), timeout_s),
        }
        return self.engine.execute(makers[name](), owner)

    def delivered(self, handle: Waiter | WatchHandle, answer: object) -> str:
        who = self.who[handle.number]
        if isinstance(handle, Waiter):
            self.deadlines.drop(handle)
            if self.held.get(who) is handle:
                del self.held[who]
        if isinstance(answer, Turn):
            self.turns[who] = answer
        return f"{who} <- {write(answer)}"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check_transcript(path, EngineScript())


def test_a_wrong_transcript_fails_with_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_REWRITE", raising=False)
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("a set x 1\na get x\n----\na get x -> 2\n")
    with pytest.raises(AssertionError, match=r"(?s)wrong\.txt says.*-a get x -> 2\n\+a get x -> 1"):
        check_transcript(wrong, EngineScript())
    monkeypatch.setenv("RALLYPOINT_REWRITE", "1")
    check_transcript(wrong, EngineScript())
    assert wrong.read_text() == "a set x 1\na get x\n----\na get x -> 1\n"


def test_a_block_without_dashes_is_refused() -> None:
    with pytest.raises(ValueError, match="block 2 has no line ----"):
        replay_transcript("a set x 1\n----\n\na get x\n", EngineScript())
