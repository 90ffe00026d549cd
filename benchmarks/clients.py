"""The clients that count: four processes, each with one connection to every server, each doing one call over and over.

Ours and torch's server get the same client, torch's own. `get` of that client is two round trips (WAIT, then GET), and
so it is for the bare echo; redis-py does it in one. Beside the calls a second stands the server's own processor time
for each call, which says more on a machine that has other things to do.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable

from benchmarks.rig import PLACEMENTS, Team, cpu_s, in_turn, say, team
from benchmarks.servers import Running, serving
from benchmarks.table import Line, Target

CLIENTS = 4
OPERATIONS = ("get", "add", "check")
KEY, COUNTER, VALUE = "bench/value", "bench/count", b"v" * 32
LEAD_S, WARM_S, SLICE_S = 0.02, 0.05, 0.4

Calls = dict[str, Callable[[], object]]


def torch_calls(port: int) -> Calls:
    """Return the calls on a TCPStore."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set(KEY, VALUE)
    part = functools.partial
    return {"get": part(store.get, KEY), "add": part(store.add, COUNTER, 1), "check": part(store.check, [KEY])}


def redis_calls(port: int) -> Calls:
    """Return the calls on redis that do the same."""
    import redis

    server = redis.Redis("127.0.0.1", port)
    server.set(KEY, VALUE)
    part = functools.partial
    return {"get": part(server.get, KEY), "add": part(server.incrby, COUNTER, 1), "check": part(server.exists, KEY)}


def echo_calls(port: int) -> Calls:
    """Return exchanges of as many bytes as torch's client and its server exchange."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(*sizes: tuple[int, int]) -> Callable[[], None]:
        requests = [bytes([answer]) + bytes(request - 1) for request, answer in sizes]

        def call() -> None:
            for request in requests:
                sock.send(request)
                sock.recv(4096)

        return call

    key, count = len(KEY) + 1, len(COUNTER) + 1  # with the slash that torch's client puts before a key
    return {
        "get": exchange((17 + key, 1), (9 + key, 8 + len(VALUE))),
        "add": exchange((17 + count, 8)),
        "check": exchange((17 + key, 1)),
    }


CALLS = {
    "rallypoint": torch_calls,
    "before": torch_calls,
    "torch": torch_calls,
    "redis": redis_calls,
    "echo": echo_calls,
}


class Client:
    """One client process, with a connection to each server."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._calls = {name: CALLS[name](port) for name, port in ports.items()}

    def rate(self, server: str, operation: str, start_at: float, slice_s: float) -> tuple[float, int]:
        """From a moment that all clients share, call and call; return calls a second, and calls with the warm-up."""
        call, now = self._calls[server][operation], time.monotonic
        time.sleep(max(0.0, start_at - now()))
        warmed = 0
        while now() < start_at + WARM_S:
            call()
            warmed += 1
        count, began_at, instant = 0, now(), now()
        while instant < start_at + WARM_S + slice_s:
            for _ in range(8):
                call()
            count += 8
            instant = now()
        return count / (instant - began_at), warmed + count


class Match:
    """Our server and peers, with the clients of all, at one placement and one operation after the other."""

    def __init__(self, servers: dict[str, Running], clients: Team, slice_s: float) -> None:
        self._servers = servers
        self._clients = clients
        self._slice_s = slice_s

    def lines(self, operation: str, where: str, rounds: int, target: Target | None) -> list[Line]:
        """Measure one operation."""
        say(f"  {operation}, {where}")
        spent: dict[str, list[float]] = {name: [] for name in self._servers}

        def measure(name: str) -> float:
            before_s = cpu_s(self._servers[name].pid)
            answers = self._clients.ask("rate", name, operation, time.monotonic() + LEAD_S, self._slice_s)
            rates, calls = zip(*answers, strict=True)
            spent[name].append((cpu_s(self._servers[name].pid) - before_s) * 1e6 / sum(calls))
            return float(sum(rates))

        rates = in_turn(tuple(self._servers), rounds, measure)
        lines = []
        for peer in list(self._servers)[1:]:
            lines.append(Line(operation, where, "op/s", rates["rallypoint"], peer, rates[peer], target))
            ours, theirs = spent["rallypoint"][1:], spent[peer][1:]  # the first was for warming up
            allowed = Target(at_most=1.05) if peer == "before" else None
            lines.append(Line(f"{operation}, server's CPU", where, "µs/op", ours, peer, theirs, allowed))
        return lines


def compare(peers: tuple[str, ...], target: Target | None, rounds: int, slice_s: float) -> list[Line]:
    """Measure every operation at every placement, ours and the peers in turn."""
    lines = []
    with serving(("rallypoint", *peers)) as servers:
        ports = {name: server.port for name, server in servers.items()}
        with team(CLIENTS, Client, ports) as clients:
            match = Match(servers, clients, slice_s)
            for placement in PLACEMENTS:
                placement.put([server.pid for server in servers.values()], clients.pids)
                for operation in OPERATIONS:
                    lines += match.lines(operation, placement.name, rounds, target)
    return lines
