"""A host that vanishes without closing its connections: its leases must end all the same.

Server and clients run on separate hosts (`tests/hosts.py`). The tests print how long each side takes to notice
(`pytest -s`), and check only that it is within the deadline. The server's log shows that our own check noticed, not the
kernel, which is late when data is in flight.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hosts import Host, hosts
from tests.raw_peer import AMPLE_S, WAITED, RawPeer, read_line, until

import rallypoint
from rallypoint.client.torch_connection import PING, TorchConnection
from rallypoint.deadline import Deadline
from rallypoint.security.client_security import ClientSecurity

PORT = 29400
LATE_S = 4.5
"""How long after the cut to send data: late enough that the kernel's timer starts over."""

CLIENT = """
import os, sys, threading, rallypoint
name = sys.argv[2]
store = rallypoint.connect(sys.argv[1], timeout=60)
def say(what):
    os.write(1, f"{what}\\n".encode())  # a whole line, from any thread
def listen():
    try:
        for change in watch:
            say(f"{name} got {change.value.decode()}")
    except rallypoint.RallypointError as error:
        say(f"{name} lost {type(error).__name__}")
watch = store.watch(f"for/{name}", timeout=600)
threading.Thread(target=listen, daemon=True).start()
store.lease(f"alive/{name}", "yes")
say("up")
for line in sys.stdin:
    try:
        say(f"{name} asked {store.add(name, 1)}")
    except rallypoint.RallypointError as error:
        say(f"{name} failed {type(error).__name__}")
"""
"""Holds a lease; prints the changes of its key; sends a request for every line of its input."""


class Client:
    """A client process on a host."""

    def __init__(self, host: Host, server: Host, name: str) -> None:
        url = f"tcp://{server.address}:{PORT}"
        command = [sys.executable, "-c", CLIENT, url, name]
        self.process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.says("up")

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def says(self, line: str) -> None:
        assert read_line(self.process) == line


@contextlib.contextmanager
def serving(host: Host, place: Path) -> Iterator[tuple[rallypoint.Store, Path]]:
    """Start a server on a host; yield a store that is connected on that host, and the path of the server's log."""
    command = [sys.executable, "-m", "rallypoint", "serve", "--host", host.address, "--port", str(PORT)]
    with open(place / "log", "wb") as log:
        host.popen(command, stdout=log, stderr=log)
    with host.inside(), rallypoint.connect(f"tcp://{host.address}:{PORT}", timeout=AMPLE_S) as store:
        yield store, place / "log"


def no_lease_ends(changes: rallypoint.Watch, within_s: float) -> None:
    with pytest.raises(rallypoint.StoreTimeout):
        changes.next(timeout=within_s)


def sever_client(server: Host, client: Host) -> None:
    client.cut()


def sever_carrier(server: Host, client: Host) -> None:
    server.carrier_lost()


@pytest.mark.needs("netns")
@pytest.mark.parametrize("sever", [sever_client, sever_carrier], ids=["client cut off", "server without carrier"])
def test_both_sides_notice_a_vanished_host_idle_or_with_data_in_flight(
    sever: Callable[[Host, Host], None], tmp_path: Path
) -> None:
    with hosts(2) as (a, b), serving(a, tmp_path) as (store, log):
        stopped = Client(a, a, "stopped")  # its kernel still acknowledges: it must keep its session
        stopped.process.send_signal(signal.SIGSTOP)
        idle, busy = Client(b, a, "idle"), Client(b, a, "busy")
        with store.watch("alive/") as changes:
            cut_at = time.monotonic()
            sever(a, b)
            no_lease_ends(changes, LATE_S)
            store.set("for/busy", "late")  # in flight from the server
            busy.ask()  # and to the server
            for _ in range(2):
                change = changes.next(timeout=AMPLE_S)
                assert change.key in ("alive/idle", "alive/busy") and change.value is None
                print(f"the lease {change.key} ended {time.monotonic() - cut_at:.2f} s after the cut")
            idle.says("idle lost SessionLost")
            print(f"the idle client noticed {time.monotonic() - cut_at:.2f} s after the cut")
            lines = {read_line(busy.process), read_line(busy.process)}
            assert lines == {"busy lost SessionLost", "busy failed SessionLost"}
            print(f"the busy client noticed {time.monotonic() - cut_at:.2f} s after the cut")
        said = until(log.read_text, lambda text: text.count(f"{b.address}:") == 2)
        print(said)
        assert "nothing received for" in said and "the host or the network is down" in said
        assert store.check(["alive/stopped"])
        stopped.process.send_signal(signal.SIGCONT)
        stopped.ask()
        stopped.says("stopped asked 1")


@pytest.mark.needs("netns")
def test_a_cut_of_four_seconds_ends_no_session(tmp_path: Path) -> None:
    with hosts(2) as (a, b), serving(a, tmp_path) as (store, log):
        idle, busy = Client(b, a, "idle"), Client(b, a, "busy")
        with b.inside():
            torch_idle, torch_busy = RawPeer((a.address, PORT)), RawPeer((a.address, PORT))
        torch_busy.wait(b"/key")
        with torch_idle, torch_busy, store.watch("alive/") as changes:
            b.cut()
            no_lease_ends(changes, 2.0)
            busy.ask()
            store.set("for/busy", "something")
            store.set("key", "value")
            no_lease_ends(changes, 2.0)
            b.mend()
            assert torch_busy.read(1) == WAITED
            assert {read_line(busy.process), read_line(busy.process)} == {"busy got something", "busy asked 1"}
            torch_idle.ping()
            idle.ask()
            idle.says("idle asked 1")
            no_lease_ends(changes, 0.0)
        assert "dropped" not in log.read_text()


ASYNC_CLIENT = """
import asyncio, sys, rallypoint, rallypoint.aio
async def main():
    store = await rallypoint.aio.connect(sys.argv[1], timeout=60)
    print("up", flush=True)
    try:
        await store.wait(["never"], timeout=600)
    except rallypoint.RallypointError as error:
        print(type(error).__name__, flush=True)
asyncio.run(main())
"""


@pytest.mark.needs("netns")
def test_asyncio_and_pytorch_protocol_clients_notice_a_vanished_server(tmp_path: Path) -> None:
    with hosts(2) as (a, b), serving(a, tmp_path), b.inside():
        link = TorchConnection(a.address, PORT, Deadline(AMPLE_S), ClientSecurity())
        command = [sys.executable, "-c", ASYNC_CLIENT, f"tcp://{a.address}:{PORT}"]
        client = b.popen(command, stdout=subprocess.PIPE, bufsize=0)
        assert read_line(client) == "up"
        cut_at = time.monotonic()
        a.cut()
        link.send(PING, "ping", Deadline(AMPLE_S))
        with contextlib.closing(link), pytest.raises(rallypoint.ConnectionLost, match="its host has been silent"):
            link.read_pong("ping", Deadline(AMPLE_S))
        print(f"the client with PyTorch's protocol noticed {time.monotonic() - cut_at:.2f} s after the cut")
        assert read_line(client) == "SessionLost"
        print(f"the asyncio client noticed {time.monotonic() - cut_at:.2f} s after the cut")
