"""Durability: what a data directory costs, beside the memory server and Redis with `appendfsync always`.

Clients are raw connections of one process on an event loop, each with one `add` under way (INCR on Redis), so that what
they cost is the same for all. One client alone is a blocking socket. The `fdatasync` that it is compared with is of 60
bytes into preallocated space on the same file system, in the same run, and on the servers' core: it may take half as
long again on one core as on another.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import struct
import tempfile
import time
from typing import Any

from benchmarks.rig import PLACEMENTS, Team, calls_a_second, in_turn, need, say, team
from benchmarks.servers import Running, scratch_directory, serving
from benchmarks.table import Line, Target

TITLE = "Durability: a server with a data directory"
NOTES = (
    "`add` of so many clients, each with one under way: calls a second, more is better. One client alone: the median "
    "of its calls; the target is the memory server's time and one and a half `fdatasync`s of the same slices. Servers, "
    "their log threads and that `fdatasync` share one core; in *two cores* the clients have the other."
)

CLIENTS, CALLS = 64, 400
FURTHER = (4, 16, 256)
"""Further numbers of clients, measured on two cores, for the plot."""

SLICE_S, WARM_S = 0.5, 0.1
_GREETING = b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", 1)
_SERVERS = ("durable", "rallypoint", "durable redis")


def _request(server: str, number: int) -> tuple[bytes, bytes, int]:
    """Return a greeting, a request that adds 1, and the least length of its answer."""
    key = b"/bench/count%d" % number
    if server == "durable redis":
        return b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$4\r\nINCR\r\n$%d\r\n%s\r\n" % (len(key), key), 4
    return _GREETING, b"\x04" + struct.pack("<Q", len(key)) + key + struct.pack("<q", 1), 8


class _Caller(asyncio.Protocol):
    """One connection, which asks again when it was answered."""

    def __init__(self, server: str, number: int) -> None:
        self.answers = 0
        self._greeting, self._request, _ = _request(server, number)
        self._greeted = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        self.answers += self._greeted
        self._greeted = True
        self._transport.write(self._request)

    def close(self) -> None:
        self._transport.abort()


class Crowd:
    """A process with connections to all servers."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports

    def rate(self, server: str, clients: int, slice_s: float) -> float:
        """Return the calls a second of so many clients."""
        import uvloop

        loop = uvloop.new_event_loop()
        try:
            return float(loop.run_until_complete(self._rate(server, clients, slice_s)))
        finally:
            loop.close()

    async def _rate(self, server: str, clients: int, slice_s: float) -> float:
        loop = asyncio.get_running_loop()
        callers = [_Caller(server, number) for number in range(clients)]
        for caller in callers:
            await loop.create_connection(lambda caller=caller: caller, "127.0.0.1", self._ports[server])
        rate = await calls_a_second(callers, WARM_S, slice_s)
        for caller in callers:
            caller.close()
        return rate

    def alone_us(self, server: str) -> float:
        """Return the median time of one client's call."""
        greeting, request, least = _request(server, 0)
        with socket.create_connection(("127.0.0.1", self._ports[server])) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(greeting)
            sock.recv(4096)
            taken = []
            for _ in range(CALLS):
                began_at = time.perf_counter()
                sock.sendall(request)
                got = sock.recv(4096)
                taken.append(time.perf_counter() - began_at)
                assert len(got) >= least
        return statistics.median(taken) * 1e6


class Disk:
    """A process that syncs, as a server does."""

    def sync_us(self) -> float:
        """Return the median time of an fdatasync of a small record into preallocated space."""
        with scratch_directory() as directory, tempfile.TemporaryFile(dir=directory) as file:
            descriptor, taken = file.fileno(), []
            os.posix_fallocate(descriptor, 0, 1 << 20)
            os.fsync(descriptor)
            for number in range(CALLS):
                os.pwrite(descriptor, b"x" * 60, number * 512)
                began_at = time.perf_counter()
                os.fdatasync(descriptor)
                taken.append(time.perf_counter() - began_at)
        return statistics.median(taken) * 1e6


def run(quick: bool) -> list[Line]:
    """Measure many clients, and one alone."""
    need("redis-server")
    rounds, slice_s = (2, 0.2) if quick else (12, SLICE_S)
    lines = []
    with (
        serving(_SERVERS) as servers,
        team(1, Disk) as disk,
        team(1, Crowd, {name: one.port for name, one in servers.items()}) as crowd,
    ):
        for placement in PLACEMENTS:
            placement.put([*(server.pid for server in servers.values()), *disk.pids], crowd.pids)
            lines += _lines(placement.name, servers, crowd, disk, rounds, slice_s)
        for clients in FURTHER:
            lines += _many(clients, PLACEMENTS[-1].name, servers, crowd, max(2, rounds // 2), slice_s)
    return lines


def _many(
    clients: int, where: str, servers: dict[str, Running], crowd: Team, rounds: int, slice_s: float, *targets: Target
) -> list[Line]:
    say(f"  {clients} clients, {where}")
    rates = in_turn(tuple(servers), rounds, lambda name: float(crowd.ask("rate", name, clients, slice_s)[0]))
    of_memory, of_redis = targets or (None, None)
    return [
        Line(f"add, {clients} clients", where, "op/s", rates["durable"], "memory", rates["rallypoint"], of_memory),
        Line(f"add, {clients} clients", where, "op/s", rates["durable"], "redis", rates["durable redis"], of_redis),
    ]


def _lines(where: str, servers: dict[str, Running], crowd: Team, disk: Team, rounds: int, slice_s: float) -> list[Line]:
    many = _many(CLIENTS, where, servers, crowd, rounds, slice_s, Target(at_least=0.6), Target(at_least=2.0))
    say(f"  one client, {where}")

    def alone(name: str) -> float:
        return float(disk.ask("sync_us")[0] if name == "fdatasync" else crowd.ask("alone_us", name)[0])

    times = in_turn((*servers, "fdatasync"), rounds, alone)
    allowed = [memory + 1.5 * sync for memory, sync in zip(times["rallypoint"], times["fdatasync"], strict=True)]
    one = "add, one client"
    return [
        *many,
        Line(one, where, "µs", times["durable"], "memory + 1.5 fdatasync", allowed, Target(at_most=1.0)),
        Line(one, where, "µs", times["durable"], "memory", times["rallypoint"]),
        Line(one, where, "µs", times["durable"], "redis", times["durable redis"]),
        Line("fdatasync", where, "µs", times["fdatasync"]),
    ]
