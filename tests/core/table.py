"""A table for tests of PyTorch's protocol: one engine, some conversations around it, and what each of them was sent."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from rallypoint.core.c10d import MAGIC, BadMessage, Conversation, Op, encode
from rallypoint.core.engine import ENTRY_BYTES, Engine

LIMIT = 64 * 1024 * 1024
MIB = 1024 * 1024
GREETING = encode(Op.VALIDATE, MAGIC)
TOLD, CANCELLED = b"\0", b"\1"


def number(value: int) -> bytes:
    return struct.pack("<q", value)


def string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def listed(op: int, *keys: bytes) -> bytes:
    return encode(op, len(keys), *keys)


def wait(*keys: bytes) -> bytes:
    return listed(Op.WAIT, *keys)


CANCEL = encode(Op.CANCEL_WAIT)
PING = encode(Op.PING, 7)
PONG = b"\7\0\0\0"


class Table:
    """One engine, and the people around it by name; it does for them what the server does."""

    def __init__(self, *names: str, max_bytes: int = 1 << 40, limit: int = LIMIT) -> None:
        self.engine = Engine(max_bytes)
        self.limit = limit
        self.people: dict[str, Conversation] = {}
        self.heard: dict[str, bytes] = {}
        for name in names:
            self.join(name)

    def join(self, name: str, greeted: bool = True) -> Conversation:
        self.people[name] = person = Conversation(self.engine, self.limit, name)
        self.heard[name] = b""
        if greeted:
            assert person.receive(GREETING) == b""
        return person

    def feed(self, name: str, data: bytes) -> None:
        """Carry bytes to the engine, and what comes of it to everybody."""
        person = self.people[name]
        try:
            self.heard[name] += person.receive(data)
            while person.blocked:
                self.heard[name] += person.receive(b"")
        finally:
            self.deliver()

    def trickle(self, name: str, data: bytes, size: int) -> None:
        for at in range(0, len(data), size):
            self.feed(name, data[at : at + size])

    def deliver(self) -> None:
        for waiter, answer in self.engine.take():
            owner: Any = waiter.owner
            self.heard[owner.link] += owner.answer(waiter, answer)

    def leave(self, name: str) -> None:
        self.people.pop(name).end()
        self.deliver()

    def say(self, name: str, *messages: bytes) -> bytes:
        """Send messages, and return all that this one has heard since it was last asked."""
        self.feed(name, b"".join(messages))
        return self.hears(name)

    def hears(self, name: str) -> bytes:
        heard, self.heard[name] = self.heard[name], b""
        return heard

    def refuses(self, name: str, *messages: bytes) -> str:
        """Send messages that must end the connection, and return why they did."""
        with pytest.raises(BadMessage) as caught:
            self.feed(name, b"".join(messages))
        self.leave(name)
        return str(caught.value)

    def picture(self) -> object:
        """Return all that the engine holds, as something to compare."""
        engine = self.engine
        queues = {key: list(queue) for key, queue in engine._queues.items()}
        waits = [(w.owner.link, w.want, tuple(w.keys), tuple(w.missing), w.need) for w in self.waiters()]  # type: ignore
        turns = [(turn.key, turn.owner.link) for turns in engine._turns.values() for turn in turns]  # type: ignore
        return dict(engine._values), queues, waits, turns, engine.size, engine.revision

    def waiters(self) -> list[Any]:
        held = [thing for things in self.engine._held.values() for thing in things]
        return [thing for thing in held if hasattr(thing, "want")]

    def check_size(self) -> None:
        """The engine's count of its bytes must be what it holds."""
        engine = self.engine
        size = sum(len(key) + len(value) + ENTRY_BYTES for key, value in engine._values.items())
        size += sum(len(key) + len(item) + ENTRY_BYTES for key, items in engine._queues.items() for item in items)
        size += sum(len(key) + ENTRY_BYTES for waiter in self.waiters() for key in waiter.keys)
        assert engine.size == size
