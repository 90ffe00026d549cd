"""A table for tests of PyTorch's protocol: one server, some clients around it, and what each of them was sent."""

from __future__ import annotations

import functools
import struct
from typing import Any

import pytest

from rallypoint.core.engine import ENTRY_BYTES
from rallypoint.core.records import Waiter
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import MAGIC, Opcode, encode
from rallypoint.server.c10d_connection import C10dConnection

from .fakes import Clock, FakeConnection, new_server

LIMIT = 64 * 1024 * 1024
MIB = 1024 * 1024
GREETING = encode(Opcode.VALIDATE, MAGIC)
TOLD, CANCELLED = b"\0", b"\1"


def number(value: int) -> bytes:
    return struct.pack("<q", value)


def string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def listed(op: int, *keys: bytes) -> bytes:
    return encode(op, len(keys), *keys)


def wait(*keys: bytes) -> bytes:
    return listed(Opcode.WAIT, *keys)


CANCEL = encode(Opcode.CANCEL_WAIT)
PING = encode(Opcode.PING, 7)
PONG = b"\7\0\0\0"


class Table:
    """One server, and the people around it by name; each is a real handler on a fake connection."""

    def __init__(self, *names: str, max_bytes: int = 1 << 40, limit: int = LIMIT) -> None:
        self.server = new_server(max_bytes=max_bytes, max_answer_bytes=limit, limit=limit)
        self.engine = self.server.state.namespaces[0].engine
        self.clock = Clock()
        self.connections: dict[str, FakeConnection] = {}
        self.people: dict[str, C10dConnection] = {}
        self.names: dict[int, str] = {}
        self.heard: dict[str, bytes] = {}
        for name in names:
            self.join(name)

    def join(self, name: str, greeted: bool = True) -> C10dConnection:
        connection: Any = FakeConnection(self.clock, functools.partial(self.hear, name))
        person = connection.handler = self.people[name] = self.server.torch_handler(connection)
        self.connections[name] = connection
        self.names[person.visitor.serial] = name
        self.heard[name] = b""
        if greeted:
            self.feed(name, GREETING)
            assert not self.heard[name]
        return person

    def hear(self, name: str, data: bytes) -> None:
        self.heard[name] += data

    def feed(self, name: str, data: bytes) -> None:
        """Carry bytes to the server, and what comes of it to everybody."""
        self.connections[name].receive(data)

    def trickle(self, name: str, data: bytes, size: int) -> None:
        for at in range(0, len(data), size):
            self.feed(name, data[at : at + size])

    def leave(self, name: str) -> None:
        del self.people[name]
        self.connections.pop(name).end()

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
        """Return all that the server holds, as something to compare."""
        engine = self.engine
        queues = {key: list(queue) for key, queue in engine._queues.items()}
        waits = [(self.names[w.owner.serial], w.want, tuple(w.keys), engine.missing(w), w.need) for w in self.waiters()]
        turns = [(turn.key, self.names[turn.owner.serial]) for turns in engine._turns.values() for turn in turns]  # type: ignore[attr-defined]
        holders = [self.names[serial] for serial in self.server.state.visitors]
        return dict(engine._values), queues, waits, turns, holders, engine.size, engine.parked, engine.revision

    def waiters(self) -> list[Any]:
        held = [thing for things in self.engine._held.values() for thing in things]
        return [thing for thing in held if isinstance(thing, Waiter)]

    def check_size(self) -> None:
        """The server's count of its bytes must be what it holds, and it must know exactly those who hold something."""
        engine = self.engine
        size = sum(len(key) + len(value) + ENTRY_BYTES for key, value in engine._values.items())
        size += sum(len(key) + len(item) + ENTRY_BYTES for key, items in engine._queues.items() for item in items)
        size += sum(len(key) + ENTRY_BYTES for waiter in self.waiters() if not waiter.reads for key in waiter.keys)
        assert engine.size == size
        assert engine.parked == sum(len(k) + ENTRY_BYTES for w in self.waiters() if w.reads for k in w.keys)
        holders = {person.visitor.serial for person in self.people.values() if person.visitor.holds}
        assert set(self.server.state.visitors) == holders
