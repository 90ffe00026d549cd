"""A harness for tests of PyTorch's protocol: one server, several clients, and what each client has received."""

from __future__ import annotations

import functools
import struct
from typing import Any

import pytest

from rallypoint.core.costs import ITEM_BYTES, KEY_BYTES, QUEUE_BYTES, WAIT_BYTES
from rallypoint.core.records import Waiter
from rallypoint.protocol import BadMessage
from rallypoint.protocol.c10d import MAGIC, Opcode, encode
from rallypoint.server.connections.c10d_connection import C10dConnection

from .fake_server import Clock, FakeConnection, new_server

LIMIT = 64 * 1024 * 1024
MIB = 1024 * 1024
GREETING = encode(Opcode.VALIDATE, MAGIC)
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"


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


class C10dHarness:
    """One server, and clients by name; each is a real handler on a fake connection."""

    def __init__(self, *names: str, max_bytes: int = 1 << 40, limit: int = LIMIT) -> None:
        self.clock = Clock()
        self.server = new_server(max_bytes=max_bytes, max_answer_bytes=limit, limit=limit, clock=self.clock)
        self.engine = self.server.state.namespaces[0].engine
        self.connections: dict[str, FakeConnection] = {}
        self.handlers: dict[str, C10dConnection] = {}
        self.names: dict[int, str] = {}
        self.inboxes: dict[str, bytes] = {}
        for name in names:
            self.connect(name)

    def connect(self, name: str, greeted: bool = True) -> C10dConnection:
        connection: Any = FakeConnection(self.clock, functools.partial(self._deliver, name))
        handler = connection.handler = self.handlers[name] = self.server.torch_handler(connection)
        self.connections[name] = connection
        self.names[handler.owner.serial] = name
        self.inboxes[name] = b""
        if greeted:
            self.feed(name, GREETING)
            assert not self.inboxes[name]
        return handler

    def _deliver(self, name: str, data: bytes) -> None:
        self.inboxes[name] += data

    def feed(self, name: str, data: bytes) -> None:
        """Deliver bytes to the server, and everything that it sends to the clients."""
        self.connections[name].receive(data)

    def trickle(self, name: str, data: bytes, size: int) -> None:
        for at in range(0, len(data), size):
            self.feed(name, data[at : at + size])

    def disconnect(self, name: str) -> None:
        del self.handlers[name]
        self.connections.pop(name).end()

    def send(self, name: str, *messages: bytes) -> bytes:
        """Send messages, and return everything that this client has received since the last call."""
        self.feed(name, b"".join(messages))
        return self.received(name)

    def received(self, name: str) -> bytes:
        """Return everything that the client has received since the last call."""
        received, self.inboxes[name] = self.inboxes[name], b""
        return received

    def refuses(self, name: str, *messages: bytes) -> str:
        """Send messages that must end the connection, and return the reason."""
        with pytest.raises(BadMessage) as caught:
            self.feed(name, b"".join(messages))
        self.disconnect(name)
        return str(caught.value)

    def content(self) -> object:
        """Return everything that the server holds, for comparison."""
        engine = self.engine
        queues = {key: list(queue) for key, queue in engine._queues.items()}
        waits = [(self.names[w.owner.serial], w.want, tuple(w.keys), engine.missing(w), w.need) for w in self.waiters()]
        turns = [(turn.key, self.names[turn.owner.serial]) for turns in engine._turns.values() for turn in turns]  # type: ignore[attr-defined]
        holders = [self.names[serial] for serial in self.server.state.connection_owners]
        return dict(engine._values), queues, waits, turns, holders, engine.size, engine.memory.parked, engine.revision

    def waiters(self) -> list[Any]:
        tables = (self.engine._held, self.engine._reading)
        held = [thing for table in tables for things in table.values() for thing in things]
        return [thing for thing in held if isinstance(thing, Waiter)]

    def check_size(self) -> None:
        """Assert that the server counts the bytes it holds, and knows exactly the owners that hold something."""
        engine = self.engine
        size = sum(len(key) + len(value) + KEY_BYTES for key, value in engine._values.items())
        size += sum(len(key) + QUEUE_BYTES for key in engine._queues)
        size += sum(len(item) + ITEM_BYTES for items in engine._queues.values() for item in items)
        size += sum(waiter.cost for waiter in self.waiters() if not waiter.reads)
        size += sum(len(key) + WAIT_BYTES for key, turns in engine._turns.items() for _ in turns)
        assert engine.size == size
        assert engine.memory.parked == sum(waiter.cost for waiter in self.waiters() if waiter.reads)
        holders = {handler.owner.serial for handler in self.handlers.values() if handler.owner.holds}
        assert set(self.server.state.connection_owners) == holders
