"""Ranks of a large job, simulated on one event loop: each has a connection of its own, and says what a real one would.

PyTorch's ranks send the messages of `torch.distributed.elastic.utils.store.barrier` and `synchronize`; ours send those
of `Barrier` and `Exchange`. What they cost themselves does not matter: what is measured is the server's processor time.
`Relays` are many relays in one process, as they would be on the nodes of the job.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from rallypoint import net
from rallypoint.core import ops
from rallypoint.core.machines import barrier, exchange
from rallypoint.protocol.c10d import Opcode, encode, hello
from rallypoint.protocol.native import ACCEPTED, PREFACE
from rallypoint.protocol.native_client import ClientProtocol

PATIENCE_S = 300.0
DATA = b"x" * 100
Talk = Generator[tuple[bytes, int], bytes, None]
"""What a rank says: a message, and how long its answer is; it receives that."""


class TorchRank(asyncio.Protocol):
    """A rank with PyTorch's client."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._talk: Talk = self._greet()
        self._need, self._buffer = 0, b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._say(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= self._need:
            answer, self._buffer = self._buffer[: self._need], self._buffer[self._need :]
            self._say(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"rank {self._rank} lost its store"))

    def begin(self, what: str, key: str) -> asyncio.Future[None]:
        """Do something once; return what tells when that is done."""
        self.done = asyncio.get_running_loop().create_future()
        self._talk = {"barrier": self._barrier, "synchronize": self._synchronize}[what](f"/{key}")
        self._say(None)
        return self.done

    def _say(self, answer: bytes | None) -> None:
        try:
            message, self._need = next(self._talk) if answer is None else self._talk.send(answer)
            while not self._need:
                self._transport.write(message)
                message, self._need = next(self._talk)
            self._transport.write(message)
        except StopIteration:
            self.done.set_result(None)

    def _greet(self) -> Talk:
        yield hello(nonce=1), 4

    def _arrive(self, key: str) -> Talk:
        count = yield encode(Opcode.ADD, f"{key}/num_members".encode(), 1), 8
        if int.from_bytes(count, "little") == self._world:
            yield encode(Opcode.SET, f"{key}/last_member".encode(), b"<val_ignored>"), 0

    def _barrier(self, key: str) -> Talk:
        yield from self._arrive(key)
        yield encode(Opcode.WAIT, 1, f"{key}/last_member".encode()), 1

    def _synchronize(self, key: str) -> Talk:
        keys = [f"{key}{rank}".encode() for rank in range(self._world)]
        yield encode(Opcode.SET, keys[self._rank], DATA), 0
        yield encode(Opcode.WAIT, self._world, *keys), 1
        yield encode(Opcode.MULTI_GET, self._world, *keys), self._world * (8 + len(DATA))
        yield from self._arrive(f"{key}/finished")
        if self._rank == 0:
            yield encode(Opcode.WAIT, 1, f"{key}/finished/last_member".encode()), 1


class NativeRank(asyncio.Protocol):
    """A rank with our client."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._core = ClientProtocol(f"rank {rank}")
        self._greeting = b""
        self._welcomed = False
        self._calls = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(PREFACE + self._core.greet())

    def data_received(self, data: bytes) -> None:
        if len(self._greeting) < len(ACCEPTED):
            missing = len(ACCEPTED) - len(self._greeting)
            self._greeting, data = self._greeting + data[:missing], data[missing:]
        for reply in self._core.receive(data):
            if self._welcomed:
                self._core.settle(reply)
            else:
                self._core.welcome(reply, "the server")
                self._welcomed = True
            self.done.set_result(None)
        self._transport.write(self._core.confirm())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"rank {self._rank} lost its server"))

    def begin(self, what: str, key: str) -> asyncio.Future[None]:
        """Do something once; return what tells when that is done."""
        self.done = asyncio.get_running_loop().create_future()
        self._calls += 1
        command: Any = barrier.BarrierArrive(self._world)
        if what == "Exchange":
            command = exchange.ExchangeGive(self._world, self._rank, DATA, "all_gather")
        op = ops.Act(0, f"/{key}".encode(), str(self._rank), self._calls, command, PATIENCE_S)
        self._transport.write(self._core.ask(op))
        return self.done


class Ranks:
    """The ranks of several jobs, by the name of each."""

    def __init__(self) -> None:
        import uvloop

        net.raise_file_limit(65_536)
        self._loop = uvloop.new_event_loop()
        self._jobs: dict[str, list[TorchRank | NativeRank]] = {}

    def connect(self, job: str, native: bool, ports: list[int], world: int) -> None:
        """Connect all ranks of a job, as many to each port."""
        self._loop.run_until_complete(self._connect(job, NativeRank if native else TorchRank, ports, world))

    async def _connect(
        self, job: str, kind: Callable[[int, int], TorchRank | NativeRank], ports: list[int], world: int
    ) -> None:
        loop = asyncio.get_running_loop()
        ranks = self._jobs[job] = []
        for rank in range(world):
            port = ports[rank * len(ports) // world]
            _, made = await loop.create_connection(lambda rank=rank: kind(rank, world), "127.0.0.1", port)
            ranks.append(made)
        await asyncio.wait_for(asyncio.gather(*(rank.done for rank in ranks)), PATIENCE_S)

    def do(self, job: str, what: str, key: str) -> float:
        """Have all ranks of a job do something once; return how long that took."""
        return float(self._loop.run_until_complete(self._do(job, what, key)))

    async def _do(self, job: str, what: str, key: str) -> float:
        start_at = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*(rank.begin(what, key) for rank in self._jobs[job])), PATIENCE_S)
        return time.monotonic() - start_at


class Relays:
    """Relays in one process, on an event loop in a thread of its own."""

    def __init__(self, upstream: int) -> None:
        import uvloop

        net.raise_file_limit(65_536)
        self._endpoints = net.parse_endpoints(f"127.0.0.1:{upstream}", 0)
        self._loop = uvloop.new_event_loop()
        self._relays: list[Any] = []
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self, count: int) -> list[int]:
        """Start more relays; return their ports."""
        return asyncio.run_coroutine_threadsafe(self._start(count), self._loop).result(PATIENCE_S)

    async def _start(self, count: int) -> list[int]:
        from rallypoint.relay.server import RelayServer
        from rallypoint.server.settings import Settings

        ports = []
        for _ in range(count):
            relay = RelayServer(Settings(max_connections=65_536), self._endpoints)
            listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            await relay.open([listener])
            while not relay.upstream.connected:
                await asyncio.sleep(0.01)
            self._relays.append(relay)
            ports.append(listener.getsockname()[1])
        return ports

    def frames(self) -> int:
        """Return how many frames all relays have exchanged with the server."""
        return sum(_frames(relay) for relay in self._relays)


def _frames(relay: Any) -> int:
    counts = relay.upstream.statistics()
    return int(counts["frames_sent"] + counts["frames_received"])
