"""Relays without sockets: shared sessions over lossy lines to a real server, and clients that use them.

Everything is random, in one thread, and time is counted in ticks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any, cast

from tests.core.fake_server import Clock, FakeConnection, new_server
from tests.linearizability.checker import Operation

from rallypoint.core import ops
from rallypoint.protocol.native_client import ClientProtocol
from rallypoint.relay.torch.client import TorchClient
from rallypoint.relay.torch.requests import TorchCall
from rallypoint.relay.torch.shared_session import SharedSession
from rallypoint.server.connections.connection import Connection

__all__ = ["LossyRelay", "LossyClient", "LossySimulation"]

ROOM = 300
"""How many bytes a relay sends at a time: few, so that many requests are merged."""


class LossySimulation:
    """One server, its relays, and what their clients did."""

    def __init__(self, seed: int, relays: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.server = new_server(clock=self.clock)
        self.engine = self.server.state.namespaces[0].engine
        self.history: list[Operation] = []
        self._ticks = count(1)
        self.relays = [LossyRelay(self, f"relay {number}") for number in range(relays)]

    def tick(self) -> float:
        return float(next(self._ticks))

    def direct(self, op: ops.Op) -> Any:
        """Execute an operation as a client of the server itself; it takes no time."""
        answer = self.engine.execute(op)
        with self.clock.running():
            self.server.settle(self.engine)
        return answer

    def run_until_quiet(self) -> None:
        """Deliver everything that was sent, without a cut, until nothing moves."""
        while sum(relay.move(lossy=False) for relay in self.relays):
            pass


class LossyRelay:
    """One shared session."""

    def __init__(self, world: LossySimulation, name: str) -> None:
        self._world = world
        self.shared = SharedSession(ClientProtocol(name, session=world.chance.randbytes(16)), "server")
        self.lossy_clients: dict[TorchClient, LossyClient] = {}
        self._late: dict[TorchClient, None] = {}  # clients with undelivered replies
        self._connect()

    def _connect(self) -> None:
        self._down = b""
        self._line = FakeConnection(self._world.clock, self._came)
        self._line.handler = self._world.server.native_handler(cast(Connection, self._line))
        self._greeting = True
        self._up = self.shared.core.greet()

    def _came(self, data: bytes) -> None:
        self._down += data

    def cut(self) -> None:
        """Lose the bytes in flight, and reconnect."""
        self._line.end()
        self._connect()

    def move(self, lossy: bool) -> bool:
        """Move some or all bytes in both directions; return whether there were any."""
        chance = self._world.chance
        if not self._greeting and not (lossy and chance.random() < 0.3):
            self._up += self.shared.send(ROOM)
        up, self._up = self._some(self._up, lossy)
        if up:
            self._line.receive(up)
        down, self._down = self._some(self._down, lossy)
        touched, self._late = self._late, {}
        for reply in self.shared.core.receive(down):
            if self._greeting:
                self.shared.core.welcome(reply, "server")
                self._greeting = False
                self._up += self.shared.repeat(0.0)
            else:
                touched.update(dict.fromkeys(self.shared.take(reply)))
        for client in touched:
            if lossy and chance.random() < 0.3:  # its connection is busy
                self._late[client] = None
            else:
                self.deliver(client)
        return bool(up or down or touched or self._up or self._down or self.shared.merger or self._greeting)

    def _some(self, data: bytes, lossy: bool) -> tuple[bytes, bytes]:
        size = self._world.chance.randint(0, len(data)) if lossy else len(data)
        return data[:size], data[size:]

    def deliver(self, client: TorchClient) -> None:
        """Deliver a client's replies, if it is still connected."""
        lossy_client = self.lossy_clients.get(client)
        while lossy_client is not None and (call := client.next_reply()) is not None:
            if call.op.__class__ is ops.TurnPop:
                self.shared.delivered(call.request)
            lossy_client.heard(call)
            client.issue_held()

    def kill(self, client: TorchClient) -> None:
        """Disconnect a client."""
        del self.lossy_clients[client]
        client.end()


class LossyClient:
    """One client, which performs one task after the other: a generator that yields messages and gets their replies."""

    def __init__(self, world: LossySimulation, relay: LossyRelay, name: str) -> None:
        self.world, self.relay, self.name = world, relay, name
        self.client = TorchClient(relay.shared.merger)
        relay.lossy_clients[self.client] = self
        self._doing: Iterator[Any] | None = None
        self._expected: list[ops.Op] = []
        self._answers: list[Any] = []

    @property
    def busy(self) -> bool:
        return self._doing is not None

    def begin(self, doing: Any) -> None:
        """Begin a task; it yields lists of messages, and is sent lists of replies."""
        self._doing = doing
        self._go_on(None)

    def _go_on(self, answers: list[Any] | None) -> None:
        doing: Any = self._doing
        try:
            self._expected, self._answers = doing.send(answers), []
        except StopIteration:
            self._doing = None
            return
        for op in self._expected:
            self.client.ask(op, 10)
        self.relay.deliver(self.client)

    def heard(self, call: TorchCall) -> None:
        assert not isinstance(call.answer, Exception), call.answer
        if any(call.op is op for op in self._expected):
            self._answers.append(call.answer)
            if len(self._answers) == len(self._expected):
                self._go_on(self._answers)

    def cancel(self) -> None:
        """Cancel its wait, like a client that timed out."""
        self._doing = None
        self._expected = []
        self.client.ask(ops.Drop(0, 0), 1)
        self.relay.deliver(self.client)

    # Tasks of a client, each recorded in the history

    def write(self, kind: str, pairs: list[tuple[bytes, bytes]], op: ops.Op) -> Any:
        called = self.world.tick()
        yield [op, ops.Ping(1)]
        returned = self.world.tick()
        for key, value in pairs:
            self.note(kind, key, (value,), None, called, returned)

    def ask(self, kind: str, key: bytes, arguments: tuple[Any, ...], op: ops.Op) -> Any:
        called = self.world.tick()
        (answer,) = yield [op]
        self.note(kind, key, arguments, answer.item if kind == "pop" else answer, called, self.world.tick())

    def wait_and(self, kind: str, key: bytes, op: ops.Op) -> Any:
        """Wait, then send a request, like `get` and `queue_pop` of PyTorch."""
        called = self.world.tick()
        yield [ops.WaitOrTurn(0, key)]
        (answer,) = yield [op]
        self.note(kind, key, (), answer.item if kind == "pop" else answer, called, self.world.tick())

    def get_all(self, keys: list[bytes]) -> Any:
        called = self.world.tick()
        (answers,) = yield [ops.MultiPeek(0, keys)]
        returned = self.world.tick()
        for key, answer in zip(keys, answers, strict=True):
            self.note("get", key, (), answer, called, returned)

    def wait_for(self, keys: list[bytes]) -> Any:
        yield [ops.Wait(0, keys, ops.MAX_WAIT_S)]

    def note(self, kind: str, key: bytes, arguments: Any, result: Any, called: float, returned: float) -> None:
        done = Operation(self.name, kind, key.decode(), arguments, result, called, returned)
        self.world.history.append(done)
