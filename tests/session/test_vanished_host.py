"""A host that vanishes: it says no farewell, and nothing answers for it any more. Its leases must fall all the same.

Server and clients are on hosts of their own (`tests/hosts.py`). How many seconds each side takes to notice is printed
(`pytest -s`), and asserted only to be within the deadline; that it was we who noticed, and not the kernel, which is
late where data is in flight, is in the server's log.
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
from tests.wire import AMPLE_S, TOLD, Peer, read_line, until

import rallypoint
from rallypoint.deadline import Deadline
from rallypoint.store.link import PING, Link

PORT = 29400
LATE_S = 4.5
"""How long after the cut something is sent: late enough for the kernel's clock to start again."""

CLIENT = """
import os, sys, threading, rallypoint
name = sys.argv[2]
store = rallypoint.connect(sys.argv[1], timeout=60)
def say(what):
    os.write(1, f"{what}\\n".encode())  # a whole line, whichever thread speaks
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
        say(f"{name} in vain {type(error).__name__}")
"""
"""Holds a lease; says what is sent to it; asks the server something for every line that it reads."""


class Client:
    """A process on a host."""

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
    """Serve on a host; yield a store that was connected there, and where the server's log is."""
    command = [sys.executable, "-m", "rallypoint", "serve", "--host", host.address, "--port", str(PORT)]
    with open(place / "log", "wb") as log:
        host.popen(command, stdout=log, stderr=log)
    with host.inside(), rallypoint.connect(f"tcp://{host.address}:{PORT}", timeout=AMPLE_S) as store:
        yield store, place / "log"


def nobody_falls(changes: rallypoint.Watch, within_s: float) -> None:
    with pytest.raises(rallypoint.StoreTimeout):
        changes.next(timeout=within_s)


def sever_client(server: Host, client: Host) -> None:
    client.cut()


def sever_carrier(server: Host, client: Host) -> None:
    server.carrier_lost()


@pytest.mark.needs("netns")
@pytest.mark.parametrize("sever", [sever_client, sever_carrier], ids=["client cut off", "server without carrier"])
def test_a_vanished_host_is_noticed_by_both_sides_whatever_is_in_flight(
    sever: Callable[[Host, Host], None], tmp_path: Path
) -> None:
    with hosts(2) as (a, b), serving(a, tmp_path) as (store, log):
        stopped = Client(a, a, "stopped")  # its kernel answers for it: it must keep its session
        stopped.process.send_signal(signal.SIGSTOP)
        idle, busy = Client(b, a, "idle"), Client(b, a, "busy")
        with store.watch("alive/") as changes:
            cut_at = time.monotonic()
            sever(a, b)
            nobody_falls(changes, LATE_S)
            store.set("for/busy", "late")  # in flight from the server
            busy.ask()  # and to the server
            for _ in range(2):
                change = changes.next(timeout=AMPLE_S)
                assert change.key in ("alive/idle", "alive/busy") and change.value is None
                print(f"the lease {change.key} fell {time.monotonic() - cut_at:.2f} s after the cut")
            idle.says("idle lost SessionLost")
            print(f"the idle client noticed {time.monotonic() - cut_at:.2f} s after the cut")
            lines = {read_line(busy.process), read_line(busy.process)}
            assert lines == {"busy lost SessionLost", "busy in vain SessionLost"}
            print(f"the busy client noticed {time.monotonic() - cut_at:.2f} s after the cut")
        said = until(log.read_text, lambda text: text.count(f"{b.address}:") == 2)
        print(said)
        assert "nothing was received for" in said and "hosts are gone" in said
        assert store.check(["alive/stopped"])
        stopped.process.send_signal(signal.SIGCONT)
        stopped.ask()
        stopped.says("stopped asked 1")


@pytest.mark.needs("netns")
def test_a_cut_of_four_seconds_is_noticed_by_nobody(tmp_path: Path) -> None:
    with hosts(2) as (a, b), serving(a, tmp_path) as (store, log):
        idle, busy = Client(b, a, "idle"), Client(b, a, "busy")
        with b.inside():
            torch_idle, torch_busy = Peer((a.address, PORT)), Peer((a.address, PORT))
        torch_busy.wait(b"/key")
        with torch_idle, torch_busy, store.watch("alive/") as changes:
            b.cut()
            nobody_falls(changes, 2.0)
            busy.ask()
            store.set("for/busy", "something")
            store.set("key", "value")
            nobody_falls(changes, 2.0)
            b.mend()
            assert torch_busy.read(1) == TOLD
            assert {read_line(busy.process), read_line(busy.process)} == {"busy got something", "busy asked 1"}
            torch_idle.ping()
            idle.ask()
            idle.says("idle asked 1")
            nobody_falls(changes, 0.0)
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
def test_clients_by_asyncio_and_by_pytorchs_protocol_notice_that_their_server_is_gone(tmp_path: Path) -> None:
    with hosts(2) as (a, b), serving(a, tmp_path), b.inside():
        link = Link(a.address, PORT, Deadline(AMPLE_S))
        command = [sys.executable, "-c", ASYNC_CLIENT, f"tcp://{a.address}:{PORT}"]
        client = b.popen(command, stdout=subprocess.PIPE, bufsize=0)
        assert read_line(client) == "up"
        cut_at = time.monotonic()
        a.cut()
        link.send(PING, "ping", Deadline(AMPLE_S))
        with contextlib.closing(link), pytest.raises(rallypoint.ConnectionLost, match="its host has been silent"):
            link.pong("ping", Deadline(AMPLE_S))
        print(f"a client by PyTorch's protocol noticed {time.monotonic() - cut_at:.2f} s after the cut")
        assert read_line(client) == "SessionLost"
        print(f"a client by asyncio noticed {time.monotonic() - cut_at:.2f} s after the cut")
