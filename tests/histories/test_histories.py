"""Histories of the engine: who did what, and what everyone was told, in order.

A command starts with who does it; `b.2` is the second call that owner `b` has under way. What a call returns is written
after it, `b get x -> 1`; a call that waits returns nothing yet, and one that only writes has nothing to say. What is
delivered is written `b <- 1`. A bare word is bytes, `b'\\x00'` is what no word can say, and `b'1'*9` is nine of them.
Durations (`for 5`) count from the last `tick`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core.engine import Engine
from rallypoint.core.records import Event, Swap, TimedOut, Turn, Waiter, Watch
from rallypoint.errors import RallypointError

from .transcript import check, replay

HERE = Path(__file__).parent
PLAIN = re.compile(rb"[\w./+-]+", re.ASCII)
WRITES = ("set", "lease", "append", "multi_set", "push")


def read(word: str) -> bytes:
    literal = re.fullmatch(r"(b'.*')(?:\*(\d+))?", word)
    return ast.literal_eval(literal[1]) * int(literal[2] or 1) if literal else word.encode()


def shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}... and {len(text) - 40} more"


def write(value: object) -> str:
    """Say an answer in the words of a transcript."""
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
        case list():
            return " ".join(map(write, value)) or "nothing"
        case _:
            return str(value)


class EngineScript:
    """An engine that takes its commands as lines of text."""

    def __init__(self, *limit: int) -> None:
        self.engine = Engine(*limit)
        self.now = 0.0
        self.held: dict[str, Waiter | Watch] = {}
        self.turns: dict[str, Turn] = {}

    def __call__(self, line: str) -> list[str]:
        first, *words = line.split()
        try:
            returned = self.hosts[first](*words) if first in self.hosts else self.operation(first, *words)
        except RallypointError as error:
            fields = ", ".join(f"{name}={shorten(repr(value))}" for name, value in vars(error).items())
            returned = f"{type(error).__name__}({fields})"
        said = [] if returned is None else [f"{line} -> {returned}"]
        return said + [self.delivered(handle, answer) for handle, answer in self.engine.take()]

    @property
    def hosts(self) -> dict[str, Callable[..., str | None]]:
        """What the host of an engine does beside its owners' operations."""
        return {
            "new": lambda *limit: self.__init__(*map(int, limit[1:])),  # type: ignore[misc]
            "tick": self.tick,
            "sweep": lambda: f"turns are {'left' if self.engine.sweep_turns() else 'over'}",
            "drop": lambda who: self.engine.drop(self.held.pop(who)),
            "done": lambda who: self.engine.drop(self.turns.pop(who)),
            "end": self.engine.end,
            "size": lambda: str(self.engine.size),
            "count": self.count,
        }

    def tick(self, now: str) -> str | None:
        self.now = float(now)
        following = self.engine.tick(self.now)
        return None if following is None else f"next at {following:g}"

    def count(self) -> str:
        held = self.engine.statistics()._asdict()
        return ", ".join(f"{n} {what}" for what, n in held.items() if n and what != "revision") or "nothing"

    def operation(self, who: str, name: str, *words: str) -> str | None:
        result = self.call(who, who.split(".")[0], name, list(words))
        if isinstance(result, Waiter | Watch):
            self.held[who] = result
            return None
        if isinstance(result, Turn):
            self.turns[who] = result
        return None if result is None and name in WRITES else write(result)

    def call(self, who: str, owner: str, name: str, words: list[str]) -> Any:
        deadline = None
        if "for" in words:
            *words, _, duration = words
            deadline = self.now + float(duration)
        engine, keys = self.engine, [read(word) for word in words]
        calls: dict[str, Callable[[], Any]] = {
            "set": lambda: engine.set(*keys),
            "lease": lambda: engine.set(*keys, owner),
            "unlease": lambda: engine.unlease(*keys, owner),
            "multi_set": lambda: engine.multi_set([*zip(keys[::2], keys[1::2], strict=True)]),
            "get": lambda: ["missing" if value is None else value for value in engine.multi_get(keys)],
            "add": lambda: engine.add(keys[0], int(words[1])),
            "append": lambda: engine.append(*keys),
            "compare_set": lambda: engine.compare_set(*keys),
            "swap": lambda: engine.swap(keys[0], None if words[1] == "missing" else keys[1], keys[2]),
            "delete": lambda: engine.delete(*keys),
            "delete_prefix": lambda: engine.delete_prefix(*keys),
            "check": lambda: engine.check(keys),
            "list": lambda: engine.list_keys(*keys),
            "num": lambda: engine.num_keys(*keys),
            "push": lambda: engine.queue_push(keys[0], keys[1], front=words[2:] == ["front"]),
            "pop": lambda: engine.queue_pop(*keys) if engine.queue_len(*keys) else "empty",
            "len": lambda: engine.queue_len(*keys),
            "wait": lambda: engine.wait(keys, owner, deadline, who),
            "values": lambda: engine.wait_values(keys, owner, deadline, who),
            "item": lambda: engine.wait_item(keys[0], owner, deadline, who),
            "turn": lambda: engine.wait_turn(keys[0], owner, who),
            "barrier": lambda: engine.barrier(keys[0], int(words[1]), owner, deadline, who),
            "watch": lambda: engine.watch(keys[0] if keys else b"", owner, who),
        }
        return calls[name]()

    def delivered(self, handle: Waiter | Watch, answer: object) -> str:
        who = str(handle.tag)
        if isinstance(handle, Waiter) and self.held.get(who) is handle:
            del self.held[who]
        if isinstance(answer, Turn):
            self.turns[who] = answer
        return f"{who} <- {write(answer)}"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_history(path: Path) -> None:
    check(path, EngineScript())


def test_a_history_that_tells_something_else_fails_with_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_REWRITE", raising=False)
    told = tmp_path / "told.txt"
    told.write_text("a set x 1\na get x\n----\na get x -> 2\n")
    with pytest.raises(AssertionError, match=r"(?s)told\.txt says.*-a get x -> 2\n\+a get x -> 1"):
        check(told, EngineScript())
    monkeypatch.setenv("RALLYPOINT_REWRITE", "1")
    check(told, EngineScript())
    assert told.read_text() == "a set x 1\na get x\n----\na get x -> 1\n"


def test_a_block_without_dashes_is_refused() -> None:
    with pytest.raises(ValueError, match="block 2 has no line ----"):
        replay("a set x 1\n----\n\na get x\n", EngineScript())
